"""Fewer dimensions: from bases and a target to ranks, lanes and matrices. What every
low-rank method shares."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from kvlathe.base.errors import KvlatheError
from kvlathe.export.bases import allocate
from kvlathe.export.bases.basis import Basis, LaneBasis
from kvlathe.export.bases.rotation import Rotation, by_kind, plane_energy
from kvlathe.export.calibration.stats import Stats
from kvlathe.export.methods.method import Decision
from kvlathe.export.methods.options import DEFAULT_RATE, RankOptions
from kvlathe.plan.groups import Group
from kvlathe.plan.heads import RANK_MULTIPLE, HeadShape, Lane, ModelShape
from kvlathe.plan.layout import CacheLayout
from kvlathe.plan.lives import KEEP, SEAL
from kvlathe.plan.plan import CompressionPlan

Array = npt.NDArray[np.floating]

STEP = 0.01
"""The share of the ranks by which a plan comes down to a share of the bytes."""


def full_lanes(shape: ModelShape, rope: bool, once: bool = False) -> tuple[Lane, ...]:
    """Every lane whole: the uncompressed model. ``once``: values that keys are made of
    are stored as a part of them."""
    once = once or shape.latent > 0
    lanes: list[Lane] = []
    for layer, head in shape.places:
        heads = shape.heads(layer)
        d, of_value = heads.head_dim, shape.value_dim(layer)
        if once and not shape.latent:
            lanes.append(_whole(layer, head, heads, rope))
            continue
        kind = "full" if rope else "none"
        ranks = allocate.whole(d), allocate.whole(of_value)
        lanes.append(Lane(layer, head, d, *ranks, kind, values_in_keys=once))
    return tuple(lanes)


def _whole(layer: int, head: int, heads: HeadShape, rope: bool) -> Lane:
    """A lane of a model some of whose values are a part of their keys."""
    d = heads.head_dim
    rank, kind = allocate.whole(d), "full" if rope else "none"
    if not heads.turned:
        return Lane(layer, head, d, rank, rank, kind)
    width = d + heads.turned
    ranks = allocate.whole(width), rank
    return Lane(layer, head, width, *ranks, "none", values_in_keys=True)


def low_rank(
    stats: Stats, options: RankOptions, rotate: Callable[[Stats, RankOptions], Rotation]
) -> Decision:
    """The lanes and bases that reach the target. Raises KvlatheError where no ranks
    can."""
    whole = bases(stats, options, rotate)
    papers = whole
    if options.rope_fold == "planes" or options.basis == "balanced":
        plain = options.asked(basis="svd")
        papers = by_kind(stats, lambda own: rotate(own, plain))
    budget = _budget(stats, options, papers)
    ranks = _ranks(stats.shape, options, whole, budget)
    ranks_k, ranks_v = ranks.reshape(2, -1).tolist()
    uncut = full_lanes(stats.shape, stats.rope)
    lanes = []
    basis = Basis()
    for lane, rank_k, rank_v in zip(uncut, ranks_k, ranks_v, strict=True):
        at = (lane.layer, lane.head)
        planes: tuple[int, ...] = ()
        if options.rope_fold == "planes":
            d = lane.input_dim
            planes = _planes(whole.b[at][:d, :d], rank_k)
        cut, basis[at] = _cut(lane, rank_k, rank_v, planes, whole)
        lanes.append(cut)
    notes = dataclasses.asdict(options)
    notes |= {"allocation": options.spending, "calibration": stats.source}
    if options.removal_rate is None:
        notes["removal_rate"] = _rate(stats.shape, options, papers, budget)
    return Decision(tuple(lanes), basis, notes=notes)


def bases(
    stats: Stats, options: RankOptions, rotate: Callable[[Stats, RankOptions], Rotation]
) -> Rotation:
    """The bases that are cut: the method's, or RoPE planes in place of those of K. Raises
    KvlatheError without RoPE."""
    if options.rope_fold == "planes" and not stats.rope:
        raise KvlatheError(
            "rope_fold=planes cannot be used",
            "the model has no RoPE",
            "leave it out: its basis folds as it is",
        )
    return by_kind(stats, lambda own: _of_kind(own, options, rotate))


def _of_kind(
    stats: Stats, options: RankOptions, rotate: Callable[[Stats, RankOptions], Rotation]
) -> Rotation:
    """The bases of layers with one shape of heads."""
    own = rotate(stats, options)
    if options.rope_fold != "planes":
        return own
    return _by_planes(own, plane_energy(stats))


# -- ranks -----------------------------------------------------------------------------
def _rows(shape: ModelShape, k: Array, v: Array) -> Array:
    """[L, H, d] of K and of V -> [2 * lanes, d]: every K lane, then every V lane."""
    at = tuple(np.array(shape.places).T)
    return np.concatenate([k[at], v[at]])


def _dims(shape: ModelShape) -> npt.NDArray[np.int64]:
    """[2 * lanes]: dims of each row."""
    return np.array([shape.heads(layer).head_dim for layer, _ in shape.places] * 2)


def _budget(stats: Stats, options: RankOptions, papers: Rotation) -> int:
    """The sum of ranks that the target leaves. ``papers``: the method's own bases,
    which the removal rate is taken of.
    """
    shape = stats.shape
    spectrum = _rows(shape, papers.spectrum_k, papers.spectrum_v)
    dims = _dims(shape)
    ratio = options.compression_ratio
    if ratio is None:
        rate = DEFAULT_RATE if options.removal_rate is None else options.removal_rate
        return int(allocate.by_rate(spectrum, dims, rate).sum())
    if not ratio:
        return int(allocate.by_rate(spectrum, dims, 0.0).sum())
    left = int((1 - ratio) * int(dims.sum()) + 1e-9)
    budget = left // RANK_MULTIPLE * RANK_MULTIPLE
    if (d := int(dims.max())) <= RANK_MULTIPLE:
        raise KvlatheError(
            f"heads of {d} dimensions cannot be cut",
            f"ranks are multiples of {RANK_MULTIPLE}",
            "choose a method that keeps all dimensions",
        )
    if budget < len(dims) * RANK_MULTIPLE:
        raise KvlatheError(
            f"a compression ratio of {ratio:g} cannot be reached",
            f"every head keeps at least {RANK_MULTIPLE} of its {d} dimensions of K and of V",
            f"ask for at most {best_ratio(shape):.4g}",
        )
    return budget


def _rate(
    shape: ModelShape, options: RankOptions, papers: Rotation, budget: int
) -> float:
    """The papers' r whose ranks sum to about ``budget``."""
    if options.compression_ratio is None:
        return DEFAULT_RATE
    spectrum = _rows(shape, papers.spectrum_k, papers.spectrum_v)
    return allocate.rate_within(spectrum, _dims(shape), budget)


