"""Laws of speculation: guesses, right or wrong, change no answer and no page, and rows are
spent only where that is expected to be faster."""

from __future__ import annotations

import dataclasses
import itertools
import math
import time
from collections.abc import Sequence as Items
from typing import cast

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvlathe.runtime.scheduling.parts import speculation
from kvlathe.runtime.scheduling.parts.speculation import Speculation
from kvlathe.runtime.scheduling.row_costs import MAX_AGE, MIN_PLAIN_STEPS, RowCosts
from kvlathe.runtime.scheduling.sequence import Sequence
from kvlathe.runtime.sessions.protocols import StepPlan
from kvlathe.runtime.text.sampler import Sampled, SamplingRows
from tests.support.drafts import Endless, Prophet, trying
from tests.support.fake_session import FakeSession, Known, SamplesThere, solo
from tests.support.nightly import rest_nightly
from tests.support.schedule_cases import (
    KINDS,
    LIMITS,
    engine_for,
    play,
    sequence_for,
)


def test_random_schedules_answer_as_without_guesses(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """play() checks pages and answers after every step. Every second engine samples on
    its device."""
    clock = itertools.count()
    monkeypatch.setattr(time, "perf_counter", lambda: next(clock) * 1e-5)
    drafted = accepted = 0
    for seed in range(2 * len(KINDS)):
        kind, error = KINDS[seed // 2], (0.1, 0.6)[seed // 2 % 2]
        engine, everyone, _ = play(seed, kind, drafter=Prophet(seed, error))
        made = engine.scheduler.speculation
        drafted += made.drafted
        accepted += made.accepted
        assert made.drafted == sum(one.drafted for one in everyone)
        assert made.accepted == sum(one.accepted for one in everyone)
        assert isinstance(made.drafter, Prophet)
        assert not made.drafter.known, "the drafter still knows who has ended"
    assert drafted > 1000
    assert 0.2 < accepted / drafted < 0.8


def test_guesses_that_break_a_step_are_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps that find no memory, too."""
    clock = itertools.count()
    monkeypatch.setattr(time, "perf_counter", lambda: next(clock) * 1e-5)
    for seed, kind in enumerate(KINDS[2:]):
        play(seed, kind, memory=9, drafter=Prophet(seed, 0.3))


@pytest.mark.parametrize("on_device", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_right_guesses_take_fewer_steps(kind: str, on_device: bool) -> None:
    """A page is filled in as many steps as guesses of six and the page's end make."""
    engine = engine_for(kind, 400)
    if on_device:
        engine.session = SamplesThere(engine.session)
    made = engine.speculate(trying(Prophet(1, 0)))
    drafter = cast(Prophet, made.drafter)
    drafter.chances = lambda sequence, most: [0.9] * most
    sequence = sequence_for(engine, [1, 2, 3], 60)
    engine.scheduler.add(sequence)
    steps = 0
    while not sequence.finish_reason:
        engine.step()
        steps += 1
    assert sequence.answer == solo([1, 2, 3], 60)
    assert made.accepted == made.drafted > 40
    assert steps < 16


def test_states_cost_guessing_one_step_a_page_at_most() -> None:
    """Three guesses of ten are wrong. A page ends with rows that are known."""
    steps: list[int] = []
    for kind in ("one", "one with states"):
        engine, count = engine_for(kind, 400), 0
        made = engine.speculate(trying(Prophet(1, 0.3)))
        cast(Prophet, made.drafter).chances = lambda sequence, most: [0.9] * most
        sequence = sequence_for(engine, [1, 2, 3], 150)
        engine.scheduler.add(sequence)
        while not sequence.finish_reason:
            engine.step()
            count += 1
        assert sequence.answer == solo([1, 2, 3], 150)
        steps.append(count)
    plain, with_states = steps
    assert with_states <= plain * 1.1 + 153 // 32 < 100


def test_a_guess_never_passes_what_ends_an_answer() -> None:
    engine = engine_for("sealed", 400)
    answer = solo([5, 6], 40)
    engine.stop_ids = frozenset([answer[30]])
    engine.speculate(trying(Prophet(1, 0), engine.stop_ids))
    sequence = sequence_for(engine, [5, 6], 40)
    engine.scheduler.add(sequence)
    while not sequence.finish_reason:
        engine.step()
        cached = sequence.cached
        assert sequence.finish_reason or cached == len(sequence.tokens) - 1
    assert sequence.answer == answer[: answer.index(answer[30]) + 1]
    assert sequence.finish_reason == "stop"


def test_a_drafter_that_fails_is_asked_again_after_a_pause(
    logged: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(speculation, "PAUSE", 10)
    engine = engine_for("one", 400)
    made = engine.speculate(trying(Prophet(1, 0)))
    drafter = cast(Prophet, made.drafter)
    works = drafter.draft
    drafter.draft = lambda counts, seconds: []
    sequence = sequence_for(engine, [1, 2, 3], 60)
    engine.scheduler.add(sequence)
    while len(sequence.tokens) < 20:
        engine.step()
    assert (made.failures, made.drafted) == (2, 0)
    drafter.draft = works
    while not sequence.finish_reason:
        engine.step()
    assert sequence.answer == solo([1, 2, 3], 60)
    assert made.failures == 2 and made.drafted
    assert any("guessing tokens has failed" in line for line in logged)


# -- how many guesses ------------------------------------------------------------------
class Line(RowCosts):
    """A step takes so much longer with any rows, and with each."""

    def __init__(self, first: float, each: float) -> None:
        super().__init__()
        self.first, self.each = first, each

    def times(self, rows: int, sequences: int) -> float:
        return 1 + (self.first + rows * self.each if rows else 0)


CHANCES = st.lists(st.lists(st.floats(0, 1), max_size=3), min_size=1, max_size=3)


@given(chances=CHANCES, first=st.floats(0, 1), each=st.floats(0.01, 0.5))
def test_as_many_rows_as_make_the_most_tokens_a_second(
    chances: list[list[float]], first: float, each: float
) -> None:
    made = Speculation(Prophet(1, 0))
    made.costs, made.allowance = Line(first, each), Endless()
    likely = [np.cumprod(one).tolist() for one in chances]
    names = cast(list[Sequence], [f"sequence {i}" for i in range(len(chances))])
    counts = made._worth(dict(zip(names, likely, strict=True)), len(names), 99)

    def rate(taken: tuple[int, ...]) -> float:
        tokens = sum(sum(one[:n]) for one, n in zip(likely, taken, strict=True))
        return (1 + tokens / len(names)) / made.costs.times(sum(taken), len(names))

    every = itertools.product(*(range(len(one) + 1) for one in chances))
    best = max(rate(taken) for taken in every)
    taken = tuple(counts.get(name, 0) for name in names)
    assert rate(taken) >= best / 1.0201
    assert sum(taken) == 0 or rate(taken) > 1.0199


@settings(max_examples=20)
@given(
    first=st.floats(0, 1),
    each=st.floats(0.02, 0.3),
    rows=st.permutations([*range(1, 9)] * 6),
)
def test_costs_are_learnt_from_steps(
    first: float, each: float, rows: list[int]
) -> None:
    costs = RowCosts()
    assert costs.times(3, 1) == np.inf, "nothing is known"
    for _ in range(MIN_PLAIN_STEPS - 1):
        costs.ran(0, 1, 0.01)
        assert costs.times(3, 1) == np.inf, "the first steps may hold anything"
    for count in rows:
        costs.ran(0, 1, 0.01)
        costs.ran(count, 1, 0.01 * (1 + first + each * count))
    for count in (1, 8):
        assert costs.times(count, 1) == pytest.approx(
            1 + first + each * count, rel=0.15
        )
    assert costs.times(0, 1) == 1
    for _ in range(30):
        costs.ran(4, 1, 0.04)
    assert costs.times(4, 1) > 3
    for _ in range(600):
        costs.ran(0, 1, 0.01)
    assert costs.times(4, 1) < 1.7, "nobody would ever try again"
    for _ in range(MAX_AGE + 1):
        costs.ran(1, 1, 0.01)
    assert costs.times(1, 1) == np.inf, "what a step takes without is to be seen again"


def test_time_after_a_step_with_guesses_is_a_price_of_guesses() -> None:
    """A host that prepares steps ahead cannot where a step waits for its tokens. And
    what rows cost in a small step says nothing of a large one."""
    kept, paid = RowCosts(), RowCosts()
    for costs in (kept, paid):
        for _ in range(20):
            costs.ran(0, 5, 0.001)
            costs.ran(0, 1, 0.001)
            costs.ran(8, 1, 0.0012)
    for _ in range(40):
        kept.ran(12, 5, 0.002)
        paid.ran(12, 5, 0.002)
        paid.began_again(5, 0.0015)
    assert kept.times(12, 5) == pytest.approx(2, rel=0.1)
    assert paid.times(12, 5) == pytest.approx(2.5, rel=0.1)
    assert paid.times(8, 1) == pytest.approx(1.2, rel=0.1)
    assert paid.times(0, 5) == 1
    paid.began_again(5, 9.0)  # follows no step with rows
    assert paid.times(12, 5) == pytest.approx(2.5, rel=0.1)


@dataclasses.dataclass
class Clock:
    """``free``: when the device has done what it was given."""

    now: float = 0.0
    free: float = 0.0


class Queued(SamplesThere):
    """Steps run one after the other, beside the host."""

    clock = Clock()

    def seconds(self, logits: npt.NDArray[np.float32]) -> float:
        """Seconds of the step that has these logits."""
        raise NotImplementedError

    def choose(self, logits: npt.NDArray[np.float32], rows: SamplingRows) -> Known:
        clock, seconds = self.clock, self.seconds(logits)
        done = max(clock.now, clock.free) + seconds
        clock.free = done

        class Later(Known):
            def result(self) -> Sampled:
                clock.now = max(clock.now, done)
                return super().result()

        return Later(super().choose(logits, rows).sampled)


class Timed(Queued):
    """A step takes 1 ms, and ``longer`` with guesses."""

    longer = 0.0

    def seconds(self, logits: npt.NDArray[np.float32]) -> float:
        return 0.001 if len(logits) == 1 else self.longer


@pytest.mark.parametrize(("pays", "longer"), [(True, 0.0005), (False, 0.0016)])
def test_a_device_that_runs_ahead_stops_guessing_where_it_does_not_pay(
    monkeypatch: pytest.MonkeyPatch, pays: bool, longer: float
) -> None:
    """Every guess is right, one at a time. The host takes 0.7 ms a step: beside steps
    without guesses, but between those with some."""
    engine = engine_for("one", 2000)
    session = engine.session = Timed(engine.session)
    session.clock, session.longer = Clock(), longer
    monkeypatch.setattr(time, "perf_counter", lambda: session.clock.now)
    made = engine.speculate(Speculation(Prophet(1, 0), most=1))
    sequence = sequence_for(engine, [1, 2], 1500)
    engine.scheduler.add(sequence)
    while not sequence.finish_reason:
        engine.step()
        session.clock.now += 0.0007
    assert made.drafted > 200 if pays else made.drafted < 100


class Priced(FakeSession):
    """A step takes time by its sequences, their tokens and its rows more."""

    def price(self, clock: Clock, seed: int) -> None:
        draw = np.random.default_rng(seed)
        self.clock, self.took = clock, 0.0
        self.first, self.each = draw.uniform(0, 1.5), draw.uniform(0.02, 0.5)
        self.of_sequence, self.of_token = draw.uniform(0, 0.3), draw.uniform(0, 0.01)
        self.noise = draw

    def run(self, step: StepPlan) -> npt.NDArray[np.float32]:
        sequences = len(step.query_offsets) and len(step.cu_seqlens_q) - 1
        rows = len(step.input_ids) - sequences
        seen = float(np.sum(step.positions[step.cu_seqlens_q[1:] - 1]))
        plain = 1 + self.of_sequence * sequences + self.of_token * seen
        longer = 1 + (self.first + self.each * rows if rows else 0)
        self.took = 1e-3 * plain * longer * self.noise.uniform(0.97, 1.03)
        return super().run(step)


class Waits(Priced):
    """Its steps are waited for."""

    def run(self, step: StepPlan) -> npt.NDArray[np.float32]:
        logits = super().run(step)
        self.clock.now += self.took
        return logits


class Ahead(Queued):
    """Steps of a Priced session."""

    def seconds(self, logits: npt.NDArray[np.float32]) -> float:
        assert isinstance(self.session, Priced)
        return self.session.took


class Liar(Prophet):
    """Its looks and drafts take time, and whatever it guesses it is sure of."""

    def price(self, clock: Clock, look: float) -> None:
        self.clock, self.look = clock, look

    def chances(self, sequence: Sequence, most: int) -> Items[float]:
        self.clock.now += self.look
        self.known.add(sequence)
        return [0.95] * most


STEPS = 1000
SMALL = [(seed, seed // 2 % 3 + 1) for seed in range(60)]
LARGE = [(seed, (8, 16, 32)[seed // 2 % 3]) for seed in range(60, 90)]
DAILY = [SMALL[seed] for seed in (1, 3, 4, 5, 30, 49)]


@pytest.mark.parametrize(("seed", "batch"), rest_nightly([*SMALL, *LARGE], *DAILY))
def test_a_thousand_steps_of_any_mix_lose_a_fiftieth_at_most(
    seed: int, batch: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In tokens, against the same requests without guesses in the same time, however
    wrong guesses are and whatever their rows and looks take. Where they are right and
    rows are cheap, much is won. Requests are never all there, so no end counts."""
    draw = np.random.default_rng(seed)
    error = draw.choice([0.05, 0.5, 1.0])
    look = draw.choice([0, 1e-5, 1e-3])
    texts = [
        (draw.integers(0, 99, 5).tolist(), int(draw.integers(2, 90)))
        for _ in range(90 * batch)
    ]
    limits = dataclasses.replace(LIMITS, max_batch_size=batch)
    answered: list[int] = []
    seconds, steps = math.inf, STEPS
    clock = Clock()
    monkeypatch.setattr(time, "perf_counter", lambda: clock.now)
    for guessing in (False, True):
        started = clock.now
        engine = engine_for("one", max(2000, 200 * batch), limits=limits)
        session = (Waits, Priced)[seed % 2](engine.pool.plan, engine.pool)
        session.price(clock, seed)
        engine.session = session
        if seed % 2:
            engine.session = ahead = Ahead(session)
            ahead.clock = clock
        if guessing:
            drafter = Liar(seed, error)
            drafter.price(clock, look)
            engine.speculate(Speculation(drafter))
        everyone = [sequence_for(engine, tokens, new) for tokens, new in texts]
        for sequence in everyone:
            engine.scheduler.add(sequence)
        while steps and clock.now - started < seconds:
            engine.step()
            clock.now += 2e-5
            steps -= not guessing
        seconds, steps = clock.now - started, STEPS
        assert not all(sequence.finish_reason for sequence in everyone)
        answered.append(sum(sequence.answered for sequence in everyone))
    assert answered[1] > 0.98 * answered[0]
    if error < 0.1 and batch == 1 and look < 1e-3:
        assert answered[1] > 1.2 * answered[0]


class Cold(Waits):
    """Its first step with guesses loads what such steps need."""

    cold = True

    def run(self, step: StepPlan) -> npt.NDArray[np.float32]:
        guesses = len(step.logit_rows) > len(step.cu_seqlens_q) - 1
        self.clock.now += 0.5 * (guesses and self.cold)
        self.cold = self.cold and not guesses
        return super().run(step)


def test_a_first_step_that_is_slow_does_not_end_guessing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clock = Clock()
    monkeypatch.setattr(time, "perf_counter", lambda: clock.now)
    engine = engine_for("one", 2000)
    session = engine.session = Cold(engine.pool.plan, engine.pool)
    session.price(clock, 1)
    session.first, session.each = 0.4, 0.05
    made = engine.speculate(Speculation(Liar(1, 0)))
    cast(Liar, made.drafter).price(clock, 1e-5)
    sequence = sequence_for(engine, [1, 2], 600)
    engine.scheduler.add(sequence)
    while not sequence.finish_reason:
        engine.step()
    assert not session.cold and made.drafted > 200
