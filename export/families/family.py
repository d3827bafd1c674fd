"""Family: what the decoder must know about a checkpoint family that numbers alone do
not say. Data only."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal


@dataclass(frozen=True, slots=True)
class Experts:
    """An MLP that is many, ``count`` of which each token passes ``chosen`` (Shazeer et
    al. 2017, arXiv 1701.06538). A softmax over all of them weighs those of a token;
    ``normalized``: their weights sum to 1. Roles ``experts_gate experts_up
    experts_down`` name the stored maps of expert ``{e}``, ``router`` what chooses.
    ``stacked``: all of a layer's experts are one tensor, [E, in, out], with biases;
    ``experts_gate_up`` has gate and up in turn. ``mxfp4``: blocks of codes and their
    scales instead (OCP Microscaling Formats 1.0). ``alpha``, ``limit``: as in Routing
    (kvlathe/layers/experts.py)."""

    count: int
    chosen: int
    intermediate_size: int
    normalized: bool
    stacked: bool = False
    mxfp4: bool = False
    alpha: float = 0.0
    limit: float = 0.0


@dataclass(frozen=True, slots=True)
class Family:
    """Names of tensors and wiring of layers of one kind of checkpoint.

    ``names``: role -> checkpoint tensor name without ``.weight`` / ``.bias``; ``{i}``
    stands for the layer. Roles are ``embed positions norm head`` once, and ``attn_norm
    q k v q_norm k_norm o attn_out_norm mlp_norm gate up down mlp_out_norm`` in each
    layer. Which roles are there says how the layer is wired: ``qkv`` (``gate_up``)
    instead of ``q k v`` (``gate up``) is a fused tensor, no ``gate`` is a plain MLP, no
    ``q_norm`` is attention without QK-norm, no ``positions`` is RoPE. Norms of outputs
    come before the residual. Without them, no ``mlp_norm`` is an MLP that shares the
    attention's norm; with them, attention and MLP read what is there. ``sinks`` names a
    logit of each query head.
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
    ropes: tuple[str | None, ...] = ()
    """The rotation of each layer: a key of ``rope_parameters``, or None where its
    positions do not turn. Empty where ``rope_parameters`` is the one of all layers."""
    interleaved: bool = False
    """RoPE turns neighbouring dims of the checkpoint, (2j, 2j + 1)."""
    norm_bias: bool = True
    """Layer norms have biases."""
    norm_offset: float = 0.0
    """The number added to a norm's stored weight: Gemma multiplies by 1 + weight."""
    wide_qk_norm: bool = False
    """QK-norms are of all heads together, not of each."""
    head_bias: bool = False
    position_offset: int = 0
    """Rows of the table of positions before the first token's."""
    experts: Experts | None = None
    """Experts in place of the MLP, or beside it: where there are ``gate up down`` too,
    they are of an expert that every token passes, weighed by the sigmoid of
    ``shared_gate``."""
    factors: Mapping[str, float] = field(default_factory=dict)
    """Role -> what its stored tensors are multiplied by: multipliers of embeddings, of
    residuals and of logits (``norm``)."""
    attn_softcap: float = 0.0
    """Scores are cap * tanh(scores / cap) before the softmax; 0 leaves them."""
    logit_softcap: float = 0.0
    """Logits are cap * tanh(logits / cap); 0 leaves them."""
    beside: tuple[str, ...] = ()
    """Other parts of a model, whose text part this is: how their tensors' names
    begin."""
    settings: tuple[str, ...] = ()
    """Names among FOREIGN_SETTINGS (export/model/spec.py) that this record obeys."""
