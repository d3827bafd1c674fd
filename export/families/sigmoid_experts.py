"""GLM-4.5 to 4.7, Solar Open, dots.llm1, K-EXAONE, Hy3, Laguna, MiniMax-M2, Ernie 4.5 MoE and AFMoE:
experts chosen by scores with a correction, in most models by sigmoids (DeepSeek-V3,
arXiv 2412.19437). An expert that every token passes may be beside them, and the first
layers may have none."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Protocol

from kvlathe.base.errors import KvlatheError
from kvlathe.export.families.experts import (
    COUNTS,
    EXPERTS,
    MIXTRAL_EXPERTS,
    WITHOUT_MLP,
    by_sigmoids,
    counted,
    not_sparse,
    plain_layers,
    with_dense,
)
from kvlathe.export.families.experts import SHARED as ONE_SHARED
from kvlathe.export.families.family import Experts, Family
from kvlathe.export.families.llama import biased, gated, llama, of_columns
from kvlathe.export.families.qwen import QK_NORMS
from kvlathe.export.families.unknown import INDEXER
from kvlathe.export.families.windows import sliding_layers
from kvlathe.layers.bounds import Bound

if TYPE_CHECKING:
    from transformers import (
        AfmoeConfig,
        Dots1Config,
        Ernie4_5_MoeConfig,
        ExaoneMoeConfig,
        FlintConfig,
        Glm4MoeConfig,
        HYV3Config,
        Kolibri1Config,
        LagunaConfig,
        MiniMaxM2Config,
        SolarOpenConfig,
        Step3p7TextConfig,
    )
    from transformers.models.ernie4_5_vl_moe.configuration_ernie4_5_vl_moe import (
        Ernie4_5_VLMoeTextConfig,
    )
    from transformers.models.minimax_m3_vl.configuration_minimax_m3_vl import (
        MiniMaxM3VLTextConfig,
    )

CORRECTION = {"router_correction": "model.layers.{i}.mlp.gate.e_score_correction_bias"}
SHARED = {
    "gate": "model.layers.{i}.mlp.shared_experts.gate_proj",
    "up": "model.layers.{i}.mlp.shared_experts.up_proj",
    "down": "model.layers.{i}.mlp.shared_experts.down_proj",
}
STEP = {
    "out_gate": "model.layers.{i}.self_attn.g_proj",
    "router": "model.layers.{i}.moe.gate",
    "router_correction": "model.layers.{i}.moe.router_bias",
    "experts_gate": "model.layers.{i}.moe.gate_proj.weight",
    "experts_up": "model.layers.{i}.moe.up_proj.weight",
    "experts_down": "model.layers.{i}.moe.down_proj.weight",
    "gate": "model.layers.{i}.share_expert.gate_proj",
    "up": "model.layers.{i}.share_expert.up_proj",
    "down": "model.layers.{i}.share_expert.down_proj",
}
SINKS = {"sinks": "model.layers.{i}.self_attn.softmax_offset"}
NAMES = WITHOUT_MLP | EXPERTS | CORRECTION | SHARED
MINIMAX_CORRECTION = {
    "router_correction": "model.layers.{i}.block_sparse_moe.e_score_correction_bias"
}
SPARSE_ATTENTION = "minimax_m3_sparse"
"""A layer with an indexer, among ``layer_types``."""
LEAST_SUM = 1e-9
"""Sums of chosen softmaxes that no model reaches."""


class Grouped(Protocol):
    """Fields of a configuration with such experts."""

    @property
    def num_experts_per_tok(self) -> int | None: ...
    @property
    def moe_intermediate_size(self) -> int: ...
    @property
    def norm_topk_prob(self) -> bool | None: ...
    @property
    def n_group(self) -> int | None: ...
    @property
    def topk_group(self) -> int | None: ...


def glm4_moe(config: Glm4MoeConfig) -> Family:
    """QK-norms in some models, RoPE on a part of each head. What guesses further tokens
    (multi-token prediction) is an engine of its own (guessing.py)."""
    family = replace(
        gated(config),
        names=NAMES | (QK_NORMS if getattr(config, "use_qk_norm", False) else {}),
        intermediate_size=config.moe_intermediate_size * config.n_shared_experts,
        qkv_bias=config.attention_bias,
        partial_rotary=True,
        experts=grouped(config, config.n_routed_experts),
        factors={"experts_down": config.routed_scaling_factor},
        beside=(f"layers.{config.num_hidden_layers}.",),
        settings=COUNTS,
    )
    first = min(config.first_k_dense_replace, config.num_hidden_layers)
    return with_dense(family, range(first), config.intermediate_size)


def solar_open(config: SolarOpenConfig) -> Family:
    """Experts in every layer, RoPE on whole heads."""
    return replace(
        of_columns(config, config.moe_intermediate_size * config.n_shared_experts),
        names=NAMES,
        qkv_bias=config.attention_bias,
        experts=grouped(config, config.n_routed_experts),
        factors={"experts_down": config.routed_scaling_factor},
        settings=COUNTS,
    )


def dots1(config: Dots1Config) -> Family:
    """QK-norms, and windows in the last layers of some models."""
    family = replace(
        biased(config),
        names=NAMES | QK_NORMS,
        intermediate_size=config.moe_intermediate_size * (config.n_shared_experts or 0),
        windows=sliding_layers(config),
        experts=grouped(config, config.n_routed_experts or 0),
        factors={"experts_down": config.routed_scaling_factor},
        settings=COUNTS,
    )
    first = min(config.first_k_dense_replace or 0, config.num_hidden_layers)
    return with_dense(family, range(first), config.intermediate_size)


def exaone_moe(config: ExaoneMoeConfig) -> Family:
    """QK-norms. If some layers have windows, the others have no positions."""
    windows = sliding_layers(config)
    ropes: tuple[str | None, ...] = ()
    if config.sliding_window is not None:
        ropes = tuple("" if window else None for window in windows)
    own = {"router_correction": "model.layers.{i}.mlp.e_score_correction_bias"}
    family = replace(
        gated(config),
        names=NAMES | QK_NORMS | own,
        intermediate_size=config.moe_intermediate_size * config.num_shared_experts,
        windows=windows,
        ropes=ropes,
        experts=grouped(config, config.num_experts),
        factors={"experts_down": config.routed_scaling_factor},
        beside=("mtp.",),
        settings=COUNTS,
    )
    return with_dense(
        family, not_sparse(config.mlp_layer_types), config.intermediate_size
    )


def hy_v3(config: HYV3Config) -> Family:
    """QK-norms, no groups of experts."""
    own = {
        "router": "model.layers.{i}.mlp.router.gate",
        "router_correction": "model.layers.{i}.mlp.expert_bias",
        "gate": "model.layers.{i}.mlp.shared_mlp.gate_proj",
        "up": "model.layers.{i}.mlp.shared_mlp.up_proj",
        "down": "model.layers.{i}.mlp.shared_mlp.down_proj",
    }
    family = replace(
        llama(config),
        names=NAMES | QK_NORMS | own,
        intermediate_size=config.moe_intermediate_size
        * (config.num_shared_experts or 0),
        experts=by_sigmoids(config),
        factors={"experts_down": config.router_scaling_factor},
        beside=(f"layers.{config.num_hidden_layers}.",),
        settings=COUNTS,
    )
    return with_dense(
        family, not_sparse(config.mlp_layer_types), config.intermediate_size
    )


def minimax_m2(config: MiniMaxM2Config) -> Family:
    """QK-norms of all heads together, RoPE on a part of each head; every token passes
    chosen experts alone."""
    experts = Experts(
        count=config.num_local_experts,
        chosen=config.num_experts_per_tok,
        intermediate_size=config.intermediate_size,
        normalized=True,
        scores="sigmoid",
        corrected=True,
    )
    return replace(
        gated(config),
        names=WITHOUT_MLP | MIXTRAL_EXPERTS | QK_NORMS | MINIMAX_CORRECTION,
        wide_qk_norm=True,
        partial_rotary=True,
        experts=experts,
        settings=COUNTS,
    )


def minimax_m3(config: MiniMaxM3VLTextConfig) -> Family:
    """QK-norms of each head, an expert that every token passes, bounded MLPs. An indexer
    chooses blocks of tokens; up to as many as it chooses, those are all of them."""
    layers = config.num_hidden_layers
    bound = Bound(config.swiglu_limit, config.swiglu_alpha)
    experts = Experts(
        count=config.num_local_experts,
        chosen=config.num_experts_per_tok,
        intermediate_size=config.intermediate_size,
        normalized=True,
        scores="sigmoid",
        corrected=True,
        limit=bound.limit,
        alpha=bound.alpha,
    )
    at = "model.layers.{i}.block_sparse_moe.shared_experts."
    shared = {role: f"{at}{role}_proj" for role in ("gate", "up", "down")}
    family = replace(
        of_columns(config, config.shared_intermediate_size),
        names=WITHOUT_MLP | MIXTRAL_EXPERTS | QK_NORMS | MINIMAX_CORRECTION | shared,
        norm_offset=1.0,
        partial_rotary=True,
        bounds=(bound,) * layers,
        experts=experts,
        factors={"experts_down": config.routed_scaling_factor},
        beside=tuple(f"layers.{i}.self_attn.index" for i in range(layers)),
        settings=COUNTS,
    )
    if SPARSE_ATTENTION in (config.layer_types or ()):
        tokens = config.index_topk_blocks * config.index_block_size
        family = replace(family, dense_tokens=tokens, beyond=INDEXER)
    dense = not_sparse(config.mlp_layer_types)
    return with_dense(family, dense, config.dense_intermediate_size)


def flint(config: FlintConfig) -> Family:
    """QK-norms and sinks, windows in most layers; layers without one have no
    positions."""
    windows = sliding_layers(config)
    shared = {role: x for role, x in ONE_SHARED.items() if role != "shared_gate"}
    family = replace(
        of_columns(config, config.shared_expert_intermediate_size),
        names=WITHOUT_MLP | EXPERTS | shared | QK_NORMS | SINKS,
        qkv_bias=config.attention_bias,
        out_bias=config.attention_bias,
        windows=windows,
        ropes=tuple("" if window else None for window in windows),
        experts=replace(counted(config, config.norm_topk_prob), scores="sigmoid"),
        settings=COUNTS,
    )
    return with_dense(family, plain_layers(config), config.intermediate_size)


def step3p5(config: Step3p7TextConfig) -> Family:
    """The text of Step 3.7: QK-norms, gates of each head, windows in most layers, which
    have more query heads; some layers bound their MLPs."""
    layers = range(config.num_hidden_layers)
    kinds = tuple(config.layer_types or ())
    routed, shared = config.swiglu_limits, config.swiglu_limits_shared
    experts = Experts(
        count=config.n_routed_experts,
        chosen=config.num_experts_per_tok,
        intermediate_size=config.moe_intermediate_size,
        normalized=True,
        scores="sigmoid",
        corrected=True,
        stacked=True,
        out_in=True,
    )
    own_heads = {"sliding_attention": config.num_sliding_attention_heads}
    scale = float(config.query_pre_attn_scalar or config.head_dim) ** -0.5
    family = replace(
        of_columns(config, config.share_expert_dim),
        names=WITHOUT_MLP | QK_NORMS | STEP,
        norm_offset=1.0,
        qkv_bias=config.attention_bias,
        out_bias=config.attention_bias,
        mlp_bias=config.mlp_bias,
        partial_rotary=True,
        head_gates=True,
        query_heads=tuple(
            own_heads.get(kind) or config.num_attention_heads for kind in kinds
        ),
        windows=sliding_layers(config),
        ropes=kinds,
        scales=(scale,) * len(layers),
        experts=experts,
        expert_limits=tuple(float(x or 0) for x in routed or ()),
        bounds=tuple(Bound(float(x)) if x else None for x in shared or ()),
        factors={"experts_down": config.moe_router_scaling_factor},
        beside=tuple(f"layers.{config.num_hidden_layers + i}." for i in range(8)),
        settings=(*COUNTS, "query_pre_attn_scalar"),
    )
    return with_dense(
        family, not_sparse(config.mlp_layer_types), config.intermediate_size
    )


def kolibri1(config: Kolibri1Config) -> Family:
    """QK-norms, norms of what attention and experts give, a correction of logits. If some
    layers have windows, the others have no positions."""
    windows = sliding_layers(config)
    own = {
        "attn_out_norm": "model.layers.{i}.post_attn_norm",
        "mlp_out_norm": "model.layers.{i}.post_ffn_norm",
        "router_correction": "model.layers.{i}.moe.router.expert_bias",
    }
    return replace(
        of_columns(config, config.shared_expert_intermediate_size),
        names=WITHOUT_MLP | EXPERTS | SHARED | QK_NORMS | own,
        windows=windows,
        ropes=tuple("" if window else None for window in windows)
        if config.sliding_window is not None
        else (),
        experts=replace(by_sigmoids(config, config.norm_topk_prob), by_logits=True),
        settings=COUNTS,
    )


def laguna(config: LagunaConfig) -> Family:
    """QK-norms, gates of outputs by a softplus, layers with unlike query heads, a RoPE of
    their own in layers with windows. Raises KvlatheError where a router's logits are
    bounded."""
    if config.moe_router_logit_softcapping:
        raise KvlatheError(
            f"config.json sets moe_router_logit_softcapping to "
            f"{config.moe_router_logit_softcapping:g}",
            "no record bounds the logits of a router",
            "choose another checkpoint",
        )
    at = "model.layers.{i}.mlp.experts.e_score_correction_bias"
    shared = {role: x for role, x in ONE_SHARED.items() if role != "shared_gate"}
    gates = {"out_gate": "model.layers.{i}.self_attn.g_proj"}
    family = replace(
        of_columns(config, config.shared_expert_intermediate_size),
        names=WITHOUT_MLP
        | EXPERTS
        | shared
        | QK_NORMS
        | gates
        | {"router_correction": at},
        qkv_bias=config.attention_bias,
        out_bias=config.attention_bias,
        partial_rotary=True,
        head_gates=config.gating is True or config.gating == "per-head",
        soft_gates=True,
        query_heads=tuple(config.num_attention_heads_per_layer or ()),
        windows=sliding_layers(config),
        ropes=tuple(config.layer_types or ()),
        experts=by_sigmoids(config),
        factors={"experts_down": config.moe_routed_scaling_factor},
        settings=COUNTS,
    )
    return with_dense(
        family, not_sparse(config.mlp_layer_types), config.intermediate_size
    )


def afmoe(config: AfmoeConfig) -> Family:
    """QK-norms, gates of attention's output, norms of outputs. If a layer has no window,
    it has no positions."""
    own = {
        "out_gate": "model.layers.{i}.self_attn.gate_proj",
        "attn_out_norm": "model.layers.{i}.post_attention_layernorm",
        "mlp_norm": "model.layers.{i}.pre_mlp_layernorm",
        "mlp_out_norm": "model.layers.{i}.post_mlp_layernorm",
        "router": "model.layers.{i}.mlp.router.gate",
        "router_correction": "model.layers.{i}.mlp.expert_bias",
    }
    windows = sliding_layers(config)
    scale = config.hidden_size**0.5 if config.mup_enabled else 1.0
    family = replace(
        biased(config),
        names=NAMES | QK_NORMS | own,
        intermediate_size=config.moe_intermediate_size
        * (config.num_shared_experts or 0),
        windows=windows,
        ropes=tuple("" if window else None for window in windows),
        experts=by_sigmoids(config),
        factors={"experts_down": config.route_scale or 1.0, "embed": scale},
        settings=COUNTS,
    )
    first = min(config.num_dense_layers or 0, config.num_hidden_layers)
    return with_dense(family, range(first), config.intermediate_size)


def ernie4_5_moe(config: Ernie4_5_MoeConfig) -> Family:
    """Raises KvlatheError where the sum of weights is bounded."""
    first, last = config.moe_layer_start_index or 0, config.moe_layer_end_index or 0
    step = config.moe_layer_interval or 1
    dense = [
        i
        for i in range(config.num_hidden_layers)
        if not first <= i <= last or (i + 1) % step
    ]
    family = _ernie(config, config.moe_intermediate_size)
    return with_dense(family, dense, config.intermediate_size)


def ernie4_5_vl_moe(config: Ernie4_5_VLMoeTextConfig) -> Family:
    """The same beside experts of images, which text does not pass: they lie behind its
    own, and so do their router and their correction. Raises as ``ernie4_5_moe``."""
    columns = (config.moe_intermediate_size or [0])[0]
    family = _ernie(config, columns)
    assert family.experts is not None
    count = family.experts.count
    of_images = [f"experts.{e}." for e in range(count, 2 * count)]
    ends = ["gate.weight_1", *of_images]
    layers = range(config.num_hidden_layers)
    family = replace(
        family,
        experts=replace(family.experts, correction_lead=(2,), router_in_out=True),
        beside=(*family.beside, *(f"layers.{i}.mlp.{x}" for i in layers for x in ends)),
    )
    return with_dense(
        family, not_sparse(config.mlp_layer_types), config.intermediate_size
    )


def _ernie(
    config: Ernie4_5_MoeConfig | Ernie4_5_VLMoeTextConfig, columns: int
) -> Family:
    """Experts of ``columns``, by softmaxes with a correction; RoPE of neighbouring
    dims."""
    if (config.moe_norm_min or 0.0) > LEAST_SUM:
        raise KvlatheError(
            f"config.json sets moe_norm_min to {config.moe_norm_min:g}",
            "no record bounds the sum of experts' weights",
            "choose another checkpoint",
        )
    names = WITHOUT_MLP | EXPERTS | SHARED
    shared = config.moe_num_shared_experts or 0
    if not shared:
        names = WITHOUT_MLP | EXPERTS
    correction = "model.layers.{i}.mlp.moe_statics.e_score_correction_bias"
    bias = bool(config.use_bias)
    experts = Experts(
        count=config.num_experts,
        chosen=config.num_experts_per_tok,
        intermediate_size=columns,
        normalized=True,
        corrected=True,
        correction_lead=(1,),
    )
    return replace(
        gated(config),
        names=names | {"router_correction": correction},
        intermediate_size=columns * shared,
        qkv_bias=bias,
        out_bias=bias,
        mlp_bias=bias,
        head_bias=bias,
        interleaved=True,
        experts=experts,
        beside=("mtp",),
        settings=COUNTS,
    )


def grouped(config: Grouped, count: int) -> Experts:
    """Experts that are chosen by sigmoids with a correction, from groups of them."""
    return Experts(
        count=count,
        chosen=config.num_experts_per_tok or 0,
        intermediate_size=config.moe_intermediate_size,
        normalized=bool(config.norm_topk_prob),
        scores="sigmoid",
        corrected=True,
        groups=config.n_group or 1,
        kept_groups=config.topk_group or 1,
    )
