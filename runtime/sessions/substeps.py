"""Substeps of a step: sequences of it that go through some layers together."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from kvlathe.runtime.sessions.adapters import Adapters
from kvlathe.runtime.sessions.protocols import Int32, PassRows, StepPlan


class Substep(NamedTuple):
    """Some ``sequences`` of a step as a step of their own; the places of their tokens
    and of their logit rows in it."""

    step: StepPlan
    sequences: Int32 | slice
    tokens: Int32 | slice
    logits: Int32 | slice


def passing(step: StepPlan, stage: int) -> npt.NDArray[np.bool_]:
    """Whether each sequence passes a stage, [B]."""
    if step.stages is None:
        return np.ones(len(step.lengths), np.bool_)
    first = step.stages[:, 0]
    end = step.stages[:, 1]
    return (first <= stage) & (stage < end)


def whole(step: StepPlan, stage: int, page_tokens: int = 0) -> Iterator[Substep]:
    """Everything that passes a stage, if anything does."""
    present = passing(step, stage)
    if present.all():
        yield Substep(step, slice(None), slice(None), slice(None))
    elif present.any():
        yield substep_of(step, present)


def substep_of(step: StepPlan, chosen: npt.NDArray[np.bool_]) -> Substep:
    """The substep of the ``chosen`` sequences [B]."""
    counts = np.diff(step.cu_seqlens_q)
    tokens = np.flatnonzero(np.repeat(chosen, counts)).astype(np.int32)
    new_place = np.full(len(step.input_ids), -1, np.int32)
    new_place[tokens] = np.arange(len(tokens), dtype=np.int32)
    rows = new_place[step.logit_rows]
    starts = np.concatenate([[0], np.cumsum(counts[chosen])])
    weights = step.observation_weights
    after = step.after
    part = dataclasses.replace(
        step,
        input_ids=step.input_ids[tokens],
        positions=step.positions[tokens],
        cu_seqlens_q=starts.astype(np.int32),
        query_offsets=np.arange(counts[chosen].max(), dtype=np.int32),
        lengths=step.lengths[chosen],
        page_tables=tuple(table[chosen] for table in step.page_tables),
        logit_rows=rows[rows >= 0],
        observation_weights=None if weights is None else weights[tokens],
        after=None if after is None else after[tokens],
        states=None if step.states is None else step.states[chosen],
        passes=_moved(step, np.flatnonzero(chosen), starts),
        adapters=_chosen(step.adapters, chosen),
        hidden=None
        if step.hidden is None
        else [step.hidden[i] for i in tokens.tolist()],
    )
    return Substep(
        part,
        np.flatnonzero(chosen).astype(np.int32),
        tokens,
        np.flatnonzero(rows >= 0).astype(np.int32),
    )


def _chosen(
    adapters: Adapters | None, chosen: npt.NDArray[np.bool_]
) -> Adapters | None:
    """Those of the ``chosen`` sequences; None where none of them has one."""
    found = [adapters[b] for b in np.flatnonzero(chosen).tolist()] if adapters else []
    return found if any(found) else None


def _moved(
    step: StepPlan, chosen: npt.NDArray[np.intp], starts: npt.NDArray[np.intp]
) -> tuple[PassRows | None, ...] | None:
    """The passes of the ``chosen`` sequences, whose rows begin at ``starts``."""
    if step.passes is None:
        return None
    moved: list[PassRows | None] = []
    for b, at in zip(chosen.tolist(), starts.tolist(), strict=False):
        part = step.passes[b]
        if part is not None:
            part = dataclasses.replace(part, at=at)
        moved.append(part)
    return tuple(moved)


def segments(step: StepPlan, stages: int) -> Iterator[tuple[range, Substep]]:
    """The stages of a step, those that the same sequences pass together. Stages that
    nobody passes are left out."""
    present = [passing(step, stage) for stage in range(stages)]
    first = 0
    for end in range(1, stages + 1):
        if end < stages and (present[end] == present[first]).all():
            continue
        for substep in whole(step, first):
            yield range(first, end), substep
        first = end
