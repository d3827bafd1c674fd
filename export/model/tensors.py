"""Tensors of a model: their names and shapes in the checkpoint, and the cuts that make
the decoder's own of them.

The decoder's names are ``embed.weight``, ``layers.<i>.<role>.weight`` and so on,
whatever the family calls them; the roles are those of Family. A *stored* tensor is the
checkpoint's; a fused one holds several roles.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor

from kvlathe.export.model import latent, mixer_tensors, stacked
from kvlathe.export.model.packed import HeaderOf
from kvlathe.export.model.spec import DecoderSpec
from kvlathe.layers.decoder import rope_names

FUSED = {
    "q": ("qkv", "q_out_gate"),
    "k": ("qkv",),
    "v": ("qkv",),
    "out_gate": ("q_out_gate",),
    "gate": ("gate_up",),
    "up": ("gate_up",),
}
"""Role -> roles of stored tensors that hold it beside others."""
LAYER_ROLES = (
    "attn_norm",
    "q_latent",
    "q_latent_norm",
    "q",
    "k",
    "latent_norm",
    "v",
    "out_gate",
    "q_norm",
    "k_norm",
    "o",
    "attn_out_norm",
    "mlp_norm",
    "gate",
    "up",
    "down",
    "mlp_out_norm",
    "shared_gate",
    "dense_norm",
    "experts_norm",
    "inputs_gate",
    "inputs_out",
    "inputs_out_norm",
    "stream_norm",
    "stream_router",
    "stream_predict",
    "stream_correct",
    "laurel_left",
    "laurel_right",
    "laurel_norm",
    "attn_sum_norm",
    "mlp_sum_norm",
)
EXPERT_ROLES = {
    "experts.router": "router",
    "experts.gate": "experts_gate",
    "experts.up": "experts_up",
    "experts.down": "experts_down",
    "experts.into": "experts_into",
    "experts.back": "experts_back",
}
"""The decoder's name of a tensor of a layer's experts -> role. Each tensor holds all
experts, or is the same for all."""
NORMS = (
    *("attn_norm", "attn_out_norm", "mlp_norm", "mlp_out_norm", "norm"),
    *("dense_norm", "experts_norm", "inputs_out_norm", "inputs_norm"),
    *("guess_embed_norm", "guess_hidden_norm", "stream_norm", "laurel_norm"),
    *("attn_sum_norm", "mlp_sum_norm"),
)
LAYER_INPUTS = ("inputs_embed", "inputs_project", "inputs_norm")
"""Roles around the layers of what each layer is given of tokens."""
GUESSES = ("guess_embed_norm", "guess_hidden_norm", "guess_join")
"""Roles before a layer that guesses tokens (export/families/guessing.py)."""
AROUND = ("head", "inputs_project", "guess_join")
"""Roles of maps around the layers, beside those of streams."""
QK_NORMS = ("q_norm", "k_norm")
OF_QUERIES = ("q", "out_gate", "o")
"""Roles of maps that have a part for each query head."""
TO_STACK = (".{e}.gate_proj", ".gate_up_proj")
"""Name of one expert's map to gates -> that of all experts to gates and ups."""


def weight_names(spec: DecoderSpec) -> tuple[str, ...]:
    """Names of the decoder's tensors before folding, in the decoder's order."""
    layers = [f"layers.{i}.{role}" for i in range(spec.layers) for role in LAYER_ROLES]
    places = [
        "embed",
        "positions",
        *LAYER_INPUTS,
        *GUESSES,
        *stream_maps(spec, "in"),
        *layers,
        *stream_maps(spec, "out"),
        "norm",
        *([] if spec.tied_head else ["head"]),
    ]
    names = [name for place in places for name in _kinds(spec, place)]
    for layer in range(spec.layers):
        experts = spec.family.experts_of(layer)
        apart: list[str] = []
        if experts is not None and not experts.stacked:
            known = spec.family.names
            apart = [own for own, role in EXPERT_ROLES.items() if role in known]
        mixing = mixer_tensors.own_names(spec, layer)
        for own in (*apart, *stacked.own_names(spec, layer), *mixing):
            names.append(f"layers.{layer}.{own}")
    return tuple(names)


