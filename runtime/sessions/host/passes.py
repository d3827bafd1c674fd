"""Hidden states of prompts that pass stages (stages.Stage), in host memory."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from kvlathe.plan.plan import CompressionPlan
from kvlathe.runtime.sessions.protocols import Float32, Int32, PassRows, StepPlan
from kvlathe.runtime.sessions.substeps import Substep

Masses = npt.NDArray[np.float64]


@dataclass(frozen=True, eq=False)
class HostRows:
    """As HiddenRows. ``hidden`` [n, D]; ``known`` [n]; ``attention`` [n]: what observed
    rows have given each in the pass's last layer."""

    hidden: Float32
    known: Int32
    attention: Masses

    def places(self) -> Int32:
        return self.known

    def stay(self, count: int, last: int) -> HostRows:
        kept = survivors(self.attention, count, last)
        return HostRows(self.hidden[kept], self.known[kept], np.zeros(count))


def survivors(attention: Masses, count: int, last: int) -> npt.NDArray[np.intp]:
    """Places [count], ascending: the ``last`` ones, and of the others those of most
    accumulated ``attention`` (of two equal ones the earlier)."""
    ranked = attention.copy()
    first = len(ranked) - min(last, count)
    ranked[first:] = np.inf
    return np.sort(np.argsort(-ranked, kind="stable")[:count])


def host_rows(rows: object) -> HostRows:
    assert isinstance(rows, HostRows)
    return rows


def entering(step: StepPlan, width: int) -> Float32:
    """Hidden states [T, width] of a step, in which rows that enter past stage 0 are.
    Makes room for those that leave."""
    hidden = np.empty((len(step.input_ids), width), np.float32)
    for part in filter(None, step.passes or ()):
        if part.leaves:
            part.left = _left(part, width)
        if part.entered is not None:
            hidden[part.rows] = host_rows(part.entered).hidden[part.places]
    return hidden


def leave(step: StepPlan, hidden: Float32) -> None:
    """Keep the hidden states [T, D] of the rows that leave."""
    for part in filter(None, step.passes or ()):
        if part.leaves:
            left = host_rows(part.left)
            left.hidden[part.places] = hidden[part.rows]


def _left(part: PassRows, width: int) -> HostRows:
    """The rows that have left so far."""
    if part.left is not None:
        return host_rows(part.left)
    known = np.arange(part.count, dtype=np.int32)
    if part.entered is not None:
        known = host_rows(part.entered).known
    hidden = np.empty((part.count, width), np.float32)
    return HostRows(hidden, known, np.zeros(part.count))


def observe(
    plan: CompressionPlan,
    step: StepPlan,
    substep: Substep,
    attended: Float32,
    stage: int,
) -> None:
    """Add what observed rows gave the rows of their passes, where these end with
    ``stage``.

    ``attended`` [b, lanes of the stage, N]: of the sequences of ``substep``. N counts
    the places of the stage's buckets, then the new tokens.
    """
    if step.passes is None or step.stages is None:
        return
    sequences = np.arange(len(step.lengths))[substep.sequences].tolist()
    for row, b in zip(attended, sequences, strict=True):
        part = step.passes[b]
        ends = step.stages[b, 1] == stage + 1
        if part is None or not part.leaves or not ends:
            continue
        left = host_rows(part.left)
        total = left.attention.copy()
        total[: part.end] += _given(
            plan,
            substep.step,
            row,
            stage,
            part,
        )
        part.left = replace(left, attention=total)


def _given(
    plan: CompressionPlan,
    step: StepPlan,
    attended: Float32,
    stage: int,
    part: PassRows,
) -> Masses:
    """[end], what the rows of a pass so far were given in the last layer of a stage, by
    all lanes together. ``attended`` [lanes of the stage, N]."""
    buckets = plan.index.buckets_of(stage)
    widths = [step.page_tables[b].shape[1] for b in buckets]
    firsts = np.cumsum([0, *widths]) * plan.page_tokens
    layer = plan.index.layers_of(stage)[-1]
    lanes = plan.index.active(layer)
    new = part.end - part.start
    own = attended[-len(lanes) :]
    total = np.zeros(part.end)
    for lane, given in zip(lanes, own, strict=True):
        bucket = plan.index.hot_bucket[plan.index.number(layer, lane.head)]
        cached = given[firsts[buckets.index(bucket)] :]
        fresh = given[firsts[-1] :]
        total[: part.start] += cached[: part.start]
        total[part.start :] += fresh[:new]
    return total
