"""Channel scales: each channel of K or V divided by a factor, so that one scale a token
serves all of them alike.

k' = k / c and q' = q c have the same product; v' = v / c comes back as rows of W_O
times c. Both fold into the weights (V's always; K's where it is projected or the model
has no RoPE; under RoPE where both channels of a plane share their factor), so they cost
nothing at run time. c_i is the square root of the channel's root mean square in
calibration, after whatever projection the lane has; ZipCache (Eq. 6) takes that of its
largest magnitude in the sequence.
"""

from __future__ import annotations

import dataclasses

import numpy as np
import numpy.typing as npt

from kvlathe.export.bases.basis import Basis, LaneBasis
from kvlathe.export.calibration.stats import Stats
from kvlathe.plan.heads import Lane

Array = npt.NDArray[np.floating]


def scaled(lanes: tuple[Lane, ...], basis: Basis, stats: Stats, sides: str) -> Basis:
    """``basis`` with the channels of the ``sides`` ("k", "v", "kv") of every lane
    divided by their factors."""
    scaled_basis = Basis(basis)
    moments = stats.whole
    for lane in lanes:
        if lane.removed:
            continue
        at = (lane.layer, lane.head)
        given = scaled_basis.get(at, LaneBasis())
        d = stats.shape.heads(lane.layer).head_dim
        if "k" in sides:
            given = _scaled_k(lane, given, moments.kk[at][:d, :d] / moments.tokens)
        if "v" in sides:
            given = _scaled_v(given, moments.vv[at][:d, :d] / moments.tokens)
        scaled_basis[at] = given
    return scaled_basis


def factors(second: Array, into: Array | None) -> Array:
    """[rank] of vectors with the second moment ``second`` [d, d] that are stored as x
    ``into`` [d, rank]. A channel that was never seen keeps its size."""
    energy = np.diag(second)
    if into is not None:
        energy = np.einsum("ij,ik,kj->j", into, second, into)
    least = np.finfo(np.float32).tiny
    root = np.maximum(energy, least) ** 0.25
    return np.where(energy > 0, root, 1.0)


def _scaled_k(lane: Lane, given: LaneBasis, second: Array) -> LaneBasis:
    if lane.planes:
        half = len(second) // 2
        dims = [*lane.planes, *(plane + half for plane in lane.planes)]
        second = second[np.ix_(dims, dims)]
    c = factors(second, given.b)
    if lane.rope != "none" and not lane.projected:
        # RoPE turns planes: both channels of a plane share a factor.
        product = np.prod(c.reshape(2, -1), 0)
        c = np.tile(np.sqrt(product), 2)
    a = _or_identity(given.a, len(c))
    b = _or_identity(given.b, len(c))
    return dataclasses.replace(given, a=a * c, b=b / c)


def _scaled_v(given: LaneBasis, second: Array) -> LaneBasis:
    c = factors(second, given.a_v)
    a_v = _or_identity(given.a_v, len(c))
    o_v = _or_identity(given.o_v, len(c))
    return dataclasses.replace(given, a_v=a_v / c, o_v=o_v * c[:, None])


def _or_identity(matrix: Array | None, size: int) -> Array:
    return np.eye(size) if matrix is None else matrix
