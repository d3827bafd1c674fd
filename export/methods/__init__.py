"""Methods as data: a request such as "name:key=value+name" becomes a plan and a basis. No other folder names a method.

A method is one file with a SUMMARY and either ``plan`` (nothing to calibrate) or CALIBRATION, the source its paper
calibrates on, and ``rotate``, the bases of all lanes that it believes in.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import numpy as np
import numpy.typing as npt

from kvlathe.errors import KvlatheError
from kvlathe.export.basis import Basis
from kvlathe.export.methods import fdc, none, zack
from kvlathe.export.methods.lowrank import bases, best_ratio, full_lanes, kept, low_rank
from kvlathe.export.methods.options import Asked, Options, Part, parse, unknown, with_written
from kvlathe.export.plan import Bucket, CompressionPlan, Lane, ModelShape, Tier
from kvlathe.export.rotation import Rotation, element_change, energy_missed, principal_angle
from kvlathe.export.stats import Stats

__all__ = [
    "METHODS",
    "CacheForm",
    "Evidence",
    "Method",
    "Options",
    "best_ratio",
    "calibration",
    "compose",
    "evidence",
    "summaries",
]

Array = npt.NDArray[np.floating]
Source = Literal["random", "text"]


@dataclass(frozen=True, slots=True)
class Method:
    """``rotate`` is None for a method that leaves the ranks alone."""

    summary: str
    calibration: Source | None = None
    rotate: Callable[[Stats, Options], Rotation] | None = None
    plan: Callable[[], Part] = Part


METHODS: dict[str, Method] = {
    "none": Method(none.SUMMARY, plan=none.plan),
    "fdc": Method(fdc.SUMMARY, fdc.CALIBRATION, fdc.rotate),
    "zack": Method(zack.SUMMARY, zack.CALIBRATION, zack.rotate),
}


@dataclass(frozen=True, slots=True)
class CacheForm:
    """The cache's form, which no method decides: bits of a cached number (16 or 32), tokens a page, the prefill grid,
    the seed.
    """

    bits: Literal[16, 32] = 16
    page_tokens: int = 64
    prefill_chunk: int = 512
    seed: int = 0


def summaries() -> dict[str, str]:
    """Every method and what it does, in one line each."""
    return {name: method.summary for name, method in METHODS.items()}


def calibration(request: str) -> Source | None:
    """The source of tokens that the request's methods calibrate on by default; None where none is needed."""
    return next((method.calibration for _, method in _methods(request) if method.calibration), None)


def compose(
    request: str, shape: ModelShape, rope: bool, stats: Stats | None, options: Options, form: CacheForm
) -> tuple[CompressionPlan, Basis]:
    """The plan and the basis of ``request`` for a model of ``shape``. ``stats`` may be None where calibration() is.

    Raises KvlatheError for unknown names and options, parts that exclude each other, and targets out of reach.
    """
    parts = [_part(asked, method, stats, options) for asked, method in _methods(request)]
    deciding = [part for part in parts if part.lanes is not None]
    if len(deciding) > 1:
        raise KvlatheError(f"{request!r} cannot be composed", "two of its methods choose the ranks", "keep one of them")
    ranks = deciding[0] if deciding else Part(full_lanes(shape, rope))
    assert ranks.lanes is not None
    notes = {key: value for part in parts for key, value in part.notes.items()}
    return _one_bucket(shape, ranks.lanes, form, request, notes), ranks.basis


def _methods(request: str) -> list[tuple[Asked, Method]]:
    asked = parse(request)
    for one in asked:
        if one.name not in METHODS:
            raise unknown(f"the compression {one.name!r}", one.name, METHODS)
    return [(one, METHODS[one.name]) for one in asked]


def _part(asked: Asked, method: Method, stats: Stats | None, options: Options) -> Part:
    options = with_written(options, asked.options)
    if method.rotate is None:
        return method.plan()
    if stats is None:
        raise KvlatheError(f"{asked.name} needs statistics", "its bases come from them", "calibrate first")
    return low_rank(stats, options, method.rotate)


def _one_bucket(
    shape: ModelShape, lanes: tuple[Lane, ...], form: CacheForm, request: str, notes: dict[str, object]
) -> CompressionPlan:
    return CompressionPlan(
        model=shape,
        lanes=lanes,
        tiers=(Tier(form.bits, form.bits),),
        buckets=(Bucket(0, tuple(i for i, lane in enumerate(lanes) if not lane.removed)),),
        page_tokens=form.page_tokens,
        prefill_chunk=form.prefill_chunk,
        seed=form.seed,
        compression=request,
        notes=notes,
    )


# -- what a person should see ------------------------------------------------------------------------------------------
@dataclass(frozen=True, eq=False)
class Evidence:
    """Spectra [L, H, d] and the stability of the bases between the two halves of the calibration, [L, H] each.

    ``epsilon`` = mean |R|, ``delta`` = mean |R_a - R_b| aligned, ``angle`` = largest principal angle of the kept
    spaces, radians, ``missed`` = fraction of the energy of one half's keys (values) that the other half's kept space
    does not hold and its own does.
    """

    spectrum_k: Array
    spectrum_v: Array
    epsilon_k: Array
    delta_k: Array
    angle_k: Array
    missed_k: Array
    epsilon_v: Array
    delta_v: Array
    angle_v: Array
    missed_v: Array


def evidence(request: str, stats: Stats, options: Options, plan: CompressionPlan) -> Evidence | None:
    """Why the plan's bases should be believed; None where no method of the request made any."""
    found = [(m.rotate, with_written(options, asked.options)) for asked, m in _methods(request) if m.rotate]
    if not found:
        return None
    rotate, options = found[0]
    second = stats.half(1)
    seen = second.whole
    whole, one, other = (bases(s, options, rotate) for s in (stats, stats.half(0), second))
    sides = {}
    for side, left, right, moment in (("k", one.b, other.b, seen.kk), ("v", one.a_v, other.a_v, seen.vv)):
        pairs = list(zip(kept(plan.lanes, left, side), kept(plan.lanes, right, side), strict=True))
        angles = np.array([principal_angle(x, y) for x, y in pairs])
        moments = moment.reshape(-1, *moment.shape[2:])
        missed = [energy_missed(*pair, m) for pair, m in zip(pairs, moments, strict=True)]
        epsilon, delta = element_change(left, right)
        shape = epsilon.shape
        sides |= {f"epsilon_{side}": epsilon, f"delta_{side}": delta}
        sides |= {f"angle_{side}": angles.reshape(shape), f"missed_{side}": np.reshape(missed, shape)}
    return Evidence(whole.spectrum_k, whole.spectrum_v, **sides)
