"""OSCAR (arXiv 2605.17757): 2 bits in the axes of what reads the cache. For comparison.

K is rotated by the eigenvectors of Q^T Q and V by those of its covariance weighted by
scores, each then by a Hadamard matrix. A token has one scale and minimum for each
``group`` channels; the first 64 tokens and the newest 256 stay in 16 bit. Differences from
the paper: V's covariance is that of attention's outputs, which are values weighted by
scores; codes are to the nearest, without clipping that was searched for.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Literal

from kvlathe.export.methods.method import Decision, Method
from kvlathe.export.methods.options import (
    Choice,
    MethodOptions,
    count,
    option,
)
from kvlathe.export.methods.turns import reader_axes
from kvlathe.plan.formats import Tier


@dataclass(frozen=True)
class OscarOptions(MethodOptions):
    """The number format of full pages, and whose axes they are in."""

    bits: Literal[2, 3, 4, 8] = option(
        2, Choice(2, 3, 4, 8), "Bits of a code.", sizes=True
    )
    group: int = option(128, Choice(128, 64, 32), "Numbers that share a scale.")
    rotations: Literal["head", "layer"] = option(
        "head", Choice("head", "layer"), "One rotation a KV head, or one a layer."
    )
    sink: int = option(64, Choice(64, 0, 128), "First tokens that are not quantized.")
    recent: int = option(
        256,
        count("a number of tokens"),
        "Newest tokens in 16 bit, in whole pages, beside those of the page that is being "
        "filled; 0 beside methods of tokens, and in cuda, vLLM and TensorRT.",
    )


def plan(options: OscarOptions, page_tokens: int) -> Decision:
    """The tier that full pages are sealed in, and what lanes are turned by."""
    tier = Tier(
        options.bits,
        options.bits,
        axis_k="rank",
        axis_v="rank",
        group_k=options.group,
        group_v=options.group,
    )
    turn = partial(reader_axes, per_layer=options.rotations == "layer")
    young = Tier(16, 16) if options.recent else None
    return Decision(
        cold=tier, sink=options.sink, young=young, recent=options.recent, turn=turn
    )


METHOD = Method(
    "comparison: 2, 3, 4 or 8 bit in the axes of queries and of attention's outputs",
    OscarOptions(),
    plan=plan,
    calibration="text",
)
