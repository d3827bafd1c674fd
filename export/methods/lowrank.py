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


def full_lanes(shape: ModelShape, rope: bool) -> tuple[Lane, ...]:
    """Every lane whole: the uncompressed model."""
    d, kind = shape.head_dim, "full" if rope else "none"
    places = ((layer, head) for layer in range(shape.layers) for head in range(shape.kv_heads))
    return tuple(Lane(layer, head, d, allocate.whole(d), allocate.whole(d), kind) for layer, head in places)


def low_rank(stats: Stats, options: Options, rotate: Callable[[Stats, Options], Rotation]) -> Part:
    """The lanes and bases that reach the target. Raises KvlatheError where no ranks can."""
    found = rotate(stats, options)
    budget = _budget(stats, options, found if options.basis == "svd" else rotate(stats, options.asked(basis="svd")))
    planes = options.rope_fold == "planes"
    if planes and not stats.rope:
        raise KvlatheError(
            "rope_fold=planes cannot be used", "the model has no RoPE", "leave it out: its basis folds as it is"
        )
    energy = plane_energy(stats) if planes else None
    if energy is not None:
        found = _by_planes(found, energy)
    ranks = _ranks(options, found, budget)
    lanes, basis = [], Basis()
    for lane, k, v in zip(full_lanes(stats.shape, stats.rope), *ranks.reshape(2, -1).tolist(), strict=True):
        at = (lane.layer, lane.head)
        kept = _kept_planes(energy[at], k) if energy is not None else ()
        cut, matrices = _cut(lane, k, v, kept, found)
        lanes.append(cut)
        basis[at] = matrices
    asked = dataclasses.asdict(options) | {"allocation": options.spending}
    return Part(tuple(lanes), basis, notes=asked | {"calibration": stats.source})


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
    budget = int((1 - ratio) * rows * allocate.whole(d) + 1e-9) // RANK_MULTIPLE * RANK_MULTIPLE
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
    return 1 - RANK_MULTIPLE / allocate.whole(shape.head_dim)


def within(
    ratio: float,
    shape: ModelShape,
    bits: int,
    page_tokens: int,
    at: Callable[[float | None], tuple[CompressionPlan, Basis]],
) -> tuple[CompressionPlan, Basis]:
    """The plan of most ranks that removes at least ``ratio`` of the bytes when its pages are quantized as well.

    ``at``: the plan whose ranks alone remove a given ratio. The uncompressed cache that bytes are taken against holds
    ``bits`` a number. Raises KvlatheError where no ranks are small enough.
    """
    whole = 2 * len(full_lanes(shape, True)) * allocate.whole(shape.head_dim) * bits / 8

    def left(found: tuple[CompressionPlan, Basis]) -> float:
        return CacheLayout(found[0]).bytes_per_token() / whole

    found, most = at(0.0), best_ratio(shape)
    kept = (1 - ratio) / left(found)
    while left(found) > 1 - ratio:
        if kept < 1 - most:
            least = left(at(most))
            if least > 1 - ratio:
                raise KvlatheError(
                    f"a compression ratio of {ratio:g} cannot be reached",
                    f"every head keeps at least {RANK_MULTIPLE} dimensions of K and of V",
                    f"ask for at most {np.floor(1e4 * (1 - least)) / 1e4:.4g}",
                )
        found = at(min(1 - kept, most))
        kept -= 0.01
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
    """The K side when planes are its dims: each plane's value stands for its two dims."""
    falling = -np.sort(-energy, -1)
    spectrum = np.repeat(np.sqrt(falling), 2, -1)
    unit = found.loss_k.sum(-1, keepdims=True) / np.maximum(energy.sum(-1, keepdims=True), 1e-300)
    return dataclasses.replace(found, spectrum_k=spectrum, loss_k=np.repeat(falling / 2, 2, -1) * unit)


def _kept_planes(energy: Array, rank: int) -> tuple[int, ...]:
    """The ``rank`` / 2 planes of most energy, ascending; none where all are kept."""
    if rank >= 2 * len(energy):
        return ()
    return tuple(sorted(np.argsort(-energy, kind="stable")[: rank // 2].tolist()))


def kept(lanes: tuple[Lane, ...], matrices: Array, side: str) -> Iterator[Array]:
    """Each lane's kept columns of ``matrices`` [L, H, d, d]."""
    return (matrices[lane.layer, lane.head][:, : getattr(lane, f"rank_{side}")] for lane in lanes)
