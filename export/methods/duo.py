"""duo: some heads see everything, the others their first and their newest tokens
(DuoAttention, arXiv 2410.10819).

Which heads see everything is measured, not trained. The paper learns a gate for each
head by gradient descent on passkeys, and cuts the gates at a quantile. Here each head is
priced by what its window costs the model's answers, alone and to second order
(export/search/heads.py), and the dearest heads keep all tokens.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from kvlathe.export.methods.method import Decision, Method
from kvlathe.export.methods.options import (
    MethodOptions,
    Number,
    option,
)
from kvlathe.export.methods.window import RECENT, SINK, TOKENS, window

ROUNDING = 1e-9
"""Error of a share of the heads."""


@dataclass(frozen=True)
class DuoOptions(MethodOptions):
    """The share of the heads that see everything, and the window of the others."""

    share: float = option(
        0.25,
        Number("a share of the heads"),
        "Share of the KV heads that see everything.",
    )
    sink: int = option(64, TOKENS, SINK)
    recent: int = option(256, TOKENS, RECENT)


def plan(options: DuoOptions, page_tokens: int) -> Decision:
    """The window; heads are named later."""
    return Decision(tokens=(window(options.sink, options.recent, page_tokens),))


def named(
    options: DuoOptions, losses: Sequence[float], heads: int
) -> tuple[str, Mapping[str, object]]:
    """The window method with the heads named that see everything: of ``losses``, one for
    each lane, the ``share`` that is largest, at least. Layers have ``heads`` KV
    heads."""
    wanted = options.share * len(losses)
    count = math.ceil(wanted - ROUNDING)
    order = sorted(range(len(losses)), key=lambda lane: -losses[lane])
    whole = tuple(divmod(lane, heads) for lane in sorted(order[:count]))
    return "window", {"whole": whole} if whole else {}


METHOD = Method(
    "a share of the heads, by measured loss, sees all tokens; the others a window",
    DuoOptions(),
    plan=plan,
    name_heads=named,
)
