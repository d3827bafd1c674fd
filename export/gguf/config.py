"""config.json of a GGUF file: what its metadata says of sizes and wiring, under
transformers' names.

Every key of the architecture is read, or must have the one value that changes nothing.
A key that is unknown here is refused: leaving it out could change the result.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from kvlathe.base.errors import KvlatheError
from kvlathe.export.gguf.file import GgufFile
from kvlathe.export.gguf.names import (
    ARCHITECTURES,
    LONG_FACTORS,
    ROPE_FACTORS,
    SHORT_FACTORS,
    Architecture,
)

Config = dict[str, object]

BASE = {
    "context_length": "max_position_embeddings",
    "embedding_length": "hidden_size",
    "block_count": "num_hidden_layers",
    "feed_forward_length": "intermediate_size",
    "attention.head_count": "num_attention_heads",
    "attention.layer_norm_rms_epsilon": "rms_norm_eps",
}
"""Keys that every file must have, after the architecture's name -> transformers'
names."""
READ_APART = (
    "attention.head_count_kv",
    "attention.key_length",
    "attention.value_length",
    "rope.dimension_count",
    "rope.freq_base",
    "rope.scale_linear",
    "rope.scaling.type",
    "rope.scaling.factor",
    "rope.scaling.original_context_length",
    "rope.scaling.attn_factor",
    "rope.scaling.yarn_beta_fast",
    "rope.scaling.yarn_beta_slow",
)
WITHOUT_MEANING = ("vocab_size", "rope.scaling.finetuned")
"""Keys that say what other places say, too."""
HARMLESS = {
    "expert_count": 0,
    "expert_used_count": 0,
    "attention.causal": True,
    "rope.scaling.yarn_ext_factor": 1.0,
    "rope.scaling.yarn_attn_factor": 1.0,
    "use_parallel_residual": False,
    "tensor_data_layout": "Meta AI original pth",
}
"""Keys of which one value changes nothing."""
OWN = {
    "granite": (
        "attention.scale",
        "embedding_scale",
        "residual_scale",
        "logit_scale",
    ),
    "qwen3moe": (
        "expert_count",
        "expert_used_count",
        "expert_feed_forward_length",
    ),
    "phi3": ("attention.sliding_window",),
    "gemma2": (
        "attention.sliding_window",
        "attn_logit_softcapping",
        "final_logit_softcapping",
    ),
    "gemma3": (
        "attention.sliding_window",
        "attention.sliding_window_pattern",
        "final_logit_softcapping",
        "rope.freq_base_swa",
    ),
}
"""Further keys of an architecture."""
LARGEST_GEMMA = {"gemma2": 46, "gemma3": 62}
"""Layers of the 27B models, whose scores are scaled by the width over the heads. The
file does not say so; llama.cpp knows them by this number, too."""
NO_ROPE_STEP = 4
"""Every such layer of SmolLM3 has no positions. The file does not say so."""


@dataclass(frozen=True)
class Sizes:
    """Sizes that the order of numbers depends on."""

    heads: int
    kv_heads: int
    head_dim: int

    @staticmethod
    def of(file: GgufFile) -> Sizes:
        keys = Keys(file)
        heads = keys.whole("attention.head_count")
        kv_heads = keys.whole("attention.head_count_kv", heads)
        d = keys.whole("attention.key_length", keys.whole("embedding_length") // heads)
        return Sizes(heads, kv_heads, d)


class Keys:
    """Values of the keys that begin with a file's architecture."""

    def __init__(self, file: GgufFile) -> None:
        self.file = file
        start = f"{file.architecture}."
        self.values = {
            name.removeprefix(start): value
            for name, value in file.metadata.items()
            if name.startswith(start)
        }

    def whole(self, name: str, default: int | None = None) -> int:
        """A whole number from 1 up."""
        value = self._given(name, default)
        if isinstance(value, list) and len(set(value)) == 1:
            value = value[0]
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise self._refusal(name, value, "it is no count")
        return value

    def number(self, name: str, default: float | None = None) -> float:
        """A number, with the digits that somebody wrote: files have 32 bits of it."""
        value = self._given(name, default)
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise self._refusal(name, value, "it is no number")
        return float(str(np.float32(value)))

    def _given(self, name: str, default: float | None) -> object:
        if name in self.values:
            return self.values[name]
        if default is None:
            raise KvlatheError(
                f"{self.file.path.name} does not say {self.file.architecture}.{name}",
                "the model needs it",
                "convert the model again",
            )
        return default

    def check(self) -> None:
        """Refuse keys that nothing here obeys."""
        own = OWN.get(self.file.architecture, ())
        known = {*BASE, *READ_APART, *WITHOUT_MEANING, *own}
        for name, value in self.values.items():
            if name in known or (name in HARMLESS and value == HARMLESS[name]):
                continue
            raise self._refusal(
                name, value, "nothing here obeys it, and it could matter"
            )

    def _refusal(self, name: str, value: object, reason: str) -> KvlatheError:
        said = f"{self.file.architecture}.{name} to {value!r:.60}"
        remedy = "give the checkpoint that the file was made of"
        return KvlatheError(f"{self.file.path.name} sets {said}", reason, remedy)


