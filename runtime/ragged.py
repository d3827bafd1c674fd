"""Ragged steps for sessions that pad: a step becomes one step for each size of chunk, so that padding stays small.

The exported function computes [sequences, most queries] squares. One prompt chunk of 512 beside 7 decodes would cost
8 chunks (lathe-27m at 1 K context: 3.9 s of processor time together, 0.6 s apart). Native kernels need none of it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

import numpy as np

from kvlathe.runtime.session import Int32, StepPlan


def by_size(step: StepPlan) -> Iterator[tuple[StepPlan, Int32 | slice]]:
    """Steps of the sequences whose query counts have equally many binary digits, and the places of their logit rows.

    Together they are ``step``. Sequences without queries are left out unless there is only one size.
    """
    counts = np.diff(step.query_starts)
    digits = np.frexp(counts)[1]
    sizes = np.unique(digits[counts > 0])
    if len(sizes) < 2:
        yield step, slice(None)
        return
    owner = np.repeat(np.arange(len(counts)), counts)
    for size in sizes:
        yield _part(step, np.flatnonzero(digits == size), np.flatnonzero(digits[owner] == size))


def _part(step: StepPlan, sequences: np.ndarray, tokens: np.ndarray) -> tuple[StepPlan, Int32]:
    """The step of these sequences, which own these tokens, and the places of its logit rows in the whole step's."""
    counts = np.diff(step.query_starts)[sequences]
    new_place = np.full(len(step.input_ids), -1, np.int32)
    new_place[tokens] = np.arange(len(tokens), dtype=np.int32)
    rows = new_place[step.logit_rows]
    part = dataclasses.replace(
        step,
        input_ids=step.input_ids[tokens],
        positions=step.positions[tokens],
        query_starts=np.concatenate([[0], np.cumsum(counts)]).astype(np.int32),
        query_offsets=np.arange(counts.max(), dtype=np.int32),
        lengths=step.lengths[sequences],
        page_tables=tuple(table[sequences] for table in step.page_tables),
        logit_rows=rows[rows >= 0],
    )
    return part, np.flatnonzero(rows >= 0).astype(np.int32)
