"""The shard of this worker of vLLM (its rank of tensor parallelism), and what it
keeps."""

from __future__ import annotations

from collections.abc import Iterator

from torch import nn
from vllm.config import ModelConfig, VllmConfig
from vllm.distributed import get_tensor_model_parallel_rank
from vllm.logger import init_logger
from vllm.model_executor.model_loader.default_loader import DefaultModelLoader

from kvlathe.base.errors import KvlatheError
from kvlathe_vllm.dealt import Dealt, Named
from kvlathe_vllm.hosted import Hosted, hosted

log = init_logger("vllm.kvlathe")
BY_NAME = (
    "auto",
    "hf",
    "safetensors",
    "fastsafetensors",
    "instanttensor",
    "npcache",
    "pt",
)
"""Formats of checkpoints that DefaultModelLoader reads by the names of transformers."""
RANDOM = "dummy"
_made: list[Dealt] = []
"""The deal of this process; none where another backend attends, or one shard has all
heads."""


def of_this_worker(config: VllmConfig) -> Hosted:
    """Raises KvlatheError where heads cannot be dealt."""
    whole = hosted(config.additional_config)
    num_shards = config.parallel_config.tensor_parallel_size
    if num_shards == 1:
        return whole
    shard = get_tensor_model_parallel_rank()
    if not _made or _made[0].whole is not whole or _made[0].num_shards != num_shards:
        made = Dealt(whole, num_shards)
        if made.changed:
            _check_reading(config)
        _made[:] = [made]
        if shard == 0:
            log.info(
                "heads are dealt to %d shards; blocks have %.3f times the bytes that"
                " they hold",
                num_shards,
                made.padding,
            )
    return _made[0].engines[shard]


def _check_reading(config: VllmConfig) -> None:
    """Whether all weights of attention pass read_as_dealt."""
    form = str(config.load_config.load_format)
    reason = ""
    if form not in (*BY_NAME, RANDOM):
        reason = f"--load-format {form} does not read tensors by their names"
    if config.lora_config is not None:
        reason = "adapters of LoRA are cut in the order of the checkpoint"
    if getattr(config, "weight_transfer_config", None) is not None:
        reason = "a trainer sends weights in an order of its own"
    if reason:
        raise KvlatheError(
            "heads of unlike bytes cannot be dealt to shards here",
            f"they are put into another order, and {reason}",
            "start vLLM without it, or with --tensor-parallel-size 1",
        )


def read_as_dealt() -> None:
    """vLLM's workers cut tensors in their order, so they are read in that of the deal.
    The layers of a model, which deal, are made before its weights are read."""
    before = DefaultModelLoader.get_all_weights

    def get_all_weights(
        self: DefaultModelLoader, model_config: ModelConfig, model: nn.Module
    ) -> Iterator[Named]:
        tensors = before(self, model_config, model)
        return _made[0].arranged(tensors) if _made else tensors

    DefaultModelLoader.get_all_weights = get_all_weights
