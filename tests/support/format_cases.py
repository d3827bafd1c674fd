"""One list of tiers that holds every number format along both axes, for all tests that
hold an implementation to kvlathe/plan/codec.py. A new format joins it by its name."""

from __future__ import annotations

import dataclasses

from kvlathe.plan.formats import (
    DECODINGS,
    NAMES,
    WHOLE_RANK,
    Axis,
    Bits,
    Coding,
    Format,
    Tier,
)
from kvlathe.plan.groups import Group
from kvlathe.plan.heads import Lane
from kvlathe.plan.lives import SEAL
from kvlathe.plan.plan import CompressionPlan
from tests.support.attend_cases import plan_of

BITS: list[Bits] = sorted(NAMES)
CODED_BITS = [bits for bits in BITS if Format(bits, "rank", 64).is_coded]


def bits_of(number: int) -> Bits:
    """The bits that a number stands for, from a command line, or of a parameter of a
    test."""
    return next(bits for bits in BITS if bits == number)


def _tiers(bits: Bits) -> list[Tier]:
    return [
        Tier(bits, bits, "rank", "token", 32, 32),
        Tier(bits, bits, "token", "rank", 16, 48),
    ]


def tier_of(k: Format, v: Format) -> Tier:
    """Pages of these two formats, read as floats."""
    sizes = (k.bits, v.bits, k.axis, v.axis, k.group, v.group)
    tier = Tier(*sizes, span_k=k.span, span_v=v.span)
    return dataclasses.replace(tier, coding_k=k.coding, coding_v=v.coding)


def _along_rank(bits: Bits, coding: Coding) -> Tier:
    """A tier of a coding whose groups run along the rank alone."""
    groups = (WHOLE_RANK,) * 2 if DECODINGS[coding].has_one_group else (32, 48)
    axis: Axis = "rank"
    return tier_of(*(Format(bits, axis, n, coding=coding) for n in groups))


Kind = tuple[Bits, Coding]
BY_RANK: list[Kind] = [
    (bits, coding)
    for coding, decoding in DECODINGS.items()
    if decoding.axis_number is not None
    for bits in decoding.widths
]
KINDS: list[Kind] = [*((bits, "affine") for bits in BITS), *BY_RANK]
"""Every width in every coding that it may have."""
TIERS = [tier for bits in BITS for tier in _tiers(bits)]
TIERS += [_along_rank(*kind) for kind in BY_RANK]
CODED_TIERS = [tier for tier in TIERS if tier.is_coded]


def sealing_plan(tier: Tier, page: int = 64) -> CompressionPlan:
    """Two unlike lanes of one layer; a hot bucket of singles is sealed in ``tier``."""
    lanes = [
        Lane(0, 0, 64, 48, 80, projected=True),
        Lane(0, 1, 64, 64, 16, projected=True),
    ]
    groups = [Group((0, 1), Tier(32, 32), (tier,), SEAL)]
    return plan_of(lanes, groups, 64, 2, page)
