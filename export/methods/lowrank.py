"""Fewer dimensions: from bases and a target to ranks, lanes and matrices. What every low-rank method shares."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator

import numpy as np
import numpy.typing as npt

from kvlathe.errors import KvlatheError
from kvlathe.export import allocate
from kvlathe.export.basis import Basis, LaneBasis
from kvlathe.export.layout import CacheLayout
from kvlathe.export.methods.options import DEFAULT_RATE, Options, Part
from kvlathe.export.plan import RANK_MULTIPLE, CompressionPlan, Lane, ModelShape
from kvlathe.export.rotation import Rotation, plane_energy
from kvlathe.export.stats import Stats

Array = npt.NDArray[np.floating]

STEP = 0.01
"""Of the ranks, by which a plan comes down to a share of the bytes."""


def full_lanes(shape: ModelShape, rope: bool) -> tuple[Lane, ...]:
    """Every lane whole: the uncompressed model."""
    d, kind = shape.head_dim, "full" if rope else "none"
    places = ((layer, head) for layer in range(shape.layers) for head in range(shape.kv_heads))
    return tuple(Lane(layer, head, d, allocate.whole(d), allocate.whole(d), kind) for layer, head in places)


def low_rank(stats: Stats, options: Options, rotate: Callable[[Stats, Options], Rotation]) -> Part:
    """The lanes and bases that reach the target. Raises KvlatheError where no ranks can."""
    found = bases(stats, options, rotate)
    ranks = _ranks(options, found, _budget(stats, options, rotate(stats, options.asked(basis="svd"))))
    lanes, basis = [], Basis()
    for lane, k, v in zip(full_lanes(stats.shape, stats.rope), *ranks.reshape(2, -1).tolist(), strict=True):
        at = (lane.layer, lane.head)
        planes = _planes(found.b[at], k) if options.rope_fold == "planes" else ()
        cut, matrices = _cut(lane, k, v, planes, found)
        lanes.append(cut)
        basis[at] = matrices
    asked = dataclasses.asdict(options) | {"allocation": options.spending}
    return Part(tuple(lanes), basis, notes=asked | {"calibration": stats.source})


def bases(stats: Stats, options: Options, rotate: Callable[[Stats, Options], Rotation]) -> Rotation:
    """What is cut: the method's bases, or RoPE planes in place of those of K. Raises KvlatheError without RoPE."""
    found = rotate(stats, options)
    if options.rope_fold != "planes":
        return found
    if not stats.rope:
        raise KvlatheError(
            "rope_fold=planes cannot be used", "the model has no RoPE", "leave it out: its basis folds as it is"
        )
    return _by_planes(found, plane_energy(stats))


# -- ranks -------------------------------------------------------------------------------------------------------------
def _rows(k: Array, v: Array) -> Array:
    """[L, H, d] of K and of V -> [2 * lanes, d]: every K lane, then every V lane."""
    return np.concatenate([k, v]).reshape(-1, k.shape[-1])


def _budget(stats: Stats, options: Options, papers: Rotation) -> int:
    """The sum of ranks that the target leaves. ``papers``: the method's own bases, which the removal rate is taken
    of.
    """
    spectrum, ratio = _rows(papers.spectrum_k, papers.spectrum_v), options.compression_ratio
    if ratio is None:
        rate = DEFAULT_RATE if options.removal_rate is None else options.removal_rate
        return int(allocate.by_rate(spectrum, rate).sum())
    rows, d = spectrum.shape
    if not ratio:
        return rows * allocate.whole(d)
    budget = int((1 - ratio) * rows * d + 1e-9) // RANK_MULTIPLE * RANK_MULTIPLE
    if d <= RANK_MULTIPLE:
        raise KvlatheError(
            f"heads of {d} dimensions cannot be cut",
            f"ranks are multiples of {RANK_MULTIPLE}",
            "choose a method that keeps all dimensions",
        )
    if budget < rows * RANK_MULTIPLE:
        raise KvlatheError(
            f"a compression ratio of {ratio:g} cannot be reached",
            f"every head keeps at least {RANK_MULTIPLE} of its {d} dimensions of K and of V",
            f"ask for at most {best_ratio(stats.shape):.4g}",
        )
    return budget


