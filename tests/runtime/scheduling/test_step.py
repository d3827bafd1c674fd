"""Laws of one step: what fails in it leaves nothing behind, whatever had been done, and
is tried again in smaller steps."""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Items
from typing import Any

import pytest

from kvlathe.base.memory import OutOfMemory
from kvlathe.plan.manifest import Limits
from kvlathe.runtime.scheduling import step as steps
from kvlathe.runtime.scheduling.engine import Engine
from kvlathe.runtime.scheduling.sequence import Chunk, Sequence
from kvlathe.runtime.scheduling.step import DONE, Kind, Step, StepContext, StepPart
from kvlathe.runtime.sessions.page_moves import PageMoves
from kvlathe.runtime.sessions.protocols import StepPlan
from tests.support.fake_session import SamplesThere
from tests.support.schedule_cases import alone, engine_for, sequence_for

PROMPTS = ([1] * 40, [2] * 33)
ANSWER = 40
ROOMY = Limits(max_batch_size=6, max_num_tokens=64, max_input_len=96, max_seq_len=160)


def answers(engine: Engine, **asked: Any) -> list[list[int]]:  # noqa: ANN401
    """Answers to PROMPTS, side by side."""
    sequences = [sequence_for(engine, one, ANSWER, **asked) for one in PROMPTS]
    for sequence in sequences:
        engine.scheduler.add(sequence)
    while not all(sequence.finish_reason for sequence in sequences):
        engine.step()
    assert [sequence.finish_reason for sequence in sequences] == ["length"] * 2
    assert not engine.pool.bytes_in_use
    return [sequence.answer for sequence in sequences]


def failing(work: Callable[..., Any], turns: Items[int]) -> Callable[..., Any]:
    """``work``, which fails at some of its calls once it is done."""
    calls = 0

    def done(*given: object) -> Any:  # noqa: ANN401
        nonlocal calls
        calls += 1
        found = work(*given)
        if calls in turns:
            raise RuntimeError("it was done and failed")
        return found

    return done


@pytest.mark.parametrize("kind", ["budget", "divided"])
def test_a_choice_that_fails_after_the_run_leaves_scores_as_they_were(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The step runs again, sequence by sequence: what it observes counts once."""
    expected = [alone(kind, list(one), ANSWER) for one in PROMPTS]
    # Only steps of both: one that fails alone would end its sequence.
    sample = steps.sample
    broken: list[int] = []

    def sometimes(logits: Any, rows: Any) -> Any:  # noqa: ANN401
        if len(logits) == 2 and len(broken) < 9:
            broken.append(1)
            raise RuntimeError("no choice")
        return sample(logits, rows)

    monkeypatch.setattr(steps, "sample", sometimes)
    engine = engine_for(kind, 1200)
    engine.scheduler.admission.fits = lambda sequences: True
    assert answers(engine) == expected
    assert len(broken) == 9


def test_a_launch_that_fails_draws_no_random_number() -> None:
    """The choice of its tokens was queued before the pages were sealed. The same step
    is then run again, and waited for."""
    asked = {"temperature": 1.0, "seed": 5}
    expected = answers(flying(engine_for("sealed", 600)), **asked)
    engine = flying(engine_for("sealed", 600))
    session = engine.session
    session.apply = failing(session.apply, (1, 3, 5))
    assert answers(engine, **asked) == expected


def flying(engine: Engine) -> Engine:
    engine.session = SamplesThere(engine.session)
    return engine


class Watched(StepPart):
    """A part that writes down what it sees, and fails where it is told to."""

    def __init__(self) -> None:
        self.seen: list[str] = []
        self.fails = ""

    def _note(self, what: str) -> None:
        self.seen.append(what)
        if what == self.fails:
            raise RuntimeError(what)

    def before(self, step: Step, plan: StepPlan) -> StepPlan:
        self._note("before")
        return plan

    def after(self, step: Step) -> None:
        self._note("after")

    def undo(self, step: Step) -> None:
        self._note("undo")


def reserved(engine: Engine, count: int) -> tuple[Sequence, list[Chunk]]:
    """The next chunk of a sequence that nobody schedules."""
    sequence = sequence_for(engine, [3] * 60, 5)
    engine.scheduler.add(sequence)
    [chunk] = engine.scheduler.schedule().chunks
    assert chunk.count >= count
    engine.pool.rollback(chunk.reservation)
    return sequence, [engine.scheduler.again(chunk.first(count))]


@pytest.mark.parametrize(
    ("fails", "seen"),
    [
        ("", ["before", "run", "after", "apply"]),
        ("before", ["before"]),
        ("run", ["before", "run"]),
        ("after", ["before", "run", "after", "undo"]),
        ("apply", ["before", "run", "after", "apply", "undo"]),
    ],
)
def test_parts_see_a_step_in_order_and_undo_only_what_has_run(
    fails: str, seen: list[str]
) -> None:
    engine = engine_for("sealed", 600, limits=ROOMY)
    part = Watched()
    part.fails = fails
    context = StepContext(engine.session, engine.pool, engine.scheduler.room, [part])
    session, run, apply = engine.session, engine.session.run, engine.session.apply

    def noted_run(step: StepPlan) -> Any:  # noqa: ANN401
        part._note("run")
        return run(step)

    def noted_apply(moves: Items[PageMoves]) -> None:
        part._note("apply")
        apply(moves)

    session.run, session.apply = noted_run, noted_apply
    sequence, chunks = reserved(engine, 60)
    before = engine.pool.pages_in_use
    step = Step(context, chunks)
    outcome = step.launch()
    assert part.seen == seen
    if fails:
        assert outcome.kind == "failed" and step.state == "given back"
        assert not sequence.cached and not engine.pool.bytes_in_use
        assert not sequence.sampler.drawn
    else:
        assert outcome is DONE and step.state == "launched"
        assert sequence.cached == 60 and engine.pool.pages_in_use != before
        assert sequence.sampler.drawn == 1


@pytest.mark.parametrize("count", [1, 2, 9])
def test_a_step_is_retried_in_halves_then_by_fewer_tokens(count: int) -> None:
    """Down to one token that finds no memory, and to one chunk that fails otherwise."""
    engine = engine_for("one", 600)
    _, chunks = reserved(engine, count)
    many = Step(engine.context, chunks * 5)
    cases: list[tuple[Step, Kind, list[list[int]]]] = [
        (many, "failed", [[count] * 2, [count] * 3]),
        (many, "out_of_memory", [[count] * 2, [count] * 3]),
        (Step(engine.context, chunks), "failed", []),
        (
            Step(engine.context, chunks),
            "out_of_memory",
            [[count // 2]] if count > 1 else [],
        ),
    ]
    for step, kind, expected in cases:
        parts = step.retry(kind)
        assert [[chunk.count for chunk in part.chunks] for part in parts] == expected
        assert all(part.state == "given back" for part in parts)


def test_a_step_larger_than_its_room_is_not_tried() -> None:
    engine = engine_for("one", 600)
    _, chunks = reserved(engine, 9)
    engine.scheduler.room.failed(16)
    step = Step(engine.context, chunks)
    engine.session.run = failing(engine.session.run, (1,))
    outcome = step.launch()
    assert outcome.kind == "out_of_memory"
    assert isinstance(outcome.error, OutOfMemory)
    assert step.state == "given back" and not engine.pool.bytes_in_use
