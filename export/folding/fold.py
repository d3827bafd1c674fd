"""Fold: rewrite a checkpoint's weights offline so that the decoder's forward pass never
knows what was rewritten.

Exact at full rank. For lane (KV head) h with its query heads g, row vectors, y = x W +
bias:

    V   W_V <- W_V a_v             b_V <- (b_V - centre_v) a_v
        W_O[g] <- o_v W_O[g]       b_O <- b_O + sum over g of centre_v W_O[g]      (softmax rows sum to 1)
        gated outputs:  o_v and centre_v turn o back before the gate, W_O stays
    QK  without RoPE:  W_Q <- W_Q a, W_K <- W_K b, b_K <- (b_K - centre_k) b       (softmax ignores q . centre_k)
        chosen planes: only their columns of W_Q and W_K stay
        with RoPE:     a, b and centre_k b go to Attend, which projects after it has rotated

A removed lane's columns vanish and its W_O is added to the lane it is filled from,
before that one is folded. Every product is taken in float64, where the checkpoint's
tensors are. Peak memory: a few copies of one tensor.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial

import torch
from torch import Tensor

from kvlathe.export.bases.basis import Basis
from kvlathe.export.folding.lane_fold import LaneFold, lane_folds, pad
from kvlathe.export.model.checkpoint import Checkpoint
from kvlathe.export.model.decoder import Decoder
from kvlathe.export.model.device import ahead
from kvlathe.export.model.tensors import rope_state
from kvlathe.plan.heads import HeadShape
from kvlathe.plan.plan import CompressionPlan

Make = Callable[[], Tensor]
NO_SINK = -6e4
"""A logit beside the scores that counts nothing, in 16 bits, too."""


class Folded(Mapping[str, Tensor]):
    """The Decoder's whole state by name, float32. A tensor is read and folded when it
    is asked for, and again when it is asked for again."""

    def __init__(self, makers: dict[str, Make]) -> None:
        self._makers = makers

    def __getitem__(self, name: str) -> Tensor:
        return self._makers[name]()

    def __iter__(self) -> Iterator[str]:
        return iter(self._makers)

    def __len__(self) -> int:
        return len(self._makers)


def fold(checkpoint: Checkpoint, plan: CompressionPlan, basis: Basis) -> Folded:
    """Raises KvlatheError if plan, basis and checkpoint do not belong together."""
    return Folded(_makers(checkpoint, plan, lane_folds(checkpoint.spec, plan, basis)))


def decoder_from(
    checkpoint: Checkpoint,
    plan: CompressionPlan,
    basis: Basis,
    dtype: torch.dtype = torch.float32,
) -> Decoder:
    """The folded decoder, ready to run on the checkpoint's device."""
    with torch.device("meta"):
        decoder = Decoder(checkpoint.spec, plan, dtype)
    dtypes = {name: value.dtype for name, value in decoder.state_dict().items()}
    folded = fold(checkpoint, plan, basis)

    def made(name: str) -> dict[str, Tensor]:
        return {name: folded[name].to(dtypes[name])}

    for state in ahead(made, folded, checkpoint.device):
        decoder.load_state_dict(state, strict=False, assign=True)
    return decoder.to(checkpoint.device).eval()


def _makers(
    checkpoint: Checkpoint, plan: CompressionPlan, folds: dict[int, list[LaneFold]]
) -> dict[str, Make]:
    spec = checkpoint.spec
    device = checkpoint.device
    makers: dict[str, Make] = {}
    for name, numbers in rope_state(spec).items():
        makers[f"rope.{name}"] = partial(torch.tensor, numbers, device=device)
    for name in checkpoint.weights:
        makers[name] = partial(checkpoint.weight, name)
    for layer in range(spec.layers):
        if not spec.attends(layer):
            continue
        lanes = folds[plan.model.source(layer)]
        makers |= _inputs(checkpoint, layer, lanes)
        makers |= _outputs(checkpoint, plan, layer, lanes)
        maps = not any(lane.values_in_keys for lane in plan.index.active(layer))
        if spec.family.value_norm and plan.model.source(layer) == layer and maps:
            makers |= _value_maps(layer, lanes, device)
        if plan.index.projected:
            makers |= _projections(layer, lanes, device)
        if plan.model.sinks:
            name = f"layers.{layer}.attend.sinks"
            makers[name] = partial(_sinks, checkpoint, name, lanes)
    return makers


