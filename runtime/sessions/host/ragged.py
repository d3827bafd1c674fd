"""Shares of a step: the sequences that pass a stage and, for sessions that pad, those
of them that are alike in size.

The exported function computes squares: [sequences, most queries] by the most cached
pages of any of them. One prompt chunk of 512 beside 7 decodes would cost 8 chunks
(lathe-27m at 1 K context: 3.9 s of processor time together, 0.6 s apart); one sequence
of 900 tokens beside 22 of 20 would cost 23 long ones. Native kernels need none of it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from kvlathe.runtime.sessions.protocols import Int32, StepPlan


class Share(NamedTuple):
    """Some ``sequences`` of a step as a step of their own; the places of their tokens
    and of their logit rows in it."""

    step: StepPlan
    sequences: Int32 | slice
    tokens: Int32 | slice
    logits: Int32 | slice


def passing(step: StepPlan, stage: int) -> npt.NDArray[np.bool_]:
    """Which sequences pass a stage, [B]."""
    if step.stages is None:
        return np.ones(len(step.lengths), np.bool_)
    first = step.stages[:, 0]
    end = step.stages[:, 1]
    return (first <= stage) & (stage < end)


def whole(step: StepPlan, stage: int, page_tokens: int = 0) -> Iterator[Share]:
    """Everything that passes a stage, if anything does."""
    present = passing(step, stage)
    if present.all():
        yield Share(step, slice(None), slice(None), slice(None))
    elif present.any():
        yield _share(step, present)


def by_size(step: StepPlan, stage: int, page_tokens: int) -> Iterator[Share]:
    """What passes a stage: together the sequences whose query counts have equally many
    binary digits, and whose cached pages do. The page tables of a share are as wide as
    its longest sequence needs.

    Sequences without queries are left out unless there is only one size.
    """
    if len(step.lengths) == 1:
        yield from whole(step, stage)
        return
    counts = np.diff(step.cu_seqlens_q)
    present = passing(step, stage)
    active = present & (counts > 0)
    pages = _pages(step, page_tokens)
    kinds = np.stack([_digits(counts), _digits(pages.sum(1))], axis=1)
    sizes = np.unique(kinds[active], axis=0)
    if len(sizes) < 2:
        yield from whole(step, stage)
        return
    for size in sizes:
        chosen = active & (kinds == size).all(1)
        share = _share(step, chosen)
        yield share._replace(step=_narrowed(share.step, pages[chosen].max(0)))


def _digits(counts: npt.NDArray[np.integer]) -> npt.NDArray[np.integer]:
    """How many binary digits each count has."""
    return np.frexp(counts)[1]


def _pages(step: StepPlan, page_tokens: int) -> npt.NDArray[np.integer]:
    """Pages [B, buckets] that hold each sequence's cached tokens and its new ones."""
    counts = np.diff(step.cu_seqlens_q)
    return -(-(step.lengths + counts[:, None]) // page_tokens)


def _narrowed(step: StepPlan, pages: npt.NDArray[np.integer]) -> StepPlan:
    """The step with page tables of at most ``pages`` [buckets] columns."""
    tables = (
        np.ascontiguousarray(table[:, : max(1, width)])
        for table, width in zip(step.page_tables, pages.tolist(), strict=True)
    )
    return dataclasses.replace(step, page_tables=tuple(tables))


def _share(step: StepPlan, chosen: npt.NDArray[np.bool_]) -> Share:
    """The share of the ``chosen`` sequences [B]."""
    counts = np.diff(step.cu_seqlens_q)
    tokens = np.flatnonzero(np.repeat(chosen, counts)).astype(np.int32)
    new_place = np.full(len(step.input_ids), -1, np.int32)
    new_place[tokens] = np.arange(len(tokens), dtype=np.int32)
    rows = new_place[step.logit_rows]
    weights = step.observation_weights
    part = dataclasses.replace(
        step,
        input_ids=step.input_ids[tokens],
        positions=step.positions[tokens],
        cu_seqlens_q=np.concatenate([[0], np.cumsum(counts[chosen])]).astype(np.int32),
        query_offsets=np.arange(counts[chosen].max(), dtype=np.int32),
        lengths=step.lengths[chosen],
        page_tables=tuple(table[chosen] for table in step.page_tables),
        logit_rows=rows[rows >= 0],
        observation_weights=None if weights is None else weights[tokens],
    )
    return Share(
        part,
        np.flatnonzero(chosen).astype(np.int32),
        tokens,
        np.flatnonzero(rows >= 0).astype(np.int32),
    )
