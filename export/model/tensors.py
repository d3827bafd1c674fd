"""Which tensors a model has: their names and shapes in the checkpoint, and how the
decoder's own are cut out of them.

The decoder's names are ``embed.weight``, ``layers.<i>.<role>.weight`` and so on,
whatever the family calls them; the roles are those of Family. A *stored* tensor is the
checkpoint's; a fused one holds several roles.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from kvlathe.export.model.spec import DecoderSpec

FUSED = {"q": "qkv", "k": "qkv", "v": "qkv", "gate": "gate_up", "up": "gate_up"}
LAYER_ROLES = (
    "attn_norm",
    "q",
    "k",
    "v",
    "q_norm",
    "k_norm",
    "o",
    "mlp_norm",
    "gate",
    "up",
    "down",
)
NORMS = ("attn_norm", "mlp_norm", "norm")


def weight_names(spec: DecoderSpec) -> tuple[str, ...]:
    """Names of the decoder's tensors before folding, in the decoder's order."""
    layers = [f"layers.{i}.{role}" for i in range(spec.layers) for role in LAYER_ROLES]
    places = [
        "embed",
        "positions",
        *layers,
        "norm",
        *([] if spec.tied_head else ["head"]),
    ]
    return tuple(name for place in places for name in _kinds(spec, place))


def _kinds(spec: DecoderSpec, place: str) -> Iterator[str]:
    role = place.rsplit(".", 1)[-1]
    if _stored_role(spec, role) is not None:
        yield f"{place}.weight"
        if biased(spec, role):
            yield f"{place}.bias"


def _stored_role(spec: DecoderSpec, role: str) -> str | None:
    """``role`` itself, the fused role that holds it, or None if the family has
    neither."""
    return next(
        (name for name in (role, FUSED.get(role)) if name in spec.family.names), None
    )


def biased(spec: DecoderSpec, role: str) -> bool:
    family = spec.family
    if role in NORMS:
        return family.norm == "layer"
    groups = (
        ("qkv", family.qkv_bias),
        ("o", family.out_bias),
        ("gate_up down", family.mlp_bias),
    )
    return any(
        flag and FUSED.get(role, role) in roles.split() for roles, flag in groups
    )


def split_name(name: str) -> tuple[int | None, str, str]:
    """``layers.3.q.weight`` -> (3, "q", "weight"); no layer for the tensors around the
    layers."""
    *layer, role, kind = name.removeprefix("layers.").split(".")
    index = int(layer[0]) if layer else None
    return index, role, kind


def stored_name(spec: DecoderSpec, name: str) -> str:
    """The checkpoint's name of the tensor that holds the decoder's tensor ``name``."""
    layer, role, kind = split_name(name)
    stored = _stored_role(spec, role)
    if stored is None:
        raise KeyError(name)
    return f"{spec.family.names[stored]}.{kind}".replace("{i}", str(layer))


def stored_shapes(spec: DecoderSpec) -> dict[str, tuple[int, ...]]:
    """Every tensor that the checkpoint must hold, with its shape."""
    shapes = {}
    for role, name in spec.family.names.items():
        weight, bias = _stored_shape(spec, role)
        for layer in range(spec.layers) if "{i}" in name else (0,):
            at = name.replace("{i}", str(layer))
            if role != "head" or not spec.tied_head:
                shapes[f"{at}.weight"] = weight
            if biased(spec, role):
                shapes[f"{at}.bias"] = bias
    return shapes


def _stored_shape(
    spec: DecoderSpec, role: str
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """(weight, bias) of a stored role."""
    d, hidden, inner = spec.head_dim, spec.hidden_size, spec.family.intermediate_size
    q, kv = spec.query_heads * d, spec.kv_heads * d
    if role in ("embed", "head"):
        return (spec.vocab_size, hidden), ()
    if role == "positions":
        return (spec.max_positions, hidden), ()
    if role in NORMS or role in ("q_norm", "k_norm"):
        size = hidden if role in NORMS else d
        return (size,), (size,)
    outputs = {
        "q": q,
        "k": kv,
        "v": kv,
        "qkv": q + 2 * kv,
        "gate": inner,
        "up": inner,
        "gate_up": 2 * inner,
    }
    inputs = {"o": q, "down": inner}
    shape = inputs.get(role, hidden), outputs.get(role, hidden)
    return shape if spec.family.in_out else shape[::-1], shape[1:]


def cut(spec: DecoderSpec, name: str, stored: Tensor) -> Tensor:
    """The decoder's tensor ``name`` out of the stored one: linear maps as [in, out], q
    and k in Rope's canonical order.

    A view, or a copy in the stored dtype where the order of dims changes.
    """
    layer, role, _ = split_name(name)
    if stored.ndim == 2 and (
        role == "head" or (layer is not None and not spec.family.in_out)
    ):
        stored = stored.T
    if FUSED.get(role) in spec.family.names:
        stored = _unfused(spec, role, stored)
    if spec.rope and role in ("q", "k", "q_norm", "k_norm"):
        order = torch.tensor(spec.rope.order, device=stored.device)
        heads = stored.unflatten(-1, (-1, spec.head_dim))
        stored = heads[..., order].flatten(-2)
    return stored


def _unfused(spec: DecoderSpec, role: str, stored: Tensor) -> Tensor:
    """[..., all outputs of the fused tensor] -> [..., outputs of this role]."""
    if role in ("gate", "up"):
        return stored.chunk(2, -1)[("gate", "up").index(role)]
    group, d, part = spec.group_size, spec.head_dim, ("q", "k", "v").index(role)
    if spec.family.grouped_qkv:
        heads = stored.unflatten(-1, (spec.kv_heads, group + 2, d))
        return heads.split([group, 1, 1], -2)[part].flatten(-3)
    return stored.split(
        [spec.query_heads * d, spec.kv_heads * d, spec.kv_heads * d], -1
    )[part]
