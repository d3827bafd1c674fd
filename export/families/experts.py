"""Mixtral, Qwen2-MoE, Qwen3-MoE, OLMoE, FlexOlmo, Mellum and Phi-3.5-MoE: experts in
place of the MLP, chosen by a softmax."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Protocol

from kvlathe.base.errors import KvlatheError
from kvlathe.export.families.family import Experts, Family
from kvlathe.export.families.llama import NAMES, biased, gated, llama
from kvlathe.export.families.norms_after import olmo2
from kvlathe.export.families.qwen import QK_NORMS
from kvlathe.export.families.windows import every_layer, sliding_layers

if TYPE_CHECKING:
    from collections.abc import Sequence

    from transformers import (
        AriaTextConfig,
        FlexOlmoConfig,
        MellumConfig,
        MixtralConfig,
        OlmoeConfig,
        PhimoeConfig,
        Qwen2MoeConfig,
        Qwen3MoeConfig,
    )
    from transformers.models.qwen3_omni_moe.configuration_qwen3_omni_moe import (
        Qwen3OmniMoeTextConfig,
    )
    from transformers.models.qwen3_vl_moe.configuration_qwen3_vl_moe import (
        Qwen3VLMoeTextConfig,
    )

WITHOUT_MLP = {
    role: name for role, name in NAMES.items() if role not in ("gate", "up", "down")
}
EXPERTS = {
    "router": "model.layers.{i}.mlp.gate",
    "experts_gate": "model.layers.{i}.mlp.experts.{e}.gate_proj",
    "experts_up": "model.layers.{i}.mlp.experts.{e}.up_proj",
    "experts_down": "model.layers.{i}.mlp.experts.{e}.down_proj",
}
STACK = {
    "router": EXPERTS["router"],
    "experts_gate_up": "model.layers.{i}.mlp.experts.gate_up_proj",
    "experts_down": "model.layers.{i}.mlp.experts.down_proj",
}
MIXTRAL_EXPERTS = {
    "router": "model.layers.{i}.block_sparse_moe.gate",
    "experts_gate": "model.layers.{i}.block_sparse_moe.experts.{e}.w1",
    "experts_up": "model.layers.{i}.block_sparse_moe.experts.{e}.w3",
    "experts_down": "model.layers.{i}.block_sparse_moe.experts.{e}.w2",
}
SHARED = {
    "gate": "model.layers.{i}.mlp.shared_expert.gate_proj",
    "up": "model.layers.{i}.mlp.shared_expert.up_proj",
    "down": "model.layers.{i}.mlp.shared_expert.down_proj",
    "shared_gate": "model.layers.{i}.mlp.shared_expert_gate",
}
COUNTS = ("num_experts", "num_local_experts")
PAIR = 2
"""Experts of a token in SparseMixer."""
SPARSE = "sparse"
"""A layer with experts, among ``mlp_layer_types``."""
OF_EXPERTS = (
    *("router", "router_correction", "experts_gate", "experts_up", "experts_down"),
    *("experts_gate_up", "shared_gate", "gate", "up", "down", "gate_up"),
    *("experts_into", "experts_back"),
)
PLAIN = {role: NAMES[role] for role in ("gate", "up", "down")}


def with_dense(
    family: Family, dense: Sequence[int], size: int, plain: dict[str, str] = PLAIN
) -> Family:
    """``family`` with MLPs of ``size`` columns in some layers, under the names
    ``plain``."""
    kept = {role: x for role, x in family.names.items() if role not in OF_EXPERTS}
    return replace(
        family, dense=tuple(dense), dense_names=kept | plain, dense_size=size
    )


def not_sparse(kinds: Sequence[str] | None) -> tuple[int, ...]:
    """Layers that have no experts, by ``mlp_layer_types``."""
    return tuple(i for i, kind in enumerate(kinds or ()) if kind != SPARSE)


class Sparse(Protocol):
    """Fields of a configuration that say which layers have experts."""

    @property
    def num_hidden_layers(self) -> int: ...
    @property
    def decoder_sparse_step(self) -> int: ...
    @property
    def mlp_only_layers(self) -> list[int] | None: ...


class Counted(Protocol):
    """Fields of a configuration with experts; most families spell them alike."""

    @property
    def num_experts(self) -> int | None: ...
    @property
    def num_experts_per_tok(self) -> int | None: ...
    @property
    def moe_intermediate_size(self) -> int: ...


def counted(config: Counted, normalized: bool = True) -> Experts:
    """Experts that a softmax chooses."""
    return Experts(
        count=config.num_experts or 0,
        chosen=config.num_experts_per_tok or 0,
        intermediate_size=config.moe_intermediate_size,
        normalized=normalized,
    )


def by_sigmoids(config: Counted, normalized: bool = True) -> Experts:
    """Experts that sigmoids with a correction choose."""
    return replace(counted(config, normalized), scores="sigmoid", corrected=True)


def mixtral(config: MixtralConfig | PhimoeConfig) -> Family:
    experts = Experts(
        count=config.num_local_experts,
        chosen=config.num_experts_per_tok,
        intermediate_size=config.intermediate_size,
        normalized=True,
    )
    return replace(
        gated(config),
        names=WITHOUT_MLP | MIXTRAL_EXPERTS,
        windows=every_layer(config),
        experts=experts,
        settings=COUNTS,
    )


def qwen2_moe(config: Qwen2MoeConfig) -> Family:
    """A record of Qwen1.5-MoE and Qwen2-MoE: an expert that every token passes, times
    the sigmoid of a gate."""
    family = replace(
        _qwen(config),
        names=WITHOUT_MLP | EXPERTS | SHARED,
        intermediate_size=config.shared_expert_intermediate_size,
        qkv_bias=bool(config.qkv_bias),
        windows=sliding_layers(config),
    )
    return with_dense(family, plain_layers(config), config.intermediate_size)


def qwen3_moe(config: Qwen3MoeConfig) -> Family:
    windows = every_layer(config) if config.use_sliding_window else ()
    return replace(qwen3_omni_moe(config), windows=windows)


def qwen3_omni_moe(config: Qwen3MoeConfig | Qwen3OmniMoeTextConfig) -> Family:
    """Qwen3-MoE without windows: the text of Qwen3-Omni."""
    family = replace(
        _qwen(config),
        names=WITHOUT_MLP | EXPERTS | QK_NORMS,
        qkv_bias=config.attention_bias,
        out_bias=config.attention_bias,
    )
    return with_dense(family, plain_layers(config), config.intermediate_size)


def qwen3_vl_moe(config: Qwen3VLMoeTextConfig) -> Family:
    """Qwen3-MoE without windows, its experts in one stack: the text of Qwen3-VL-MoE."""
    family = replace(
        biased(config),
        names=WITHOUT_MLP | STACK | QK_NORMS,
        intermediate_size=config.moe_intermediate_size,
        experts=replace(counted(config), stacked=True, halves=True),
        settings=COUNTS,
    )
    return with_dense(family, plain_layers(config), config.intermediate_size)


def mellum(config: MellumConfig) -> Family:
    """Qwen3-MoE with windows in some layers, and a RoPE of their own."""
    family = replace(
        _qwen(config),
        names=WITHOUT_MLP | EXPERTS | QK_NORMS,
        qkv_bias=config.attention_bias,
        out_bias=config.attention_bias,
        partial_rotary=True,
        windows=sliding_layers(config),
        ropes=tuple(config.layer_types or ()),
        beside=("mtp.",),
    )
    return with_dense(
        family, not_sparse(config.mlp_layer_types), config.intermediate_size
    )


def olmoe(config: OlmoeConfig) -> Family:
    """QK-norms are of all heads together. Raises KvlatheError for clipped q, k and
    v."""
    if config.clip_qkv is not None:
        raise KvlatheError(
            f"config.json sets clip_qkv to {config.clip_qkv:g}",
            "no record bounds q, k and v",
            "choose another checkpoint",
        )
    return replace(
        biased(config),
        names=WITHOUT_MLP | EXPERTS | QK_NORMS,
        wide_qk_norm=True,
        experts=Experts(
            count=config.num_experts,
            chosen=config.num_experts_per_tok,
            intermediate_size=config.intermediate_size,
            normalized=config.norm_topk_prob,
        ),
        settings=COUNTS,
    )


def _qwen(
    config: Qwen2MoeConfig | Qwen3MoeConfig | Qwen3OmniMoeTextConfig | MellumConfig,
) -> Family:
    return replace(
        gated(config),
        names=WITHOUT_MLP | EXPERTS,
        intermediate_size=config.moe_intermediate_size,
        experts=counted(config, config.norm_topk_prob),
        settings=COUNTS,
    )


def plain_layers(config: Sparse) -> tuple[int, ...]:
    """Layers that have no experts, as Qwen's models count them."""
    step, plain = config.decoder_sparse_step, config.mlp_only_layers or ()
    layers = range(config.num_hidden_layers)
    return tuple(i for i in layers if i in plain or (i + 1) % step)


