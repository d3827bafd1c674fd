"""Whole lanes in bases from statistics: every dim is kept, and turned before it is
quantized.

In full precision they change nothing: q' k'^T = q k^T, and what turns V is undone in
W_O. Keys that leave out their mean are exact too, since softmax ignores a constant. K's
bases are passed in attention where the model has RoPE, and folded into its weights
where it has none; V's are folded always.
"""

from __future__ import annotations

import dataclasses

import numpy as np

from kvlathe.export.bases import allocate
from kvlathe.export.bases.basis import Basis, LaneBasis
from kvlathe.export.bases.hadamard import hadamard
from kvlathe.export.bases.rotation import eigen
from kvlathe.export.calibration.stats import Stats
from kvlathe.export.methods.forms import Grid
from kvlathe.plan.heads import Lane

PAGE = 64
"""Tokens of a page, of which no basis knows."""


def balanced_keys(stats: Stats, seed: int) -> Basis:
    """Keys in the balanced basis, turned by a Hadamard matrix: stored keys and their
    queries have equal variances in it, so a step of a channel errs by what its queries
    make of it."""
    grid = Grid(stats, PAGE, seed, PAGE)
    basis = Basis()
    for layer, head in stats.shape.places:
        rank = allocate.whole(stats.shape.heads(layer).head_dim)
        cut = grid.cut("k", layer, head, rank)
        basis[layer, head] = LaneBasis(a=cut.back, b=cut.into, centre_k=cut.centre)
    return basis


def reader_axes(stats: Stats, seed: int, per_layer: bool) -> Basis:
    """Both sides rotated into the axes of their readers, then by a Hadamard matrix: K by
    the eigenvectors of Q^T Q, V by those of what attention makes of it. ``per_layer``:
    one rotation for all KV heads of a layer."""
    moments = stats.whole
    basis = Basis()
    for layer in range(stats.shape.layers):
        heads, d = stats.shape.lanes(layer), stats.shape.heads(layer).head_dim
        queries = moments.qq[layer, :heads, :d, :d]  # [H, d, d]
        outputs = moments.oo[layer, :heads, :d, :d]
        if per_layer:
            queries, outputs = (
                np.broadcast_to(x.sum(0), x.shape) for x in (queries, outputs)
            )
        for head in range(heads):
            k = _turned(queries[head], (seed, layer, head, 0))
            v = _turned(outputs[head], (seed, layer, head, 1))
            basis[layer, head] = LaneBasis(a=k, b=k, a_v=v, o_v=v.T)
    return basis


def _turned(gram: np.ndarray, seed: tuple[int, ...]) -> np.ndarray:
    """Eigenvectors of ``gram`` [d, d], then a Hadamard matrix: orthogonal."""
    _, vectors = eigen(gram)
    return vectors @ hadamard(len(gram), np.random.default_rng(seed))


def in_bases(lanes: tuple[Lane, ...], basis: Basis) -> tuple[tuple[Lane, ...], Basis]:
    """``lanes``, which keep every dim, as they read ``basis``; and what of it belongs to
    lanes that are not removed."""
    kept = Basis()
    reading: list[Lane] = []
    for lane in lanes:
        if not lane.removed:
            kept[lane.layer, lane.head] = basis[lane.layer, lane.head]
            lane = _reading(lane)
        reading.append(lane)
    return tuple(reading), kept


def _reading(lane: Lane) -> Lane:
    if lane.rope == "none":
        return dataclasses.replace(lane, input_dim=lane.rank_k)
    return dataclasses.replace(lane, projected=True)