def stream_maps(spec: DecoderSpec, way: str) -> list[str]:
    """Roles of the maps to further streams ("in") or from them ("out")."""
    return [f"stream_{way}_{i}" for i in range(1, spec.family.streams)]


def expert_names(spec: DecoderSpec, name: str) -> list[str]:
    """The checkpoint's names of what the decoder's tensor ``name`` holds of each expert
    (of its router: one); none for any other tensor."""
    _, _, end = name.partition(".")
    layer, _, own = end.partition(".")
    if own not in EXPERT_ROLES or spec.family.experts is None:
        return []
    stored = spec.family.names[EXPERT_ROLES[own]].replace("{i}", layer)
    every = [stored.replace("{e}", str(e)) for e in range(spec.family.experts.count)]
    return [f"{one}.weight" for one in dict.fromkeys(every)]


def _kinds(spec: DecoderSpec, place: str) -> Iterator[str]:
    layer, role, _ = split_name(f"{place}.weight")
    if _stored_role(spec, role, layer) is not None:
        yield f"{place}.weight"
        if has_bias(spec, role) or made(spec, f"{place}.bias") is not None:
            yield f"{place}.bias"


def made(spec: DecoderSpec, name: str) -> Tensor | None:
    """The decoder's tensor ``name``, where no checkpoint stores it: weights of norms
    that have none, the bias of a layer norm or of a map that has none, positions of
    sines."""
    layer, role, kind = split_name(name)
    family = spec.family
    if role in NORMS:
        if kind == "weight" and not family.norm_weight:
            return torch.ones(spec.hidden_size)
        if kind == "bias" and family.norm == "layer" and not family.norm_bias:
            return torch.zeros(spec.hidden_size)
    unweighted = role in QK_NORMS and not family.qk_norm_weight
    if unweighted and layer is not None and kind == "weight":
        return torch.ones(qk_norm_width(spec, role, layer))
    lacks = layer is not None and family.out_bias_in and layer not in family.out_bias_in
    if lacks and role == "o" and kind == "bias":
        return torch.zeros(spec.hidden_size)
    if role == "positions" and kind == "weight" and family.sinusoidal:
        return _sines(spec)
    return None


def _sines(spec: DecoderSpec) -> Tensor:
    """[max_positions, D] of the tokens, in the order of fairseq: all sines, then all
    cosines."""
    half = spec.hidden_size // 2
    steps = torch.arange(half).float() * -(math.log(1e4) / (half - 1))
    offset = spec.family.position_offset
    places = torch.arange(offset, offset + spec.max_positions).float()
    angles = places[:, None] * steps.exp()
    return torch.cat([angles.sin(), angles.cos()], 1)


def _stored_role(spec: DecoderSpec, role: str, layer: int | None) -> str | None:
    """``role`` itself, the fused role that holds it, or None if the family has
    neither in this layer."""
    names = spec.family.roles(layer)
    return next((name for name in (role, *FUSED.get(role, ())) if name in names), None)


def has_bias(spec: DecoderSpec, role: str) -> bool:
    family = spec.family
    if role in NORMS:
        return family.norm == "layer" and family.norm_bias
    if role in QK_NORMS:
        return family.qk_norm == "layer" and family.qk_norm_weight
    if family.latent is not None and role in latent.ROLES:
        return role in latent.BIASED and family.qkv_bias
    groups = (
        ("head", family.head_bias),
        ("q k v qkv q_out_gate", family.qkv_bias),
        ("out_gate", family.qkv_bias and "q_out_gate" in family.names),
        ("o", family.out_bias),
        ("gate up gate_up down", family.mlp_bias),
    )
    return any(flag and role in roles.split() for roles, flag in groups)


def split_name(name: str) -> tuple[int | None, str, str]:
    """``layers.3.q.weight`` -> (3, "q", "weight"); no layer for the tensors around the
    layers."""
    *layer, role, kind = name.removeprefix("layers.").split(".")
    return int(layer[0]) if layer else None, role, kind


def stored_name(spec: DecoderSpec, name: str) -> str:
    """The checkpoint's name of the tensor that holds the decoder's tensor ``name``."""
    layer, role, kind = split_name(name)
    stored = _stored_role(spec, role, layer)
    if stored is None:
        raise KeyError(name)
    return f"{spec.family.roles(layer)[stored]}.{kind}".replace("{i}", str(layer))


