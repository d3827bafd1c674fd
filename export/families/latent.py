"""DeepSeek V2, V3 (Kimi K2.5 is one) and V3.2, GLM-5, GLM-4.7 Flash, Mistral Small 4, A.X K1, Youtu-LLM
and MiniCPM3: heads share one latent (MLA, arXiv 2405.04434), most beside experts. What
guesses further tokens (multi-token prediction) is an engine of its own (guessing.py)."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Protocol

from kvlathe.base.errors import KvlatheError
from kvlathe.export.families.experts import COUNTS, not_sparse, with_dense
from kvlathe.export.families.family import Experts, Family, Latent
from kvlathe.export.families.llama import NAMES, llama
from kvlathe.export.families.llama_like import temperature_of
from kvlathe.export.families.sigmoid_experts import NAMES as WITH_EXPERTS
from kvlathe.export.families.sigmoid_experts import Grouped, grouped
from kvlathe.export.families.unknown import INDEXER

if TYPE_CHECKING:
    from transformers import (
        AXK1Config,
        DeepseekV2Config,
        DeepseekV3Config,
        DeepseekV32Config,
        Glm4MoeLiteConfig,
        GlmMoeDsaConfig,
        MiniCPM3Config,
        Mistral4Config,
        YoutuConfig,
    )
    from transformers.models.deepseek_ocr2.configuration_deepseek_ocr2 import (
        DeepseekOcr2TextConfig,
    )

ATTENTION = {
    "q_latent": "model.layers.{i}.self_attn.q_a_proj",
    "q_latent_norm": "model.layers.{i}.self_attn.q_a_layernorm",
    "q": "model.layers.{i}.self_attn.q_b_proj",
    "k": "model.layers.{i}.self_attn.kv_a_proj_with_mqa",
    "latent_norm": "model.layers.{i}.self_attn.kv_a_layernorm",
    "kv_up": "model.layers.{i}.self_attn.kv_b_proj",
}
STACKED = {
    "experts_gate_up": "model.layers.{i}.mlp.experts.gate_up_proj",
    "experts_down": "model.layers.{i}.mlp.experts.down_proj",
}
"""Experts that are stored in one tensor each."""
NORM_EPS = 1e-6
"""That of norms of latents, whatever the other norms have."""
GROUP_BY_BEST = {"greedy": False, "group_limited_greedy": True}
"""Choices of experts of DeepSeek V2, and whether they are from groups by their best one."""


class Absorbed(Protocol):
    """Fields of a configuration whose heads share a latent."""

    @property
    def num_hidden_layers(self) -> int: ...
    @property
    def rms_norm_eps(self) -> float: ...
    @property
    def hidden_act(self) -> str: ...
    @property
    def intermediate_size(self) -> int: ...
    @property
    def kv_lora_rank(self) -> int: ...
    @property
    def q_lora_rank(self) -> int | None: ...
    @property
    def qk_nope_head_dim(self) -> int: ...
    @property
    def qk_rope_head_dim(self) -> int: ...
    @property
    def v_head_dim(self) -> int | None: ...
    @property
    def attention_bias(self) -> bool: ...


class WithExperts(Grouped, Absorbed, Protocol):
    """The same, with experts in some layers."""

    @property
    def n_routed_experts(self) -> int: ...
    @property
    def n_shared_experts(self) -> int: ...
    @property
    def routed_scaling_factor(self) -> float: ...


def deepseek_v2(config: DeepseekV2Config) -> Family:
    """Experts by softmax. Raises KvlatheError for an unknown choice of experts."""
    family = _with_experts(
        config, _by_softmax(config), range(config.first_k_dense_replace)
    )
    return replace(family, interleaved=True, mlp_bias=config.mlp_bias)


def deepseek_ocr2(config: DeepseekOcr2TextConfig) -> Family:
    """The experts of DeepSeek V2 behind the attention of Llama: the text of DeepSeek-OCR.
    Raises KvlatheError for an unknown choice of experts."""
    shared = config.n_shared_experts
    names = {role: x for role, x in WITH_EXPERTS.items() if role != "router_correction"}
    family = replace(
        llama(config),
        names=names,
        intermediate_size=config.moe_intermediate_size * shared,
        experts=_by_softmax(config),
        factors={"experts_down": config.routed_scaling_factor},
        settings=COUNTS,
    )
    first = int(getattr(config, "first_k_dense_replace", 0))
    dense = not_sparse(config.mlp_layer_types) or range(first)
    return with_dense(family, dense, config.intermediate_size)


def _by_softmax(config: DeepseekV2Config | DeepseekOcr2TextConfig) -> Experts:
    method = config.topk_method or ""
    if method not in GROUP_BY_BEST:
        raise KvlatheError(
            f"config.json sets topk_method to {method!r}",
            f"experts are chosen by {' or '.join(GROUP_BY_BEST)}",
            "choose another checkpoint",
        )
    by_best = GROUP_BY_BEST[method]
    return Experts(
        count=config.n_routed_experts,
        chosen=config.num_experts_per_tok or 0,
        intermediate_size=config.moe_intermediate_size,
        normalized=False,
        groups=(config.n_group or 1) if by_best else 1,
        kept_groups=(config.topk_group or 1) if by_best else 1,
        group_best=1,
    )


def deepseek_v3(config: DeepseekV3Config) -> Family:
    """Experts by sigmoids with a correction."""
    experts = grouped(config, config.n_routed_experts)
    family = _with_experts(config, experts, range(config.first_k_dense_replace or 0))
    return replace(family, interleaved=bool(config.rope_interleave))


def deepseek_v32(config: DeepseekV32Config | GlmMoeDsaConfig) -> Family:
    """DeepSeek V3.2 and GLM-5. An indexer chooses the tokens that each query sees; up to
    as many as it chooses, those are all of them."""
    experts = grouped(config, config.n_routed_experts)
    family = _with_experts(config, experts, not_sparse(config.mlp_layer_types))
    return replace(
        family,
        interleaved=True,
        dense_tokens=config.index_topk,
        beyond=INDEXER,
        beside=(*family.beside, *indexers(config.num_hidden_layers)),
    )


def indexers(layers: int) -> tuple[str, ...]:
    """Beginnings of the names of indexers' tensors."""
    return tuple(f"layers.{layer}.self_attn.indexer." for layer in range(layers))


