"""Family: what the decoder must know about a checkpoint family that numbers alone do
not say. Data only."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, slots=True)
class Family:
    """How one kind of checkpoint names its tensors and wires its layers.

    ``names``: role -> checkpoint tensor name without ``.weight`` / ``.bias``; ``{i}``
    stands for the layer. Roles are ``embed positions norm head`` once, and ``attn_norm
    q k v q_norm k_norm o mlp_norm gate up down`` in each layer. Which roles are there
    says how the layer is wired: ``qkv`` (``gate_up``) instead of ``q k v`` (``gate
    up``) is a fused tensor, no ``gate`` is a plain MLP, no ``q_norm`` is attention
    without QK-norm, no ``positions`` is RoPE, and no ``mlp_norm`` is an MLP that shares
    the attention's norm.
    """

    names: Mapping[str, str]
    norm: Literal["rms", "layer"]
    norm_eps: float
    activation: str
    kv_heads: int
    intermediate_size: int
    qkv_bias: bool = False
    out_bias: bool = False
    mlp_bias: bool = False
    parallel: bool = False
    """The MLP reads the layer's input, not the attention's output; both are added to
    it."""
    grouped_qkv: bool = False
    """A fused qkv is [kv_heads, group + 2, head_dim], not all q, then all k, then all
    v."""
    in_out: bool = False
    """Linear weights are stored [in, out] (GPT-2's Conv1D), not [out, in]."""
    partial_rotary: bool = False
    """RoPE may turn the first dims of a head only."""
    windows: tuple[int, ...] = ()
    """Tokens that each layer's queries see, their own included; 0 is all of them. Empty
    where no layer has a window."""
    scales: tuple[float, ...] | None = None
    """Softmax scale of each layer; None is 1/sqrt(head_dim) everywhere."""
