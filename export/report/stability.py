"""Whether the calibration was enough, in words that a user can act on."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from kvlathe.export.methods.evidence import Evidence
from kvlathe.export.report.heads import Kept

Array = npt.NDArray[np.floating]
Row = tuple[str, float, float, float, float, float]
STABLE, DOUBTFUL = 1.0, 5.0
"""Percent of energy missed, as the mean over heads: up to which the halves agree, and
from which they do not."""


@dataclass(frozen=True, slots=True)
class Stability:
    """``missed`` and ``worst``: percent of energy that one half's subspace misses, mean
    and largest, over the ``checked`` keys and values of heads: those that keep some of
    their dimensions. ``missed_k``, ``missed_v``: the same of each head, NaN where it is
    not among them. ``rows``: (what, mean epsilon, mean delta, delta / epsilon in %,
    largest angle in degrees, energy missed in %)."""

    verdict: str
    advice: str
    checked: int
    missed: float
    worst: float
    missed_k: Array
    missed_v: Array
    rows: tuple[Row, ...]


def stability(evidence: Evidence, held: Kept, dims: Array) -> Stability | None:
    """The verdict on the bases of a plan. None where no head keeps some of its
    ``dims`` [layers, heads] and drops others: two halves miss nothing of a whole space, however
    little text there was."""
    e = evidence
    missed_k = _checked(e.missed_k, held.ranks_k, dims)
    missed_v = _checked(e.missed_v, held.ranks_v, dims)
    checked = int(np.isfinite(missed_k).sum() + np.isfinite(missed_v).sum())
    if not checked:
        return None
    rows = [
        _row(name, epsilon, delta, angle, missed)
        for name, epsilon, delta, angle, missed in (
            ("K (with its queries)", e.epsilon_k, e.delta_k, e.angle_k, missed_k),
            ("V", e.epsilon_v, e.delta_v, e.angle_v, missed_v),
        )
        if np.isfinite(missed).any()
    ]
    missed = max(row[-1] for row in rows)
    worst = max(float(np.nanmax(side, initial=0)) for side in (missed_k, missed_v))
    verdict, advice = _words(missed)
    return Stability(
        verdict, advice, checked, missed, worst, missed_k, missed_v, tuple(rows)
    )


def _checked(missed: Array, ranks: Array, dims: Array) -> Array:
    """Percent of energy missed, NaN where a head keeps all of its dimensions or none."""
    return np.where((ranks > 0) & (ranks < dims), 100 * missed, np.nan)


def _row(name: str, epsilon: Array, delta: Array, angle: Array, missed: Array) -> Row:
    own = np.isfinite(missed)
    size, difference = float(epsilon[own].mean()), float(delta[own].mean())
    return (
        name,
        size,
        difference,
        100 * difference / size,
        float(np.degrees(angle[own].max())),
        float(missed[own].mean()),
    )


def _words(missed: float) -> tuple[str, str]:
    """(verdict, advice)."""
    if missed <= STABLE:
        return "Yes.", "More text would hardly change this engine."
    if missed <= DOUBTFUL:
        return "Nearly.", "Twice the calibration tokens may gain a little accuracy."
    return "No.", "Calibrate on more text, and on text like yours, then build again."
