"""Gemma 3n (text): four hidden states of a token side by side (AltUp), maps beside
attention (LAuReL), few gates in the first MLPs, embeddings for each layer, and last
layers that read the keys and values of earlier ones."""

from __future__ import annotations

from collections.abc import Mapping
from statistics import NormalDist
from typing import TYPE_CHECKING

from kvlathe.base.errors import KvlatheError
from kvlathe.export.families.family import Family
from kvlathe.export.families.gemma import FOUR_NORMS
from kvlathe.export.families.gemma4 import (
    INPUTS,
    LAYER,
    OF_CACHE,
    halved_inputs,
    readers,
    sources_of,
    unread,
)
from kvlathe.export.families.llama import NAMES
from kvlathe.export.families.qwen import QK_NORMS
from kvlathe.export.families.windows import sliding_layers
from kvlathe.layers.bounds import Bound

if TYPE_CHECKING:
    from transformers import Gemma3nTextConfig

STREAMS = {
    "stream_norm": f"{LAYER}altup.router_norm",
    "stream_router": f"{LAYER}altup.modality_router",
    "stream_predict": f"{LAYER}altup.prediction_coefs",
    "stream_correct": f"{LAYER}altup.correction_coefs",
}
SCALE = {"stream_scale": f"{LAYER}altup.correct_output_scale"}
LAUREL = {
    "laurel_left": f"{LAYER}laurel.linear_left",
    "laurel_right": f"{LAYER}laurel.linear_right",
    "laurel_norm": f"{LAYER}laurel.post_laurel_norm",
}


def gemma3n(config: Gemma3nTextConfig) -> Family:
    """Raises KvlatheError for MLPs of unlike widths, for streams of which another than
    the first is computed, and where no layer reads another's cache."""
    columns = _columns(config)
    sources = sources_of(config)
    names = NAMES | FOUR_NORMS | QK_NORMS | INPUTS | STREAMS | LAUREL
    names |= SCALE if config.altup_correct_scale else {}
    count = config.altup_num_inputs
    names |= _around(count)
    return Family(
        names=names,
        norm="rms",
        norm_eps=config.rms_norm_eps,
        activation=config.hidden_activation,
        kv_heads=config.num_key_value_heads,
        sources=sources,
        lacks=dict.fromkeys(readers(sources), OF_CACHE),
        intermediate_size=columns,
        bounds=_bounds(config),
        qkv_bias=config.attention_bias,
        out_bias=config.attention_bias,
        ropes=tuple(config.layer_types or ()),
        windows=sliding_layers(config),
        scales=(1.0,) * config.num_hidden_layers,
        value_norm=True,
        layer_inputs=config.hidden_size_per_layer_input,
        input_rows=min(config.vocab_size_per_layer_input, config.vocab_size),
        streams=count,
        laurel=config.laurel_rank,
        factors={"embed": config.hidden_size**0.5, **_factors(config)},
        logit_softcap=config.final_logit_softcapping or 0.0,
        beside=unread(sources),
        # Its own code leaves query_pre_attn_scalar unread, which checkpoints have.
        settings=("final_logit_softcapping", "query_pre_attn_scalar"),
    )


def _factors(config: Gemma3nTextConfig) -> Mapping[str, float]:
    return {**halved_inputs(config), "stream_router": 1 / config.hidden_size}


def _columns(config: Gemma3nTextConfig) -> int:
    """Columns of every MLP."""
    given = config.intermediate_size
    every = [given] if isinstance(given, int) else list(given)
    if len({*every}) == 1 and not config.altup_active_idx and sources_of(config):
        return every[0]
    raise KvlatheError(
        f"config.json sets intermediate_size to {sorted({*every})}, altup_active_idx to "
        f"{config.altup_active_idx} and num_kv_shared_layers to "
        f"{config.num_kv_shared_layers}",
        "MLPs are alike in all layers, the first stream is computed, and the last layers "
        "read an earlier one's cache",
        "choose the E2B or the E4B",
    )


def _bounds(config: Gemma3nTextConfig) -> tuple[Bound | None, ...]:
    """The first layers count gates far above their mean alone."""
    shares = config.activation_sparsity_pattern
    assert isinstance(shares, list)  # the configuration has one of each layer
    found = [NormalDist().inv_cdf(share) if share > 0 else None for share in shares]
    return tuple(x if x is None else Bound(deviations=x) for x in found)


def _around(count: int) -> Mapping[str, str]:
    """Names of the maps between one hidden state and ``count``."""
    modules = {"in": "altup_projections", "out": "altup_unembed_projections"}
    return {
        f"stream_{way}_{i}": f"model.{module}.{i - 1}"
        for way, module in modules.items()
        for i in range(1, count)
    }
