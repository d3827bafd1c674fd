"""One list of tiers that holds every number format along both axes, for all tests that
hold an implementation to kvlathe/plan/codec.py. A new format joins it by its name."""

from __future__ import annotations

from kvlathe.plan.formats import NAMES, NORMAL, Bits, Format, Tier
from kvlathe.plan.groups import Group
from kvlathe.plan.heads import Lane
from kvlathe.plan.lives import SEAL
from kvlathe.plan.plan import CompressionPlan
from tests.support.attend_cases import plan_of

BITS: list[Bits] = sorted(NAMES)
CODED_BITS = [bits for bits in BITS if Format(bits, "rank", 64).is_coded]


def bits_of(number: int) -> Bits:
    """Of a number from a command line, or of a parameter of a test."""
    return next(bits for bits in BITS if bits == number)


def _tiers(bits: Bits) -> list[Tier]:
    return [
        Tier(bits, bits, "rank", "token", 32, 32),
        Tier(bits, bits, "token", "rank", 16, 48),
    ]


def _fixed(bits: Bits) -> Tier:
    """Levels of the normal."""
    return Tier(
        bits, bits, "rank", "rank", 32, 48, levels_k="normal", levels_v="normal"
    )


TIERS = [tier for bits in BITS for tier in _tiers(bits)]
TIERS += [_fixed(bits) for bits in NORMAL]
CODED_TIERS = [tier for tier in TIERS if tier.is_coded]


def sealing_plan(tier: Tier, page: int = 64) -> CompressionPlan:
    """Two unlike lanes of one layer; a hot bucket of singles is sealed in ``tier``."""
    lanes = [
        Lane(0, 0, 64, 48, 80, projected=True),
        Lane(0, 1, 64, 64, 16, projected=True),
    ]
    groups = [Group((0, 1), Tier(32, 32), (tier,), SEAL)]
    return plan_of(lanes, groups, 64, 2, page)
