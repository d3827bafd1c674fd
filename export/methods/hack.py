"""HACK, sections 5 and 6: full pages are quantized once, and attention multiplies the
codes as integers.

K is partitioned along the head dim, V along a page's tokens; each partition has a
minimum and a scale. The partial page of V (and of K) stays as it is computed until it
is full. Differences from the paper: codes are rounded to the nearest unless asked
otherwise, Q and P are quantized symmetrically, so no sums of codes are stored
(export/attention/integer.py) unless asked for, and where a projection of K exists the
kept subspace is rotated first (hadamard.py). docs/quantization.md has the measurements.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from kvlathe.base.errors import KvlatheError
from kvlathe.export.methods.method import Decision, Hadamard, Method
from kvlathe.export.methods.options import (
    Choice,
    MethodOptions,
    option,
)
from kvlathe.plan.formats import Coding, Tier

Codes = Literal[2, 3, 4, 8]
Numbers = Literal[2, 3, 4, 8, 16]
CODINGS: dict[str, Coding] = {"even": "affine", "normal": "normal"}
"""Codings by the option ``levels``."""


@dataclass(frozen=True)
class HackOptions(MethodOptions):
    """The number format of full pages."""

    bits: Codes = option(2, Choice(2, 3, 4, 8), "Bits of a code.", sizes=True)
    bits_k: Numbers | None = option(
        None, Choice(2, 3, 4, 8, 16), "Bits of K in place of bits; 16: not quantized."
    )
    bits_v: Numbers | None = option(
        None, Choice(2, 3, 4, 8, 16), "Bits of V in place of bits; 16: not quantized."
    )
    group: int = option(64, Choice(64, 32, 128), "Numbers that share a scale.")
    levels: Literal["even", "normal"] = option(
        "even",
        Choice("even", "normal"),
        "Even levels from a group's minimum on, or fixed ones with one scale a group; "
        "V's groups then run along the rank, too.",
    )
    rounding: Literal["nearest", "stochastic"] = option(
        "nearest", Choice("nearest", "stochastic"), "How numbers become codes."
    )
    arithmetic: Literal["int", "float"] = option(
        "int",
        Choice("int", "float"),
        "Whether attention multiplies codes as integers, or dequantizes them.",
    )
    sums: Literal["none", "stored"] = option(
        "none",
        Choice("none", "stored"),
        "Whether pages hold sums of codes, for asymmetric Q and P: the paper's form.",
    )
    hadamard: Hadamard = option(
        "auto",
        Choice("auto", "none", "k", "v", "kv"),
        "Sides that are rotated first; auto: where it costs nothing.",
        also=("spin",),
    )


def plan(options: HackOptions, page_tokens: int) -> Decision:
    """The tier that full pages are sealed in. Raises KvlatheError for groups that no
    page can hold, and for options that contradict each other."""
    group = options.group
    if page_tokens % group:
        raise KvlatheError(
            f"group={group} cannot be used with pages of {page_tokens} tokens",
            "V's groups run along a page's tokens",
            f"choose a smaller group or --tokens-per-block {group}",
        )
    _check_products(options)
    bits_k = options.bits_k or options.bits
    bits_v = options.bits_v or options.bits
    if bits_k == bits_v == 16:
        raise KvlatheError(
            "bits_k=16 contradicts bits_v=16",
            "nothing would be quantized",
            "give one of them 8, 4, 3 or 2",
        )
    levels = options.levels
    if levels == "normal":
        _check_fixed(options, bits_k, bits_v)
    tier = Tier(
        bits_k,
        bits_v,
        axis_k="rank",
        axis_v="rank" if levels == "normal" else "token",
        group_k=group,
        group_v=group,
        arithmetic=options.arithmetic,
        rounding=options.rounding,
        sums=options.sums == "stored",
        coding_k=CODINGS[levels],
        coding_v=CODINGS[levels],
    )
    return Decision(cold=tier, hadamard=options.hadamard)


def _check_products(options: HackOptions) -> None:
    """Raises KvlatheError for sums that nothing would read."""
    if options.sums == "stored" and options.arithmetic != "int":
        raise KvlatheError(
            "sums=stored contradicts arithmetic=float",
            "only products of integers read the sums",
            "drop one of them",
        )


def _check_fixed(options: HackOptions, *bits: int) -> None:
    """Raises KvlatheError for what fixed levels cannot be composed with."""
    if 8 in bits:
        raise KvlatheError(
            "levels=normal contradicts bits=8",
            "the tables are for 4, 3 and 2 bits",
            "choose fewer bits, or levels=even",
        )
    if options.sums == "stored" or options.rounding != "nearest":
        raise KvlatheError(
            "levels=normal contradicts sums=stored and rounding=stochastic",
            "its codes are the nearest, and nothing reads their sums",
            "leave both out",
        )


METHOD = Method(
    "quantize full pages to 8, 4, 3 or 2 bit and compute on the codes",
    HackOptions(),
    plan=plan,
)
