"""GGUF files of tiny models, written as llama.cpp's converter writes them: with the gguf
package's names of tensors and keys, q and k of some architectures in pairs, norms of
Gemma with their 1, and experts in one stack."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from gguf.constants import MODEL_ARCH_NAMES
from torch import Tensor
from transformers import PreTrainedModel

from tests.support.families.plain import longrope
from tests.support.families.sizes import PHI, sizes

Writer = gguf.GGUFWriter
Kind = gguf.GGMLQuantizationType
NORMAL, UNKNOWN, CONTROL, USER_DEFINED, BYTE = 1, 2, 3, 4, 6


@dataclass(frozen=True)
class Case:
    """A model of transformers and the architecture that it is written as. ``paired``:
    rows of q and k are written in pairs. ``keys`` writes what this kind alone has."""

    arch: str
    kind: str
    settings: dict[str, Any]
    paired: bool = False
    norm_offset: float = 0.0
    keys: Callable[[Writer, Any], None] = lambda writer, config: None
    extra: dict[str, Callable[[Any], Sequence[float]]] = field(default_factory=dict)


def small(**more: object) -> dict[str, Any]:
    """Rows of every map are whole blocks of 32."""
    return sizes(64, 4, 2, intermediate_size=96) | more


def llama3_factors(config: Any) -> list[float]:  # noqa: ANN401
    """Of each plane, as Llama 3.1's paper and its converter give them."""
    said = config.rope_parameters
    planes = np.arange(0, config.head_dim, 2) / config.head_dim
    lengths = 2 * np.pi * said["rope_theta"] ** planes
    original, factor = said["original_max_position_embeddings"], said["factor"]
    low, high = said["low_freq_factor"], said["high_freq_factor"]
    smooth = (original / lengths - low) / (high - low)
    between = 1 / ((1 - smooth) / factor + smooth)
    ends = np.where(lengths > original / low, factor, between)
    return np.where(lengths < original / high, 1.0, ends).tolist()


def granite_keys(writer: Writer, config: Any) -> None:  # noqa: ANN401
    writer.add_attention_scale(config.attention_multiplier)
    writer.add_embedding_scale(config.embedding_multiplier)
    writer.add_residual_scale(config.residual_multiplier)
    writer.add_logit_scale(config.logits_scaling)


def yarn_keys(writer: Writer, config: Any) -> None:  # noqa: ANN401
    writer.add_rope_scaling_type(gguf.RopeScalingType.YARN)
    writer.add_rope_scaling_factor(config.rope_parameters["factor"])
    writer.add_rope_scaling_orig_ctx_len(64)


def gemma2_keys(writer: Writer, config: Any) -> None:  # noqa: ANN401
    writer.add_attn_logit_softcapping(config.attn_logit_softcapping)
    writer.add_final_logit_softcapping(config.final_logit_softcapping)
    writer.add_sliding_window(config.sliding_window)


def gemma3_keys(writer: Writer, config: Any) -> None:  # noqa: ANN401
    writer.add_sliding_window(config.sliding_window)
    writer.add_rope_scaling_type(gguf.RopeScalingType.LINEAR)
    writer.add_rope_scaling_factor(8.0)


def expert_keys(writer: Writer, config: Any) -> None:  # noqa: ANN401
    writer.add_expert_count(config.num_experts)
    writer.add_expert_used_count(config.num_experts_per_tok)
    writer.add_expert_feed_forward_length(config.moe_intermediate_size)


def phi3_keys(writer: Writer, config: Any) -> None:  # noqa: ANN401
    writer.add_sliding_window(config.sliding_window or 0)
    writer.add_rope_scaling_orig_ctx_len(64)


LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
YARN = {"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 64}
MULTIPLIERS = {
    "attention_multiplier": 0.3,
    "embedding_multiplier": 3.0,
    "residual_multiplier": 0.5,
    "logits_scaling": 2.0,
}
GEMMA3_ROPES = {
    "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
    "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
}
EXPERTS = {
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "norm_topk_prob": True,
    "decoder_sparse_step": 1,
}

CASES = {
    "llama": Case("llama", "Llama", small(rope_theta=1e5), paired=True),
    "llama-biased-d32": Case(
        "llama",
        "Llama",
        sizes(64, 4, 1, 32, intermediate_size=96, attention_bias=True, mlp_bias=True),
        paired=True,
    ),
    "llama3-tied": Case(
        "llama",
        "Llama",
        small(tie_word_embeddings=True, rope_theta=5e5, rope_scaling=LLAMA3),
        paired=True,
        extra={"rope_freqs.weight": llama3_factors},
    ),
    "mistral": Case("llama", "Mistral", small(sliding_window=None), paired=True),
    "granite": Case(
        "granite", "Granite", small(**MULTIPLIERS), paired=True, keys=granite_keys
    ),
    "smollm3": Case(
        "smollm3", "SmolLM3", small(num_hidden_layers=5, pad_token_id=0), paired=True
    ),
    "qwen2": Case("qwen2", "Qwen2", small(tie_word_embeddings=True)),
    "qwen2-yarn": Case("qwen2", "Qwen2", small(rope_scaling=YARN), keys=yarn_keys),
    "qwen3": Case("qwen3", "Qwen3", small(head_dim=32)),
    "qwen3moe": Case(
        "qwen3moe", "Qwen3Moe", small(head_dim=16, **EXPERTS), keys=expert_keys
    ),
    "phi3-window": Case(
        "phi3", "Phi3", small(sliding_window=16, **PHI), keys=phi3_keys
    ),
    "phi3-longrope": Case(
        "phi3",
        "Phi3",
        small(rope_scaling=longrope(8), original_max_position_embeddings=64, **PHI),
        keys=phi3_keys,
        extra={
            "rope_factors_long.weight": lambda c: c.rope_parameters["long_factor"],
            "rope_factors_short.weight": lambda c: c.rope_parameters["short_factor"],
        },
    ),
    "gemma2": Case(
        "gemma2",
        "Gemma2",
        small(head_dim=32, sliding_window=20, query_pre_attn_scalar=32),
        norm_offset=1.0,
        keys=gemma2_keys,
    ),
    "gemma3": Case(
        "gemma3",
        "Gemma3Text",
        small(
            head_dim=32,
            num_hidden_layers=7,
            sliding_window=20,
            query_pre_attn_scalar=32,
            rope_parameters=GEMMA3_ROPES,
        ),
        norm_offset=1.0,
        keys=gemma3_keys,
    ),
}


def write_gguf(
    path: Path,
    model: PreTrainedModel,
    case: Case,
    kind: str = "F32",
    more: Callable[[Writer], None] = lambda writer: None,
) -> None:
    """The model's weights, its matrices as ``kind``. ``more`` writes further keys: by
    default there is no tokenizer."""
    config, writer = model.config, Writer(path, case.arch)
    write_sizes(writer, config)
    case.keys(writer, config)
    more(writer)
    arch = next(a for a, name in MODEL_ARCH_NAMES.items() if name == case.arch)
    names = gguf.get_tensor_name_map(arch, config.num_hidden_layers)
    for name, tensor in stacked(model).items():
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        own = names.get_name(name, try_suffixes=(".weight", ".bias"))
        assert own is not None, name
        add(writer, own, converted(name, tensor, case, config), kind)
    for name, numbers in case.extra.items():
        add(writer, name, torch.tensor(numbers(config)), "F32")
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def write_sizes(writer: Writer, config: Any) -> None:  # noqa: ANN401
    writer.add_vocab_size(config.vocab_size)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    head_dim = getattr(config, "head_dim", None)
    if head_dim is not None:
        writer.add_key_length(head_dim)
        writer.add_value_length(head_dim)
    said = config.rope_parameters
    writer.add_rope_freq_base(said.get("full_attention", said)["rope_theta"])


def stacked(model: PreTrainedModel) -> dict[str, Tensor]:
    """A model's tensors; maps of experts as [E, out, in], gate and up apart."""
    found: dict[str, Tensor] = {}
    for name, tensor in model.state_dict().items():
        if name.endswith("experts.gate_up_proj"):
            gate, up = tensor.chunk(2, 1)
            base = name.removesuffix("gate_up_proj")
            found |= {f"{base}gate_proj.weight": gate, f"{base}up_proj.weight": up}
        elif name.endswith("experts.down_proj"):
            found[f"{name}.weight"] = tensor
        else:
            found[name] = tensor
    return found


def converted(name: str, tensor: Tensor, case: Case, config: Any) -> Tensor:  # noqa: ANN401
    """As the converter changes it."""
    if name.endswith("norm.weight"):
        return tensor + case.norm_offset
    if case.paired and (found := re.search(r"\.(q|k)_proj\.", name)):
        q, kv = config.num_attention_heads, config.num_key_value_heads
        heads = q if found[1] == "q" else kv
        return tensor.unflatten(0, (heads, 2, -1)).transpose(1, 2).flatten(0, 2)
    return tensor


def add(writer: Writer, name: str, tensor: Tensor, kind: str) -> None:
    numbers = tensor.detach().float().contiguous().numpy()
    if tensor.ndim == 1 or kind == "F32":
        writer.add_tensor(name, numbers)
        return
    known = Kind[kind]
    writer.add_tensor(name, gguf.quantize(numbers, known), raw_dtype=known)


def rounded(model: PreTrainedModel, kind: str) -> None:
    """Round the matrices of a model as ``kind`` does."""
    known = Kind[kind]
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.ndim > 1:
                flat = parameter.flatten(0, -2).numpy()
                back = gguf.dequantize(gguf.quantize(flat, known), known)
                parameter.copy_(torch.from_numpy(back).view(parameter.shape))
            assert name
