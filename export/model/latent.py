"""Maps of heads that share one latent (MLA), in absorbed form: every head's queries and
outputs are those of the latent itself.

For head h with its stored q_h [inputs, plain + turning], keys K_h [R, plain] and values
V_h [R, values] of the latent, and rows o_h [values, D] of W_O:

    scores   (x q_h) (c K_h)^T = (x q_h K_h^T) c^T      q <- [q_h K_h^T, q_h's turning dims]
    outputs  (p c V_h) o_h = (p c) (V_h o_h)            o <- V_h o_h

Products are taken in float64. The dims that turn come in Rope's canonical order.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from kvlathe.export.families import Latent
from kvlathe.export.model.spec import DecoderSpec

Read = Callable[[str], Tensor]
"""The folder's tensor of a role and kind, such as ``q.weight``, as it is stored."""
ROLES = ("q_latent", "q_latent_norm", "q", "k", "latent_norm", "kv_up")
BIASED = ("q_latent", "k")
"""Roles with a bias where the family's q, k and v have them."""
SHAPED = (*ROLES, "o")
OWN = ("q.weight", "k.weight", "k.bias", "o.weight")
"""The decoder's tensors that are not the stored ones."""


def is_own(spec: DecoderSpec, name: str) -> bool:
    """Whether the decoder's tensor ``name`` is computed here."""
    if spec.family.latent is None or not name.startswith("layers."):
        return False
    return name.split(".", 2)[2] in OWN


def stored_shape(
    spec: DecoderSpec, role: str
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """(weight, bias) of a stored role."""
    own = spec.family.latent
    assert own is not None
    hidden, heads = spec.hidden_size, spec.query_heads
    if role in ("q_latent_norm", "latent_norm"):
        size = own.rank if role == "latent_norm" else own.query_rank
        return (size,), (size,)
    inputs, outputs = {
        "q_latent": (hidden, own.query_rank),
        "q": (own.query_rank or hidden, heads * (own.plain + own.turning)),
        "k": (hidden, own.key_dim),
        "kv_up": (own.rank, heads * (own.plain + own.values)),
        "o": (heads * own.values, hidden),
    }[role]
    return (outputs, inputs), (outputs,)


def read(spec: DecoderSpec, name: str, stored: Read) -> Tensor:
    """The decoder's tensor ``name``, float32."""
    own = spec.family.latent
    assert own is not None
    _, _, end = name.split(".", 2)
    turning = torch.tensor(spec.ropes[0].order)
    if end in ("k.weight", "k.bias"):
        k = stored(end).t()  # [D, d] or [d]
        order = torch.cat([torch.arange(own.rank), own.rank + turning])
        return k[..., order.to(k.device)].contiguous().float()
    up = stored("kv_up.weight").double().T  # [R, heads * (plain + values)]
    by_head = up.unflatten(-1, (spec.query_heads, -1)).transpose(0, 1)
    keys, values = by_head.split([own.plain, own.values], -1)  # [heads, R, ...]
    return (
        _queries(own, stored, keys, turning)
        if end == "q.weight"
        else _outputs(stored, values)
    )


def _queries(own: Latent, stored: Read, keys: Tensor, turning: Tensor) -> Tensor:
    """[inputs, heads * d]"""
    q = stored("q.weight").double().T.unflatten(-1, (len(keys), -1))
    plain, turned = q.split([own.plain, own.turning], -1)  # [inputs, heads, ...]
    of_latent = torch.einsum("ihp,hrp->ihr", plain, keys)
    whole = torch.cat([of_latent, turned[..., turning.to(q.device)]], -1)
    return whole.flatten(-2).float()


def _outputs(stored: Read, values: Tensor) -> Tensor:
    """[heads * R, D]"""
    o = stored("o.weight").double().T.unflatten(0, (len(values), -1))
    return (values @ o).flatten(0, 1).float()
