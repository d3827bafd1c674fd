"""Family: what the decoder must know about a checkpoint family that numbers alone do
not say. Data only."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from kvlathe.layers.bounds import Bound
    from kvlathe.layers.mixers import Mixing
    from kvlathe.layers.routing import Scores
    from kvlathe.layers.temperature import Temperature
    from kvlathe.plan.heads import HeadShape


@dataclass(frozen=True, slots=True)
class Experts:
    """An MLP that is many, ``count`` of which each token passes ``chosen`` (Shazeer et
    al. 2017, arXiv 1701.06538). Their ``scores`` weigh those of a token;
    ``normalized``: their weights sum to 1. Roles ``experts_gate experts_up
    experts_down`` name the stored maps of expert ``{e}``, ``router`` what chooses.
    ``stacked``: all of a layer's experts are one tensor, [E, in, out], or [E, out, in]
    where ``out_in``; ``experts_gate_up`` has gate and up in turn, or in ``halves``.
    ``biased``: they and the router have biases. ``mxfp4``: blocks of codes and their
    scales instead (OCP Microscaling Formats 1.0). ``corrected``: ``router_correction``
    names what is added to scores for the choice alone. The others as in Routing
    (kvlathe/layers/routing.py)."""

    count: int
    chosen: int
    intermediate_size: int
    normalized: bool
    stacked: bool = False
    out_in: bool = False
    halves: bool = False
    biased: bool = False
    mxfp4: bool = False
    alpha: float = 0.0
    limit: float = 0.0
    scores: Scores = "softmax"
    gated: bool = True
    """Else an expert is a plain MLP."""
    corrected: bool = False
    correction_lead: tuple[int, ...] = ()
    """Dims of the stored correction before that of the experts: the first row counts."""
    router_in_out: bool = False
    """The router is stored [in, out]."""
    may_lack_correction: bool = False
    """Checkpoints may store no correction: then it is none."""
    groups: int = 1
    kept_groups: int = 1
    group_best: int = 2
    jitter: float = 0.0
    before: bool = False
    by_logits: bool = False
    latent: int = 0
    """Dims of what experts read and give in place of hidden states: maps
    ``experts_into`` and ``experts_back`` are before and after all of them. 0: none."""
    beside: bool = False
    """They are beside a dense MLP, and read what it reads before its norm. Roles
    ``router_scale expert_scales experts_in_norm`` are of numbers that enter their maps,
    ``dense_norm experts_norm`` of what either gives."""


@dataclass(frozen=True, slots=True)
class Latent:
    """Attention whose heads share one latent (MLA, DeepSeek-V2, arXiv 2405.04434). Of a
    token are cached the normalized latent, ``rank`` dims, and one key of ``turning``
    dims that RoPE turns. A head's stored keys have ``plain`` more dims, and its values
    ``values``: maps of the latent, which are multiplied into those of queries and of
    outputs (export/model/latent.py). So all heads read one key, [latent, turned], of
    which the latent is the value. ``query_rank``: queries pass a normalized latent of
    their own; 0: they do not. ``norm_eps``: of both norms.

    Roles: ``q_latent q_latent_norm`` where queries have one, ``q``, ``k`` (latent and
    turning dims of a token), ``latent_norm``, ``kv_up`` (keys and values of heads from
    the latent), ``o``."""

    rank: int
    turning: int
    plain: int
    values: int
    query_rank: int = 0
    norm_eps: float = 1e-6

    @property
    def key_dim(self) -> int:
        """Dims of the one key."""
        return self.rank + self.turning


ATTENTION = ("q", "k", "v", "qkv", "q_out_gate", "out_gate", "q_norm", "k_norm", "o")
"""Roles of a layer's attention."""


