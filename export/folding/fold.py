"""Fold: rewrite a checkpoint's weights offline so that the decoder's forward pass never
knows what was rewritten.

Exact at full rank. For lane (KV head) h with its query heads g, row vectors, y = x W +
bias:

    V   W_V <- W_V a_v             b_V <- (b_V - centre_v) a_v
        W_O[g] <- o_v W_O[g]       b_O <- b_O + sum over g of centre_v W_O[g]      (softmax rows sum to 1)
    QK  without RoPE:  W_Q <- W_Q a, W_K <- W_K b, b_K <- (b_K - centre_k) b       (softmax ignores q . centre_k)
        chosen planes: only their columns of W_Q and W_K stay
        with RoPE:     a, b and centre_k b go to Attend, which projects after it has rotated

A removed lane's columns vanish and its W_O is added to the lane it is filled from,
before that one is folded. Every product is taken in float64. Peak memory: a few copies
of one tensor.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from kvlathe.export.bases.basis import Basis
from kvlathe.export.folding.lane_fold import LaneFold, lane_folds, padded
from kvlathe.export.model.checkpoint import Checkpoint
from kvlathe.export.model.decoder import Decoder
from kvlathe.export.model.spec import DecoderSpec
from kvlathe.plan.plan import CompressionPlan


def fold(
    checkpoint: Checkpoint, plan: CompressionPlan, basis: Basis
) -> Iterator[tuple[str, Tensor]]:
    """The Decoder's whole state (name, float32 tensor), one at a time, in no order that
    matters.

    Raises KvlatheError before the first tensor if plan, basis and checkpoint do not
    belong together.
    """
    folds = lane_folds(checkpoint.spec, plan, basis)
    return _stream(checkpoint, plan, folds)


def decoder_from(
    checkpoint: Checkpoint,
    plan: CompressionPlan,
    basis: Basis,
    dtype: torch.dtype = torch.float32,
) -> Decoder:
    """The folded decoder, ready to run."""
    decoder = Decoder(checkpoint.spec, plan, dtype)
    dtypes = {name: value.dtype for name, value in decoder.state_dict().items()}
    for name, tensor in fold(checkpoint, plan, basis):
        decoder.load_state_dict(
            {name: tensor.to(dtypes[name])}, strict=False, assign=True
        )
    return decoder.eval()


def _stream(
    checkpoint: Checkpoint, plan: CompressionPlan, folds: dict[int, list[LaneFold]]
) -> Iterator[tuple[str, Tensor]]:
    rope = checkpoint.spec.rope
    if rope:
        yield "rope.inv_freq", torch.tensor(rope.inv_freq)
        yield "rope.amplitude", torch.tensor(rope.amplitude)
    folded = {
        f"layers.{layer}.{role}.{kind}"
        for layer in folds
        for role in "qkvo"
        for kind in ("weight", "bias")
    }
    for name in checkpoint.weights:
        if name not in folded:
            yield name, checkpoint.weight(name)
    for layer, lanes in folds.items():
        yield from _inputs(checkpoint, layer, lanes)
        yield from _output(checkpoint, plan, layer, lanes)
        if plan.projected:
            yield from _projections(layer, lanes)


def _inputs(
    checkpoint: Checkpoint, layer: int, lanes: list[LaneFold]
) -> Iterator[tuple[str, Tensor]]:
    """W_Q, W_K, W_V and their biases."""
    spec = checkpoint.spec
    at = f"layers.{layer}."
    q = {lane.head: lane.q for lane in lanes}
    k = {lane.head: lane.k for lane in lanes}
    v = {lane.head: lane.v for lane in lanes}
    for role, maps in (("q", q), ("k", k), ("v", v)):
        name = f"{at}{role}.weight"
        yield name, _columns(checkpoint.weight(name), maps, spec)
    biased = checkpoint.has(f"{at}q.bias")
    if biased:
        name = f"{at}q.bias"
        yield name, _columns(checkpoint.weight(name), q, spec)
    if biased or spec.rope is None:
        shifts = {lane.head: lane.shift_k for lane in lanes}
        yield f"{at}k.bias", _bias(checkpoint, f"{at}k.bias", k, shifts)
    shifts = {lane.head: lane.shift_v for lane in lanes}
    yield f"{at}v.bias", _bias(checkpoint, f"{at}v.bias", v, shifts)


def _columns(weight: Tensor, maps: dict[int, Tensor], spec: DecoderSpec) -> Tensor:
    """[..., heads * d] -> every kept lane's heads, each times its lane's [d, n];
    ``heads`` is Hq or H."""
    identity = torch.eye(spec.head_dim)
    unchanged = all(torch.equal(matrix, identity) for matrix in maps.values())
    if unchanged and len(maps) == spec.kv_heads:
        return weight
    heads = weight.unflatten(-1, (spec.kv_heads, -1, spec.head_dim))
    columns = []
    for head, matrix in maps.items():
        product = heads[..., head, :, :].double() @ matrix
        columns.append(product.float().flatten(-2))
    return torch.cat(columns, -1)


def _bias(
    checkpoint: Checkpoint,
    name: str,
    maps: dict[int, Tensor],
    shifts: dict[int, Tensor],
) -> Tensor:
    """(bias - shift) @ map of each kept lane; a model without this bias has zeros."""
    spec = checkpoint.spec
    bias = torch.zeros(spec.kv_heads * spec.head_dim)
    if checkpoint.has(name):
        bias = checkpoint.weight(name)
    heads = bias.double().unflatten(0, (spec.kv_heads, spec.head_dim))
    parts = []
    for head, matrix in maps.items():
        parts.append((heads[head] - shifts[head]) @ matrix)
    return torch.cat(parts).float()


def _output(
    checkpoint: Checkpoint, plan: CompressionPlan, layer: int, lanes: list[LaneFold]
) -> Iterator[tuple[str, Tensor]]:
    """W_O and its bias."""
    spec = checkpoint.spec
    at = f"layers.{layer}.o."
    weight = checkpoint.weight(f"{at}weight")
    heads = weight.unflatten(0, (spec.kv_heads, spec.group_size, spec.head_dim))
    bias = torch.zeros(spec.hidden_size)
    if checkpoint.has(f"{at}bias"):
        bias = checkpoint.weight(f"{at}bias")
    bias = bias.double()
    sources = [plan.lane(layer, head).fill_from for head in range(spec.kv_heads)]
    rows = []
    for lane in lanes:
        filled = [head for head, source in enumerate(sources) if source == lane.head]
        outputs = heads[[lane.head, *filled]].sum(0, dtype=torch.double)  # [G, d, D]
        rows.append((lane.out @ outputs).float().flatten(0, 1))
        bias += lane.shift_v @ outputs.sum(0)
    yield f"{at}weight", torch.cat(rows)
    yield f"{at}bias", bias.float()


def _projections(layer: int, lanes: list[LaneFold]) -> Iterator[tuple[str, Tensor]]:
    """Attend's state: [H, D, Rk] and [H, Rk], padded with zeros to the widest lane of
    the layer."""
    width = max(lane.proj_q.shape[0] for lane in lanes)
    rank = max(lane.proj_q.shape[1] for lane in lanes)
    q = [padded(lane.proj_q, width, rank) for lane in lanes]
    k = [padded(lane.proj_k, width, rank) for lane in lanes]
    centres = [padded(lane.centre[None], 1, rank)[0] for lane in lanes]
    state = {"proj_q": q, "proj_k": k, "centre_k": centres}
    for name, of_lanes in state.items():
        stacked = torch.stack(of_lanes)
        yield f"layers.{layer}.attend.{name}", stacked.float()
