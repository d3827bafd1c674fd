"""StepPlan and Session: one packed step in, logits and rows to append out. Every backend offers this."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt

Int32 = npt.NDArray[np.int32]
Float32 = npt.NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class StepPlan:
    """One packed step of any mix of prefill chunks and decodes. All int32. docs/attend.md gives the meaning.

    Arrays may be padded to a capacity: tokens past ``query_starts[-1]`` belong to nobody, sequences past the real ones
    have no queries and length 0.
    """

    input_ids: Int32  # [T]
    positions: Int32  # [T]
    query_starts: Int32  # [B+1]
    query_offsets: Int32  # [Q]
    lengths: Int32  # [B, S] tokens cached before this step
    page_tables: tuple[Int32, ...]  # S arrays [B, M_b], with the pages of this step's tokens already reserved
    logit_rows: Int32  # [R] rows of input_ids whose next-token logits are wanted
    stages: Int32 | None = None  # [B, 2] the stages that each sequence passes: first, end; None: all of them
    probe_weights: npt.NDArray[np.float32] | None = None  # [T] 1 for rows whose attention is observed, else 0
    mass: npt.NDArray[np.float32] | None = None  # [B, lanes, N] zeros; then what they give (docs/attend.md)
    hidden: npt.NDArray[np.float32] | None = None  # [T, D] rows that enter past stage 0; then those that leave early


@dataclass(frozen=True, slots=True)
class Scores:
    """Of a sequence's tokens in one bucket, [lanes of the bucket, tokens]: the probe mass of each, and its position
    where the plan keeps those."""

    mass: Float32
    position: Int32 | None


class PageMover(Protocol):
    """The calls that move whole pages: all that page accounting needs to know of a session."""

    def copy_page(self, bucket: int, source: int, target: int) -> None:
        """Copy on write."""
        ...

    def read_page(self, bucket: int, page: int) -> bytes:
        """Swap out: the page's bytes."""
        ...

    def write_page(self, bucket: int, page: int, data: bytes) -> None:
        """Swap in."""
        ...


class Session(PageMover, Protocol):
    """A loaded engine. ``run`` computes; the other calls change the pool between steps, on whole pages."""

    def run(self, step: StepPlan) -> npt.NDArray[np.float32]:
        """Logits [R, vocab]; the step's rows are written to the places after ``lengths`` in the fresh buckets, and what
        observed rows attended is added to the scores of the pages.

        Where ``step.mass`` is given, it holds the observed rows' attention afterwards: of all kept lanes, layer by
        layer. Where ``step.stages`` is given, only those of the layers that each sequence passes are computed, and
        ``step.hidden`` holds afterwards what its tokens leave with.
        """
        ...

    def unobserve(self) -> None:
        """The scores are again what they were before the last ``run``: its step is rolled back."""
        ...

    def seal(self, fresh: int, page: int, cold_pages: tuple[int, ...], position: int) -> None:
        """Quantize full page ``page`` of fresh bucket ``fresh`` into one page of each of its cold buckets, in order.

        ``position``: place of the page's first token in its sequence, which stochastic rounding depends on.
        """
        ...

    def scores(self, bucket: int, pages: Sequence[int], tokens: int) -> Scores:
        """Of the first ``tokens`` tokens in ``pages`` of a bucket whose tokens are ranked."""
        ...

    def move(
        self, source: int, pages: Sequence[int], target: int, target_pages: Sequence[int], places: npt.NDArray[np.int64]
    ) -> None:
        """Write tokens of a sequence, with their scores, into new pages of bucket ``target``, in its number format.

        ``places`` [lanes of the target, n]: for each lane (in lane order) the places of its tokens in ``pages`` of
        bucket ``source``, ascending. Within a bucket the bytes stay what they are; else the target's pages are filled.
        """
        ...

    def forget(self, bucket: int, pages: Sequence[int]) -> None:
        """The probe mass of all tokens in ``pages`` is 0 from now on."""
        ...