def flex_olmo(config: FlexOlmoConfig) -> Family:
    """OLMo 2 with experts: norms of what attention and experts give."""
    experts = Experts(
        count=config.num_experts,
        chosen=config.num_experts_per_tok,
        intermediate_size=config.intermediate_size,
        normalized=config.norm_topk_prob,
    )
    kept = {role: x for role, x in olmo2(config).names.items() if role not in PLAIN}
    return replace(
        olmo2(config), names=kept | EXPERTS, experts=experts, settings=COUNTS
    )


def phimoe(config: PhimoeConfig) -> Family:
    """Raises KvlatheError for scaled RoPE, which transformers turns by other factors
    than the model was trained with, and where experts are chosen without a range."""
    form = (config.rope_parameters or {}).get("rope_type", "default")
    if form != "default":
        raise KvlatheError(
            f"config.json asks for RoPE of the type {form!r}",
            "transformers turns this model by the factors of short sequences alone, so "
            "nothing says what long ones should give",
            "choose another checkpoint",
        )
    if not config.router_jitter_noise or config.num_experts_per_tok != PAIR:
        raise KvlatheError(
            "config.json changes how experts are chosen",
            f"SparseMixer chooses {PAIR}, within router_jitter_noise",
            "choose another checkpoint",
        )
    experts = Experts(
        count=config.num_local_experts,
        chosen=PAIR,
        intermediate_size=config.intermediate_size,
        normalized=False,
        jitter=config.router_jitter_noise,
    )
    return replace(
        mixtral(config),
        norm="layer",
        experts=experts,
        qkv_bias=config.attention_bias,
        out_bias=config.attention_bias,
        head_bias=config.lm_head_bias,
    )


def aria_text(config: AriaTextConfig) -> Family:
    """Experts in one stack, beside some that every token passes."""
    own = {
        "router": "model.layers.{i}.mlp.router",
        "experts_gate_up": "model.layers.{i}.mlp.experts.fc1.weight",
        "experts_down": "model.layers.{i}.mlp.experts.fc2.weight",
        "gate": "model.layers.{i}.mlp.shared_experts.gate_proj",
        "up": "model.layers.{i}.mlp.shared_experts.up_proj",
        "down": "model.layers.{i}.mlp.shared_experts.down_proj",
    }
    experts = Experts(
        count=config.moe_num_experts,
        chosen=config.moe_topk,
        intermediate_size=config.intermediate_size,
        normalized=True,
        stacked=True,
        halves=True,
    )
    return replace(
        llama(config),
        names=WITHOUT_MLP | own,
        intermediate_size=config.intermediate_size * config.moe_num_shared_experts,
        experts=experts,
    )
