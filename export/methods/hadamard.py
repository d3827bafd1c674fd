"""Hadamard rotation: turn the kept subspace of K or V, so that no few channels set the
range of a quantization group (QuaRot, arXiv 2404.00456).

Any orthogonal S may follow a lane's projections: (q A S) (k B S)^T = (q A) (k B)^T and
(v A_v S) (S^T O_v) = v A_v O_v. In full precision it changes nothing. The axes of an
SVD are the worst ones for groups along the rank: energy falls steeply along them. S is
a Hadamard matrix with random signs where the rank is a power of two, else a random
orthogonal matrix. It is folded into matrices that exist (V's always do), so it costs
nothing at run time; only a K that is rotated by RoPE and keeps every dimension has
none, and gets one if that is asked for.
"""

from __future__ import annotations

import dataclasses

import numpy as np

from kvlathe.export.bases.basis import Basis, LaneBasis
from kvlathe.export.bases.hadamard import hadamard
from kvlathe.export.methods.method import Hadamard
from kvlathe.plan.formats import Tier
from kvlathe.plan.heads import Lane, ModelShape


def rotated(
    lanes: tuple[Lane, ...],
    basis: Basis,
    shape: ModelShape,
    tier: Tier,
    sides: Hadamard,
    seed: int,
) -> tuple[tuple[Lane, ...], Basis]:
    """``lanes`` and ``basis`` with these ``sides`` rotated. ``tier`` is the number format
    that follows."""
    named = _costless(lanes, tier) if sides == "auto" else sides
    if named == "none":
        return lanes, Basis(basis)
    rotated_basis = Basis(basis)
    rotated_lanes = []
    for lane in lanes:
        if not lane.removed and not lane.values_in_keys:
            at = (lane.layer, lane.head)
            given = rotated_basis.get(at, LaneBasis())
            if "k" in named:
                rng = np.random.default_rng((seed, *at, 0))
                lane, given = _rotated_k(lane, given, rng)
            if "v" in named:
                rng = np.random.default_rng((seed, *at, 1))
                given = _rotated_v(given, shape.value_dim(lane.layer), rng)
            rotated_basis[at] = given
        rotated_lanes.append(lane)
    return tuple(rotated_lanes), rotated_basis


def _costless(lanes: tuple[Lane, ...], tier: Tier) -> str:
    """The sides that are quantized in groups along the rank; K only where it is
    projected or folded anyway (where any lane is projected, all are multiplied by
    something).
    """
    k = tier.k.along_rank and any(
        lane.projected or lane.rope == "none"
        for lane in lanes
        if not lane.values_in_keys
    )
    v = tier.v.along_rank
    return "k" * k + "v" * v


def _rotated_k(
    lane: Lane, given: LaneBasis, rng: np.random.Generator
) -> tuple[Lane, LaneBasis]:
    rank = lane.input_dim if given.a is None else given.a.shape[1]
    s = hadamard(rank, rng)
    a = s if given.a is None else given.a @ s
    b = s if given.b is None else given.b @ s
    turns = lane.rope != "none"
    rotated = dataclasses.replace(given, a=a, b=b)
    return dataclasses.replace(lane, projected=turns), rotated


def _rotated_v(given: LaneBasis, dims: int, rng: np.random.Generator) -> LaneBasis:
    rank = dims if given.a_v is None else given.a_v.shape[1]
    s = hadamard(rank, rng)
    a_v = s if given.a_v is None else given.a_v @ s
    o_v = s.T if given.o_v is None else s.T @ given.o_v
    return dataclasses.replace(given, a_v=a_v, o_v=o_v)
