"""Layers that guess further tokens (multi-token prediction, DeepSeek-V3, arXiv
2412.19437, section 2.2): where checkpoints have them. Data only.

Such a layer reads, of each place, the hidden state behind the model's last norm and the
embedding of the next token, and guesses the token after that one:

    x = join([embed_norm(embedding), hidden_norm(hidden)])
    logits = head(norm(layer(x)))

Only the first of several is read: it guesses token after token from what it gave.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

EMBED_NORM, HIDDEN_NORM = "model.embed_norm", "model.hidden_norm"
JOIN, NORM, HEAD = "model.join", "model.norm", "lm_head"
NAMES = {
    "guess_embed_norm": EMBED_NORM,
    "guess_hidden_norm": HIDDEN_NORM,
    "guess_join": JOIN,
}
"""Roles of what such a layer reads with -> names in a model of that layer alone."""
FIRST_LAYER = "model.layers.0"


@dataclass(frozen=True, slots=True)
class GuessingLayer:
    """``prefix``: how the names of its tensors begin, where ``{n}`` is the number of
    the model's layers. ``names``: what follows -> the name in a model of this layer
    alone; all others are of its layer 0, and lie in ``inside``. ``settings``: of
    config.json, that make layer 0 such a layer."""

    prefix: str
    names: Mapping[str, str]
    inside: str = ""
    settings: Mapping[str, object] = field(default_factory=dict)


AFTER_THE_LAYERS = {
    "enorm": EMBED_NORM,
    "hnorm": HIDDEN_NORM,
    "eh_proj": JOIN,
    "shared_head.norm": NORM,
    "shared_head.head": HEAD,
    "embed_tokens": "model.embed_tokens",
}
BESIDE_THE_MODEL = {
    "pre_fc_norm_embedding": EMBED_NORM,
    "pre_fc_norm_hidden": HIDDEN_NORM,
    "fc": JOIN,
    "norm": NORM,
}
WITH_EXPERTS = {"mlp_layer_types": ["sparse"], "first_k_dense_replace": 0}
"""Behind layers of experts there is one more."""
LAST = GuessingLayer("model.layers.{n}.", AFTER_THE_LAYERS, settings=WITH_EXPERTS)
FULL_ATTENTION = {"layer_types": ["full_attention"], "mlp_only_layers": []}
MTP = GuessingLayer("mtp.", BESIDE_THE_MODEL, "layers.0.", FULL_ATTENTION)
GUESSING: Mapping[str, GuessingLayer] = {
    "deepseek_v3": LAST,
    "glm4_moe": LAST,
    "glm4_moe_lite": LAST,
    "qwen3_next": MTP,
    "qwen3_5": MTP,
    "qwen3_5_moe": MTP,
    "qwen3_5_text": MTP,
    "qwen3_5_moe_text": MTP,
}
"""Model type -> its layer. Released checkpoints of these types have one."""
