"""Fold: rewrite a checkpoint's weights offline so that the decoder's forward pass never knows what was rewritten.

Exact at full rank. For lane (KV head) h with its query heads g, row vectors, y = x W + bias:

    V   W_V <- W_V a_v             b_V <- (b_V - centre_v) a_v
        W_O[g] <- o_v W_O[g]       b_O <- b_O + sum over g of centre_v W_O[g]      (softmax rows sum to 1)
    QK  without RoPE:  W_Q <- W_Q a, W_K <- W_K b, b_K <- (b_K - centre_k) b       (softmax ignores q . centre_k)
        chosen planes: only their columns of W_Q and W_K stay
        with RoPE:     a, b and centre_k b go to Attend, which projects after it has rotated

A removed lane's columns vanish and its W_O is added to the lane it is filled from, before that one is folded.
Every product is taken in float64. Peak memory: a few copies of one tensor.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NoReturn

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from kvlathe.errors import KvlatheError
from kvlathe.export.basis import Array, Basis, LaneBasis
from kvlathe.export.checkpoint import Checkpoint
from kvlathe.export.decoder import Decoder
from kvlathe.export.plan import CompressionPlan, Lane
from kvlathe.export.spec import DecoderSpec


@dataclass(frozen=True)
class LaneFold:
    """What happens to one lane, all float64: d = head_dim, I = the lane's input_dim.

    ``q``, ``k`` [d, I] and ``shift_k`` [d] enter W_Q and W_K; ``proj_q``, ``proj_k`` [I, rank_k] and ``centre``
    [rank_k] are for Attend; ``v`` [d, rank_v], ``out`` [rank_v, d] and ``shift_v`` [d] enter W_V and W_O.
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


def fold(checkpoint: Checkpoint, plan: CompressionPlan, basis: Basis) -> Iterator[tuple[str, Tensor]]:
    """The Decoder's whole state (name, float32 tensor), one at a time, in no order that matters.

    Raises KvlatheError before the first tensor if plan, basis and checkpoint do not belong together.
    """
    spec = checkpoint.spec
    folds = _lane_folds(spec, plan, basis)
    return _stream(checkpoint, plan, folds)


def decoder_from(
    checkpoint: Checkpoint, plan: CompressionPlan, basis: Basis, dtype: torch.dtype = torch.float32
) -> Decoder:
    """The folded decoder, ready to run."""
    decoder = Decoder(checkpoint.spec, plan, dtype)
    dtypes = {name: value.dtype for name, value in decoder.state_dict().items()}
    for name, tensor in fold(checkpoint, plan, basis):
        decoder.load_state_dict({name: tensor.to(dtypes[name])}, strict=False, assign=True)
    return decoder.eval()


def _stream(
    checkpoint: Checkpoint, plan: CompressionPlan, folds: dict[int, list[LaneFold]]
) -> Iterator[tuple[str, Tensor]]:
    rope = checkpoint.spec.rope
    if rope:
        yield "rope.inv_freq", torch.tensor(rope.inv_freq)
        yield "rope.amplitude", torch.tensor(rope.amplitude)
    folded = {f"layers.{layer}.{role}.{kind}" for layer in folds for role in "qkvo" for kind in ("weight", "bias")}
    for name in checkpoint.weights:
        if name not in folded:
            yield name, checkpoint.weight(name)
    for layer, lanes in folds.items():
        yield from _inputs(checkpoint, layer, lanes)
        yield from _output(checkpoint, plan, layer, lanes)
        if plan.projected:
            yield from _projections(layer, lanes)


def _inputs(checkpoint: Checkpoint, layer: int, lanes: list[LaneFold]) -> Iterator[tuple[str, Tensor]]:
    """W_Q, W_K, W_V and their biases."""
    spec, at = checkpoint.spec, f"layers.{layer}."
    yield f"{at}q.weight", _columns(checkpoint.weight(f"{at}q.weight"), {x.head: x.q for x in lanes}, spec)
    yield f"{at}k.weight", _columns(checkpoint.weight(f"{at}k.weight"), {x.head: x.k for x in lanes}, spec)
    yield f"{at}v.weight", _columns(checkpoint.weight(f"{at}v.weight"), {x.head: x.v for x in lanes}, spec)
    biased = checkpoint.has(f"{at}q.bias")
    if biased:
        yield f"{at}q.bias", _columns(checkpoint.weight(f"{at}q.bias"), {x.head: x.q for x in lanes}, spec)
    if biased or spec.rope is None:
        yield f"{at}k.bias", _bias(checkpoint, f"{at}k.bias", {x.head: (x.k, x.shift_k) for x in lanes})
    yield f"{at}v.bias", _bias(checkpoint, f"{at}v.bias", {x.head: (x.v, x.shift_v) for x in lanes})


