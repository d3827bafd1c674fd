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

import torch
from torch import Tensor

from kvlathe.export.basis import Basis
from kvlathe.export.checkpoint import Checkpoint
from kvlathe.export.decoder import Decoder
from kvlathe.export.lane_fold import LaneFold, lane_folds, padded
from kvlathe.export.plan import CompressionPlan
from kvlathe.export.spec import DecoderSpec


def fold(checkpoint: Checkpoint, plan: CompressionPlan, basis: Basis) -> Iterator[tuple[str, Tensor]]:
    """The Decoder's whole state (name, float32 tensor), one at a time, in no order that matters.

    Raises KvlatheError before the first tensor if plan, basis and checkpoint do not belong together.
    """
    return _stream(checkpoint, plan, lane_folds(checkpoint.spec, plan, basis))


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
        yield f"layers.{layer}.attend.{name}", torch.stack([padded(m, width, rank) for m in matrices]).float()
    yield f"layers.{layer}.attend.centre_k", torch.stack([padded(x.centre[None], 1, rank)[0] for x in lanes]).float()
