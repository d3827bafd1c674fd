"""Substeps of a step: the sequences that pass a stage and, for sessions that pad, those
of them that are alike in size.

The exported function computes squares: [sequences, most queries] by the most cached
pages of any of them. One prompt chunk of 512 beside 7 decodes would cost 8 chunks
(lathe-27m at 1 K context: 3.9 s of processor time together, 0.6 s apart); one sequence
of 900 tokens beside 22 of 20 would cost 23 long ones. Native kernels need none of it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

import numpy as np
import numpy.typing as npt

from kvlathe.runtime.sessions.protocols import StepPlan
from kvlathe.runtime.sessions.substeps import Substep, passing, substep_of, whole


def by_size(step: StepPlan, stage: int, page_tokens: int) -> Iterator[Substep]:
    """Substeps of what passes a stage: together the sequences whose query counts have
    equally many binary digits, and whose cached pages do. The page tables of a substep
    are as wide as its longest sequence needs.

    Sequences without queries are left out unless there is only one size.
    """
    if len(step.lengths) == 1:
        yield from whole(step, stage)
        return
    counts = np.diff(step.cu_seqlens_q)
    active = passing(step, stage) & (counts > 0)
    pages = _pages(step, page_tokens)
    kinds = np.stack([_digits(counts), _digits(pages.sum(1))], axis=1)
    sizes = np.unique(kinds[active], axis=0)
    if len(sizes) < 2:
        yield from whole(step, stage)
        return
    for size in sizes:
        chosen = active & (kinds == size).all(1)
        substep = substep_of(step, chosen)
        yield substep._replace(step=_narrowed(substep.step, pages[chosen].max(0)))


def _digits(counts: npt.NDArray[np.integer]) -> npt.NDArray[np.integer]:
    """The number of binary digits of each count."""
    return np.frexp(counts)[1]


def _pages(step: StepPlan, page_tokens: int) -> npt.NDArray[np.integer]:
    """Pages [B, buckets] that hold each sequence's cached tokens and its new ones."""
    return -(-(step.lengths + np.diff(step.cu_seqlens_q)[:, None]) // page_tokens)


def _narrowed(step: StepPlan, pages: npt.NDArray[np.integer]) -> StepPlan:
    """The step with page tables of at most ``pages`` [buckets] columns."""
    tables = (
        np.ascontiguousarray(table[:, : max(1, width)])
        for table, width in zip(step.page_tables, pages.tolist(), strict=True)
    )
    return dataclasses.replace(step, page_tables=tuple(tables))
