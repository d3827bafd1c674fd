"""Channel scales: each channel of K or V divided by a factor, so that one scale a token serves all of them alike.

k' = k / c and q' = q c have the same product; v' = v / c comes back as rows of W_O times c. Both fold into the weights
(V's always; K's where it is projected or the model has no RoPE; under RoPE where both channels of a plane share their
factor), so they cost nothing at run time. c_i is the square root of the channel's root mean square in calibration,
after whatever projection the lane has; ZipCache (Eq. 6) takes that of its largest magnitude in the sequence.
"""

from __future__ import annotations

import dataclasses

import numpy as np
import numpy.typing as npt

from kvlathe.export.basis import Basis, LaneBasis
from kvlathe.export.plan import Lane
from kvlathe.export.stats import Stats

Array = npt.NDArray[np.floating]


def scaled(lanes: tuple[Lane, ...], basis: Basis, stats: Stats, sides: str) -> Basis:
    """``basis`` with the channels of the ``sides`` ("k", "v", "kv") of every lane divided by their factors."""
    found, seen = Basis(basis), stats.whole
    for lane in lanes:
        at = (lane.layer, lane.head)
        if lane.removed:
            continue
        given = found.get(at, LaneBasis())
        if "k" in sides:
            given = _scaled_k(lane, given, seen.kk[at] / seen.tokens)
        if "v" in sides:
            given = _scaled_v(given, seen.vv[at] / seen.tokens)
        found[at] = given
    return found


def factors(second: Array, into: Array | None) -> Array:
    """[rank] of vectors with the second moment ``second`` [d, d] that are stored as x ``into`` [d, rank]. A channel
    that was never seen keeps its size."""
    energy = np.diag(second) if into is None else np.einsum("ij,ik,kj->j", into, second, into)
    return np.where(energy > 0, np.maximum(energy, np.finfo(np.float32).tiny) ** 0.25, 1.0)


def _scaled_k(lane: Lane, given: LaneBasis, second: Array) -> LaneBasis:
    if lane.planes:
        dims = [*lane.planes, *(plane + len(second) // 2 for plane in lane.planes)]
        second = second[np.ix_(dims, dims)]
    c = factors(second, given.b)
    if lane.rope != "none" and not lane.projected:  # RoPE turns planes: one factor for both channels of each
        c = np.tile(np.sqrt(np.prod(c.reshape(2, -1), 0)), 2)
    a, b = (np.eye(len(c)) if m is None else m for m in (given.a, given.b))
    return dataclasses.replace(given, a=a * c, b=b / c)


def _scaled_v(given: LaneBasis, second: Array) -> LaneBasis:
    c = factors(second, given.a_v)
    a_v, o_v = (np.eye(len(c)) if m is None else m for m in (given.a_v, given.o_v))
    return dataclasses.replace(given, a_v=a_v / c, o_v=o_v * c[:, None])
