"""pack: the chunks of one step become a StepPlan, side by side and without padding."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from collections.abc import Sequence as Items
from itertools import chain

import numpy as np

from kvlathe.runtime.scheduling.sequence import Chunk, Sequence
from kvlathe.runtime.sessions.adapters import Adapters
from kvlathe.runtime.sessions.protocols import Int32, PassRows, StepPlan


def pack(
    chunks: Items[Chunk], chosen: Mapping[Sequence, int] | None = None
) -> StepPlan:
    """The step that computes ``chunks``, at least one. ``chosen``: where the step
    before chooses a token of a sequence, its row of logits."""
    sequences = [chunk.sequence for chunk in chunks]
    counts = np.array([chunk.count for chunk in chunks], np.int32)
    starts = np.zeros(len(chunks) + 1, np.int32)
    np.cumsum(counts, out=starts[1:])
    cached = np.array([sequence.cached for sequence in sequences], np.int32)
    rows = np.arange(starts[-1], dtype=np.int32)
    places = rows - np.repeat(starts[:-1], counts)
    pages = zip(*[sequence.table.rows for sequence in sequences], strict=True)
    lengths = [sequence.table.lengths for sequence in sequences]
    step = StepPlan(
        input_ids=_input_ids(chunks, int(starts[-1])),
        positions=places + np.repeat(cached, counts),
        cu_seqlens_q=starts,
        query_offsets=np.arange(counts.max(), dtype=np.int32),
        lengths=np.array(lengths, np.int32),
        page_tables=tuple(_page_table(rows) for rows in pages),
        logit_rows=_logit_rows(chunks, starts),
        after=_after(chunks, starts, chosen) if chosen else None,
        adapters=_adapters(sequences),
    )
    if graphs := max([sequence.path.graphs for sequence in sequences]):
        step = _staged(step, chunks, graphs)
    return step


def _adapters(sequences: Items[Sequence]) -> Adapters | None:
    """The adapters of the sequences; None where none of them has one."""
    adapters = [sequence.adapter for sequence in sequences]
    return adapters if any(adapters) else None


def _input_ids(chunks: Items[Chunk], count: int) -> Int32:
    """The ids [T] of the chunks' tokens."""
    fresh = (chunk.ids for chunk in chunks)
    return np.fromiter(chain.from_iterable(fresh), np.int32, count)


def _after(
    chunks: Items[Chunk], starts: Int32, rows: Mapping[Sequence, int]
) -> Int32 | None:
    """The row [T] that each token is chosen from; None where all are known. A
    token that is not known is the last of its sequence."""
    after = np.full(int(starts[-1]), -1, np.int32)
    for chunk, end in zip(chunks, starts[1:].tolist(), strict=True):
        sequence = chunk.sequence
        if sequence.pending and chunk.completes:
            after[end - 1] = rows[sequence]
    return after if (after >= 0).any() else None


def _logit_rows(chunks: Items[Chunk], starts: Int32) -> Int32:
    """The rows [R] of the step that want logits."""
    rows: list[int] = []
    for start, chunk in zip(starts[:-1].tolist(), chunks, strict=True):
        rows += [start + row for row in chunk.wanted]
    return np.array(rows, np.int32)


def _page_table(rows: Items[Int32]) -> Int32:
    """[B, longest row, at least 1]; short rows end in page 0, which nobody reads past a
    sequence's length."""
    if len(rows) == 1 and len(rows[0]):
        return np.array(rows, np.int32)
    lengths = np.fromiter(map(len, rows), np.intp, len(rows))
    table = np.zeros((len(rows), max(1, int(lengths.max()))), np.int32)
    taken = np.arange(table.shape[1]) < lengths[:, None]
    table[taken] = np.concatenate(rows)
    return table


def _staged(step: StepPlan, chunks: Items[Chunk], graphs: int) -> StepPlan:
    """The step with the rows of prompts that pass some of ``graphs`` stages: those that
    are still there."""
    stages = np.tile(np.array([0, graphs], np.int32), (len(chunks), 1))
    step = dataclasses.replace(step, stages=stages)
    passes: list[PassRows | None] = []
    for place, chunk in enumerate(chunks):
        sequence = chunk.sequence
        passes.append(sequence.path.enter(step, place, sequence.tokens))
    return dataclasses.replace(step, passes=tuple(passes))
