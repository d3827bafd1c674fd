"""Patches by which vLLM is told of the backend, and of the bytes of each layer's
blocks."""

from __future__ import annotations

import dataclasses

import torch
from vllm.config import VllmConfig
from vllm.model_executor.layers.attention.attention import Attention
from vllm.platforms import current_platform
from vllm.utils.import_utils import resolve_obj_by_qualname
from vllm.v1.attention.backend import AttentionBackend
from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend
from vllm.v1.kv_cache_interface import (
    AttentionSpec,
    FullAttentionSpec,
    KVCacheSpec,
    SlidingWindowSpec,
)

from kvlathe.base.errors import KvlatheError
from kvlathe_vllm.hosted import named
from kvlathe_vllm.worker import of_this_worker, read_as_dealt

BACKEND = "kvlathe_vllm.backend.KvlatheBackend"
NAME = "CUSTOM"
DRAFT = "draft_model."
"""The beginning of the names of a draft's layers."""


def install() -> None:
    """``--attention-backend CUSTOM`` is ours; where vLLM knows one backend alone, as on
    CPUs, ours takes its place if the environment names an engine."""
    if getattr(Attention, "kvlathe_installed", False):
        return
    Attention.kvlathe_installed = True
    register_backend(AttentionBackendEnum.CUSTOM, BACKEND)
    if current_platform.is_cpu() and named() is not None:
        register_backend(AttentionBackendEnum.CPU_ATTN, BACKEND)
        _drafts_as_before()
    _sizes_by_layer()
    read_as_dealt()


def _drafts_as_before() -> None:
    """Layers of a draft model keep vLLM's own cache: the plan is for the other model."""
    before = Attention.__init__

    def __init__(self: Attention, *given: object, **named: object) -> None:
        if str(named.get("prefix", "")).startswith(DRAFT):
            own = resolve_obj_by_qualname(AttentionBackendEnum.CPU_ATTN.value)
            named["attn_backend"] = own
        before(self, *given, **named)

    Attention.__init__ = __init__


def _sizes_by_layer() -> None:
    """vLLM asks a backend for bytes without naming the layer, so the layer is asked."""
    before = Attention.get_kv_cache_spec

    def get_kv_cache_spec(self: Attention, vllm_config: VllmConfig) -> KVCacheSpec:
        spec = before(self, vllm_config)
        if self.attn_backend.get_name() != NAME:
            return spec
        return _spec(self.layer_name, spec, vllm_config)

    Attention.get_kv_cache_spec = get_kv_cache_spec


def _spec(layer_name: str, spec: KVCacheSpec, config: VllmConfig) -> KVCacheSpec:
    """The layer's blocks as raw bytes. Raises KvlatheError for what a plan cannot
    be."""
    from vllm.model_executor.models.utils import extract_layer_index

    engine = of_this_worker(config)
    if layer_name.startswith(DRAFT):
        raise KvlatheError(
            "layers of a draft model cannot have compressed blocks",
            "the plan is for the model that the draft guesses for",
            "name another attention_backend in --speculative-config",
        )
    if type(spec) not in (FullAttentionSpec, SlidingWindowSpec):
        raise KvlatheError(
            f"{layer_name} cannot have compressed blocks",
            f"vLLM gives it a {type(spec).__name__}",
            "serve a model whose layers attend all tokens, or a window of the newest",
        )
    page = engine.plan.page_tokens
    if spec.block_size % page:
        raise KvlatheError(
            f"blocks of {spec.block_size} tokens hold no whole pages",
            f"the plan's pages have {page}",
            f"start vLLM with --block-size {page}",
        )
    layer = extract_layer_index(layer_name)
    window = engine.window(layer, getattr(spec, "sliding_window", None))
    kept = {
        field.name: getattr(spec, field.name)
        for field in dataclasses.fields(AttentionSpec)
        if field.init
    }
    kept |= _raw(engine.token_bytes(layer))
    # On a GPU all layers of a step are planned at once, with one block table.
    if window is None or not current_platform.is_cpu():
        return FullAttentionSpec(**kept)
    return SlidingWindowSpec(**kept, sliding_window=window)


def _raw(token_bytes: int) -> dict[str, object]:
    """Fields of a spec whose block is so many bytes a token. vLLM before 0.29 asks the
    backend for the shape of K and V of one head."""
    if hasattr(AttentionBackend, "get_kv_cache_shape"):
        half = token_bytes // 2
        packed = {"num_kv_heads": 1, "head_size": half, "head_size_v": half}
    else:
        packed = {"num_head_slots": 1, "state_content_bytes": token_bytes}
    return {"dtype": torch.uint8, **packed}