def _ranks(options: Options, found: Rotation, budget: int) -> npt.NDArray[np.int64]:
    """[2 * lanes] ranks of K lanes, then of V lanes, summing to at most ``budget``."""
    spectrum = _rows(found.spectrum_k, found.spectrum_v)
    if options.spending == "uniform":
        return allocate.uniform(len(spectrum), spectrum.shape[-1], budget)
    if options.spending == "global":
        return allocate.by_loss(_rows(found.loss_k, found.loss_v), budget)
    return allocate.by_rate(spectrum, allocate.rate_within(spectrum, budget))


def best_ratio(shape: ModelShape) -> float:
    """The largest compression ratio that ranks can reach."""
    return max(0.0, 1 - RANK_MULTIPLE / shape.head_dim)


def within(
    ratio: float, shape: ModelShape, bits: int, at: Callable[[float | None], tuple[CompressionPlan, Basis]]
) -> tuple[CompressionPlan, Basis]:
    """The plan of most ranks that removes at least ``ratio`` of the bytes when its full pages are quantized as well.

    ``at``: the plan whose ranks alone remove a given ratio. The uncompressed cache that bytes are taken against holds
    ``bits`` a number. Raises KvlatheError where no ranks are small enough.
    """
    whole = 2 * len(full_lanes(shape, True)) * shape.head_dim * bits / 8

    def left(found: tuple[CompressionPlan, Basis]) -> float:
        return CacheLayout(found[0]).bytes_per_token() / whole

    found = at(0.0)
    kept, least = (1 - ratio) / left(found), 1 - best_ratio(shape)
    while left(found) > 1 - ratio:  # metadata and padding do not shrink as ranks do: a few steps down
        found = at(1 - max(kept, least))
        if kept <= least and left(found) > 1 - ratio:
            raise KvlatheError(
                f"a compression ratio of {ratio:g} cannot be reached",
                f"every head keeps at least {RANK_MULTIPLE} dimensions of K and of V",
                f"ask for at most {np.floor(1e4 * (1 - left(found))) / 1e4:.4g}",
            )
        kept -= STEP
    return found


# -- one lane ----------------------------------------------------------------------------------------------------------
def _cut(lane: Lane, rank_k: int, rank_v: int, planes: tuple[int, ...], found: Rotation) -> tuple[Lane, LaneBasis]:
    """Cut a whole lane to its ranks. A side that keeps everything is left as it is: exact, and nothing to multiply."""
    at, d = (lane.layer, lane.head), lane.input_dim
    matrices: dict[str, Array] = {}
    if planes:
        lane = dataclasses.replace(lane, input_dim=2 * len(planes), rank_k=rank_k, rope="planes", planes=planes)
    elif rank_k < d:
        matrices |= {"a": found.a[at][:, :rank_k], "b": found.b[at][:, :rank_k], "centre_k": found.centre_k[at]}
        folded = lane.rope == "none"
        lane = dataclasses.replace(lane, input_dim=rank_k if folded else d, rank_k=rank_k, projected=not folded)
    if rank_v < d:
        matrices |= {"a_v": found.a_v[at][:, :rank_v], "o_v": found.o_v[at][:rank_v], "centre_v": found.centre_v[at]}
    return dataclasses.replace(lane, rank_v=rank_v), LaneBasis(**matrices)


# -- RoPE planes -------------------------------------------------------------------------------------------------------
def _by_planes(found: Rotation, energy: Array) -> Rotation:
    """The K side when planes are its dims: pairs of unit vectors by falling energy; a plane's value stands for both."""
    half = energy.shape[-1]
    order = np.argsort(-energy, -1, kind="stable")
    dims = np.stack([order, order + half], -1).reshape(*energy.shape[:-1], 2 * half)
    units = np.eye(2 * half)[dims].mT
    falling = np.repeat(np.take_along_axis(energy, order, -1), 2, -1)
    unit = found.loss_k.sum(-1, keepdims=True) / np.maximum(falling.sum(-1, keepdims=True), 1e-300)
    return dataclasses.replace(found, a=units, b=units, spectrum_k=np.sqrt(falling), loss_k=falling * unit)


def _planes(units: Array, rank: int) -> tuple[int, ...]:
    """The planes of the first ``rank`` of the unit vectors [d, d], ascending; none where all are kept."""
    return () if rank >= len(units) else tuple(sorted(units[:, :rank:2].argmax(0).tolist()))


def kept(lanes: tuple[Lane, ...], matrices: Array, side: str) -> Iterator[Array]:
    """Each lane's kept columns of ``matrices`` [L, H, d, d]."""
    return (matrices[lane.layer, lane.head][:, : getattr(lane, f"rank_{side}")] for lane in lanes)
