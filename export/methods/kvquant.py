"""In the manner of KVQuant (arXiv 2401.18079): 4 bit, one scale a channel of K and one
a token of V. For comparison.

What it shares with the paper is where the scales run: a channel of K over all of a
page's tokens, a token of V over all its channels. What it does not: the paper quantizes
K before RoPE, and a cache that is attended in any order holds K after it (positions mix
the two channels of a plane, so a channel's range is wider here); its codes lie on a
grid fitted to the data, ours are evenly spaced; and it keeps the 1 % of outliers apart
in full precision. Codes are dequantized, then multiplied.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from kvlathe.export.methods.method import Decision, Method
from kvlathe.export.methods.options import (
    Choice,
    MethodOptions,
    option,
)
from kvlathe.plan.formats import WHOLE_RANK, Tier


@dataclass(frozen=True)
class KvquantOptions(MethodOptions):
    """The number format of full pages."""

    bits: Literal[2, 4, 8] = option(4, Choice(2, 4, 8), "Bits of a code.", sizes=True)


def plan(options: KvquantOptions, page_tokens: int) -> Decision:
    """The tier that full pages are sealed in."""
    return Decision(
        cold=Tier(
            options.bits,
            options.bits,
            axis_k="token",
            axis_v="rank",
            group_k=page_tokens,
            group_v=WHOLE_RANK,
        )
    )


METHOD = Method(
    "comparison: quantize to 4 bit, one scale a channel of K and a token of V",
    KvquantOptions(),
    plan=plan,
)