def _columns(weight: Tensor, maps: dict[int, Tensor], spec: DecoderSpec) -> Tensor:
    """[..., heads * d] -> every kept lane's heads, each times its lane's [d, n]; ``heads`` is Hq or H."""
    if len(maps) == spec.kv_heads and all(torch.equal(m, torch.eye(spec.head_dim)) for m in maps.values()):
        return weight
    heads = weight.unflatten(-1, (spec.kv_heads, -1, spec.head_dim))
    return torch.cat([(heads[..., h, :, :].double() @ m).float().flatten(-2) for h, m in maps.items()], -1)


def _bias(checkpoint: Checkpoint, name: str, maps: dict[int, tuple[Tensor, Tensor]]) -> Tensor:
    """(bias - shift) @ map of each kept lane; a model without this bias has zeros."""
    spec = checkpoint.spec
    bias = checkpoint.weight(name) if checkpoint.has(name) else torch.zeros(spec.kv_heads * spec.head_dim)
    heads = bias.double().unflatten(0, (spec.kv_heads, spec.head_dim))
    return torch.cat([(heads[h] - shift) @ m for h, (m, shift) in maps.items()]).float()


def _output(
    checkpoint: Checkpoint, plan: CompressionPlan, layer: int, lanes: list[LaneFold]
) -> Iterator[tuple[str, Tensor]]:
    """W_O and its bias."""
    spec, at = checkpoint.spec, f"layers.{layer}.o."
    heads = checkpoint.weight(f"{at}weight").unflatten(0, (spec.kv_heads, spec.group_size, spec.head_dim))
    bias = checkpoint.weight(f"{at}bias") if checkpoint.has(f"{at}bias") else torch.zeros(spec.hidden_size)
    bias = bias.double()
    rows = []
    for lane in lanes:
        filled = [head for head in range(spec.kv_heads) if plan.lane(layer, head).fill_from == lane.head]
        outputs = heads[[lane.head, *filled]].sum(0, dtype=torch.double)  # [G, d, D]
        rows.append((lane.out @ outputs).float().flatten(0, 1))
        bias += lane.shift_v @ outputs.sum(0)
    yield f"{at}weight", torch.cat(rows)
    yield f"{at}bias", bias.float()


def _projections(layer: int, lanes: list[LaneFold]) -> Iterator[tuple[str, Tensor]]:
    """Attend's state: [H, D, Rk] and [H, Rk], padded with zeros to the widest lane of the layer."""
    width, rank = max(x.proj_q.shape[0] for x in lanes), max(x.proj_q.shape[1] for x in lanes)
    for name, matrices in (("proj_q", [x.proj_q for x in lanes]), ("proj_k", [x.proj_k for x in lanes])):
        yield f"layers.{layer}.attend.{name}", torch.stack([_padded(m, width, rank) for m in matrices]).float()
    yield f"layers.{layer}.attend.centre_k", torch.stack([_padded(x.centre[None], 1, rank)[0] for x in lanes]).float()


# -- from plan and basis to matrices ---------------------------------------------------------------------------------


def _lane_folds(spec: DecoderSpec, plan: CompressionPlan, basis: Basis) -> dict[int, list[LaneFold]]:
    if plan.model != spec.shape:
        raise KvlatheError(
            f"the plan was made for {plan.model}", f"the checkpoint is {spec.shape}", "plan for this checkpoint"
        )
    return {
        layer: [_lane_fold(spec, lane, basis.get((layer, lane.head), LaneBasis())) for lane in plan.active(layer)]
        for layer in range(spec.layers)
    }