def glm4_moe_lite(config: Glm4MoeLiteConfig) -> Family:
    experts = grouped(config, config.n_routed_experts)
    family = _with_experts(config, experts, not_sparse(config.mlp_layer_types))
    return replace(family, interleaved=config.rope_interleave, partial_rotary=True)


def axk1(config: AXK1Config) -> Family:
    """A norm follows the experts of a layer. Released checkpoints correct no choice of
    experts, and store a norm for layers without experts that nothing reads."""
    dense = not_sparse(config.mlp_layer_types)
    experts = grouped(config, config.n_routed_experts)
    experts = replace(experts, may_lack_correction=True)
    family = _with_experts(config, experts, dense)
    after = "layers.{i}.post_mlp_layernorm"
    return replace(
        family,
        names={**family.names, "mlp_out_norm": f"model.{after}"},
        interleaved=bool(config.rope_interleave),
        beside=(*family.beside, *(after.replace("{i}", f"{i}") for i in dense)),
    )


def mistral4(config: Mistral4Config) -> Family:
    """Experts by softmax, and queries that grow with their positions."""
    experts = replace(
        grouped(config, config.n_routed_experts),
        scores="softmax",
        corrected=False,
        stacked=True,
        out_in=True,
        halves=True,
    )
    family = _with_experts(config, experts, range(config.first_k_dense_replace or 0))
    return replace(
        family,
        interleaved=bool(config.rope_interleave),
        partial_rotary=True,
        temperature=temperature_of(config.rope_parameters),
    )


def youtu(config: YoutuConfig) -> Family:
    return replace(_plain(config), interleaved=bool(config.rope_interleave))


def minicpm3(config: MiniCPM3Config) -> Family:
    """Multipliers of embeddings, residuals and logits."""
    depth = float(config.scale_depth or 1.0) / math.sqrt(config.num_hidden_layers)
    factors = {
        "embed": float(config.scale_emb),
        "norm": 1 / config.logits_scaling,
        **dict.fromkeys(("o", "down"), depth),
    }
    return replace(_plain(config), factors=factors, mlp_bias=config.mlp_bias)


def _plain(config: Absorbed) -> Family:
    """The record of a model without experts."""
    latent = Latent(
        rank=config.kv_lora_rank,
        turning=config.qk_rope_head_dim,
        plain=config.qk_nope_head_dim,
        values=config.v_head_dim or 0,
        query_rank=config.q_lora_rank or 0,
        norm_eps=NORM_EPS,
    )
    parameters = getattr(config, "rope_parameters", None) or {}
    return Family(
        names=_names(NAMES, latent),
        norm="rms",
        norm_eps=config.rms_norm_eps,
        activation=config.hidden_act,
        kv_heads=1,
        intermediate_size=config.intermediate_size,
        qkv_bias=config.attention_bias,
        out_bias=config.attention_bias,
        scales=(_scale(latent, parameters),) * config.num_hidden_layers,
        latent=latent,
    )


def _with_experts(
    config: WithExperts, experts: Experts, dense: Sequence[int]
) -> Family:
    """The record of a model with experts in all layers that are not ``dense``."""
    family = _plain(config)
    assert family.latent is not None
    stored = dict(WITH_EXPERTS)
    if not experts.corrected:
        del stored["router_correction"]
    if experts.stacked:
        del stored["experts_gate"], stored["experts_up"]
        stored |= STACKED
    family = replace(
        family,
        names=_names(stored, family.latent),
        intermediate_size=config.moe_intermediate_size * config.n_shared_experts,
        experts=experts,
        factors={"experts_down": config.routed_scaling_factor},
        beside=(f"layers.{config.num_hidden_layers}.",),
        settings=COUNTS,
    )
    layers = range(config.num_hidden_layers)
    return with_dense(
        family, [i for i in dense if i in layers], config.intermediate_size
    )


def _names(names: Mapping[str, str], latent: Latent) -> dict[str, str]:
    """``names`` with those of attention."""
    own = {role: x for role, x in names.items() if role not in ("q", "k", "v")}
    own |= ATTENTION
    if not latent.query_rank:
        del own["q_latent"], own["q_latent_norm"]
        own["q"] = NAMES["q"]
    return own


def _scale(latent: Latent, rope: Mapping[str, object]) -> float:
    """The factor of scores: that of heads' own keys, and YaRN's where it is of all
    dims."""
    scale = (latent.plain + latent.turning) ** -0.5
    all_dims = float(str(rope.get("mscale_all_dim") or 0))
    if rope.get("rope_type", "default") == "default" or not all_dims:
        return scale
    factor = float(str(rope["factor"]))
    grown = 0.1 * all_dims * math.log(factor) + 1 if factor > 1 else 1.0
    return scale * grown * grown
