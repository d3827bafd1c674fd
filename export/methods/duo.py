"""duo: some heads see everything, the others their first and their newest tokens
(DuoAttention, arXiv 2410.10819).

Which heads see everything is measured, not trained. The paper learns a gate for each
head by gradient descent on passkeys, and cuts the gates at a quantile. Here each head is
priced by what its window costs the model's answers, alone and to second order
(export/search/heads.py), and the dearest heads keep all tokens.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from kvlathe.base.errors import KvlatheError
from kvlathe.export.methods import window
from kvlathe.export.methods.options import Decision, known_only

SUMMARY = "a share of the heads, by measured loss, sees all tokens; the others a window"
SHARE = 0.25
"""Of the KV heads, unless asked otherwise."""
ROUNDING = 1e-9
"""Of a share of them."""


def plan(written: dict[str, str], page_tokens: int) -> Decision:
    """Options ``sink`` and ``recent`` (tokens, rounded up to pages) and ``share`` (of
    the KV heads, that see everything). What is known before heads are named: the window.
    Raises KvlatheError."""
    known_only(written, ("sink", "recent", "share"))
    _share(written)
    return window.plan(_of_window(written), page_tokens)


def named(written: dict[str, str], losses: Sequence[float], heads: int) -> str:
    """The same as a request that names its heads: of ``losses``, one for each lane, the
    ``share`` that is largest, at least. Layers have ``heads`` KV heads."""
    lanes = len(losses)
    wanted = _share(written) * lanes
    count = math.ceil(wanted - ROUNDING)
    order = sorted(range(lanes), key=lambda lane: -losses[lane])
    dearest = order[:count]
    names: list[str] = []
    for lane in sorted(dearest):
        layer, head = divmod(lane, heads)
        names.append(f"{layer}.{head}")
    options = _of_window(written)
    if names:
        options["whole"] = "/".join(names)
    texts = [f"{name}={value}" for name, value in options.items()]
    if not texts:
        return "window"
    return f"window:{','.join(texts)}"


def _of_window(written: dict[str, str]) -> dict[str, str]:
    """The options that say how large the window is."""
    return {name: text for name, text in written.items() if name != "share"}


def _share(written: dict[str, str]) -> float:
    text = written.get("share", str(SHARE))
    try:
        share = float(text)
    except ValueError:
        share = math.nan
    if not 0 <= share <= 1:
        fact = f"share={text} cannot be used"
        raise KvlatheError(fact, "it is a share of the heads", "write share=0.25")
    return share
