"""Fewer dimensions: from bases and a target to ranks, lanes and matrices. What every low-rank method shares."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

import numpy as np
import numpy.typing as npt

from kvlathe.errors import KvlatheError
from kvlathe.export import allocate
from kvlathe.export.basis import Basis, LaneBasis
from kvlathe.export.methods.options import DEFAULT_RATE, Options, Part
from kvlathe.export.plan import RANK_MULTIPLE, Lane, ModelShape
from kvlathe.export.rotation import Rotation, plane_energy
from kvlathe.export.stats import Stats

Array = npt.NDArray[np.floating]


def full_lanes(shape: ModelShape, rope: bool) -> tuple[Lane, ...]:
    """Every lane whole: the uncompressed model."""
    d, kind = shape.head_dim, "full" if rope else "none"
    places = ((layer, head) for layer in range(shape.layers) for head in range(shape.kv_heads))
    return tuple(Lane(layer, head, d, allocate.whole(d), allocate.whole(d), kind) for layer, head in places)


def low_rank(stats: Stats, options: Options, found: Rotation) -> Part:
    """The lanes and bases that reach the target. Raises KvlatheError where no ranks can."""
    planes = options.rope_fold == "planes"
    if planes and not stats.rope:
        raise KvlatheError(
            "rope_fold=planes cannot be used", "the model has no RoPE", "leave it out: its basis folds as it is"
        )
    energy = plane_energy(stats) if planes else None
    if energy is not None:
        found = _by_planes(found, energy)
    ranks, rate = _ranks(stats.shape, options, found)
    lanes, basis = [], Basis()
    for lane, k, v in zip(full_lanes(stats.shape, stats.rope), *ranks.tolist(), strict=True):
        at = (lane.layer, lane.head)
        kept = _kept_planes(energy[at], k) if energy is not None else ()
        cut, matrices = _cut(lane, k, v, kept, found)
        lanes.append(cut)
        basis[at] = matrices
    return Part(tuple(lanes), basis, _notes(stats, options, rate))


def _notes(stats: Stats, options: Options, rate: float | None) -> dict[str, object]:
    return {**dataclasses.asdict(options), "removal_rate": rate, "calibration": stats.source}


# -- ranks -------------------------------------------------------------------------------------------------------------
def _ranks(shape: ModelShape, options: Options, found: Rotation) -> tuple[npt.NDArray[np.int64], float | None]:
    """[2, lanes] ranks of K and of V, and the removal rate where they follow from one."""
    d = shape.head_dim
    spectrum, loss = (
        np.concatenate([x.reshape(-1, d) for x in pair])
        for pair in ((found.spectrum_k, found.spectrum_v), (found.loss_k, found.loss_v))
    )
    rate = options.removal_rate
    if options.compression_ratio is not None:
        budget = _budget(len(spectrum), d, options.compression_ratio)
        rate = allocate.rate_within(spectrum, budget)
    else:
        rate = DEFAULT_RATE if rate is None else rate
        budget = int(allocate.by_rate(spectrum, rate).sum())
    if options.allocation == "rate":
        return allocate.by_rate(spectrum, rate).reshape(2, -1), rate
    if options.allocation == "uniform":
        return allocate.uniform(len(spectrum), d, budget).reshape(2, -1), None
    return allocate.by_loss(loss, budget).reshape(2, -1), None


def _budget(rows: int, d: int, ratio: float) -> int:
    """The sum of ranks that leaves 1 - ``ratio`` of the bytes."""
    full, least = rows * allocate.whole(d), rows * RANK_MULTIPLE
    budget = int((1 - ratio) * full + 1e-9) // RANK_MULTIPLE * RANK_MULTIPLE
    if budget < least:
        raise KvlatheError(
            f"a compression ratio of {ratio:g} cannot be reached",
            f"every head keeps at least {RANK_MULTIPLE} of its {d} dimensions of K and of V",
            f"ask for at most {1 - least / full:.4g}",
        )
    return budget


def best_ratio(shape: ModelShape) -> float:
    """The largest compression ratio that ranks can reach."""
    return 1 - RANK_MULTIPLE / allocate.whole(shape.head_dim)


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
