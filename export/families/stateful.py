"""LFM2 and LFM3: layers that mix tokens by short convolutions, and keep a state in place of keys
and values, among layers with attention (docs/hybrids.md)."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from kvlathe.export.families.experts import COUNTS, by_sigmoids, with_dense
from kvlathe.export.families.family import ATTENTION, Family, Mixer
from kvlathe.export.families.windows import sliding_layers
from kvlathe.layers.mixers import Mixing

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from transformers import Lfm2Config, Lfm2MoeConfig, Lfm3Config

    AnyLfm = Lfm2Config | Lfm2MoeConfig | Lfm3Config

LAYER = "model.layers.{i}."
LFM2 = {
    "embed": "model.embed_tokens",
    "attn_norm": LAYER + "operator_norm",
    "q": LAYER + "self_attn.q_proj",
    "k": LAYER + "self_attn.k_proj",
    "v": LAYER + "self_attn.v_proj",
    "q_norm": LAYER + "self_attn.q_layernorm",
    "k_norm": LAYER + "self_attn.k_layernorm",
    "o": LAYER + "self_attn.out_proj",
    "mlp_norm": LAYER + "ffn_norm",
    "gate": LAYER + "feed_forward.w1",
    "up": LAYER + "feed_forward.w3",
    "down": LAYER + "feed_forward.w2",
    "norm": "model.embedding_norm",
    "head": "lm_head",
}
LFM2_MLP = {role: LFM2[role] for role in ("gate", "up", "down")}
LFM3 = LFM2 | {
    "q_norm": LAYER + "self_attn.q_norm",
    "k_norm": LAYER + "self_attn.k_norm",
    "o": LAYER + "self_attn.o_proj",
}
LFM3_GATES = {"out_gate": LAYER + "self_attn.gate_proj"}
LFM3_NORMS = {
    "attn_out_norm": LAYER + "post_operator_norm",
    "mlp_out_norm": LAYER + "post_ffn_norm",
}
LFM2_EXPERTS = {
    "router": LAYER + "feed_forward.gate",
    "router_correction": LAYER + "feed_forward.expert_bias",
    "experts_gate": LAYER + "feed_forward.experts.{e}.w1",
    "experts_up": LAYER + "feed_forward.experts.{e}.w3",
    "experts_down": LAYER + "feed_forward.experts.{e}.w2",
}


def mixing_layers(
    kinds: Sequence[str] | None, kind: str
) -> tuple[tuple[int, ...], Mapping[int, tuple[str, ...]]]:
    """Layers of a ``kind``, and that they have no attention."""
    found = tuple(i for i, one in enumerate(kinds or ()) if one == kind)
    return found, dict.fromkeys(found, ATTENTION)


def lfm2(config: Lfm2Config) -> Family:
    return _convolving(config, _columns(config))


def _convolving(config: Lfm2Config | Lfm2MoeConfig, columns: int) -> Family:
    mixes, lacks = mixing_layers(config.layer_types, "conv")
    return Family(
        names=LFM2,
        norm="rms",
        norm_eps=config.norm_eps,
        activation="silu",
        kv_heads=config.num_key_value_heads,
        intermediate_size=columns,
        mixer=_short_convolution(config),
        mixes=mixes,
        lacks=lacks,
    )


def lfm3(config: Lfm3Config) -> Family:
    """Gates of each head, norms of outputs, windows and a RoPE of their own in some
    layers."""
    kinds = config.layer_types or ()
    mixes, lacks = mixing_layers(kinds, "conv")
    return Family(
        names=LFM3
        | (LFM3_GATES if config.use_attention_gate else {})
        | (LFM3_NORMS if config.use_sandwich_norm else {}),
        norm="rms",
        norm_eps=config.norm_eps,
        activation="silu",
        kv_heads=config.num_key_value_heads,
        intermediate_size=config.intermediate_size,
        qkv_bias=config.attention_bias,
        out_bias=config.attention_bias,
        partial_rotary=True,
        windows=sliding_layers(config),
        ropes=_ropes(kinds),
        head_gates=True,
        mixer=_short_convolution(config),
        mixes=mixes,
        lacks=lacks,
    )


def lfm2_moe(config: Lfm2MoeConfig) -> Family:
    """LFM2 with experts, chosen by sigmoids."""
    own = dict(LFM2_EXPERTS)
    if not config.use_expert_bias:
        del own["router_correction"]
    kept = {role: x for role, x in LFM2.items() if role not in LFM2_MLP}
    family = replace(
        _convolving(config, config.moe_intermediate_size),
        names=kept | own,
        experts=replace(
            by_sigmoids(config, config.norm_topk_prob),
            corrected=config.use_expert_bias,
        ),
        factors={"experts_down": config.routed_scaling_factor},
        settings=COUNTS,
    )
    first = min(config.num_dense_layers, config.num_hidden_layers)
    return with_dense(family, range(first), config.intermediate_size, LFM2_MLP)


def _ropes(kinds: Sequence[str]) -> tuple[str, ...]:
    """The rotation of each layer by its kind. Layers without attention turn nothing: they
    have one that others have."""
    attending = [kind for kind in kinds if kind != "conv"]
    return tuple(kind if kind in attending else attending[0] for kind in kinds)


def _short_convolution(config: AnyLfm) -> Mixer:
    return Mixer(
        Mixing("conv", config.hidden_size, config.conv_L_cache),
        names={
            "project": (LAYER + "conv.in_proj",),
            "conv": (LAYER + "conv.conv",),
            "out": (LAYER + "conv.out_proj",),
        },
        bias=config.conv_bias,
        conv_bias=config.conv_bias,
    )


def _columns(config: Lfm2Config) -> int:
    """Columns of the MLP: two thirds of what is written, up to a multiple."""
    size = config.intermediate_size
    if not config.block_auto_adjust_ff_dim:
        return size
    size = int(config.block_ffn_dim_multiplier * int(2 * size / 3))
    return -(-size // config.block_multiple_of) * config.block_multiple_of