def _lane_fold(spec: DecoderSpec, lane: Lane, given: LaneBasis) -> LaneFold:
    _check_lane(spec, lane, given)
    d, width, rank = spec.head_dim, lane.input_dim, lane.rank_k
    picked = torch.eye(d, dtype=torch.double)[:, _dims(lane, d)]
    in_weights = lane.rope == "none" and not lane.projected
    rows, columns = (d, width) if in_weights else (width, rank)
    a, b = _pair(lane, "a", given.a, "b", None if given.b is None else given.b.T, rows, columns)
    centre, none = _vector(lane, "centre_k", given.centre_k, rows), torch.zeros(d, dtype=torch.double)
    v, out = _pair(lane, "a_v", given.a_v, "o_v", given.o_v, d, lane.rank_v)
    through = torch.eye(width, rank, dtype=torch.double)
    return LaneFold(
        head=lane.head,
        q=a if in_weights else picked,
        k=b.T if in_weights else picked,
        shift_k=centre if in_weights else none,
        proj_q=through if in_weights else a,
        proj_k=through if in_weights else b.T,
        centre=none.new_zeros(rank) if in_weights else centre @ b.T,
        v=v,
        out=out,
        shift_v=_vector(lane, "centre_v", given.centre_v, d),
    )


def _dims(lane: Lane, d: int) -> list[int]:
    """The head's canonical dims that this lane's input holds: chosen planes' first halves, then their second halves."""
    return [*lane.planes, *(plane + d // 2 for plane in lane.planes)] if lane.rope == "planes" else list(range(d))


def _check_lane(spec: DecoderSpec, lane: Lane, given: LaneBasis) -> None:
    def refuse(fact: str, reason: str) -> None:
        raise KvlatheError(f"layer {lane.layer} head {lane.head} {fact}", reason, "mend the method that made this plan")

    d, planes = spec.head_dim, lane.planes
    if (lane.rope == "none") != (spec.rope is None):
        refuse(f"has RoPE {lane.rope!r}", f"the model has {'no RoPE' if spec.rope is None else 'RoPE'}")
    if lane.rope == "planes" and (len(set(planes)) != len(planes) or not set(planes) <= set(range(d // 2))):
        refuse(f"keeps the planes {planes}", f"a head has the planes 0 to {d // 2 - 1}, each once")
    if lane.rope == "planes" and "q_norm" in spec.family.names:
        refuse("keeps chosen planes", "this model's QK-norm needs all dims of a head")
    if lane.rope != "planes" and lane.input_dim != d and (lane.projected or lane.rope == "full"):
        refuse(f"has input_dim {lane.input_dim}", f"the model's heads have {d} dims")
    if lane.rope != "none" and not lane.projected and (given.a is not None or given.centre_k is not None):
        refuse("has a basis or a centre for Q and K and is not projected", "neither can be folded past RoPE")


def _pair(
    lane: Lane, left: str, m: Array | None, right: str, n: Array | None, rows: int, rank: int
) -> tuple[Tensor, Tensor]:
    """Matrix ``left`` [rows, rank] and its counterpart ``right`` [rank, rows], zero-padded; identities if not given."""
    if (m is None) != (n is None):
        _misfit(lane, f"has {left} or {right} alone", "each undoes the other")
    if m is None or n is None:
        if rank < rows:
            _misfit(lane, f"keeps {rank} of {rows} dims and has no {left}", "dropping raw dims is no projection")
        return torch.eye(rows, rank, dtype=torch.double), torch.eye(rank, rows, dtype=torch.double)
    if m.ndim != 2 or m.shape != n.shape[::-1] or m.shape[0] != rows or m.shape[1] > rank:
        _misfit(
            lane, f"has {left} {list(m.shape)} and {right} {list(n.shape)}", f"the plan has {rows} dims and rank {rank}"
        )
    return _padded(_double(lane, left, m), rows, rank), _padded(_double(lane, right, n), rank, rows)


def _vector(lane: Lane, name: str, given: Array | None, size: int) -> Tensor:
    if given is None:
        return torch.zeros(size, dtype=torch.double)
    if given.shape != (size,):
        _misfit(lane, f"has {name} {list(given.shape)}", f"the plan has {size} dims")
    return _double(lane, name, given)


def _double(lane: Lane, name: str, given: Array) -> Tensor:
    if not np.isfinite(given).all():
        _misfit(lane, f"has NaN or infinite numbers in {name}", "nothing sound can be computed from them")
    return torch.from_numpy(np.ascontiguousarray(given, np.float64))


def _misfit(lane: Lane, fact: str, reason: str) -> NoReturn:
    raise KvlatheError(
        f"the basis of layer {lane.layer} head {lane.head} {fact}", reason, "plan again for this checkpoint"
    )


def _padded(m: Tensor, rows: int, columns: int) -> Tensor:
    return F.pad(m, (0, columns - m.shape[1], 0, rows - m.shape[0]))
