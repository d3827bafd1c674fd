"""Evidence: how stable a plan's bases are between the two halves of the calibration.
The report shows it."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from kvlathe.export.bases.rotation import (
    element_change,
    energy_missed,
    principal_angle,
)
from kvlathe.export.calibration.stats import Stats
from kvlathe.export.methods.compression import Compression
from kvlathe.export.methods.lowrank import bases
from kvlathe.export.methods.options import RankOptions
from kvlathe.plan.plan import CompressionPlan

Array = npt.NDArray[np.floating]


@dataclass(frozen=True, eq=False)
class Evidence:
    """Spectra [L, H, d] of the whole calibration, and how stable the bases are between
    its halves, [L, H] each. R_a and R_b are the bases of the two halves.

    ``epsilon`` = mean |R_a|. ``delta`` = mean |R_a - R_b|, columns aligned. ``angle`` =
    the largest principal angle between the kept spaces, radians. ``missed`` = the share
    of one half's energy that the other half's kept space does not hold and its own
    does.
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


def evidence(
    compression: Compression, stats: Stats, options: RankOptions, plan: CompressionPlan
) -> Evidence | None:
    """Why the plan's bases should be believed; None where no method made any."""
    for one in compression.methods:
        rotate = one.method.rotate
        if rotate is None:
            continue
        options = one.overruling(options)
        first, second = stats.half(0), stats.half(1)
        whole = bases(stats, options, rotate)
        of_first = bases(first, options, rotate)
        of_second = bases(second, options, rotate)
        moments = second.whole
        return Evidence(
            whole.spectrum_k,
            whole.spectrum_v,
            *_stability(plan, "k", of_first.b, of_second.b, moments.kk),
            *_stability(plan, "v", of_first.a_v, of_second.a_v, moments.vv),
        )
    return None


def _stability(
    plan: CompressionPlan, side: str, one: Array, other: Array, moments: Array
) -> tuple[Array, Array, Array, Array]:
    """epsilon, delta, angle and missed, [L, H] each. ``one``, ``other``: bases [L, H,
    d, d]; ``moments`` [L, H, d, d] of the half that ``other`` was made from."""
    found = np.zeros((4, *one.shape[:2]))
    for lane in plan.lanes:
        at = lane.layer, lane.head
        d = plan.model.heads(lane.layer).head_dim
        a, b = one[at][:d, :d], other[at][:d, :d]
        epsilon, delta = element_change(a, b)
        rank = getattr(lane, f"rank_{side}")
        a, b = a[:, :rank], b[:, :rank]
        missed = energy_missed(a, b, moments[at][:d, :d])
        found[:, lane.layer, lane.head] = epsilon, delta, principal_angle(a, b), missed
    return found[0], found[1], found[2], found[3]
