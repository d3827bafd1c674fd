"""Bases of every lane from calibration moments. Pure functions on float64 arrays,
batched over lanes [L, H, ...].

``svd`` (FDC, ZACK): one orthogonal matrix for Q and K together, one for V and W_O;
columns by falling singular value. ``balanced`` (ours): the pair of matrices that loses
least of what attention uses, at every rank at once.

    scores   C_k = L L^T, eigenvectors W of L^T C_q L:   A = L W,  B = L^-T W,   A B^T = 1 at full rank. The columns
    after j
             hold the score energy sum w_j+1.. of E[(q A B^T k - q k)^2] for independent
             q and k (Eckart and Young).
    outputs  C_o = L L^T, eigenvectors U of L^T W_O W_O^T L:   A_v = L^-T U,  O_v = U^T L^T. C_o is the covariance of
    what W_O
             reads, attention's outputs: errors of V that averaging over tokens removes
             cost nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields

import numpy as np
import numpy.typing as npt

from kvlathe.export.calibration.stats import Moments, Stats

Array = npt.NDArray[np.floating]

RIDGE = 1e-4
"""Added to every covariance, as a share of its mean variance: bases stay exact where
calibration saw nothing (dead channels, fewer tokens than dims), at an error far below
the first removed direction's."""

SCORE_SHARE = 0.15
"""Cost of a score error, as a share of its cost if it moved attention freely. Errors of
different keys partly cancel: 0.04 to 0.18 if they were independent, 1 if they
conspired. Chosen on text held out of calibration (docs/basis.md)."""


@dataclass(frozen=True, eq=False)
class Rotation:
    """Full-rank bases of all lanes, dims by falling importance; LaneBasis gives the
    meaning of the matrices.

    ``a``, ``b``, ``a_v`` [L, H, d, d], ``o_v`` [L, H, d, d] (rows are dims);
    ``centre_k``, ``centre_v`` [L, H, d]. ``spectrum_k``, ``spectrum_v`` [L, H, d]:
    singular values, what the removal rate is taken of. ``loss_k``, ``loss_v`` [L, H,
    d]: what removing a dim adds to the lane's output, squared, over the layer's input,
    squared.
    """

    a: Array
    b: Array
    centre_k: Array
    a_v: Array
    o_v: Array
    centre_v: Array
    spectrum_k: Array
    spectrum_v: Array
    loss_k: Array
    loss_v: Array


def by_kind(stats: Stats, make: Callable[[Stats], Rotation]) -> Rotation:
    """Bases that ``make`` makes of layers with one shape of heads, for all layers: zeros
    where a layer has fewer heads or dims than others."""
    if stats.shape.alike:
        return make(stats)
    lanes, d = (stats.shape.layers, stats.shape.kv_heads), stats.shape.head_dim
    whole: dict[str, Array] = {}
    for layers, own in stats.kinds():
        made = make(own)
        for field in fields(Rotation):
            part: Array = getattr(made, field.name)
            empty = np.zeros((*lanes, *[d] * (part.ndim - 2)))
            every = whole.setdefault(field.name, empty)
            every[(layers, *map(slice, part.shape[1:]))] = part
    return Rotation(**whole)


@dataclass(frozen=True, eq=False)
class Side:
    """One side of a Rotation: K (with its queries) or V (with W_O). ``back`` [L, H, d,
    d]: ``into @ back^T`` = 1."""

    into: Array
    back: Array
    spectrum: Array


def eigen(symmetric: Array) -> tuple[Array, Array]:
    """Eigenvalues (at least 0) and eigenvectors [..., d, d] (columns) by falling
    value."""
    values, vectors = np.linalg.eigh(symmetric)
    falling = values[..., ::-1]
    # Products with columns in reverse take several times as long.
    return falling.clip(0), np.ascontiguousarray(vectors[..., ::-1])