def architecture_of(file: GgufFile) -> Architecture:
    """Raises KvlatheError for one that is not read."""
    if file.architecture not in ARCHITECTURES:
        known = ", ".join(sorted(ARCHITECTURES))
        raise KvlatheError(
            f"{file.path.name} has the architecture {file.architecture!r}",
            f"those that are read from GGUF files are {known}",
            "give the checkpoint that the file was made of",
        )
    return ARCHITECTURES[file.architecture]


def read_config(file: GgufFile) -> Config:
    """config.json. Raises KvlatheError for an architecture that is not read, missing
    keys, and keys that nothing obeys."""
    architecture = architecture_of(file)
    keys = Keys(file)
    keys.check()
    sizes = Sizes.of(file)
    if keys.whole("attention.value_length", sizes.head_dim) != sizes.head_dim:
        raise KvlatheError(
            f"{file.path.name} has keys of {sizes.head_dim} dims",
            "its values have others",
            "choose another model",
        )
    config: Config = {
        "architectures": [architecture.causal_lm],
        "model_type": architecture.model_type,
        "vocab_size": _vocabulary(file),
        "num_key_value_heads": sizes.kv_heads,
        "head_dim": sizes.head_dim,
        "tie_word_embeddings": "output.weight" not in file.tensors,
        "rope_parameters": _rope(keys, sizes),
    }
    for name, own in BASE.items():
        if name.endswith("epsilon"):
            config[own] = keys.number(name)
        elif name in keys.values or file.architecture != "qwen3moe":
            config[own] = keys.whole(name)
    rope = config["rope_parameters"]
    assert isinstance(rope, dict)
    before = "original_max_position_embeddings"
    if rope.get("rope_type") == "longrope":
        config[before] = rope[before]  # some classes have another by default
    config |= _biases(file)
    config |= _wiring(keys, sizes)
    return config | _ends(file)


def _vocabulary(file: GgufFile) -> int:
    """Rows of the embedding."""
    if "token_embd.weight" not in file.tensors:
        raise KvlatheError(
            f"{file.path.name} has no token_embd.weight",
            "the decoder needs it",
            "give the file of a language model",
        )
    return file.tensors["token_embd.weight"].shape[0]


def _biases(file: GgufFile) -> Config:
    """The maps that have biases. Qwen2 has them always."""
    if file.architecture not in ("llama", "granite", "smollm3", "qwen3", "qwen3moe"):
        return {}
    return {
        "attention_bias": "blk.0.attn_q.bias" in file.tensors,
        "mlp_bias": "blk.0.ffn_up.bias" in file.tensors,
    }


def _wiring(keys: Keys, sizes: Sizes) -> Config:
    """Settings of one architecture."""
    name = keys.file.architecture
    if name == "granite":
        return {
            "attention_multiplier": keys.number(
                "attention.scale", sizes.head_dim**-0.5
            ),
            "embedding_multiplier": keys.number("embedding_scale", 1.0),
            "residual_multiplier": keys.number("residual_scale", 1.0),
            "logits_scaling": keys.number("logit_scale", 1.0),
        }
    if name == "smollm3":
        layers = range(1, keys.whole("block_count") + 1)
        return {"no_rope_layers": [int(i % NO_ROPE_STEP != 0) for i in layers]}
    if name == "qwen3moe":
        return {
            "num_experts": keys.whole("expert_count"),
            "num_experts_per_tok": keys.whole("expert_used_count"),
            "moe_intermediate_size": keys.whole("expert_feed_forward_length"),
            "norm_topk_prob": True,
            "decoder_sparse_step": 1,
            "mlp_only_layers": [],
        }
    if name == "phi3":
        # Its tokenizer's ids that the class would name by default may be none of ours.
        none = dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id"))
        return none | {
            "sliding_window": keys.values.get("attention.sliding_window") or None
        }
    if name in LARGEST_GEMMA:
        return _gemma(keys, sizes)
    return {}


