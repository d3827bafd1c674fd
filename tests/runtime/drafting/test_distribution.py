"""A sampled answer has the distribution of the model, whatever is guessed; and with a
seed it is the answer that it is without guesses."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from collections.abc import Sequence as Items
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from scipy.stats import chisquare

from kvlathe.plan.manifest import Limits
from kvlathe.runtime.scheduling.engine import Engine
from kvlathe.runtime.scheduling.parts.speculation import Speculation
from kvlathe.runtime.scheduling.scheduler import Scheduler
from kvlathe.runtime.scheduling.sequence import Sequence
from kvlathe.runtime.sessions.protocols import StepPlan
from tests.support.drafts import whatever_is_guessed
from tests.support.fake_session import FakeSession, SamplesThere
from tests.support.schedule_cases import engine_for, sequence_for

WORDS = 4
LIMITS = Limits(16, 4096, 96, 160)
LOGITS = np.random.default_rng(7).normal(0, 1.5, (WORDS, WORDS)).astype(np.float32)
"""After each token, of the next one."""
ASKED = {"temperature": 0.8, "top_p": 0.9, "logit_bias": ((2, 0.5),)}
MANY = 1500


class Markov(FakeSession):
    """The next token depends on the last one alone; the pages stay empty."""

    def run(self, step: StepPlan) -> npt.NDArray[np.float32]:
        return LOGITS[step.input_ids[step.logit_rows]]


class Guesser:
    """Guesses the likeliest tokens, and sometimes any."""

    def __init__(self) -> None:
        self.random = np.random.default_rng(3)

    def chances(self, sequence: Sequence, most: int) -> Items[float]:
        return [0.5] * min(2, most)

    def draft(self, counts: Mapping[Sequence, int], seconds: float) -> list[list[int]]:
        return [self.guess(one.tokens[-1], n) for one, n in counts.items()]

    def guess(self, token: int, count: int) -> list[int]:
        guess: list[int] = []
        for _ in range(count):
            token = int(LOGITS[token].argmax())
            if self.random.random() < 0.3:
                token = int(self.random.integers(WORDS))
            guess.append(token)
        return guess

    def forget(self, sequence: Sequence) -> None: ...


def engine(on_device: bool, guesses: bool) -> Engine:
    made = engine_for("sealed", 200 * LIMITS.max_batch_size)
    session = Markov(made.pool.plan, made.pool)
    scheduler = Scheduler(made.pool, session, LIMITS)
    made = Engine(session, made.pool, scheduler, ())
    if on_device:
        made.session = SamplesThere(session)
    if guesses:
        made.speculate(whatever_is_guessed(Speculation(Guesser(), 2)))
    return made


def answers(made: Engine, count: int, asked: dict[str, Any]) -> list[list[int]]:
    """Answers to ``count`` requests of different seeds: four tokens each."""
    sequences: list[Sequence] = []
    for seed in range(count):
        one = sequence_for(made, [0], 4, seed=seed, **asked)
        sequences.append(one)
        made.scheduler.add(one)
        if len(made.scheduler.waiting) == LIMITS.max_batch_size or seed == count - 1:
            while made.scheduler.waiting or made.scheduler.running:
                made.step()
    return [one.answer for one in sequences]


def distribution(token: int) -> npt.NDArray[np.float64]:
    """The distribution of the token after another: temperature, bias and nucleus, in
    float64."""
    logits = LOGITS[token].astype(np.float64)
    logits[2] += 0.5
    weights = np.exp(logits / 0.8)
    shares = weights / weights.sum()
    kept = np.zeros(WORDS)
    mass = 0.0
    for place in np.argsort(-shares):
        if mass >= 0.9:
            break
        kept[place] = shares[place]
        mass += shares[place]
    return kept / kept.sum()


def test_sampled_answers_have_the_models_distribution() -> None:
    """Chi-square over all answers of four tokens."""
    made = engine(False, True)
    found = answers(made, MANY, ASKED)
    speculation = made.scheduler.speculation
    assert 0.2 < speculation.accepted / speculation.drafted < 0.8
    seen: list[float] = []
    expected: list[float] = []
    for answer in itertools.product(range(WORDS), repeat=4):
        share = 1.0
        for before, token in itertools.pairwise((0, *answer)):
            share *= distribution(before)[token]
        if share:
            seen.append(found.count(list(answer)))
            expected.append(share * MANY)
    assert sum(seen) == MANY, "an answer that cannot be"
    assert len(seen) > 40
    assert min(expected) > 4
    assert chisquare(seen, expected).pvalue > 1e-3


@pytest.mark.parametrize("on_device", [False, True])
def test_a_seed_gives_the_same_answer_with_guesses_and_without(on_device: bool) -> None:
    asked = ASKED | {"frequency_penalty": 0.7, "repetition_penalty": 1.2}
    with_guesses = answers(engine(on_device, True), 100, asked)
    assert with_guesses == answers(engine(on_device, False), 100, asked)
