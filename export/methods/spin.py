"""Spin: turn the kept subspace of K or V so that no few channels set the range of a quantization group.

Any orthogonal S may follow a lane's projections: (q A S) (k B S)^T = (q A) (k B)^T and (v A_v S) (S^T O_v) = v A_v O_v.
In full precision it changes nothing. The axes of an SVD are the worst ones for groups along the rank: energy falls
steeply along them. S is a Hadamard matrix with random signs where the rank is a power of two, else a random orthogonal
matrix. It is folded into matrices that exist (V's always do), so it costs nothing at run time; only a K that is rotated
by RoPE and keeps every dimension has none, and gets one if that is asked for.
"""

from __future__ import annotations

import dataclasses

import numpy as np
import numpy.typing as npt

from kvlathe.export.basis import Basis, LaneBasis
from kvlathe.export.methods.options import Spin
from kvlathe.export.plan import Lane, Tier

Array = npt.NDArray[np.float64]


def turn(rank: int, rng: np.random.Generator) -> Array:
    """An orthogonal matrix [rank, rank] that spreads every axis over all of them."""
    if rank & (rank - 1):
        q, r = np.linalg.qr(rng.normal(size=(rank, rank)))
        return q * np.sign(np.diag(r))
    hadamard = np.ones((1, 1))
    while len(hadamard) < rank:
        hadamard = np.kron([[1.0, 1.0], [1.0, -1.0]], hadamard)
    return rng.choice([-1.0, 1.0], (rank, 1)) * hadamard / np.sqrt(rank)


def spun(
    lanes: tuple[Lane, ...], basis: Basis, head_dim: int, tier: Tier, spin: Spin, seed: int
) -> tuple[tuple[Lane, ...], Basis]:
    """``lanes`` and ``basis`` with the sides turned that ``spin`` names. ``tier`` is what they are quantized in."""
    sides = _costless(lanes, tier) if spin == "auto" else spin
    found, turned = Basis(basis), []
    for lane in lanes:
        at = (lane.layer, lane.head)
        if not lane.removed and sides != "none":
            given = found.get(at, LaneBasis())
            if "k" in sides:
                lane, given = _spun_k(lane, given, np.random.default_rng((seed, *at, 0)))
            if "v" in sides:
                given = _spun_v(given, head_dim, np.random.default_rng((seed, *at, 1)))
            found[at] = given
        turned.append(lane)
    return tuple(turned), found


def _costless(lanes: tuple[Lane, ...], tier: Tier) -> str:
    """The sides that are quantized in groups along the rank; K only where it is projected or folded anyway (where any
    lane is projected, all are multiplied by something).
    """
    k = tier.bits_k < 16 and tier.axis_k == "rank" and any(lane.projected or lane.rope == "none" for lane in lanes)
    v = tier.bits_v < 16 and tier.axis_v == "rank"
    return "k" * k + "v" * v


def _spun_k(lane: Lane, given: LaneBasis, rng: np.random.Generator) -> tuple[Lane, LaneBasis]:
    s = turn(lane.input_dim if given.a is None else given.a.shape[1], rng)
    a, b = (s if m is None else m @ s for m in (given.a, given.b))
    return dataclasses.replace(lane, projected=lane.rope != "none"), dataclasses.replace(given, a=a, b=b)


def _spun_v(given: LaneBasis, head_dim: int, rng: np.random.Generator) -> LaneBasis:
    s = turn(head_dim if given.a_v is None else given.a_v.shape[1], rng)
    a_v = s if given.a_v is None else given.a_v @ s
    o_v = s.T if given.o_v is None else s.T @ given.o_v
    return dataclasses.replace(given, a_v=a_v, o_v=o_v)
