"""8-bit floats: full pages are E4M3 (OCP 8-bit Floating Point Specification, 2023) with
one scale for each token and head, of K and of V.

Nothing is calibrated, and attention reads the codes as the floats that they are. Nothing
is rotated either: a float's error is a share of the number itself, so evening out sizes
gains little (docs/quantization.md, which has the bytes and measurements). So there are
no options.
"""

from __future__ import annotations

from kvlathe.export.methods.method import Decision, Method
from kvlathe.export.methods.options import NoOptions
from kvlathe.plan.formats import WHOLE_RANK, Tier

TIER = Tier(
    8,
    8,
    axis_k="rank",
    axis_v="rank",
    group_k=WHOLE_RANK,
    group_v=WHOLE_RANK,
    coding_k="float8",
    coding_v="float8",
)


def plan(options: NoOptions, page_tokens: int) -> Decision:
    """The tier that full pages are sealed in."""
    return Decision(cold=TIER)


METHOD = Method(
    "full pages as 8-bit floats (e4m3), one scale a token and head",
    NoOptions(),
    plan=plan,
)