def _ranks(
    shape: ModelShape, options: RankOptions, whole: Rotation, budget: int
) -> npt.NDArray[np.int64]:
    """[2 * lanes] ranks of K lanes, then of V lanes, summing to at most ``budget``."""
    dims = _dims(shape)
    if options.spending == "uniform":
        return allocate.uniform(dims, budget)
    if options.spending == "global":
        loss = _rows(shape, whole.loss_k, whole.loss_v)
        return allocate.by_loss(loss, dims, budget)
    spectrum = _rows(shape, whole.spectrum_k, whole.spectrum_v)
    rate = allocate.rate_within(spectrum, dims, budget)
    return allocate.by_rate(spectrum, dims, rate)


def best_ratio(shape: ModelShape) -> float:
    """The largest compression ratio that ranks can reach."""
    dims = _dims(shape)
    return max(0.0, 1 - RANK_MULTIPLE * len(dims) / int(dims.sum()))


def within(
    ratio: float,
    shape: ModelShape,
    bits: int,
    at: Callable[[float | None], tuple[CompressionPlan, Basis]],
) -> tuple[CompressionPlan, Basis]:
    """The plan of most ranks that removes at least ``ratio`` of the bytes when its full
    pages are quantized as well.

    ``at``: the plan whose ranks alone remove a given ratio. The uncompressed cache that
    bytes are taken against holds ``bits`` a number. Raises KvlatheError where no ranks
    are small enough.
    """
    plan, basis = at(0.0)
    target = 1 - ratio
    kept = target / left(plan, bits)
    least = 1 - best_ratio(shape)
    # Metadata and padding do not shrink as ranks do: a few steps down.
    while left(plan, bits) > target:
        plan, basis = at(1 - max(kept, least))
        if kept <= least and left(plan, bits) > target:
            best = np.floor(1e4 * (1 - left(plan, bits))) / 1e4
            raise KvlatheError(
                f"a compression ratio of {ratio:g} cannot be reached",
                f"every head keeps at least {RANK_MULTIPLE} dimensions of K and of V",
                f"ask for at most {best:.4g}",
            )
        kept -= STEP
    return plan, basis


