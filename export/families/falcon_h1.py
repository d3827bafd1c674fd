"""Falcon-H1: attention and a state space beside each other in every layer, and multipliers
of all that enters and leaves them, which are folded."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from kvlathe.base.errors import KvlatheError
from kvlathe.export.families.family import Family, Mixer
from kvlathe.export.families.llama import NAMES, gated
from kvlathe.export.families.spaces import space_names
from kvlathe.export.families.stateful import LAYER
from kvlathe.layers.mixers import MOST_STEP, Mixing

if TYPE_CHECKING:
    from transformers import FalconH1Config

OWN = {
    "mlp_norm": LAYER + "pre_ff_layernorm",
    "gate": LAYER + "feed_forward.gate_proj",
    "up": LAYER + "feed_forward.up_proj",
    "down": LAYER + "feed_forward.down_proj",
    "norm": "model.final_layernorm",
}
BIASES = ("attention_bias", "mlp_bias", "mamba_proj_bias", "projectors_bias")


def falcon_h1(config: FalconH1Config) -> Family:
    """Raises KvlatheError for biases, which multipliers of inputs do not reach."""
    for name in BIASES:
        if getattr(config, name):
            raise KvlatheError(
                f"config.json sets {name}",
                "multipliers enter maps, and no record says what becomes of biases",
                "choose another checkpoint",
            )
    enters = float(config.attention_in_multiplier or 1.0)
    gate, down = config.mlp_multipliers or (1.0, 1.0)
    return replace(
        gated(config),
        names=NAMES | OWN,
        factors={
            "embed": float(config.embedding_multiplier or 1.0),
            "q": enters,
            "k": enters * float(config.key_multiplier or 1.0),
            "v": enters,
            "o": float(config.attention_out_multiplier or 1.0),
            "gate": float(gate),
            "down": float(down),
            "norm": float(config.lm_head_multiplier or 1.0),
        },
        mixer=_mixer(config),
        mixes=tuple(range(config.num_hidden_layers)),
        settings=("embedding_multiplier",),
    )


def _mixer(config: FalconH1Config) -> Mixer:
    heads, groups = config.mamba_n_heads or 0, config.mamba_n_groups or 0
    key_dim, value_dim = config.mamba_d_state or 0, int(config.mamba_d_head or 0)
    least, most = config.time_step_limit or (0.0, float("inf"))
    norm = "before" if config.mamba_norm_before_gate else "after"
    mixing = Mixing(
        "space",
        channels=heads * value_dim + 2 * groups * key_dim,
        taps=config.mamba_d_conv or 0,
        heads=heads,
        groups=groups,
        key_dim=key_dim,
        value_dim=value_dim,
        norm=norm if config.mamba_rms_norm else "none",
        norm_eps=config.rms_norm_eps,
        norm_groups=groups,
        least_step=float(least),
        most_step=min(float(most), MOST_STEP),
    )
    names = space_names(LAYER + "mamba.")
    if not config.mamba_rms_norm:
        del names["norm"]
    enters = float(config.ssm_in_multiplier or 1.0)
    return Mixer(
        mixing,
        names,
        "space",
        conv_bias=bool(config.mamba_conv_bias),
        factor=float(config.ssm_out_multiplier or 1.0),
        factors=tuple(enters * float(x) for x in config.ssm_multipliers or (1.0,) * 5),
    )
