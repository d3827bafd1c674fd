"""LaneFold: the matrices that one lane's weights are multiplied with, made from its
plan and its basis, and checked. They are made on the CPU."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NoReturn

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from kvlathe.base.errors import KvlatheError
from kvlathe.export.bases.basis import Array, Basis, LaneBasis
from kvlathe.export.model.spec import DecoderSpec
from kvlathe.plan.heads import Lane
from kvlathe.plan.plan import CompressionPlan


@dataclass(frozen=True)
class LaneFold:
    """Matrices that enter the weights for one lane, all float64: d = head_dim, dv dims
    of a value, I = the lane's input_dim.

    ``q``, ``k`` [d, I] and ``shift_k`` [d] enter W_Q and W_K; ``proj_q``, ``proj_k``
    [I, rank_k] and ``centre`` [rank_k] are for Attend; ``v`` [dv, rank_v], ``out``
    [rank_v, dv] and ``shift_v`` [dv] enter W_V and W_O.
    """

    head: int
    q: Tensor
    k: Tensor
    shift_k: Tensor
    proj_q: Tensor
    proj_k: Tensor
    centre: Tensor
    v: Tensor
    out: Tensor
    shift_v: Tensor


def lane_folds(
    spec: DecoderSpec, plan: CompressionPlan, basis: Basis
) -> dict[int, list[LaneFold]]:
    """The kept lanes' matrices, by layer. Raises KvlatheError unless plan, basis and
    model belong together."""
    if plan.model != spec.shape:
        raise KvlatheError(
            f"the plan was made for {plan.model}",
            f"the checkpoint is {spec.shape}",
            "plan for this checkpoint",
        )
    folds: dict[int, list[LaneFold]] = {layer: [] for layer in range(spec.layers)}
    for layer, of_layer in folds.items():
        if spec.family.wide_qk_norm and len(
            plan.index.active(layer)
        ) < spec.shape.lanes(layer):
            raise KvlatheError(
                f"the plan removes heads of layer {layer}",
                "this model's QK-norm is of all heads together",
                "choose a compression that keeps every head",
            )
        for lane in plan.index.active(layer):
            given = basis.get((layer, lane.head), LaneBasis())
            _check_centres(spec, lane, given)
            of_layer.append(_lane_fold(spec, lane, given))
    return folds


def _lane_fold(spec: DecoderSpec, lane: Lane, given: LaneBasis) -> LaneFold:
    _check_lane(spec, lane, given)
    if spec.heads(lane.layer).turned and lane.values_in_keys:
        return _as_it_is(spec, lane)
    d, width, rank = spec.heads(lane.layer).head_dim, lane.input_dim, lane.rank_k
    value_dim = spec.shape.value_dim(lane.layer)
    picked = _eye(d, d)[:, _dims(lane, d)]
    in_weights = not lane.projected
    rows = d if lane.rope == "none" and in_weights else width
    a, b = _pair(
        lane,
        "a",
        given.a,
        "b",
        None if given.b is None else given.b.T,
        rows,
        width if in_weights else rank,
    )
    centre = _vector(lane, "centre_k", given.centre_k, rows)
    none = _zeros(d)
    v, out = _pair(lane, "a_v", given.a_v, "o_v", given.o_v, value_dim, lane.rank_v)
    through = _eye(width, rank)
    return LaneFold(
        head=lane.head,
        q=picked @ a if in_weights else picked,
        k=picked @ b.T if in_weights else picked,
        shift_k=centre if in_weights and lane.rope == "none" else none,
        proj_q=through if in_weights else a,
        proj_k=through if in_weights else b.T,
        centre=none.new_zeros(rank) if in_weights else centre @ b.T,
        v=v,
        out=out,
        shift_v=_vector(lane, "centre_v", given.centre_v, value_dim),
    )


def _as_it_is(spec: DecoderSpec, lane: Lane) -> LaneFold:
    """The fold of a lane whose keys the layer makes of values: nothing enters weights."""
    d = spec.heads(lane.layer).head_dim
    same, through = _eye(d, d), _eye(lane.input_dim, lane.rank_k)
    return LaneFold(
        head=lane.head,
        q=same,
        k=same,
        shift_k=_zeros(d),
        proj_q=through,
        proj_k=through,
        centre=_zeros(lane.rank_k),
        v=_eye(d, lane.rank_v),
        out=_eye(lane.rank_v, d),
        shift_v=_zeros(d),
    )


def _check_centres(spec: DecoderSpec, lane: Lane, given: LaneBasis) -> None:
    centres = [x for x in (given.centre_k, given.centre_v) if x is not None]
    if not spec.shape.shifts and any(x.any() for x in centres):
        _misfit(
            lane,
            "has a centre",
            "sinks and bounded scores notice a constant of all keys or values",
        )


def _dims(lane: Lane, d: int) -> list[int]:
    """The head's canonical dims that this lane's input holds: chosen planes' first
    halves, then their second halves."""
    if lane.rope != "planes":
        return list(range(d))
    return [*lane.planes, *(plane + d // 2 for plane in lane.planes)]


def _check_lane(spec: DecoderSpec, lane: Lane, given: LaneBasis) -> None:
    def refuse(fact: str, reason: str) -> None:
        raise KvlatheError(
            f"layer {lane.layer} head {lane.head} {fact}",
            reason,
            "mend the method that made this plan",
        )

    d, planes = spec.heads(lane.layer).head_dim, lane.planes
    if lane.values_in_keys and given != LaneBasis():
        refuse(
            "has a basis",
            "its V is a part of its K, and both are as the model has them",
        )
    made_once = lane.values_in_keys and spec.heads(lane.layer).turned > 0
    if not made_once and (lane.rope == "none") != (spec.rope is None):
        refuse(
            f"has RoPE {lane.rope!r}",
            f"the model has {'no RoPE' if spec.rope is None else 'RoPE'}",
        )
    if lane.rope == "planes" and (
        len(set(planes)) != len(planes) or not set(planes) <= set(range(d // 2))
    ):
        refuse(
            f"keeps the planes {planes}",
            f"a head has the planes 0 to {d // 2 - 1}, each once",
        )
    if lane.rope == "planes" and "q_norm" in spec.family.names:
        refuse("keeps chosen planes", "this model's QK-norm needs all dims of a head")
    if (
        lane.rope != "planes"
        and lane.input_dim != d
        and (lane.projected or lane.rope == "full")
    ):
        refuse(f"has input_dim {lane.input_dim}", f"the model's heads have {d} dims")
    if lane.rope != "none" and not lane.projected:
        if given.centre_k is not None or not all(
            m is None or _scales_planes(m) for m in (given.a, given.b)
        ):
            refuse(
                "has a basis or a centre for Q and K and is not projected",
                "neither can be folded past RoPE",
            )
        if given.a is not None and "q_norm" in spec.family.names:
            refuse(
                "scales planes of Q and K",
                "this model's QK-norm stands between its weights and RoPE",
            )


def _scales_planes(m: Array) -> bool:
    """Whether ``m`` multiplies both dims of each RoPE plane by one number, which
    rotations do not notice."""
    if m.ndim != 2 or m.shape[0] != m.shape[1] or len(m) % 2:
        return False
    factors = np.diag(m)
    if not np.array_equal(m, np.diag(factors)):
        return False
    first, second = np.split(factors, 2)
    return np.array_equal(first, second)


def _pair(
    lane: Lane,
    left: str,
    m: Array | None,
    right: str,
    n: Array | None,
    rows: int,
    rank: int,
) -> tuple[Tensor, Tensor]:
    """Matrix ``left`` [rows, rank] and its counterpart ``right`` [rank, rows],
    zero-padded; identities if not given."""
    if (m is None) != (n is None):
        _misfit(lane, f"has {left} or {right} alone", "each undoes the other")
    if m is None or n is None:
        if rank < rows:
            _misfit(
                lane,
                f"keeps {rank} of {rows} dims and has no {left}",
                "dropping raw dims is no projection",
            )
        identity = _eye(rows, rank)
        return identity, identity.T.contiguous()
    fits = m.ndim == 2 and m.shape == n.shape[::-1]
    if not fits or m.shape[0] != rows or m.shape[1] > rank:
        _misfit(
            lane,
            f"has {left} {list(m.shape)} and {right} {list(n.shape)}",
            f"the plan has {rows} dims and rank {rank}",
        )
    first = pad(_double(lane, left, m), rows, rank)
    return first, pad(_double(lane, right, n), rank, rows)


def _vector(lane: Lane, name: str, given: Array | None, size: int) -> Tensor:
    if given is None:
        return _zeros(size)
    if given.shape != (size,):
        _misfit(lane, f"has {name} {list(given.shape)}", f"the plan has {size} dims")
    return _double(lane, name, given)


def _double(lane: Lane, name: str, given: Array) -> Tensor:
    if not np.isfinite(given).all():
        _misfit(
            lane,
            f"has NaN or infinite numbers in {name}",
            "nothing sound can be computed from them",
        )
    return torch.from_numpy(np.ascontiguousarray(given, np.float64))


def _misfit(lane: Lane, fact: str, reason: str) -> NoReturn:
    raise KvlatheError(
        f"the basis of layer {lane.layer} head {lane.head} {fact}",
        reason,
        "plan again for this checkpoint",
    )


def _eye(rows: int, columns: int) -> Tensor:
    return torch.eye(rows, columns, dtype=torch.double, device="cpu")


def _zeros(size: int) -> Tensor:
    return torch.zeros(size, dtype=torch.double, device="cpu")


def pad(m: Tensor, rows: int, columns: int) -> Tensor:
    """``m`` with zeros below and to the right, up to [rows, columns]."""
    right = columns - m.shape[1]
    below = rows - m.shape[0]
    return F.pad(m, (0, right, 0, below))
