"""In the manner of TurboQuant (arXiv 2504.19874): a random rotation, then fixed levels
of the normal around one scale a token. For comparison.

K and V of a token are rotated (hadamard.py), so that their channels are nearly normal;
each is coded by the nearest of the levels that lose least of a normal number
(Lloyd-Max). Differences from the paper: the scale is the one of least squared error and
not the norm; the rotation is Hadamard's where the rank is a power of two; there is no
second stage of 1 bit that makes inner products unbiased; the page that is being filled
stays as it is. Codes are dequantized, then multiplied.
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
class TurboquantOptions(MethodOptions):
    """The number format of full pages."""

    bits: Literal[2, 3, 4] = option(4, Choice(4, 3, 2), "Bits of a code.", sizes=True)


def plan(options: TurboquantOptions, page_tokens: int) -> Decision:
    """The tier that full pages are sealed in."""
    tier = Tier(
        options.bits,
        options.bits,
        axis_k="rank",
        axis_v="rank",
        group_k=WHOLE_RANK,
        group_v=WHOLE_RANK,
        coding_k="normal",
        coding_v="normal",
    )
    return Decision(cold=tier, hadamard="kv")


METHOD = Method(
    "comparison: rotate, then fixed levels of 4, 3 or 2 bit and one scale a token",
    TurboquantOptions(),
    plan=plan,
)
