"""A decoder layer, and what is before and after the layers: the one definition.

The exporter traces it into ONNX and takes gradients through it. The torch backend runs
it on products of its own: q, k and v at once, sums in place. Both pass their linear
maps in as a ``Layer``.

Sizes: T packed tokens of a step, R logit rows, D hidden size, d head dim, Hq query
heads, H KV heads, I columns of the MLP, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import torch.nn.functional as F
from torch import Tensor

from kvlathe.layers.activations import ACTIVATIONS
from kvlathe.layers.rows import Rows

RowMap = Callable[[Tensor], Tensor]
Attention = Callable[[Tensor, Tensor, Tensor], Tensor]
"""q, k, v [T, all heads] -> o [T, all heads]. RoPE and the cache are in here."""


class Layer(Protocol):
    """What a decoder layer is made of. A norm that the model does not have is None."""

    @property
    def parallel(self) -> bool: ...
    @property
    def head_dim(self) -> int: ...
    @property
    def activation(self) -> str: ...
    @property
    def rows(self) -> Rows: ...
    @property
    def attn_norm(self) -> RowMap: ...
    @property
    def mlp_norm(self) -> RowMap | None: ...
    @property
    def q_norm(self) -> RowMap | None: ...
    @property
    def k_norm(self) -> RowMap | None: ...

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


def run_layer(layer: Layer, x: Tensor, attend: Attention) -> Tensor:
    """x [T, D] -> the next layer's x [T, D].

        n = attn_norm(x)
        a = x + W_O attend(W_Q n, W_K n, W_V n)
        m = mlp_norm(a)            sequential (Llama)
            mlp_norm(x)            parallel, two norms (Falcon 40B)
            n                      parallel, one norm (Falcon 7B)
        y = a + W_down (activation(W_gate m) * W_up m)

    Where the model has QK-norms, each head's q and k pass through theirs first.
    """
    normed = layer.attn_norm(x)
    # Before a: add_o may overwrite x.
    mlp_input = _mlp_input(layer, x, normed) if layer.parallel else None
    q, k, v = layer.qkv(normed)
    if layer.q_norm is not None and layer.k_norm is not None:
        q = _by_head(layer.q_norm, q, layer.head_dim)
        k = _by_head(layer.k_norm, k, layer.head_dim)
    attended = layer.add_o(x, attend(q, k, v))
    if mlp_input is None:
        mlp_input = _mlp_input(layer, attended, normed)
    return layer.add_down(attended, _mlp_inner(layer, mlp_input))


def _mlp_input(layer: Layer, x: Tensor, normed: Tensor) -> Tensor:
    return normed if layer.mlp_norm is None else layer.mlp_norm(x)


def _mlp_inner(layer: Layer, x: Tensor) -> Tensor:
    gate, up = layer.gate_up(x)
    if gate is None:
        return ACTIVATIONS[layer.activation](up)
    return layer.rows.gated(layer.activation, gate, up)


def _by_head(norm: RowMap, x: Tensor, head_dim: int) -> Tensor:
    heads = x.unflatten(-1, (-1, head_dim))
    return norm(heads).flatten(-2)


def rope_angles(
    positions: Tensor, inv_freq: Tensor, amplitude: Tensor
) -> tuple[Tensor, Tensor]:
    """positions [T], inv_freq and amplitude [d/2] -> cos, sin [T, d/2], float32."""
    rows = positions.float().unsqueeze(-1)
    angles = rows * inv_freq
    cos = angles.cos() * amplitude
    sin = angles.sin() * amplitude
    return cos, sin


def tied_head(embed: Tensor) -> RowMap:
    """The head of a model that reuses its embedding [V, D]."""
    return lambda x: F.linear(x, embed)


def logits(x: Tensor, logit_rows: Tensor, norm: RowMap, head: RowMap) -> Tensor:
    """x [T, D], logit_rows [R] -> [R, V]."""
    return head(norm(x.index_select(0, logit_rows)))