def shared_basis(*grams: Array) -> Side:
    """``svd``: the right singular vectors of matrices stacked on top of each other,
    given their Gram matrices X^T X."""
    values, vectors = eigen(np.sum(grams, axis=0))
    return Side(vectors, vectors, np.sqrt(values))


def balanced_basis(covariance: Array, reader: Array) -> Side:
    """The best pair for rows x of ``covariance`` that are read through inner products
    with vectors y of Gram ``reader``.

    Cutting ``into`` and ``back`` to their first j columns minimises the mean of ((x - x
    into back^T) y^T)^2 among all rank-j pairs, for every j. Columns are scaled so that
    x into and y back have equal variances.
    """
    root = np.linalg.cholesky(add_ridge(covariance))  # covariance = root root^T
    values, vectors = eigen(root.mT @ reader @ root)
    safe_values = values.clip(np.maximum(values[..., :1], 1e-300) * 1e-12)
    # the fourth root: half of a singular value on each side
    scale = np.sqrt(np.sqrt(safe_values))[..., None, :]
    into = np.linalg.solve(root.mT, vectors)  # root^-T V
    return Side(into * scale, root @ vectors / scale, np.sqrt(values))


def add_ridge(covariance: Array) -> Array:
    """``covariance`` [..., d, d] plus RIDGE of its mean variance (of 1, where it is
    zero)."""
    d = covariance.shape[-1]
    mean = np.trace(covariance, axis1=-2, axis2=-1)[..., None, None] / d
    return covariance + np.where(mean > 0, RIDGE * mean, 1.0) * np.eye(d)


def removed_energy(side: Side, covariance: Array, reader: Array) -> Array:
    """[..., d]: mean of (x into_j)^2 (y back_j)^2 for each dim j alone, for independent
    x and y: what its removal costs.
    """
    return column_energy(side.into, covariance) * column_energy(side.back, reader)


def column_energy(columns: Array, second: Array) -> Array:
    """[..., j]: c^T second c of every column c of ``columns`` [..., d, j]: the mean of
    (x c)^2 where ``second`` [..., d, d] is the second moment of x."""
    return (columns * (second @ columns)).sum(-2)


def rotation(stats: Stats, scores: Side, outputs: Side, centred: bool) -> Rotation:
    """Put both sides together with the centres and the cost of every dim. The mean of K
    costs nothing, centred or not.

    No plan centres what bounded scores or sinks would notice: a constant of all keys
    or, beside a sink, of all values.
    """
    centred = centred and stats.shape.shifts
    moments = stats.whole
    zero = np.zeros_like(moments.k)
    # [L, 1, 1]
    hidden = np.maximum(moments.hidden / moments.tokens, 1e-30)[:, None, None]
    query_count = stats.shape.group_size * moments.tokens
    # [L, H]
    unit = SCORE_SHARE * (stats.scale**2)[:, None] * moments.spread / query_count
    keys = moments.second("k", stats.shape.shifts)
    loss_k = removed_energy(scores, keys, moments.qq / moments.tokens) * unit[..., None]
    loss_v = removed_energy(outputs, output_covariance(stats, centred), stats.wo_gram)
    return Rotation(
        a=scores.back,
        b=scores.into,
        centre_k=moments.mean("k") if centred else zero,
        a_v=outputs.into,
        o_v=outputs.back.mT,
        centre_v=output_mean(stats) if centred else zero,
        spectrum_k=scores.spectrum,
        spectrum_v=outputs.spectrum,
        loss_k=loss_k / hidden,
        loss_v=loss_v / hidden,
    )


def output_mean(stats: Stats) -> Array:
    """[L, H, d] mean of attention's outputs over tokens and the lane's query heads."""
    return stats.whole.mean("o") / stats.shape.group_size


def output_covariance(stats: Stats, centred: bool) -> Array:
    """[L, H, d, d] second moment of attention's outputs, averaged over tokens and the
    lane's query heads."""
    second = stats.whole.second("o", False) / stats.shape.group_size
    if not centred:
        return second
    mean = output_mean(stats)
    return second - mean[..., :, None] * mean[..., None, :]