def other_names(spec: DecoderSpec, name: str) -> list[str]:
    """Other names that a checkpoint may have for its tensor ``name``: base models lack
    the first part (``transformer.h.0...`` is ``h.0...``), text parts of larger models
    have one more."""
    first, _, bare = name.partition(".")
    inside = spec.family.inside
    others = [f"{inside}.{name}", f"{first}.{inside}.{bare}"] if inside else [bare]
    for part, other in spec.family.spellings.items():
        others += [x.replace(part, other) for x in (name, *others) if part in x]
    return others


def stacked_as_stored(spec: DecoderSpec, header: HeaderOf) -> DecoderSpec:
    """``spec`` as the checkpoint with these headers has its experts: in one stack where
    its record has them apart (transformers' modules are such, and the folders of
    Qwen3.5 with experts), [E, out, in] or [E, in, out]."""
    family = spec.family
    experts, names = family.experts, dict(family.names)
    apart = "experts_gate" in names and experts is not None and not experts.stacked
    if experts is None or not (experts.halves or apart):
        return spec
    if not experts.stacked:
        names["experts_gate_up"] = names.pop("experts_gate").replace(*TO_STACK)
        names["experts_down"] = names["experts_down"].replace(".{e}", "")
        del names["experts_up"]
        experts = replace(experts, stacked=True, out_in=True, halves=True)
    layers = (i for i in range(spec.layers) if family.experts_of(i) is not None)
    layer = str(next(layers, 0))
    found: list[tuple[int, ...]] = []
    for role in ("experts_gate_up", "experts_down"):
        name = names[role].replace("{i}", layer)
        headers = (header(one) for one in (name, *other_names(spec, name)))
        found += [one[0][1:] for one in headers if one is not None]
    if not found:
        return spec
    hidden, inner = spec.hidden_size, experts.intermediate_size
    experts = replace(experts, out_in=found == [(2 * inner, hidden), (hidden, inner)])
    return replace(spec, family=replace(family, names=names, experts=experts))


def stored_shapes(spec: DecoderSpec) -> dict[str, tuple[int, ...]]:
    """Every tensor that the checkpoint must hold, with its shape."""
    shapes = stacked.stored_shapes(spec) | mixer_tensors.stored_shapes(spec)
    around = {role: x for role, x in spec.family.names.items() if "{i}" not in x}
    if spec.tied_head:
        del around["head"]
    shapes |= _shapes_of(spec, around, None)
    for layer in range(spec.layers):
        roles = spec.family.roles(layer).items()
        of_layer = {role: name for role, name in roles if "{i}" in name}
        shapes |= _shapes_of(spec, of_layer, layer)
    return shapes


def _shapes_of(
    spec: DecoderSpec, names: Mapping[str, str], layer: int | None
) -> dict[str, tuple[int, ...]]:
    """The tensors of some roles, of one layer or around the layers."""
    whole: set[str] = set()
    for own in stacked.own_names(spec, layer):
        whole.update(stacked.ROLES[own])
    experts = spec.family.experts.count if spec.family.experts else 1
    shapes: dict[str, tuple[int, ...]] = {}
    for role, name in names.items():
        if role in whole:
            continue
        weight, bias = _stored_shape(spec, role, layer)
        lead = "" if layer is None else f"layers.{layer}."
        if made(spec, f"{lead}{role}.weight") is not None:
            continue
        for expert in range(experts if "{e}" in name else 1):
            at = name.replace("{i}", str(layer)).replace("{e}", str(expert))
            shapes[f"{at}.weight"] = weight
            if has_bias(spec, role) and made(spec, f"{lead}{role}.bias") is None:
                shapes[f"{at}.bias"] = bias
    return shapes


