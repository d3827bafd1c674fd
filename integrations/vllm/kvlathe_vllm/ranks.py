"""Which rank of vLLM's tensor parallelism this process is, and what it keeps."""

from __future__ import annotations

from collections.abc import Iterator

from torch import nn
from vllm.config import ModelConfig, VllmConfig, get_current_vllm_config
from vllm.distributed import get_tensor_model_parallel_rank
from vllm.logger import init_logger
from vllm.model_executor.model_loader.default_loader import DefaultModelLoader

from kvlathe.base.errors import KvlatheError
from kvlathe_vllm.dealt import Dealt, Named
from kvlathe_vllm.hosted import Hosted, hosted, named

log = init_logger("vllm.kvlathe")
LIKE_HUGGING_FACE = ("auto", "hf", "safetensors", "pt")
"""Formats of checkpoints whose tensors have the names of transformers."""
_dealt: list[Dealt] = []
"""Of this process."""


def dealt(config: VllmConfig) -> Dealt:
    whole = hosted(config.additional_config)
    ranks = config.parallel_config.tensor_parallel_size
    if not _dealt or _dealt[0].whole is not whole or _dealt[0].ranks != ranks:
        _dealt[:] = [Dealt(whole, ranks)]
        if get_tensor_model_parallel_rank() == 0:
            log.info(
                "heads are dealt to %d ranks; blocks have %.3f times the bytes that"
                " they hold",
                ranks,
                _dealt[0].padding,
            )
    return _dealt[0]


def of_this_rank(config: VllmConfig) -> Hosted:
    """Raises KvlatheError where heads cannot be dealt."""
    if config.parallel_config.tensor_parallel_size == 1:
        return hosted(config.additional_config)
    return dealt(config).engines[get_tensor_model_parallel_rank()]


def read_as_dealt() -> None:
    """vLLM's ranks cut tensors in their order, so they are read in that of the deal."""
    before = DefaultModelLoader.get_all_weights

    def get_all_weights(
        self: DefaultModelLoader, model_config: ModelConfig, model: nn.Module
    ) -> Iterator[Named]:
        tensors = before(self, model_config, model)
        config = get_current_vllm_config()
        ranks = config.parallel_config.tensor_parallel_size
        if ranks == 1 or named(config.additional_config) is None:
            return tensors
        form = str(self.load_config.load_format)
        if form not in LIKE_HUGGING_FACE:
            raise KvlatheError(
                f"checkpoints of the format {form} cannot be dealt to {ranks} ranks",
                "their tensors have other names",
                "start vLLM with --load-format safetensors",
            )
        return dealt(config).arranged(tensors)

    DefaultModelLoader.get_all_weights = get_all_weights
