"""The attention backend: metadata of a step, and attention of a layer."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar
from weakref import WeakValueDictionary

import numpy as np
import torch
from torch import Tensor
from vllm.config import SpeculativeConfig, VllmConfig, get_current_vllm_config
from vllm.model_executor.layers.attention.attention import Attention
from vllm.model_executor.models.utils import extract_layer_index
from vllm.v1.attention.backend import (
    AttentionBackend,
    AttentionCGSupport,
    AttentionImpl,
    AttentionMetadata,
    AttentionMetadataBuilder,
    CommonAttentionMetadata,
)
from vllm.v1.kv_cache_interface import KVCacheSpec

from kvlathe.base.errors import KvlatheError
from kvlathe_vllm.calls import Call, Calls, Int32, Step, is_decode
from kvlathe_vllm.cpu import CpuLayer
from kvlathe_vllm.gpu_step import DecodeBuffers, run_next
from kvlathe_vllm.host_tables import take
from kvlathe_vllm.hosted import Hosted, hosted
from kvlathe_vllm.layer import Layer, Most
from kvlathe_vllm.tables import Table, Tables
from kvlathe_vllm.watch import watch
from kvlathe_vllm.worker import of_this_worker

MAKERS: WeakValueDictionary[Table, Maker] = WeakValueDictionary()
"""The makers that the builders of this process have."""
GUESSING = ("ngram", "suffix", "draft_model")
"""What guesses tokens without a cache of its own, or with layers of other names."""


class KvlatheBackend(AttentionBackend):
    supported_dtypes: ClassVar = [torch.float32, torch.float16, torch.bfloat16]
    forward_includes_kv_cache_update = True

    @staticmethod
    def get_name() -> str:
        return "CUSTOM"

    @staticmethod
    def get_impl_cls() -> type[KvlatheImpl]:
        return KvlatheImpl

    @staticmethod
    def get_builder_cls() -> type[KvlatheBuilder]:
        return KvlatheBuilder

    @staticmethod
    def get_supported_kernel_block_sizes(kv_cache_spec: object = None) -> list[int]:
        """The plan's page: larger blocks of vLLM are divided."""
        return [hosted().plan.page_tokens]

    @classmethod
    def supports_sink(cls) -> bool:
        return True

    @classmethod
    def supports_kv_connector(cls) -> bool:
        return False

    @classmethod
    def supported_kv_cache_layouts(cls) -> tuple[object, ...]:
        """Blocks of a layer as they lie, whatever is between them."""
        from vllm.v1.kv_cache_layout import KVCacheLayout

        return KVCacheLayout.LBHNC, KVCacheLayout.BLHNC

    @staticmethod
    def get_kv_cache_shape(
        num_blocks: int,
        block_size: int,
        num_kv_heads: int,
        head_size: int,
        cache_dtype_str: str = "auto",
    ) -> tuple[int, ...]:
        """Asked by vLLM before 0.29: see patch.py."""
        return num_blocks, num_kv_heads, block_size, 2 * head_size


@dataclass
class KvlatheMetadata(AttentionMetadata):
    """``tokens`` of the step, padding aside."""

    tokens: int
    call: Call


class Maker:
    """Makes the metadata of steps, once for all builders that have one block table."""

    def __init__(
        self, engine: Hosted, count: int, guesses: bool, device: torch.device
    ) -> None:
        """``count``: sequences that run at most. ``guesses``: as in Calls."""
        self.calls = Calls(engine.plan, count, guesses)
        self.buffers: DecodeBuffers | None = None
        if device.type == "cuda":
            self.buffers = DecodeBuffers(count, len(engine.plan.index.buckets), device)
        self._last: tuple[CommonAttentionMetadata, KvlatheMetadata] | None = None

    def of(self, m: CommonAttentionMetadata) -> KvlatheMetadata:
        if self._last is None or self._last[0] is not m:
            self._last = (m, self._made(m))
        return self._last[1]

    def _made(self, m: CommonAttentionMetadata) -> KvlatheMetadata:
        count = m.num_reqs
        starts = _numbers(m.query_start_loc_cpu)[: count + 1]
        lengths = self._lengths(m)
        page = self.calls.plan.page_tokens
        pages = (int(lengths.max(initial=1)) + page - 1) // page
        table = m.block_table_tensor[:count]
        blocks = take(m.block_table_tensor.data_ptr(), count, pages)
        if blocks is None:
            blocks = _numbers(table[:, :pages])
        call = self.calls.of(Step(starts, lengths, blocks))
        if self.buffers is not None and is_decode(call):
            run_next(call, self.buffers.send(call, table))
        return KvlatheMetadata(m.num_actual_tokens, call)

    def _lengths(self, m: CommonAttentionMetadata) -> Int32:
        """On a GPU vLLM knows them on the host too: they are exact where it does not
        guess tokens."""
        known = getattr(m, "seq_lens_cpu_upper_bound", None)
        if self.buffers is None or known is None or self.calls.guesses:
            known = m.seq_lens
        return _numbers(known)[: m.num_reqs]


