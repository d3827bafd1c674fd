"""Whether the calibration was enough, in words that a user can act on."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from kvlathe.export.methods.evidence import Evidence

Array = npt.NDArray[np.floating]
Row = tuple[str, float, float, float, float, float]
STABLE, DOUBTFUL = 1.0, 5.0
"""Percent of energy missed, as the mean over heads: up to which the halves agree, and
from which they do not."""


@dataclass(frozen=True, slots=True)
class Stability:
    """``missed`` and ``worst``: percent of energy that one half's subspace misses, mean
    and largest. ``rows``: (what, mean epsilon, mean delta, delta / epsilon in %, largest
    angle in degrees, energy missed in %)."""

    verdict: str
    advice: str
    missed: float
    worst: float
    rows: tuple[Row, ...]


def stability(evidence: Evidence) -> Stability:
    """The verdict on the bases of a plan."""
    e = evidence
    rows = (
        _row("K (with its queries)", e.epsilon_k, e.delta_k, e.angle_k, e.missed_k),
        _row("V", e.epsilon_v, e.delta_v, e.angle_v, e.missed_v),
    )
    missed = max(row[-1] for row in rows)
    worst = 100 * float(max(e.missed_k.max(), e.missed_v.max()))
    return Stability(*_words(missed), missed, worst, rows)


def _row(name: str, epsilon: Array, delta: Array, angle: Array, missed: Array) -> Row:
    size, difference = float(epsilon.mean()), float(delta.mean())
    return (
        name,
        size,
        difference,
        100 * difference / size,
        float(np.degrees(angle.max())),
        100 * float(missed.mean()),
    )


def _words(missed: float) -> tuple[str, str]:
    """(verdict, advice)."""
    if missed <= STABLE:
        return "Yes.", "More text would hardly change this engine."
    if missed <= DOUBTFUL:
        return "Nearly.", "Twice the calibration tokens may gain a little accuracy."
    return "No.", "Calibrate on more text, and on text like yours, then build again."
