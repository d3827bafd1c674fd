"""pack: the chunks of one step become a StepPlan, side by side and without padding."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from collections.abc import Sequence as Items
from itertools import chain

import numpy as np

from kvlathe.runtime.scheduling.sequence import Chunk, Sequence
from kvlathe.runtime.sessions.protocols import Int32, PassRows, StepPlan


def pack(
    chunks: Items[Chunk], chosen: Mapping[Sequence, int] | None = None
) -> StepPlan:
    """The step that computes ``chunks``, at least one. ``chosen``: where the step before
    chooses a token of a sequence, its row of logits."""
    sequences = [chunk.sequence for chunk in chunks]
    counts = np.array([chunk.count for chunk in chunks], np.int32)
    starts = np.zeros(len(chunks) + 1, np.int32)
    np.cumsum(counts, out=starts[1:])
    cached = np.array([sequence.cached for sequence in sequences], np.int32)
    rows = np.arange(starts[-1], dtype=np.int32)
    first = np.repeat(starts[:-1], counts)
    places = rows - first
    tables = [sequence.table.rows for sequence in sequences]
    pages = zip(*tables, strict=True)
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
    )
    if any(sequence.prompt_stages for sequence in sequences):
        step = _staged(step, chunks)
    if any(sequence.observed_rows for sequence in sequences):
        step = _observed(step, chunks)
    return step


def _input_ids(chunks: Items[Chunk], count: int) -> Int32:
    """The ids [T] of the chunks' tokens."""
    fresh = (chunk.ids for chunk in chunks)
    return np.fromiter(chain.from_iterable(fresh), np.int32, count)


def _after(
    chunks: Items[Chunk], starts: Int32, rows: Mapping[Sequence, int]
) -> Int32 | None:
    """Of each token [T], the row that it is chosen from; None where all are known. A
    token that is not known is the last of its sequence."""
    after = np.full(int(starts[-1]), -1, np.int32)
    for chunk, end in zip(chunks, starts[1:].tolist(), strict=True):
        sequence = chunk.sequence
        if sequence.pending and sequence.completes(chunk.count):
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
    lengths = np.fromiter(map(len, rows), np.intp, len(rows))
    table = np.zeros((len(rows), max(1, int(lengths.max()))), np.int32)
    taken = np.arange(table.shape[1]) < lengths[:, None]
    table[taken] = np.concatenate(rows)
    return table


def _observed(step: StepPlan, chunks: Items[Chunk]) -> StepPlan:
    """The step with the observation weights of its rows."""
    weights = np.zeros(len(step.input_ids), np.float32)
    for chunk, start in zip(chunks, step.cu_seqlens_q[:-1].tolist(), strict=True):
        observed = chunk.sequence.observed_rows
        if observed is None:
            continue
        rows = slice(start, start + chunk.count)
        positions = step.positions[rows]
        first, last = positions[[0, -1]].tolist()
        known = observed.weights(chunk.sequence.tokens, first, last + 1)
        weights[rows] = known[positions - first]
    return dataclasses.replace(step, observation_weights=weights)


def _staged(step: StepPlan, chunks: Items[Chunk]) -> StepPlan:
    """The step with the rows of prompts that pass stages: those that are still there."""
    prompts = [chunk.sequence.prompt_stages for chunk in chunks]
    graphs = next(prompt.plan.index.graphs for prompt in prompts if prompt)
    every_stage = np.array([0, graphs], np.int32)
    stages = np.tile(every_stage, (len(chunks), 1))
    step = dataclasses.replace(step, stages=stages)
    passes: list[PassRows | None] = []
    for i, (prompt, chunk) in enumerate(zip(prompts, chunks, strict=True)):
        tokens = chunk.sequence.tokens
        passes.append(prompt.enter(step, i, tokens) if prompt else None)
    return dataclasses.replace(step, passes=tuple(passes))
