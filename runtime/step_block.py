"""A step's integers in one block of int32, which one copy brings to a GPU; and which steps repeat themselves.

A decode step (one token of every sequence) runs in a CUDA graph of the next larger batch size of a ladder, so all its
arrays have fixed sizes. What belongs to nobody stays zero.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import prod
from typing import Any

from kvlathe.engines.manifest import Limits
from kvlathe.errors import KvlatheError
from kvlathe.export.plan import CompressionPlan
from kvlathe.runtime.session import StepPlan

LADDER = (1, 2, 4, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512)
"""Batch sizes that get a graph; a batch runs in the next larger one."""
ALIGNED = 64
"""Elements: arrays begin at multiples of 256 bytes."""


@dataclass(frozen=True)
class StepForm:
    """Sizes of a step: ``tokens``, sequences, logit rows, and the pages of each bucket's table."""

    tokens: int
    batch: int
    rows: int
    widths: tuple[int, ...]

    @classmethod
    def of(cls, step: StepPlan) -> StepForm:
        """Just large enough for a step."""
        widths = tuple(table.shape[1] for table in step.page_tables)
        return cls(len(step.input_ids), len(step.query_starts) - 1, len(step.logit_rows), widths)

    @cached_property
    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        return {
            "input_ids": (self.tokens,),
            "positions": (self.tokens,),
            "query_starts": (self.batch + 1,),
            "lengths": (self.batch, len(self.widths)),
            "logit_rows": (self.rows,),
            **{f"page_table_{b}": (self.batch, width) for b, width in enumerate(self.widths)},
        }

    @cached_property
    def places(self) -> Mapping[str, int]:
        """Where each array begins in the block."""
        at, places = 0, {}
        for name, shape in self.shapes.items():
            places[name] = at
            at += -(-prod(shape) // ALIGNED) * ALIGNED
        return places

    @cached_property
    def size(self) -> int:
        """Of the block, in elements."""
        return sum(-(-prod(shape) // ALIGNED) * ALIGNED for shape in self.shapes.values())

    def cut(self, block: Any) -> dict[str, Any]:  # noqa: ANN401  an array of numpy or a tensor of torch
        """Its arrays, as views of a block."""
        return {
            name: block[self.places[name] : self.places[name] + prod(shape)].reshape(shape)
            for name, shape in self.shapes.items()
        }

    def write(self, step: StepPlan, arrays: Mapping[str, Any]) -> None:
        """A step of at most these sizes into the arrays of a block whose rest is zero, or was a step before."""
        tokens, batch, rows = len(step.input_ids), len(step.query_starts) - 1, len(step.logit_rows)
        arrays["input_ids"][:tokens], arrays["positions"][:tokens] = step.input_ids, step.positions
        arrays["query_starts"][: batch + 1], arrays["query_starts"][batch + 1 :] = step.query_starts, tokens
        arrays["lengths"][:batch], arrays["lengths"][batch:] = step.lengths, 0
        arrays["logit_rows"][:rows], arrays["logit_rows"][rows:] = step.logit_rows, 0
        for b, table in enumerate(step.page_tables):
            arrays[f"page_table_{b}"][:batch, : table.shape[1]] = table


def is_decode(step: StepPlan, widths: Sequence[int]) -> bool:
    """Whether a step is one token and one row of logits of every sequence, in page tables no wider than ``widths``."""
    batch = len(step.query_starts) - 1
    one = len(step.input_ids) == len(step.logit_rows) == batch and len(step.query_offsets) == 1
    fits = all(t.shape[1] <= width for t, width in zip(step.page_tables, widths, strict=True))
    return one and fits and bool((step.query_starts[1:] > step.query_starts[:-1]).all())


def most_pages(plan: CompressionPlan, bucket: int, tokens: int) -> int:
    """Pages of a bucket that a decoding sequence of up to ``tokens`` tokens can have."""
    hot = plan.prefill_chunk + plan.page_tokens if plan.cold(bucket) else tokens
    return -(-min(tokens, hot) // plan.page_tokens) + 1


def check_step(step: StepPlan, limits: Limits) -> None:
    """Raises KvlatheError for a step beyond the profile."""
    for count, limit, flag in (
        (len(step.input_ids), limits.max_num_tokens, "max_num_tokens"),
        (len(step.query_starts) - 1, limits.max_batch_size, "max_batch_size"),
    ):
        if count > limit:
            raise KvlatheError(
                f"a step of {count} exceeds this engine", f"its {flag} is {limit}", f"build with a larger --{flag}"
            )
