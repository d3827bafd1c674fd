"""Patches by which the tables of blocks that vLLM writes to the GPU are known here."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

from torch import Tensor

from kvlathe.plan.kernel_forms import UNPROVEN
from kvlathe_vllm.host_tables import HostRows, Int32, note

RUNNER = "vllm.v1.worker.gpu.model_runner"
"""vLLM's newer runner. The older one has its tables on the host, and lends none."""
ROWS = "kvlathe_rows"
"""The attribute of a table of vLLM that has its HostRows."""


def watch() -> None:
    """Keep what this process's runner writes into its tables. Does nothing beside the
    older runner, and where it was called before."""
    if RUNNER not in sys.modules or os.environ.get(UNPROVEN) != "1":
        return
    from vllm.v1.worker.gpu.model_runner import GPUModelRunner

    if not hasattr(GPUModelRunner, "kvlathe_watched"):
        GPUModelRunner.kvlathe_watched = True
        _keep_what_is_written()
        _note_steps()


def _keep_what_is_written() -> None:
    from vllm.v1.worker.gpu.block_table import BlockTables
    from vllm.v1.worker.gpu.buffer_utils import StagedWriteTensor

    append, stage = BlockTables.append_block_ids, StagedWriteTensor.stage_write

    def append_block_ids(
        self: BlockTables,
        req_index: int,
        new_block_ids: tuple[list[int], ...],
        overwrite: bool,
    ) -> None:
        for table in self.block_tables:
            if not hasattr(table, ROWS):
                setattr(table, ROWS, HostRows())
        append(self, req_index, new_block_ids, overwrite)

    def stage_write(
        self: StagedWriteTensor, index: int, start: int, x: Sequence[int]
    ) -> None:
        stage(self, index, start, x)
        if hasattr(self, ROWS):
            getattr(self, ROWS).write(index, int(start), x)

    BlockTables.append_block_ids = append_block_ids
    StagedWriteTensor.stage_write = stage_write


def _note_steps() -> None:
    from vllm.v1.worker.gpu.input_batch import InputBatch
    from vllm.v1.worker.gpu.model_runner import GPUModelRunner

    prepare = GPUModelRunner.prepare_attn

    def prepare_attn(
        self: GPUModelRunner, input_batch: InputBatch
    ) -> tuple[tuple[Tensor, ...], Tensor]:
        tables, slots = prepare(self, input_batch)
        said: dict[int, Int32] = {}
        if getattr(self, "pcp_manager", None) is None:  # else its tables are others
            for table, own in zip(tables, self.block_tables.block_tables, strict=True):
                if hasattr(own, ROWS):
                    rows = getattr(own, ROWS).of(input_batch.idx_mapping_np)
                    said[table.data_ptr()] = rows
        note(said)
        return tables, slots

    GPUModelRunner.prepare_attn = prepare_attn