def balanced_rotation(stats: Stats) -> Rotation:
    """The ``balanced`` basis. K and V are centred, which is free: softmax ignores a
    constant of all keys, and a constant of all values comes back as a bias of W_O.
    docs/basis.md has the measurements.

    K's axes are those of its moments around zero: where the first token's key is a sink,
    the direction of the mean tells it from all others, and few tokens show that."""
    moments = stats.whole
    centred = stats.shape.shifts
    scores = balanced_basis(moments.second("k", False), moments.qq / moments.tokens)
    outputs = balanced_basis(output_covariance(stats, centred), stats.wo_gram)
    return rotation(stats, scores, outputs, centred)


def score_gram(moments: Moments, centred: bool) -> Array:
    """[L, H, d, d] Gram matrix of all queries and keys of a lane, stacked."""
    return moments.qq + moments.second("k", centred) * moments.tokens


# -- RoPE planes -----------------------------------------------------------------------
def plane_energy(stats: Stats) -> Array:
    """[L, H, d/2]: score energy tr(C_q C_k) of every RoPE plane (dims i and i + d/2)
    alone, K centred."""
    moments = stats.whole
    q = _planes(moments.qq / moments.tokens)
    k = _planes(moments.second("k", stats.shape.shifts))
    return np.einsum("...pij,...pij->...p", q, k).clip(0)


def _planes(symmetric: Array) -> Array:
    """[..., d, d] -> [..., d/2, 2, 2]: the diagonal blocks of the planes."""
    half = symmetric.shape[-1] // 2
    return np.einsum(
        "...apbp->...pab", symmetric.reshape(*symmetric.shape[:-2], 2, half, 2, half)
    )


# -- stability -------------------------------------------------------------------------
def element_change(one: Array, other: Array) -> tuple[Array, Array]:
    """(epsilon, delta) of the papers FDC and ZACK, for bases R and R' [..., d, d]:
    mean |R| and mean |R - R'|, columns matched and signs aligned.

    Columns are taken at unit length. Each column of ``one`` meets the column of
    ``other`` it is most parallel to. Near-equal singular values mix freely, so a large
    delta there means nothing: see principal_angle.
    """
    one = _unit_columns(one)
    other = _unit_columns(other)
    overlap = one.mT @ other  # [..., d, d]: cosines of columns
    best = np.abs(overlap).argmax(-1)[..., None]  # [..., d, 1]
    sign = np.sign(np.take_along_axis(overlap, best, -1)).mT
    aligned = np.take_along_axis(other, np.broadcast_to(best.mT, one.shape), -1) * sign
    return np.abs(one).mean((-2, -1)), np.abs(one - aligned).mean((-2, -1))


def _unit_columns(columns: Array) -> Array:
    return columns / np.maximum(np.linalg.norm(columns, axis=-2, keepdims=True), 1e-300)


def principal_angle(one: Array, other: Array) -> float:
    """Largest angle, radians, between the spaces that the columns of [d, n] and [d, n]
    span."""
    if one.shape[0] <= one.shape[1]:
        return 0.0
    a = np.linalg.qr(one).Q
    b = np.linalg.qr(other).Q
    outside = b - a @ (a.T @ b)
    # The sine is exact where the angle is small. There the cosine is all rounding.
    sine = np.linalg.norm(outside, 2)
    return float(np.arcsin(min(1.0, sine)))


def energy_missed(one: Array, other: Array, moment: Array) -> float:
    """Fraction of what the columns of ``other`` keep of data with second moment [d, d]
    that those of ``one`` do not.

    What an unstable rotation costs: directions that mix freely do so because they carry
    equally much.
    """
    a = np.linalg.qr(one).Q
    b = np.linalg.qr(other).Q
    of_one = float(np.einsum("ij,ik,kj->", a, moment, a))
    of_other = float(np.einsum("ij,ik,kj->", b, moment, b))
    if of_other <= 0:
        return 0.0
    return max(0.0, 1.0 - of_one / of_other)