def left(plan: CompressionPlan, bits: int) -> float:
    """Share of the bytes of the uncompressed cache, in ``bits`` a number, that ``plan``
    keeps of a long sequence. What the model's own windows leave out is in neither."""
    whole = [_without_own_window(group) for group in plan.groups]
    seen = dataclasses.replace(plan, groups=tuple(whole))
    uncompressed = plan.model.numbers * bits / 8
    return CacheLayout(seen).bytes_per_token() / uncompressed


def _without_own_window(group: Group) -> Group:
    """Windows to the token are a model's; those that a method chooses are whole
    pages."""
    if not group.life.sees.exact:
        return group
    return dataclasses.replace(group, life=SEAL if group.cold else KEEP)


# -- one lane --------------------------------------------------------------------------
def _cut(
    lane: Lane, rank_k: int, rank_v: int, planes: tuple[int, ...], whole: Rotation
) -> tuple[Lane, LaneBasis]:
    """Cut a whole lane to its ranks. A side that keeps everything is left as it is:
    exact, and nothing to multiply."""
    at = (lane.layer, lane.head)
    d = lane.input_dim
    matrices: dict[str, Array] = {}
    if planes:
        lane = dataclasses.replace(
            lane, input_dim=2 * len(planes), rank_k=rank_k, rope="planes", planes=planes
        )
    elif rank_k < d:
        matrices |= {
            "a": whole.a[at][:d, :rank_k],
            "b": whole.b[at][:d, :rank_k],
            "centre_k": whole.centre_k[at][:d],
        }
        folded = lane.rope == "none"
        lane = dataclasses.replace(
            lane, input_dim=rank_k if folded else d, rank_k=rank_k, projected=not folded
        )
    if rank_v < d:
        matrices |= {
            "a_v": whole.a_v[at][:d, :rank_v],
            "o_v": whole.o_v[at][:rank_v, :d],
            "centre_v": whole.centre_v[at][:d],
        }
    return dataclasses.replace(lane, rank_v=rank_v), LaneBasis(**matrices)


# -- RoPE planes -----------------------------------------------------------------------
def _by_planes(whole: Rotation, energy: Array) -> Rotation:
    """The K side when planes are its dims: pairs of unit vectors by falling energy; a
    plane's value stands for both."""
    half = energy.shape[-1]
    order = np.argsort(-energy, -1, kind="stable")
    dims = np.stack([order, order + half], -1).reshape(*energy.shape[:-1], 2 * half)
    units = np.eye(2 * half)[dims].mT
    falling = np.repeat(np.take_along_axis(energy, order, -1), 2, -1)
    total = np.maximum(falling.sum(-1, keepdims=True), 1e-300)
    unit = whole.loss_k.sum(-1, keepdims=True) / total
    return dataclasses.replace(
        whole, a=units, b=units, spectrum_k=np.sqrt(falling), loss_k=falling * unit
    )


def _planes(units: Array, rank: int) -> tuple[int, ...]:
    """The planes of the first ``rank`` of the unit vectors [d, d], ascending; none
    where all are kept."""
    if rank >= len(units):
        return ()
    planes = units[:, :rank:2].argmax(0)
    return tuple(sorted(planes.tolist()))
