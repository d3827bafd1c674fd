"""A decoder layer, and what is before and after the layers: the one definition.

The exporter traces it into ONNX and takes gradients through it. The torch backend runs
it on products of its own: q, k and v at once, sums in place. Both pass their linear
maps in as a ``Layer``.

Sizes: T packed tokens of a step, R logit rows, D hidden size, d head dim, Hq query
heads, H KV heads, I columns of the MLP, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from kvlathe.layers.bounds import Bound, bounded
from kvlathe.layers.gated import gated
from kvlathe.layers.latent import Angles, turned_ends
from kvlathe.layers.rows import ACTIVATIONS, Rows

RowMap = Callable[[Tensor], Tensor]
Attention = Callable[[Tensor, Tensor, Tensor], Tensor]
"""q, k, v [T, all heads] -> o [T, all heads]. RoPE and the cache are in here."""


@dataclass(frozen=True, slots=True)
class OwnParts:
    """Parts that few families have: Gemma 3n and 4, GPT-1. ``v_norm``: norms of values. ``dense_norm``: of
    what the MLP gives, beside ``experts``, which read what it reads before its norm and
    have norms of their own. ``middle`` maps the sum with what attention gave and the
    layer's normed input, [T, D] each, to what the MLP reads and is added to. ``end`` maps
    what leaves the layer, [T, D]."""

    v_norm: RowMap | None = None
    dense_norm: RowMap | None = None
    experts: RowMap | None = None
    middle: Callable[[Tensor, Tensor], Tensor] | None = None
    end: RowMap | None = None


NO_PARTS = OwnParts()


class Layer(Protocol):
    """Parts of a decoder layer. A norm that the model does not have is None."""

    @property
    def parallel(self) -> bool: ...
    @property
    def head_dim(self) -> int: ...
    @property
    def activation(self) -> str: ...
    @property
    def rows(self) -> Rows: ...
    @property
    def wide_qk_norm(self) -> bool: ...
    @property
    def norm_after_rope(self) -> bool: ...
    @property
    def soft_gates(self) -> bool: ...
    @property
    def attn_norm(self) -> RowMap | None: ...
    @property
    def attn_out_norm(self) -> RowMap | None: ...
    @property
    def mlp_norm(self) -> RowMap | None: ...
    @property
    def mlp_out_norm(self) -> RowMap | None: ...
    @property
    def o(self) -> RowMap: ...
    @property
    def down(self) -> RowMap | None: ...
    @property
    def q_norm(self) -> RowMap | None: ...
    @property
    def k_norm(self) -> RowMap | None: ...

    @property
    def curve(self) -> RowMap | None:
        """The activation of a plain MLP, where it is learned."""
        ...

    @property
    def out_gate(self) -> RowMap | None:
        """The map of the gates that multiply attention's output, before their sigmoid."""
        ...

    @property
    def whole_heads(self) -> RowMap:
        """o in the model's own dims, where it has gates."""
        ...

    @property
    def bound(self) -> Bound | None: ...
    @property
    def experts(self) -> RowMap | None: ...
    @property
    def shared_gate(self) -> RowMap | None: ...

    def qkv(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """x [T, D] -> q, k, v."""
        ...

    def gate_up(self, x: Tensor) -> tuple[Tensor | None, Tensor]:
        """x [T, D] -> gate (None in a plain MLP) and up, [T, I] each."""
        ...

    def add_o(self, x: Tensor, o: Tensor) -> Tensor:
        """x + o W_O + b_O; may write into x."""
        ...

    def add_down(self, x: Tensor, inner: Tensor) -> Tensor:
        """x + inner W_down + b_down; may write into x."""
        ...

    def add_experts(self, x: Tensor, read: Tensor) -> Tensor:
        """x + what ``experts`` give of ``read`` [T, D]."""
        ...


def run_layer(
    layer: Layer,
    x: Tensor,
    attend: Attention | None,
    places: Tensor | None = None,
    query_factors: Tensor | None = None,
    angles: Angles | None = None,
    mix: RowMap | None = None,
    own: OwnParts = NO_PARTS,
) -> Tensor:
    """x [T, D] -> the next layer's x [T, D].

        n = attn_norm(x)
        a = x + W_O attend(W_Q n, W_K n, W_V n)
        m = mlp_norm(a)            sequential (Llama)
            mlp_norm(x)            parallel, two norms (Falcon 40B)
            n                      parallel, one norm (Falcon 7B)
        y = a + W_down (activation(W_gate m) * W_up m)

    Where it has experts, they are the MLP, and one that every token passes may be
    beside them.
    Where the model has QK-norms, each head's q and k (or all heads together) pass
    through theirs first; q is then times ``query_factors`` [T, 1]. Where it has gates of
    outputs, what attention gives is times sigmoid(W_gate n), or its softplus. Where it has norms
    of outputs, those of W_O and W_down pass through theirs before they are added (Gemma
    2, OLMo 2). In GPT-1 they are of the sums, and what they give is added to (``own``).
    Where heads share a latent, ``angles`` turn the last dims of each head's q and
    of the one k before ``attend``, which turns nothing. Where QK-norms follow RoPE, they turn
    whole heads before those. A layer that keeps a state adds
    what ``mix`` makes of n, beside attention or in place of it (``attend`` None). A layer
    may have no MLP.

    With ``places`` [R] the output is that of these tokens alone, [R, D]: ``attend``
    then gives o of no others.
    """
    normed = x if layer.attn_norm is None else layer.attn_norm(x)
    # Before a: add_o may overwrite x.
    mlp_input = _mlp_input(layer, x, normed) if layer.parallel else None
    o = None
    if attend is not None:
        o = _attended(layer, normed, attend, query_factors, angles, own)
    mixed = None if mix is None else mix(normed)
    if places is not None:
        x = x.index_select(0, places)
        normed = normed.index_select(0, places)
        mixed = None if mixed is None else mixed.index_select(0, places)
        if mlp_input is not None:
            mlp_input = mlp_input.index_select(0, places)
    attended = x if o is None else _plus_o(layer, x, normed, o)
    if mixed is not None:
        norm = layer.attn_out_norm
        attended = attended + (mixed if norm is None else norm(mixed))
    if own.middle is not None:
        attended = own.middle(attended, normed)
    if layer.down is None and layer.experts is None:
        return attended
    if mlp_input is None:
        mlp_input = _mlp_input(layer, attended, normed)
    after = _plus_mlp(layer, own, attended, mlp_input)
    return after if own.end is None else own.end(after)


def _normed(
    layer: Layer, own: OwnParts, q: Tensor, k: Tensor, v: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """q, k and v after the norms that the model has."""
    if layer.q_norm is not None:
        q = _qk_norm(layer, layer.q_norm, q)
    if layer.k_norm is not None:
        k = _qk_norm(layer, layer.k_norm, k)
    return q, k, v if own.v_norm is None else own.v_norm(v)


def _plus_mlp(layer: Layer, own: OwnParts, x: Tensor, mlp_input: Tensor) -> Tensor:
    """x [T, D], which may be overwritten, with what the MLP gives, or experts, or
    both."""
    if layer.experts is None and layer.mlp_out_norm is None:
        return layer.add_down(x, _mlp_inner(layer, mlp_input))
    dense = layer.experts is None or own.experts is not None
    if not dense and layer.down is None and layer.mlp_out_norm is None:
        return layer.add_experts(x, mlp_input)
    out = (_mlp if dense else _mixture)(layer, mlp_input)
    if own.dense_norm is not None and own.experts is not None:
        out = own.dense_norm(out) + own.experts(x)
    return x + (out if layer.mlp_out_norm is None else layer.mlp_out_norm(out))


def _attended(
    layer: Layer,
    normed: Tensor,
    attend: Attention,
    query_factors: Tensor | None,
    angles: Angles | None,
    own: OwnParts,
) -> Tensor:
    """o of what a layer's attention reads, ``normed`` [T, D]."""
    q, k, v = layer.qkv(normed)
    if angles is not None and layer.norm_after_rope:
        q, k = (turned_ends(one, layer.head_dim, angles) for one in (q, k))
    q, k, v = _normed(layer, own, q, k, v)
    if query_factors is not None:
        q = q * query_factors.to(q.dtype)
    if angles is not None and not layer.norm_after_rope:
        q, k = (turned_ends(one, layer.head_dim, angles) for one in (q, k))
    return attend(q, k, v)


def _plus_o(layer: Layer, x: Tensor, normed: Tensor, o: Tensor) -> Tensor:
    if layer.out_gate is not None:
        gates = layer.out_gate(normed)
        o = gated(layer.whole_heads(o), gates, layer.soft_gates)
    if layer.attn_out_norm is None:
        return layer.add_o(x, o)
    return x + layer.attn_out_norm(layer.o(o))


def _mlp_input(layer: Layer, x: Tensor, normed: Tensor) -> Tensor:
    if layer.mlp_norm is not None:
        return layer.mlp_norm(x)
    shares = layer.mlp_out_norm is None and layer.attn_norm is not None
    return normed if shares else x


def _mixture(layer: Layer, x: Tensor) -> Tensor:
    """What the chosen experts give, and the one that every token passes, if there is
    one."""
    assert layer.experts is not None
    out = layer.experts(x)
    if layer.down is None:
        return out
    shared = _mlp(layer, x)
    if layer.shared_gate is not None:
        shared = layer.shared_gate(x).sigmoid() * shared
    return out + shared


def _mlp(layer: Layer, x: Tensor) -> Tensor:
    assert layer.down is not None
    return layer.down(_mlp_inner(layer, x))


def _mlp_inner(layer: Layer, x: Tensor) -> Tensor:
    gate, up = layer.gate_up(x)
    if layer.curve is not None:
        return layer.curve(up)
    if gate is None:
        return ACTIVATIONS[layer.activation](up)
    if layer.bound is not None:
        return bounded(gate, up, layer.bound, layer.activation)
    return layer.rows.gated(layer.activation, gate, up)


def _qk_norm(layer: Layer, norm: RowMap, x: Tensor) -> Tensor:
    if layer.wide_qk_norm:
        return norm(x)
    return norm(x.unflatten(-1, (-1, layer.head_dim))).flatten(-2)


def rope_angles(
    positions: Tensor, inv_freq: Tensor, amplitude: Tensor
) -> tuple[Tensor, Tensor]:
    """positions [T], inv_freq and amplitude [d/2] -> cos, sin [T, d/2], float32."""
    angles = positions.float().unsqueeze(-1) * inv_freq
    cos = angles.cos() * amplitude
    sin = angles.sin() * amplitude
    return cos, sin


def rope_names(rope: int) -> tuple[str, str]:
    """Names of the frequencies and amplitudes of a model's rotation number ``rope``."""
    end = f"_{rope}" if rope else ""
    return f"inv_freq{end}", f"amplitude{end}"


def tied_head(embed: Tensor) -> RowMap:
    """The head of a model that reuses its embedding [V, D]."""
    return lambda x: F.linear(x, embed)


def joined(
    embedded: Tensor,
    hidden: Tensor,
    embed_norm: RowMap,
    hidden_norm: RowMap,
    join: RowMap,
) -> Tensor:
    """The input of a layer that guesses tokens (DeepSeek-V3, arXiv 2412.19437, eq. 21):
    ``embedded`` [T, D] are embeddings of the tokens behind the places whose ``hidden``
    [T, D] states the model gave, behind its last norm -> [T, D]."""
    return join(torch.cat([embed_norm(embedded), hidden_norm(hidden)], -1))


def logits(x: Tensor, head: RowMap, softcap: float = 0.0) -> Tensor:
    """x [R, D], behind the last norm -> [R, V]; between -softcap and softcap, where that
    is not 0."""
    found = head(x)
    return softcap * (found / softcap).tanh() if softcap else found