def _gemma(keys: Keys, sizes: Sizes) -> Config:
    name, layers = keys.file.architecture, keys.whole("block_count")
    largest = layers == LARGEST_GEMMA[name]
    width = keys.whole("embedding_length") // sizes.heads
    config: Config = {
        "hidden_activation": "gelu_pytorch_tanh",
        "query_pre_attn_scalar": width if largest else sizes.head_dim,
    }
    if name == "gemma2":
        caps = {"attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0}
        config |= {cap: keys.number(cap, value) for cap, value in caps.items()}
        window, period = keys.whole("attention.sliding_window", 4096), 2
    else:
        cap = "final_logit_softcapping"
        config[cap] = keys.number(cap) if keys.values.get(cap) else None
        has_window = bool(keys.values.get("attention.sliding_window"))
        window = keys.whole("attention.sliding_window") if has_window else 1
        period = keys.whole("attention.sliding_window_pattern", 6) if has_window else 1
    kinds = ("sliding_attention", "full_attention")
    types = [kinds[i % period == 0] for i in range(1, layers + 1)]
    return config | {"sliding_window": window, "layer_types": types}


def _ends(file: GgufFile) -> Config:
    """Ids of special tokens."""
    names = {"bos": "bos", "eos": "eos", "padding": "pad"}
    found = {
        f"{own}_token_id": file.metadata.get(f"tokenizer.ggml.{name}_token_id")
        for name, own in names.items()
    }
    return {name: value for name, value in found.items() if value is not None}


# -- RoPE ------------------------------------------------------------------------------
def _rope(keys: Keys, sizes: Sizes) -> Config:
    theta = keys.number("rope.freq_base", 10000.0)
    own: Config = {"rope_type": "default", "rope_theta": theta}
    own |= _scaling(keys)
    turned = keys.whole("rope.dimension_count", sizes.head_dim)
    if turned != sizes.head_dim:
        own["partial_rotary_factor"] = turned / sizes.head_dim
    if keys.file.architecture != "gemma3":
        return own
    local = {
        "rope_type": "default",
        "rope_theta": keys.number("rope.freq_base_swa", 10000.0),
    }
    return {"full_attention": own, "sliding_attention": local}


def _scaling(keys: Keys) -> Config:
    """Changes of the frequencies. Factors of each plane that the file has as a tensor
    are LongRoPE's, whatever they came from."""
    file = keys.file
    length = keys.whole("context_length")
    original = "rope.scaling.original_context_length"
    if ROPE_FACTORS in file.tensors:
        factors = _factors(file, ROPE_FACTORS)
        return {
            "rope_type": "longrope",
            "long_factor": factors,
            "short_factor": factors,
            "attention_factor": 1.0,
            "original_max_position_embeddings": length,
        }
    if LONG_FACTORS in file.tensors and SHORT_FACTORS in file.tensors:
        before = keys.whole(original, length)
        amplitude = 1.0
        if length > before:
            amplitude = math.sqrt(1 + math.log(length / before) / math.log(before))
        return {
            "rope_type": "longrope",
            "long_factor": _factors(file, LONG_FACTORS),
            "short_factor": _factors(file, SHORT_FACTORS),
            "attention_factor": keys.number("rope.scaling.attn_factor", amplitude),
            "original_max_position_embeddings": before,
        }
    kind = keys.values.get("rope.scaling.type", "none")
    if "rope.scale_linear" in keys.values:
        kind = "linear"
    if kind == "none":
        return {}
    if kind not in ("linear", "yarn") or keys.values.get("rope.scaling.attn_factor"):
        raise KvlatheError(
            f"{file.path.name} scales RoPE in the way {kind!r}",
            "linear and yarn are read, without a factor of the scores",
            "give the checkpoint that the file was made of",
        )
    older = "rope.scale_linear"
    factor = keys.number(older if older in keys.values else "rope.scaling.factor")
    if kind == "linear":
        return {"rope_type": kind, "factor": factor}
    betas = {f"beta_{x}": f"rope.scaling.yarn_beta_{x}" for x in ("fast", "slow")}
    given: Config = {
        own: keys.number(name) for own, name in betas.items() if name in keys.values
    }
    return given | {
        "rope_type": kind,
        "factor": factor,
        "original_max_position_embeddings": keys.whole(original),
    }


def _factors(file: GgufFile, name: str) -> list[float]:
    """A tensor of float32."""
    stored = file.tensors[name]
    if stored.kind != "F32":
        raise KvlatheError(
            f"{file.path.name} stores {name} as {stored.kind}",
            "factors of RoPE are read as F32",
            "convert the model again",
        )
    numbers = file.rows_of(stored).reshape(-1).view(np.float32)
    return [float(str(x)) for x in numbers]
