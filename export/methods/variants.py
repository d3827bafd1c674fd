"""Variants: the plans of one compression that a search chooses from."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
from collections.abc import Callable
from dataclasses import dataclass

from kvlathe.base.errors import KvlatheError
from kvlathe.export.calibration.stats import Stats
from kvlathe.export.methods.composition import CacheSettings, Made, compose
from kvlathe.export.methods.compression import Compression, RequestedMethod
from kvlathe.export.methods.lowrank import left
from kvlathe.export.methods.options import Option, RankOptions
from kvlathe.export.methods.registry import methods
from kvlathe.plan.heads import RANK_MULTIPLE, ModelShape
from kvlathe.plan.plan import CompressionPlan

EXACT = 1e-9
"""Shares of the bytes that rounding cannot tell apart."""


@dataclass(frozen=True, slots=True)
class Variant:
    """Plans by the share of the bytes that they remove, from ``least`` to ``most``
    (equal where it is one plan). Shares are of the uncompressed cache in ``bits`` a
    number. ``name``: the compression with every option written; ``of``: as it was asked,
    which is what the variants of one compression have in common. ``guess`` gives the
    share at which a search begins; None: half of what can be removed.
    """

    name: str
    of: str
    bits: int
    least: float
    most: float
    plan: Callable[[float], Made]
    guess: Callable[[], float] | None = None

    def at(self, ratio: float) -> Made:
        """The plan that removes at least ``ratio`` of the bytes. Raises KvlatheError
        where none does."""
        if ratio > self.most:
            raise KvlatheError(
                f"a compression ratio of {ratio:g} cannot be reached",
                "every head keeps its smallest form",
                f"ask for at most {int(1e4 * self.most) / 1e4:.4g}",
            )
        return self.plan(ratio)


def removed(plan: CompressionPlan, bits: int) -> float:
    """Share of the bytes that ``plan`` removes of the uncompressed cache in ``bits`` a
    number, a long sequence."""
    return 1 - left(plan, bits)


def for_comparison(
    shape: ModelShape, rope: bool, stats: Stats | None, settings: CacheSettings
) -> list[Variant]:
    """Plans to show beside measured ones: those of every method that chooses ranks or a number
    format for all tokens. One that these settings cannot hold is left out.
    """
    shown: list[Variant] = []
    for name, method in methods().items():
        if not method.measured and (method.sizes or method.rotate):
            alone = Compression.of([RequestedMethod.plain(name)])
            with contextlib.suppress(KvlatheError):
                shown += variants(alone, shape, rope, stats, RankOptions(), settings)
    return shown


def variants(
    compression: Compression,
    shape: ModelShape,
    rope: bool,
    stats: Stats | None,
    options: RankOptions,
    settings: CacheSettings,
) -> list[Variant]:
    """Everything that ``compression`` leaves open. Raises KvlatheError for what
    ``compose`` refuses."""
    has_ranks = bool(compression.choosing_ranks)

    def variant(whole: Compression) -> Variant:
        def at(ratio: float) -> Made:
            share = max(0.0, ratio)  # padding may take more than the model itself
            target = options.asked(compression_ratio=share if has_ranks else None)
            return compose(whole, shape, rope, stats, target, settings)

        gentlest, _ = at(0.0)
        least = most = removed(gentlest, settings.bits)
        if has_ranks:
            most = removed(_smallest(gentlest), settings.bits) - EXACT
        return Variant(whole.text, compression.text, settings.bits, least, most, at)

    return [variant(whole) for whole in written_out(compression)]


def _smallest(plan: CompressionPlan) -> CompressionPlan:
    """``plan`` with every lane cut to the least rank."""
    least = {"rank_k": RANK_MULTIPLE, "rank_v": RANK_MULTIPLE, "projected": True}
    lanes = (dataclasses.replace(lane, **least) for lane in plan.lanes)
    return dataclasses.replace(plan, lanes=tuple(lanes))


def written_out(compression: Compression) -> list[Compression]:
    """``compression`` with every value of every size that it leaves open."""
    ways = itertools.product(*map(_written_out, compression.methods))
    return [Compression.of(way) for way in ways]


def _written_out(one: RequestedMethod) -> list[RequestedMethod]:
    """One method of a compression, each way its open sizes may be written."""
    ways = [one]
    for size in one.method.sizes:
        if not _is_settled(size, one):
            ways = [
                way.asked(**{size.name: value})
                for way in ways
                for value in sorted(size.kind.values)
            ]
    return ways


def _is_settled(size: Option, one: RequestedMethod) -> bool:
    """Whether it was written, or what stands in its place: ``bits_k`` for ``bits``."""
    return any(name.startswith(size.name) for name in one.written)
