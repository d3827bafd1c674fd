"""Variants: the plans of one request that a search chooses from."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
from collections.abc import Callable
from dataclasses import dataclass

from kvlathe.base.errors import KvlatheError
from kvlathe.export.calibration.stats import Stats
from kvlathe.export.methods.composition import CacheSettings, Made, compose
from kvlathe.export.methods.lowrank import left
from kvlathe.export.methods.options import Options
from kvlathe.export.methods.registry import METHODS, chooses_ranks, methods_of
from kvlathe.plan.heads import RANK_MULTIPLE, ModelShape
from kvlathe.plan.plan import CompressionPlan

EXACT = 1e-9
"""Shares of the bytes that rounding cannot tell apart."""


@dataclass(frozen=True, slots=True)
class Variant:
    """Plans by the share of the bytes that they remove, from ``least`` to ``most``
    (equal where it is one plan). Shares are of the uncompressed cache in ``bits`` a
    number. ``name``: the request with every option written; ``of``: as it was asked,
    which is what the variants of one request have in common. ``guess`` gives the
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
    """What measured plans are shown beside: every method that chooses ranks or a number
    format for all tokens. One that these settings cannot hold is left out.
    """
    shown: list[Variant] = []
    for name, method in METHODS.items():
        if not method.measured and (method.sizes or method.rotate):
            with contextlib.suppress(KvlatheError):
                shown += variants(name, shape, rope, stats, Options(), settings)
    return shown


def variants(
    request: str,
    shape: ModelShape,
    rope: bool,
    stats: Stats | None,
    options: Options,
    settings: CacheSettings,
) -> list[Variant]:
    """Everything that ``request`` leaves open. Raises KvlatheError for what ``compose``
    refuses."""
    has_ranks = chooses_ranks(request)

    def variant(name: str) -> Variant:
        def at(ratio: float) -> Made:
            target = options.asked(compression_ratio=ratio if has_ranks else None)
            return compose(name, shape, rope, stats, target, settings)

        whole, _ = at(0.0)
        least = most = removed(whole, settings.bits)
        if has_ranks:
            most = removed(_smallest(whole), settings.bits) - EXACT
        return Variant(name, request, settings.bits, least, most, at)

    return [variant(name) for name in written_out(request)]


def _smallest(plan: CompressionPlan) -> CompressionPlan:
    """``plan`` with every lane cut to the least rank."""
    least = {"rank_k": RANK_MULTIPLE, "rank_v": RANK_MULTIPLE, "projected": True}
    lanes = (dataclasses.replace(lane, **least) for lane in plan.lanes)
    return dataclasses.replace(plan, lanes=tuple(lanes))


def written_out(request: str) -> list[str]:
    """``request`` with every value of every size that it leaves open."""
    methods = [_written_out(text.strip()) for text in request.split("+")]
    return ["+".join(choice) for choice in itertools.product(*methods)]


def _written_out(text: str) -> list[str]:
    """One method of a request, each way its open sizes may be written."""
    ((requested, method),) = methods_of(text)
    ways = [text]
    for key, values in method.sizes.items():
        if any(name.startswith(key) for name in requested.options):
            continue
        longer = itertools.product(ways, values)
        ways = [_with_option(way, key, value) for way, value in longer]
    return ways


def _with_option(text: str, key: str, value: str) -> str:
    separator = "," if ":" in text else ":"
    return f"{text}{separator}{key}={value}"