def _inputs(
    checkpoint: Checkpoint, layer: int, lanes: list[LaneFold]
) -> dict[str, Make]:
    """W_Q, W_K, W_V and their biases."""
    spec = checkpoint.spec
    if spec.family.latent is not None:
        return {}  # as they are: lanes that share a latent have no basis
    at = f"layers.{layer}."
    q = {lane.head: lane.q for lane in lanes}
    if not checkpoint.has(f"{at}k.weight"):
        return _maps(checkpoint, layer, (("q", q),))
    k = {lane.head: lane.k for lane in lanes}
    v = {lane.head: lane.v for lane in lanes}
    shift_k = {lane.head: lane.shift_k for lane in lanes}
    shift_v = {lane.head: lane.shift_v for lane in lanes}
    if spec.family.value_norm:  # maps of values come after it
        v = {lane.head: torch.eye(len(lane.v), dtype=torch.double) for lane in lanes}
        return _maps(checkpoint, layer, (("q", q), ("k", k), ("v", v)))
    makers = _maps(checkpoint, layer, (("q", q), ("v", v)))
    name = f"{at}k.weight"
    makers[name] = partial(_columns, checkpoint, layer, name, k)
    biased = checkpoint.has(f"{at}q.bias")
    if biased or spec.rope is None:
        name = f"{at}k.bias"
        makers[name] = partial(_bias, checkpoint, layer, name, k, shift_k)
    name = f"{at}v.bias"
    makers[name] = partial(_bias, checkpoint, layer, name, v, shift_v)
    return makers


def _maps(
    checkpoint: Checkpoint,
    layer: int,
    of_roles: Iterable[tuple[str, dict[int, Tensor]]],
) -> dict[str, Make]:
    """Weights of these roles, and the biases that the checkpoint has, times a matrix of
    each lane."""
    makers: dict[str, Make] = {}
    for role, maps in of_roles:
        for kind in ("weight", "bias"):
            name = f"layers.{layer}.{role}.{kind}"
            if checkpoint.has(name):
                makers[name] = partial(_columns, checkpoint, layer, name, maps)
    return makers


def _value_maps(
    layer: int, lanes: list[LaneFold], device: torch.device
) -> dict[str, Make]:
    """ValueMap's state: maps [H, d, R], padded with zeros to the widest lane."""
    widest = max(lane.v.shape[1] for lane in lanes)
    maps = torch.stack([pad(lane.v, len(lane.v), widest) for lane in lanes])
    bias = torch.cat([-lane.shift_v @ lane.v for lane in lanes])
    return {
        f"layers.{layer}.v_map.maps": partial(maps.float().to, device),
        f"layers.{layer}.v_map.bias": partial(bias.float().to, device),
    }


def _columns(
    checkpoint: Checkpoint, layer: int, name: str, maps: dict[int, Tensor]
) -> Tensor:
    """[..., heads * d] -> every kept lane's heads, each times its lane's [d, n];
    ``heads`` is Hq or H."""
    own = checkpoint.spec.heads(layer)
    weight = checkpoint.weight(name)
    if _keeps_all(maps, own):
        return weight
    heads = weight.unflatten(-1, (own.kv_heads, -1, own.head_dim))
    columns = []
    for head, matrix in maps.items():
        product = heads[..., head, :, :].double() @ matrix.to(weight.device)
        columns.append(product.float().flatten(-2))
    return torch.cat(columns, -1)


def _keeps_all(maps: dict[int, Tensor], own: HeadShape) -> bool:
    identity = torch.eye(own.head_dim, device="cpu")
    unchanged = all(torch.equal(matrix, identity) for matrix in maps.values())
    return unchanged and len(maps) == own.kv_heads


def _bias(
    checkpoint: Checkpoint,
    layer: int,
    name: str,
    maps: dict[int, Tensor],
    shifts: dict[int, Tensor],
) -> Tensor:
    """(bias - shift) @ map of each kept lane; a model without this bias has zeros."""
    own = checkpoint.spec.heads(layer)
    bias = _bias_or_zeros(checkpoint, name, own.kv_heads * own.head_dim)
    heads = bias.unflatten(0, (own.kv_heads, own.head_dim))
    parts = []
    for head, matrix in maps.items():
        centred = heads[head] - shifts[head].to(bias.device)
        parts.append(centred @ matrix.to(bias.device))
    return torch.cat(parts).float()


def _bias_or_zeros(checkpoint: Checkpoint, name: str, size: int) -> Tensor:
    """float64"""
    if checkpoint.has(name):
        return checkpoint.weight(name).double()
    return torch.zeros(size, dtype=torch.double, device=checkpoint.device)


