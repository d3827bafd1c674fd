"""Llama 4 (text): attention in most layers begins anew at every chunk of tokens; the
others have no positions, and queries that grow. Experts read a token times what they
count, beside one that every token passes."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from kvlathe.export.families.experts import COUNTS, WITHOUT_MLP, with_dense
from kvlathe.export.families.family import Experts, Family
from kvlathe.export.families.llama import biased
from kvlathe.export.families.qwen import QK_NORMS
from kvlathe.export.families.unknown import CHUNKS
from kvlathe.layers.temperature import Temperature

if TYPE_CHECKING:
    from transformers import Llama4TextConfig

MLP = "model.layers.{i}.feed_forward."
PLAIN = {role: f"{MLP}{role}_proj" for role in ("gate", "up", "down")}
EXPERTS = {
    "router": f"{MLP}router",
    "experts_gate_up": f"{MLP}experts.gate_up_proj",
    "experts_down": f"{MLP}experts.down_proj",
    **{role: f"{MLP}shared_expert.{role}_proj" for role in ("gate", "up", "down")},
}
CHUNKED = "chunked_attention"
"""A layer whose attention begins anew at every chunk, among ``layer_types``."""


def llama4(config: Llama4TextConfig) -> Family:
    """QK-norms without weights, in layers that turn alone. They follow RoPE, which
    changes no length: their order does not matter. Up to a chunk of tokens, queries see
    all before them."""
    turns = [bool(turn) for turn in config.no_rope_layers or ()]
    still = tuple(i for i, turn in enumerate(turns) if not turn)
    temperature = None
    if config.attn_temperature_tuning and still:
        scale, floor = config.attn_scale, float(config.floor_scale)
        temperature = Temperature(scale, floor, first=1, layers=still)
    experts = Experts(
        count=config.num_local_experts,
        chosen=config.num_experts_per_tok,
        intermediate_size=config.intermediate_size,
        normalized=False,
        stacked=True,
        halves=True,
        scores="sigmoid",
        before=True,
    )
    family = replace(
        biased(config),
        names=WITHOUT_MLP | EXPERTS | (QK_NORMS if config.use_qk_norm else {}),
        qk_norm_weight=False,
        ropes=tuple("" if turn else None for turn in turns),
        interleaved=True,
        temperature=temperature,
        experts=experts,
        lacks=dict.fromkeys(still, tuple(QK_NORMS)),
        settings=(*COUNTS, "attention_chunk_size", "no_rope_layers"),
    )
    if CHUNKED in (config.layer_types or ()):
        chunk = config.attention_chunk_size or 0
        family = replace(family, dense_tokens=chunk, beyond=CHUNKS)
    layers, sparse = range(config.num_hidden_layers), set(config.moe_layers or ())
    dense = [layer for layer in layers if layer not in sparse]
    return with_dense(family, dense, config.intermediate_size_mlp, PLAIN)
