"""The simulation against queueing theory, and against a loop that runs every step."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("simpy", reason="simpy is not installed: pip install '.[dev]'")

from benchmarks.scale import Limits, Load, most_users
from benchmarks.support.cluster import Engine, Job, Shape, simulate
from benchmarks.support.step_times import (
    StepTimes,
    decode_row,
    errors,
    expected,
    fitted,
    measured,
    prompt_row,
)

ROOT = Path(__file__).resolve().parents[2]
TIMES = StepTimes(1e-2, 1e-4, 1e-3, 1e-7, 1e-6)
ENGINE = Engine(
    TIMES, token_bytes=1000, cache_tokens=2000, most_running=4, step_tokens=64
)
WHOLE = Shape(0, 1)


# -- step times ------------------------------------------------------------------------
def test_a_fit_finds_the_times_that_made_the_rows() -> None:
    rows = [decode_row(a, c, 1) for a in (1, 8, 60) for c in (0, 900, 30000)]
    rows += [prompt_row(p, n, 512, 1) for p in (1, 3) for n in (64, 700, 9000)]
    made = [row.__class__(*row.counts, seconds=expected(TIMES, row)) for row in rows]
    found = fitted(made)
    assert max(map(abs, errors(found, made))) < 1e-6
    assert found.cached == pytest.approx(TIMES.cached, rel=1e-4)


@pytest.mark.parametrize("name", list(measured()))
def test_every_measured_time_stands_on_the_page_it_names(name: str) -> None:
    build = measured()[name]
    for row in build.rows:
        page = (ROOT / row.source).read_text("utf-8")
        assert row.says and row.says in page
        if row.seconds in COMPUTED:
            assert row.seconds == pytest.approx(COMPUTED[row.seconds], rel=5e-3)
            continue
        written = {f"{row.seconds:,g}", f"{1000 * row.seconds:,g}"}
        assert written & set(re.findall(r"\d[\d,.]*\d|\d", row.says)), row
    assert max(map(abs, errors(fitted(build.rows), build.rows))) < 0.03


COMPUTED = {3.37: 3.18 * 1.060, 28.5: 27.9 * 1.02}
"""Seconds that stand on no page: the product of two numbers that do (docs/scale.md)."""


# -- one worker ------------------------------------------------------------------------
@dataclass
class Stepwise:
    """One worker, step by step: the reference."""

    engine: Engine
    jobs: list[Job]
    done: dict[int, int] = field(default_factory=dict)
    drawn: dict[int, int] = field(default_factory=dict)
    first: dict[int, float] = field(default_factory=dict)
    last: dict[int, float] = field(default_factory=dict)
    now: float = 0.0

    def run(self) -> None:
        waiting, running = list(range(len(self.jobs))), list[int]()
        while waiting or running:
            while waiting and self.fits(waiting[0], running):
                running.append(waiting.pop(0))
                self.done[running[-1]] = self.jobs[running[-1]].hit
            if running:
                running = self.step(running)
            else:
                self.now = self.jobs[waiting[0]].due

    def fits(self, new: int, running: list[int]) -> bool:
        jobs = [self.jobs[i] for i in (*running, new)]
        tokens = sum(job.prompt + job.answer for job in jobs)
        if jobs[-1].due > self.now or len(jobs) > self.engine.most_running:
            return False
        return not running or tokens <= self.engine.cache_tokens

    def step(self, running: list[int]) -> list[int]:
        times = self.engine.times
        answers = [i for i in running if i in self.drawn]
        cached = sum(self.jobs[i].prompt + self.drawn[i] - 1 for i in answers)
        seconds = times.step + times.decode(len(answers), cached)
        room = self.engine.step_tokens - len(answers)
        if answers:
            room = min(room, self.engine.beside)
        for i in running:
            if i not in self.drawn:
                count = min(room, self.jobs[i].prompt - self.done[i])
                seconds += times.prompt(count, count * (self.done[i] + count / 2))
                self.done[i] += count
                room -= count
        self.now += seconds
        for i in running:
            if i in self.drawn:
                self.drawn[i] += 1
            elif self.done[i] == self.jobs[i].prompt:
                self.drawn[i] = 1
                self.first[i] = self.now
            self.last[i] = self.now
        return [i for i in running if self.drawn.get(i, 0) < self.jobs[i].answer]


def job_lists(most_gap: float) -> st.SearchStrategy[list[Job]]:
    numbers = st.tuples(
        st.floats(1e-3, most_gap),
        st.integers(1, 200),
        st.integers(1, 60),
        st.integers(0, 99),
    )

    def made(rows: list[tuple[float, int, int, int]]) -> list[Job]:
        due = np.cumsum([row[0] for row in rows]).tolist()
        return [
            Job(when, prompt, answer, hit * (prompt - 1) // 100)
            for when, (_, prompt, answer, hit) in zip(due, rows, strict=True)
        ]

    return st.lists(numbers, min_size=1, max_size=12).map(made)


@settings(max_examples=30, deadline=None)
@given(jobs=job_lists(0.7), beside=st.sampled_from([16, 64]))
def test_jumping_over_steps_changes_no_time(jobs: list[Job], beside: int) -> None:
    engine = Engine(TIMES, 1000, 600, most_running=4, step_tokens=64, beside=beside)
    reference = Stepwise(engine, jobs)
    reference.run()
    (worker,) = simulate(engine, WHOLE, jobs).decoding
    for number, job in enumerate(jobs):
        assert job.first == pytest.approx(reference.first[number], abs=1e-9)
        assert job.last == pytest.approx(reference.last[number], abs=1e-9)
    assert worker.most_held <= 600
    assert worker.held == worker.cached == worker.unfinished == 0


def test_a_single_server_waits_as_long_as_queueing_theory_says() -> None:
    """A queue with Poisson arrivals and one service time: Pollaczek and Khinchine."""
    engine = Engine(TIMES, 1, 1 << 40, most_running=1, step_tokens=64)
    service, load, count = TIMES.step + TIMES.prompt(50, 1250), 0.6, 12_000
    gaps = np.random.default_rng(0).exponential(service / load, count)
    jobs = [Job(due, 50, 1) for due in np.cumsum(gaps).tolist()]
    simulate(engine, WHOLE, jobs)
    waited = np.mean([job.first - job.due for job in jobs]) - service
    assert waited == pytest.approx(load * service / (2 * (1 - load)), rel=0.08)


# -- prefill and decode ----------------------------------------------------------------
@settings(max_examples=20, deadline=None)
@given(jobs=job_lists(0.3), prefill=st.integers(1, 3), decode=st.integers(1, 3))
def test_every_answer_ends_after_its_pages_came(
    jobs: list[Job], prefill: int, decode: int
) -> None:
    shape = Shape(prefill, decode, link=1e6)
    cluster = simulate(ENGINE, shape, jobs)
    for job in jobs:
        travels = job.answer > 1
        seconds = job.prompt * ENGINE.token_bytes / shape.link if travels else 0.0
        assert job.first >= job.due + TIMES.step + seconds
        assert job.last - job.first >= (job.answer - 1) * TIMES.step - 1e-9
    for worker in (*cluster.decoding, *cluster.computing):
        assert worker.most_held <= ENGINE.cache_tokens
        assert worker.held == worker.unfinished == worker.arriving == 0


def test_one_link_carries_one_prompt_at_a_time() -> None:
    shape = Shape(1, 1, link=1e5)
    jobs = [Job(0.0, 50, 2) for _ in range(8)]
    simulate(ENGINE, shape, jobs)
    assert max(job.first for job in jobs) >= 8 * 50 * ENGINE.token_bytes / shape.link


# -- users -----------------------------------------------------------------------------
def test_twice_the_gpus_carry_twice_the_users() -> None:
    from kvlathe.bench.load import TRACES

    engine = Engine(TIMES, 1, 100_000, most_running=32)
    load = Load(TRACES["humaneval"], interval=10, hit=0, seconds=100)
    limits = Limits(first=1, per_token=0.1)
    one, two = (
        most_users(engine, Shape(0, gpus), load, limits, 20.0 * gpus, 2.0)
        for gpus in (2, 4)
    )
    assert 0 < 1.7 * one < two < 2.6 * one