def _outputs(
    checkpoint: Checkpoint, plan: CompressionPlan, layer: int, lanes: list[LaneFold]
) -> dict[str, Make]:
    """W_O and its bias."""
    if checkpoint.spec.has_out_gates:
        return _gated_outputs(checkpoint, plan, layer, lanes)
    at = f"layers.{layer}.o."
    readers = partial(_readers, checkpoint, plan, layer, lanes)
    weight = partial(_output, readers)
    bias = partial(_output_bias, checkpoint, f"{at}bias", readers, lanes)
    return {f"{at}weight": weight, f"{at}bias": bias}


def _gated_outputs(
    checkpoint: Checkpoint, plan: CompressionPlan, layer: int, lanes: list[LaneFold]
) -> dict[str, Make]:
    """W_O as it is, for what is turned back before it: a gate stands between."""
    at = f"layers.{layer}."
    folds = {lane.head: lane for lane in lanes}
    sources: list[LaneFold] = []
    for head in range(checkpoint.spec.heads(layer).kv_heads):
        filled = plan.index.lane(layer, head).fill_from
        sources.append(folds[head if filled is None else filled])
    rank = max(len(lane.out) for lane in sources)
    weight = torch.stack([pad(x.out, rank, x.out.shape[1]) for x in sources])
    bias = torch.stack([lane.shift_v[None] for lane in sources])
    size = checkpoint.spec.hidden_size
    name = f"{at}o.bias"
    return {
        f"{at}o.weight": partial(checkpoint.weight, f"{at}o.weight"),
        name: lambda: _bias_or_zeros(checkpoint, name, size).float(),
        f"{at}lift.weight": partial(weight.float().to, checkpoint.device),
        f"{at}lift.bias": partial(bias.float().to, checkpoint.device),
    }


Readers = Callable[[], Iterator[tuple[LaneFold, Tensor]]]


def _readers(
    checkpoint: Checkpoint, plan: CompressionPlan, layer: int, lanes: list[LaneFold]
) -> Iterator[tuple[LaneFold, Tensor]]:
    """Each kept lane with its rows of W_O, those of the lanes that it fills added: [G,
    d, D] float64."""
    spec = checkpoint.spec
    weight = checkpoint.weight(f"layers.{layer}.o.weight")
    value_dim = spec.shape.value_dim(layer)
    heads = weight.unflatten(0, (-1, spec.group(layer), value_dim))
    every = range(len(heads))
    source = plan.model.source(layer)
    sources = [plan.index.lane(source, head).fill_from for head in every]
    for lane in lanes:
        filled = [head for head, source in enumerate(sources) if source == lane.head]
        yield lane, heads[[lane.head, *filled]].sum(0, dtype=torch.double)


def _output(readers: Readers) -> Tensor:
    rows = []
    for lane, outputs in readers():
        rows.append((lane.out.to(outputs.device) @ outputs).float().flatten(0, 1))
    return torch.cat(rows)


def _output_bias(
    checkpoint: Checkpoint, name: str, readers: Readers, lanes: list[LaneFold]
) -> Tensor:
    bias = _bias_or_zeros(checkpoint, name, checkpoint.spec.hidden_size)
    if any(bool(lane.shift_v.any()) for lane in lanes):
        for lane, outputs in readers():
            bias += lane.shift_v.to(bias.device) @ outputs.sum(0)
    return bias.float()


def _sinks(checkpoint: Checkpoint, name: str, lanes: list[LaneFold]) -> Tensor:
    """[H, G] of the kept lanes. Where a layer has none: numbers that take no share."""
    if not checkpoint.has(name):
        layer = int(name.split(".")[1])
        return torch.full((len(lanes), checkpoint.spec.group(layer)), NO_SINK)
    return checkpoint.weight(name)[[lane.head for lane in lanes]]


def _projections(
    layer: int, lanes: list[LaneFold], device: torch.device
) -> dict[str, Make]:
    """Attend's state: [H, D, Rk] and [H, Rk], padded with zeros to the widest lane of
    the layer."""
    width = max(lane.proj_q.shape[0] for lane in lanes)
    rank = max(lane.proj_q.shape[1] for lane in lanes)
    q = [pad(lane.proj_q, width, rank) for lane in lanes]
    k = [pad(lane.proj_k, width, rank) for lane in lanes]
    centres = [pad(lane.centre[None], 1, rank)[0] for lane in lanes]
    makers: dict[str, Make] = {}
    for name, of_lanes in {"proj_q": q, "proj_k": k, "centre_k": centres}.items():
        makers[f"layers.{layer}.attend.{name}"] = partial(
            torch.stack(of_lanes).float().to, device
        )
    return makers
