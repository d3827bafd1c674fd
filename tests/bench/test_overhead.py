"""The bare loop does what the engine did: else nothing can be compared with it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial

import numpy as np
import pytest

from benchmarks import overhead
from kvlathe.runtime.llm import LLM
from kvlathe.runtime.sessions.protocols import Sampling, Session, StepPlan
from kvlathe.runtime.text.sampler import SamplingRows
from kvlathe.runtime.text.sampling_params import SamplingParams
from tests.support.fake_session import SamplesThere
from tests.support.runtime_cases import llm as engine_of

PROMPTS = overhead.prompts_of(count=3, tokens=70, seed=1)
ANSWER = 9


@pytest.fixture
def llm() -> Iterator[LLM]:
    with engine_of("torch", "sealed") as engine:
        yield engine


class Ahead:
    """A session that samples, and notes what happens when."""

    def __init__(self, session: Session) -> None:
        self.inner = SamplesThere(session)
        self.apply = session.apply
        self.events: list[str] = []

    def start(self, step: StepPlan) -> Callable[[SamplingRows], Sampling]:
        self.events.append("start")
        return partial(self.noted, self.inner.start(step))

    def noted(
        self, choose: Callable[[SamplingRows], Sampling], rows: SamplingRows
    ) -> Sampling:
        return Told(self.events, choose(rows))


class Told:
    def __init__(self, events: list[str], sampling: Sampling) -> None:
        self.events, self.sampling = events, sampling

    def result(self) -> overhead.Any:
        self.events.append("result")
        return self.sampling.result()


def answered(llm: LLM) -> tuple[Counter[int], list[overhead.Call]]:
    """The tokens of the answers, and the calls that made them."""
    params = SamplingParams(max_new_tokens=ANSWER, ignore_eos=True)
    with overhead.recorded(llm.session) as calls:
        answers = llm.generate(PROMPTS, params)
    tokens: Counter[int] = Counter()
    for answer in answers:
        tokens.update(answer.token_ids)
    return tokens, calls


def tokens_of(landed: list[overhead.Landed]) -> Counter[int]:
    return Counter(np.concatenate([one.tokens for one in landed]).tolist())


def test_the_bare_loop_computes_the_same_tokens(llm: LLM) -> None:
    tokens, calls = answered(llm)
    assert tokens_of(overhead.bare(llm.session, calls)) == tokens
    applied = [args[0] for name, args in calls if name == "apply"]
    assert any(one.seals for moves in applied for one in moves)
    assert "run" not in vars(llm.session)
    spent = overhead.spent_bare(llm.session, calls)
    assert spent.prompts > 0
    assert spent.decode > 0


def test_the_bare_loop_is_one_step_ahead_where_the_session_samples(llm: LLM) -> None:
    tokens, calls = answered(llm)
    session = Ahead(llm.session)
    started = [("start" if name == "run" else name, args) for name, args in calls]
    assert tokens_of(overhead.bare(session, started)) == tokens
    steps = len(overhead.steps_of(started))
    between = ["start", "result"] * (steps - 1)
    assert session.events == ["start", *between, "result"]