class KvlatheBuilder(AttentionMetadataBuilder[KvlatheMetadata]):
    def __init__(
        self,
        kv_cache_spec: KVCacheSpec,
        layer_names: list[str],
        vllm_config: VllmConfig,
        device: torch.device,
    ) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)
        engine = of_this_worker(vllm_config)
        _check(vllm_config)
        watch()
        self.engine = engine
        self.count = vllm_config.scheduler_config.max_num_seqs
        self.guesses = vllm_config.speculative_config is not None
        self.makers = Tables(MAKERS)

    @classmethod
    def get_cudagraph_support(
        cls, vllm_config: VllmConfig, kv_cache_spec: KVCacheSpec
    ) -> AttentionCGSupport:
        """Decode steps: on a GPU their numbers lie in buffers that stay."""
        return AttentionCGSupport.UNIFORM_SINGLE_TOKEN_DECODE

    def build(
        self,
        common_prefix_len: int,
        common_attn_metadata: CommonAttentionMetadata,
        fast_build: bool = False,
    ) -> KvlatheMetadata:
        """A table of blocks lies where it lay: sequences are told apart by its blocks."""
        table = common_attn_metadata.block_table_tensor
        device = table.device
        known = Table(
            str(self.engine.folder),
            self.count,
            self.guesses,
            str(device),
            table.data_ptr(),
        )
        maker = self.makers.of(
            known, lambda: Maker(self.engine, self.count, self.guesses, device)
        )
        return maker.of(common_attn_metadata)


def _numbers(tensor: Tensor) -> Int32:
    """A copy on the host: vLLM writes the next step into its own."""
    return tensor.cpu().numpy().astype(np.int32)


def _check(config: VllmConfig) -> None:
    """Refuse what would give wrong answers."""
    parallel, model = config.parallel_config, config.model_config
    fact = "vLLM cannot run so with compressed blocks"
    if getattr(parallel, "decode_context_parallel_size", 1) > 1:
        reason = "a page has its tokens together, and workers would share them out"
        raise KvlatheError(fact, reason, "leave out --decode-context-parallel-size")
    if getattr(parallel, "use_ubatching", False):
        reason = "the numbers of a step lie in one place, and two would run at a time"
        raise KvlatheError(fact, reason, "leave out --enable-dbo and --ubatch-size")
    if config.speculative_config is not None:
        _check_guesses(config.speculative_config, fact)
    shape = (
        model.get_num_layers(parallel),
        model.get_num_attention_heads(parallel) * parallel.tensor_parallel_size,
        model.get_total_num_kv_heads(),
        model.get_head_size(),
    )
    hosted(config.additional_config).check_model(shape, model.model)


def _check_guesses(asked: SpeculativeConfig, fact: str) -> None:
    page = hosted().plan.page_tokens
    reason = ""
    if asked.method not in GUESSING:
        reason = f"layers of {asked.method} have K and V that the plan knows nothing of"
    elif asked.num_speculative_tokens >= page:
        reason = f"a step would take back pages: a page has {page} tokens"
    if reason:
        able = " or ".join(GUESSING)
        raise KvlatheError(
            fact,
            reason,
            f"choose {able} in --speculative-config, and fewer than {page} tokens",
        )


class KvlatheImpl(AttentionImpl[KvlatheMetadata]):
    """Attention of one layer."""

    def __init__(
        self,
        num_heads: int,
        head_size: int,
        scale: float,
        num_kv_heads: int | None = None,
        alibi_slopes: list[float] | None = None,
        sliding_window: int | None = None,
        kv_cache_dtype: str = "auto",
        logits_soft_cap: float | None = None,
        attn_type: str = "decoder",
        kv_sharing_target_layer_name: str | None = None,
        sinks: Tensor | None = None,
    ) -> None:
        if alibi_slopes is not None or kv_sharing_target_layer_name is not None:
            raise KvlatheError(
                "this model's cache cannot be compressed here",
                "it has ALiBi, or layers that share a cache",
                "serve it without --attention-backend CUSTOM",
            )
        if attn_type != "decoder":
            raise KvlatheError(
                "this model's attention is not a decoder's",
                f"vLLM calls it {attn_type}",
                "serve it without --attention-backend CUSTOM",
            )
        self.num_heads = num_heads
        self.head_size = head_size
        self.scale = float(scale)
        self.num_kv_heads = num_kv_heads or num_heads
        self.kv_cache_dtype = kv_cache_dtype
        self.sliding_window = sliding_window
        self.softcap = logits_soft_cap or 0.0
        self.sinks = sinks
        config = get_current_vllm_config()
        self.engine = of_this_worker(config)
        scheduler = config.scheduler_config
        self.most = Most(
            scheduler.max_num_seqs,
            scheduler.max_num_batched_tokens,
            config.model_config.max_model_len,
            config.speculative_config is not None,
        )
        self.layer: Layer | None = None

    def forward(
        self,
        layer: Attention,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        kv_cache: Tensor,
        attn_metadata: KvlatheMetadata | None,
        output: Tensor,
        output_scale: Tensor | None = None,
        output_block_scale: Tensor | None = None,
    ) -> Tensor:
        """q, k, v, output [T, heads, d]. Without metadata vLLM measures its memory."""
        if attn_metadata is None:
            return output.zero_()
        own = self._layer(layer, kv_cache, query.dtype)
        rows = slice(0, attn_metadata.tokens)
        output[rows] = own.run(
            query[rows],
            key[rows],
            value[rows],
            attn_metadata.call,
        ).to(output.dtype)
        return output

    def _layer(self, layer: Attention, kv_cache: Tensor, dtype: torch.dtype) -> Layer:
        """Made when vLLM has given the layer its blocks, and again for other ones."""
        own = self.layer
        if own is None or own.span.blocks != kv_cache.data_ptr():
            own = self._made(extract_layer_index(layer.layer_name), kv_cache, dtype)
            self.layer = own
        return own

    def _made(self, index: int, cache: Tensor, dtype: torch.dtype) -> Layer:
        """A layer that attends blocks where they are."""
        sinks = self.sinks
        if sinks is not None:
            sinks = sinks.float().reshape(self.num_kv_heads, -1)
        given = (self.engine, index, cache, self.most, self.scale)
        if cache.device.type == "cpu":
            return CpuLayer(*given, sinks=sinks, softcap=self.softcap)
        from kvlathe_vllm.cuda import CudaLayer

        return CudaLayer(*given, dtype, sinks=sinks)