@dataclass(frozen=True, slots=True)
class Mixer:
    """Tensors of layers that keep a state (``mixing``, kvlathe/layers/mixers.py).
    ``names``: role -> modules whose outputs are side by side in it, or tensors. Roles are
    ``project`` (channels of the convolution, then gates; of a convolution alone what is
    before, after and in it), ``gates`` (strengths, then steps), ``conv``, ``decay``
    ``step_bias`` ``skip`` ``norm``, and ``out``. ``stored``: how the outputs of
    ``project`` and ``gates`` lie there; ``apart``: in that order, ``group``: of each
    group q, k, v and gates (strengths and steps), ``space``: gates, channels and steps
    in one module. ``conv`` may be several modules of channels. ``bias``: maps have
    biases; ``conv_bias``: the convolution. ``factor`` multiplies ``out``; ``factors`` the
    gates, values, keys, queries and steps of a state space."""

    mixing: Mixing
    names: Mapping[str, tuple[str, ...]]
    stored: Literal["apart", "group", "space"] = "apart"
    bias: bool = False
    conv_bias: bool = False
    factor: float = 1.0
    factors: tuple[float, ...] = ()


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
    attention's norm; with them, attention and MLP read what is there. ``attn_sum_norm
    mlp_sum_norm`` are of the sums with the residual, and what they give is it. ``sinks`` names a
    logit of each query head, ``curve`` the module of a learned activation (xIELU).
    ``out_gate`` maps a layer's input to gates of attention's output, of each dim or of
    each head (``head_gates``); ``q_out_gate`` has q and it in turn, head by head.
    """

    names: Mapping[str, str]
    norm: Literal["rms", "layer"]
    norm_eps: float
    activation: str
    kv_heads: int
    intermediate_size: int
    own_heads: tuple[HeadShape, ...] = ()
    """Heads of each layer, where layers differ; ``kv_heads`` is then the most."""
    value_dims: int = 0
    """Dims of a value that are stored, where keys have more: zeros fill it up. 0: as
    many."""
    query_heads: tuple[int, ...] = ()
    """Query heads that are stored of each layer, where layers differ: those with fewer
    than the most get heads of zeros, which give nothing. Empty: the configuration's."""
    sources: tuple[int, ...] = ()
    """The layer whose keys and values each layer reads; empty: its own."""
    qkv_bias: bool = False
    out_bias: bool = False
    out_bias_in: tuple[int, ...] = ()
    """The layers whose W_O has a stored bias, where not all have; empty: all."""
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
    dense_tokens: int = 0
    """Tokens up to which a query sees all before it: in longer sequences an indexer
    chooses among them, or attention begins anew. 0: there is none."""
    beyond: str = ""
    """The reason for which longer sequences are refused."""
    scales: tuple[float, ...] | None = None
    """Softmax scale of each layer; None is 1/sqrt(head_dim) everywhere."""
    ropes: tuple[str | None, ...] = ()
    """The rotation of each layer: a key of ``rope_parameters``, or None where its
    positions do not turn. Empty where ``rope_parameters`` is the one of all layers."""
    interleaved: bool = False
    """RoPE turns neighbouring dims of the checkpoint, (2j, 2j + 1)."""
    norm_bias: bool = True
    """Layer norms have biases."""
    norm_weight: bool = True
    """Norms multiply by stored weights; else by 1, and no checkpoint stores it."""
    norm_offset: float = 0.0
    """The number added to a norm's stored weight: Gemma multiplies by 1 + weight."""
    wide_qk_norm: bool = False
    """QK-norms are of all heads together, not of each."""
    qk_norm: Literal["rms", "layer"] = "rms"
    """The kind of QK-norms; layer norms have biases."""
    qk_norm_weight: bool = True
    """QK-norms multiply by stored weights; else by 1."""
    norm_after_rope: bool = False
    """QK-norms follow RoPE."""
    embed_norm: bool = False
    """Embeddings pass an RMS norm without weights before the first layer."""
    head_bias: bool = False
    more_rows: int = 0
    """Rows of the table of embeddings past the vocabulary, which no text has."""
    position_offset: int = 0
    """Rows of the table of positions before the first token's."""
    sinusoidal: bool = False
    """The table of positions is not stored: it is sines, then cosines (Vaswani et al.
    2017, arXiv 1706.03762)."""
    qkv_blocks: int = 0
    """A fused qkv is that many blocks, each all q of its heads, then all v, then all
    k (CodeGen)."""
    rope_parameters: Mapping[str, object] = field(default_factory=dict)
    """In place of those that the configuration does not have."""
    backward: bool = False
    """RoPE turns against its usual sense."""
    temperature: Temperature | None = None
    """Queries grow with their positions."""
    latent: Latent | None = None
    """Heads share one latent, in place of keys and values of their own."""
    expert_limits: tuple[float, ...] = ()
    """``limit`` of each layer's experts, where layers differ."""
    bounds: tuple[Bound | None, ...] = ()
    """Those of each layer's MLP, or of the expert that every token passes; empty: it has
    none."""
    experts: Experts | None = None
    """Experts in place of the MLP, or beside it: where there are ``gate up down`` too,
    they are of an expert that every token passes, weighed by the sigmoid of
    ``shared_gate``, where that is there."""
    dense: tuple[int, ...] = ()
    """Layers that have a plain MLP of ``dense_size`` columns in place of experts."""
    dense_names: Mapping[str, str] = field(default_factory=dict)
    """Names in such layers."""
    dense_size: int = 0
    factors: Mapping[str, float] = field(default_factory=dict)
    """Role -> what its stored tensors are multiplied by: multipliers of embeddings, of
    residuals and of logits (``norm``). The W_down of an expert that every token passes
    is ``shared_down``."""
    attn_softcap: float = 0.0
    """Scores are cap * tanh(scores / cap) before the softmax; 0 leaves them."""
    logit_softcap: float = 0.0
    """Logits are cap * tanh(logits / cap); 0 leaves them."""
    beside: tuple[str, ...] = ()
    """Parts of a model that are not run, such as those that read images: how their
    tensors' names begin."""
    spellings: Mapping[str, str] = field(default_factory=dict)
    """Part of a stored name -> what some checkpoints have in its place."""
    inside: str = ""
    """The name of this part in the names of its tensors, where it is one of several."""
    head_gates: bool = False
    soft_gates: bool = False
    """Gates of outputs are softplus, not sigmoids."""
    lacks: Mapping[int, tuple[str, ...]] = field(default_factory=dict)
    """Roles that a layer lacks. Without ``v``, a value is what ``k`` gives; without
    ``k``, both are those of another layer (``sources``)."""
    value_norm: bool = False
    """Values pass an RMS norm without weights, each head's own."""
    layer_inputs: int = 0
    """Dims of what each layer is given of a token beside its hidden state. Roles:
    ``inputs_embed inputs_project inputs_norm`` around the layers, ``inputs_gate
    inputs_out inputs_out_norm`` in each."""
    input_rows: int = 0
    """Rows of ``inputs_embed``, where they are fewer than words: others have the first
    row. 0: as many."""
    streams: int = 0
    """Hidden states of a token side by side (kvlathe/layers/streams.py). Roles:
    ``stream_in_1 stream_out_1`` and so on around the layers, ``stream_norm stream_router
    stream_predict stream_correct stream_scale`` in each. 0: one, without them."""
    laurel: int = 0
    """Dims between two maps beside attention (LAuReL, arXiv 2411.07501). Roles:
    ``laurel_left laurel_right laurel_norm``."""
    mixer: Mixer | None = None
    """The mixer of some layers, in place of attention or beside it."""
    mixes: tuple[int, ...] = ()
    """Those layers."""
    settings: tuple[str, ...] = ()
    """Names among FOREIGN_SETTINGS (export/model/spec.py) that this record obeys."""

    def roles(self, layer: int | None) -> Mapping[str, str]:
        """``names`` of the tensors of a layer, or of those around the layers."""
        names = self.dense_names if layer in self.dense else self.names
        lacked = () if layer is None else self.lacks.get(layer, ())
        return {role: x for role, x in names.items() if role not in lacked}

    def inner(self, layer: int) -> int:
        """Columns of a layer's MLP, or of the expert that every token passes."""
        return self.dense_size if layer in self.dense else self.intermediate_size

    def experts_of(self, layer: int) -> Experts | None:
        if self.experts is None or "router" not in self.roles(layer):
            return None
        if not self.expert_limits:
            return self.experts
        return replace(self.experts, limit=self.expert_limits[layer])

    def mixer_of(self, layer: int) -> Mixer | None:
        return self.mixer if layer in self.mixes else None
