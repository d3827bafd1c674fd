"""Penalties by counts that stay where the logits are: the tokens that the host draws,
who comes and goes, and whatever the host knows late."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvlathe.runtime.scheduling.engine import Engine
from kvlathe.runtime.scheduling.sequence import Sequence
from kvlathe.runtime.sessions.protocols import Capability, Session
from kvlathe.runtime.sessions.torch_cuda.sampling import sampling
from kvlathe.runtime.sessions.torch_cuda.sampling.counts import TokenCounts
from kvlathe.runtime.text.sampler import (
    Request,
    Sampled,
    Sampler,
    SamplingRows,
    StepRows,
    rows_of,
    sample,
)
from kvlathe.runtime.text.sampling_params import SamplingParams
from tests.support.fake_session import VOCABULARY, Known, SamplesThere
from tests.support.schedule_cases import engine_for, sequence_for

WIDTH = 40
CPU = torch.device("cpu")

params = st.builds(
    SamplingParams,
    temperature=st.sampled_from([0.0, 0.7]),
    repetition_penalty=st.sampled_from([1.0, 1.4, 0.6]),
    presence_penalty=st.sampled_from([0.0, 1.5, -1.0]),
    frequency_penalty=st.sampled_from([0.0, 0.75]),
    logit_bias=st.sampled_from([(), ((3, 2.0), (3, 1.0))]),
    seed=st.integers(0, 99),
)


@settings(max_examples=40, deadline=None)
@given(
    st.lists(params, min_size=1, max_size=5),
    st.lists(st.sets(st.integers(0, 4)), min_size=1, max_size=10),
    st.integers(0, 2**32),
)
def test_counts_choose_what_the_host_chooses(
    asked: list[SamplingParams], steps: list[set[int]], seed: int
) -> None:
    """In each step some of the sequences: one that was in the step before is a token
    ahead of what the host knows."""
    random = np.random.default_rng(seed)
    counts, step_rows = TokenCounts(WIDTH, CPU), StepRows()
    samplers = [Sampler(one) for one in asked]
    contexts = [random.integers(0, WIDTH, 6).tolist() for _ in asked]
    before: set[int] = set()
    for step in steps:
        those = [i for i in sorted(step) if i < len(asked)]
        if not those:
            continue
        logits = 3 * random.standard_normal((len(those), WIDTH)).astype(np.float32)
        known: list[Request] = []
        told: list[Request] = []
        for i in those:
            counted = asked[i].is_counted or not asked[i].has_penalties
            pending = int(i in before and counted)
            told.append(
                Request(
                    samplers[i],
                    contexts[i][: len(contexts[i]) - pending],
                    4,
                    pending=pending,
                )
            )
            known.append(Request(samplers[i], contexts[i], 4))
        rows = step_rows.of(told, None, counted=True)
        found = sampling.sample(torch.from_numpy(logits), rows, counts).result()
        wanted = sample(logits, rows_of(known))
        np.testing.assert_array_equal(found.tokens, wanted.tokens)
        for i, token in zip(those, found.tokens.tolist(), strict=True):
            contexts[i].append(token)
            samplers[i].drawn += 1
        before = set(those)


class CountsThere(SamplesThere):
    """Samples with torch, and counts tokens there."""

    def __init__(self, session: Session) -> None:
        super().__init__(session)
        more: frozenset[Capability] = frozenset({"counts_tokens"})
        self.capabilities = self.capabilities | more
        self.counts = TokenCounts(VOCABULARY, CPU)
        self.counted = 0

    def choose(self, logits: Any, rows: SamplingRows) -> Known:  # noqa: ANN401
        self.counted += rows.penalties is not None
        assert rows.changes is None
        drawn = sampling.sample(torch.from_numpy(logits), rows, self.counts)
        sampled: Sampled = drawn.result()
        self.tokens = sampled.tokens
        return Known(sampled)


def answers(engine: Engine, stops: frozenset[int]) -> list[list[int]]:
    """Answers of sequences that come and go, each with penalties of its own; some stop
    early, which is found a step late where the GPU chooses."""
    engine.stop_ids = stops
    make: Callable[..., Sequence] = partial(sequence_for, engine, temperature=1.0)
    everyone: list[Sequence] = []
    for i in range(6):
        penalties: dict[str, Any] = {
            "presence_penalty": 1.0,
            "frequency_penalty": 0.5 * i,
        }
        if i % 3 == 2:
            penalties = {"repetition_penalty": 1.5}
        one = make([i + 1] * 9, 10 + i, seed=i, ignore_eos=False, **penalties)
        everyone.append(one)
        engine.scheduler.add(one)
        engine.step()
        engine.step()
    while not all(one.finish_reason for one in everyone):
        engine.step()
    engine.rest()
    return [one.answer for one in everyone]


def test_stops_that_are_found_late_leave_no_count_behind() -> None:
    stops = frozenset(range(0, VOCABULARY, 25))
    host = answers(engine_for("one", 900), stops)
    engine = engine_for("one", 900)
    counter = CountsThere(engine.session)
    engine.session = counter
    assert answers(engine, stops) == host
    assert counter.counted > 20
    assert {len(answer) for answer in host} != {10 + i for i in range(6)}
    assert engine.pool.bytes_in_use == 0
