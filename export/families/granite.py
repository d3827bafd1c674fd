"""Granite and HyperCLOVA X: multipliers of embeddings, residuals, scores and logits; with
experts, with sinks and windows, with norms of outputs."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from kvlathe.export.families.experts import COUNTS, WITHOUT_MLP
from kvlathe.export.families.family import Experts, Family
from kvlathe.export.families.llama import biased, llama
from kvlathe.export.families.windows import sliding_layers

if TYPE_CHECKING:
    from transformers import (
        GraniteConfig,
        GraniteMoeConfig,
        GraniteMoeHybridConfig,
        GraniteMoeSharedConfig,
        GraniteMoeSWAConfig,
        GraniteSWAConfig,
        HyperCLOVAXConfig,
    )

    Plain = GraniteMoeConfig | GraniteMoeHybridConfig
    Shared = GraniteMoeSharedConfig | GraniteMoeHybridConfig
    WithExperts = Plain | Shared | GraniteMoeSWAConfig
    WithWindows = GraniteSWAConfig | GraniteMoeSWAConfig

MULTIPLIERS = (
    "attention_multiplier",
    "embedding_multiplier",
    "residual_multiplier",
    "logits_scaling",
)
MOE = "model.layers.{i}.block_sparse_moe"
STORED = {
    "router": f"{MOE}.router.layer",
    "experts_gate_up": f"{MOE}.input_linear.weight",
    "experts_down": f"{MOE}.output_linear.weight",
}
LATER = {
    "router": f"{MOE}.router",
    "experts_gate_up": f"{MOE}.experts.gate_up_proj",
    "experts_down": f"{MOE}.experts.down_proj",
}
SHARED = {
    "gate_up": "model.layers.{i}.shared_mlp.input_linear",
    "down": "model.layers.{i}.shared_mlp.output_linear",
}
SINKS = {"sinks": "model.layers.{i}.self_attn.sinks"}


def granite(config: GraniteConfig | GraniteSWAConfig | HyperCLOVAXConfig) -> Family:
    return replace(
        llama(config),
        factors=_factors(config, ("o", "down")),
        scales=_scales(config),
        settings=MULTIPLIERS,
    )


def granite_swa(config: GraniteSWAConfig) -> Family:
    """Sinks beside the scores, windows in most layers, and a RoPE by layer."""
    family = granite(config)
    return _with_windows(replace(family, names={**family.names, **SINKS}), config)


def granitemoe(config: Plain) -> Family:
    return _with_experts(config, STORED, 0)


def granitemoeshared(config: Shared) -> Family:
    """A record of Granite MoE with an expert that every token passes."""
    return _with_experts(config, STORED, config.shared_intermediate_size)


def granitemoe_swa(config: GraniteMoeSWAConfig) -> Family:
    family = _with_experts(config, LATER, config.shared_intermediate_size)
    return _with_windows(replace(family, names={**family.names, **SINKS}), config)


def hyperclovax(config: HyperCLOVAXConfig) -> Family:
    """Norms of outputs in some models, which residuals' multipliers follow. Logits are
    multiplied, where Granite's are divided."""
    family = granite(config)
    names, scaled = dict(family.names), ("o", "down")
    if config.use_post_norm:
        names["attn_out_norm"] = "model.layers.{i}.post_norm1"
        names["mlp_out_norm"] = "model.layers.{i}.post_norm2"
        scaled = ("attn_out_norm", "mlp_out_norm")
    factors = _factors(config, scaled) | {"norm": float(config.logits_scaling)}
    return replace(family, names=names, factors=factors)


def _with_experts(
    config: WithExperts, stored: dict[str, str], shared_size: int
) -> Family:
    experts = Experts(
        count=config.num_local_experts or 0,
        chosen=config.num_experts_per_tok or 0,
        intermediate_size=config.intermediate_size,
        normalized=True,
        stacked=True,
        out_in=True,
        halves=True,
    )
    return replace(
        biased(config),
        names=WITHOUT_MLP | stored | (SHARED if shared_size else {}),
        intermediate_size=shared_size,
        experts=experts,
        factors=_factors(config, ("o", "experts_down", "shared_down")),
        scales=_scales(config),
        settings=(*MULTIPLIERS, *COUNTS),
    )


def _with_windows(family: Family, config: WithWindows) -> Family:
    """Each layer has a base of its own for RoPE; with 0 its positions do not turn."""
    bases = config.layer_rope_theta or ()
    parameters = {
        f"{base:g}": {**(config.rope_parameters or {}), "rope_theta": base}
        for base in bases
        if base
    }
    return replace(
        family,
        windows=sliding_layers(config),
        ropes=tuple(f"{base:g}" if base else None for base in bases),
        rope_parameters=parameters,
    )


def _factors(
    config: GraniteConfig | HyperCLOVAXConfig | WithExperts | WithWindows,
    residual: tuple[str, ...],
) -> dict[str, float]:
    return dict.fromkeys(residual, float(config.residual_multiplier or 1.0)) | {
        "embed": float(config.embedding_multiplier or 1.0),
        "norm": 1 / (config.logits_scaling or 1.0),
    }


def _scales(
    config: GraniteConfig | HyperCLOVAXConfig | WithExperts | WithWindows,
) -> tuple[float, ...]:
    return (float(config.attention_multiplier or 1.0),) * config.num_hidden_layers