def _stored_shape(
    spec: DecoderSpec, role: str, layer: int | None
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """(weight, bias) of a stored role."""
    if spec.family.latent is not None and role in latent.SHAPED:
        return latent.stored_shape(spec, role)
    hidden = spec.hidden_size
    tables = _table_shapes(spec)
    if role in tables:
        return tables[role], (spec.vocab_size,)
    if role in NORMS:
        return (hidden,), (hidden,)
    if role in QK_NORMS:
        assert layer is not None
        width = qk_norm_width(spec, role, layer)
        return (width,), (width,)
    experts = spec.family.experts
    if experts is not None:
        own, reads = experts.intermediate_size, experts.latent or hidden
        shapes = {
            "router": (hidden, experts.count)
            if experts.router_in_out
            else (experts.count, hidden),
            "experts_gate": (own, reads),
            "experts_up": (own, reads),
            "experts_down": (reads, own),
            "experts_into": (reads, hidden),
            "experts_back": (hidden, reads),
        }
        if role in shapes:
            return shapes[role], ()
    inputs, outputs = _map_sizes(spec, layer)
    shape = inputs.get(role, hidden), outputs.get(role, hidden)
    return shape if spec.family.in_out else shape[::-1], shape[1:]


def _map_sizes(
    spec: DecoderSpec, layer: int | None
) -> tuple[dict[str, int], dict[str, int]]:
    """Inputs and outputs of a layer's maps, where they are not hidden states."""
    of_layer, streams = spec.family.layer_inputs, spec.family.streams
    inputs = {
        "inputs_out": of_layer,
        "guess_join": 2 * spec.hidden_size,
        "laurel_right": spec.family.laurel,
        "stream_predict": streams,
        "stream_correct": streams,
    }
    outputs = {
        "shared_gate": 1,
        "inputs_project": of_layer * spec.layers,
        "inputs_gate": of_layer,
        "laurel_left": spec.family.laurel,
        "stream_router": streams,
        "stream_predict": streams**2,
        "stream_correct": streams,
    }
    if layer is None:
        return inputs, outputs
    heads, inner = spec.heads(layer), spec.family.inner(layer)
    queries, dims = spec.stored_heads(layer), heads.head_dim
    values = spec.family.value_dims or dims
    q, kv = queries * dims, heads.kv_heads * dims
    inputs |= {"o": queries * values, "down": inner}
    outputs |= {
        "q": q,
        "k": kv,
        "v": heads.kv_heads * values,
        "qkv": q + 2 * kv,
        "out_gate": queries * spec.out_gates // spec.query_heads,
        "q_out_gate": 2 * q,
        "gate": inner,
        "up": inner,
        "gate_up": 2 * inner,
    }
    return inputs, outputs


def _table_shapes(spec: DecoderSpec) -> dict[str, tuple[int, ...]]:
    """Roles around the layers that are no maps, but for norms of hidden states."""
    positions = spec.max_positions + spec.family.position_offset
    of_inputs = spec.family.layer_inputs
    return {
        "embed": (spec.vocab_size + spec.family.more_rows, spec.hidden_size),
        "head": (spec.vocab_size, spec.hidden_size),
        "positions": (positions, spec.hidden_size),
        "inputs_embed": (
            spec.family.input_rows or spec.vocab_size,
            of_inputs * spec.layers,
        ),
        "inputs_norm": (of_inputs,),
    }


def rope_state(spec: DecoderSpec) -> dict[str, tuple[float, ...]]:
    """Frequencies and amplitudes of every rotation, by the decoder's names."""
    state: dict[str, tuple[float, ...]] = {}
    for i, rope in enumerate(spec.ropes):
        inv_freq, amplitude = rope_names(i)
        state[inv_freq] = rope.inv_freq
        state[amplitude] = rope.amplitude
    return state


def qk_norm_width(spec: DecoderSpec, role: str, layer: int) -> int:
    """Numbers of a QK-norm's weight."""
    own = spec.heads(layer)
    if not spec.family.wide_qk_norm:
        return own.head_dim
    heads = spec.query_heads if role == "q_norm" else own.kv_heads
    return heads * own.head_dim


def apply_factor(spec: DecoderSpec, name: str, tensor: Tensor) -> Tensor:
    """The decoder's tensor ``name``, float32, from the numbers that are stored: with
    the family's factor, and with what stands beside a norm's weight.

    A tied head reads the embedding with its factor, which the last norm takes out.
    """
    family = spec.family
    layer, role, kind = split_name(name)
    if family.norm_offset and kind == "weight" and role in (*NORMS, *QK_NORMS):
        tensor = tensor + family.norm_offset
    if role == "embed" and family.embed_norm:
        mean = tensor.square().mean(-1, keepdim=True)
        tensor = tensor / (mean + family.norm_eps).sqrt()
    if layer is not None and role == "down" and family.experts_of(layer):
        role = "shared_down"
    factor = family.factors.get(EXPERT_ROLES.get(f"{role}.{kind}", role), 1.0)
    if role == "norm" and spec.tied_head:
        factor /= family.factors.get("embed", 1.0)
    return tensor if factor == 1.0 else tensor * factor


def cut(spec: DecoderSpec, name: str, stored: Tensor) -> Tensor:
    """The decoder's tensor ``name`` out of the stored one: linear maps as [in, out], q
    and k in Rope's canonical order.

    A view, or a copy in the stored dtype where the order of dims changes.
    """
    layer, role, kind = split_name(name)
    if role == "positions":
        return stored[spec.family.position_offset :]
    if role == "embed":
        return stored[: spec.vocab_size]
    around = role in AROUND or role.startswith("stream_")
    if stored.ndim == 2 and (around or (layer is not None and not spec.family.in_out)):
        stored = stored.T
    if _stored_role(spec, role, layer) != role:
        assert layer is not None
        stored = _unfused(spec, role, layer, stored)
    if spec.rope and role in ("q", "k", *QK_NORMS):
        assert layer is not None
        order = torch.tensor(spec.order(layer), device=stored.device)
        stored = stored.unflatten(-1, (-1, len(order)))[..., order].flatten(-2)
    of_queries = role in OF_QUERIES and (role, kind) != ("o", "bias")
    if layer is not None and of_queries and spec.family.query_heads:
        stored = _filled(spec, role, layer, stored)
    of_values = role in ("v", "o") and (role, kind) != ("o", "bias")
    if layer is not None and of_values and spec.family.value_dims:
        stored = _as_wide_as_keys(spec, role, stored)
    return stored


def _as_wide_as_keys(spec: DecoderSpec, role: str, stored: Tensor) -> Tensor:
    """``stored`` with zeros for the dims that values lack beside keys."""
    if role == "o":
        stored = stored.T
    dims = spec.family.value_dims
    by_head = stored.unflatten(-1, (-1, dims))
    filled = F.pad(by_head, (0, spec.head_dim - dims)).flatten(-2)
    return filled.T if role == "o" else filled


def _filled(spec: DecoderSpec, role: str, layer: int, stored: Tensor) -> Tensor:
    """``stored`` with zeros for the query heads of each KV head that the layer lacks."""
    if role == "o":
        stored = stored.T
    kv_heads = spec.heads(layer).kv_heads
    group, most = spec.stored_heads(layer) // kv_heads, spec.group(layer)
    by_head = stored.unflatten(-1, (kv_heads, group, -1))
    filled = F.pad(by_head, (0, 0, 0, most - group)).flatten(-3)
    return filled.T if role == "o" else filled


def _unfused(spec: DecoderSpec, role: str, layer: int, stored: Tensor) -> Tensor:
    """[..., all outputs of the fused tensor] -> [..., outputs of this role]."""
    if role in ("gate", "up"):
        return stored.chunk(2, -1)[("gate", "up").index(role)]
    if "q_out_gate" in spec.family.names and role in ("q", "out_gate"):
        by_head = stored.unflatten(-1, (spec.query_heads, 2, -1))
        return by_head[..., ("q", "out_gate").index(role), :].flatten(-2)
    heads, part = spec.heads(layer), ("q", "k", "v").index(role)
    group, d = spec.group(layer), heads.head_dim
    if spec.family.qkv_blocks:
        blocks = stored.unflatten(-1, (spec.family.qkv_blocks, 3, -1))
        return blocks[..., ("q", "v", "k").index(role), :].flatten(-2)
    if spec.family.grouped_qkv:
        by_head = stored.unflatten(-1, (heads.kv_heads, group + 2, d))
        return by_head.split([group, 1, 1], -2)[part].flatten(-3)
    q, kv = spec.query_heads * d, heads.kv_heads * d
    return stored.split([q, kv, kv], -1)[part]
