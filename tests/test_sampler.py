"""The sampler against transformers' own processors, and its independence of everything but the request."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import (
    LogitsProcessorList,
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from kvlathe.errors import KvlatheError
from kvlathe.runtime.sampler import Sampler, SamplingParams, filtered, logprob, penalize

VOCABULARY = 97

sampled = st.builds(
    SamplingParams,
    temperature=st.floats(0.1, 3),
    top_k=st.integers(0, VOCABULARY + 5),
    top_p=st.one_of(st.just(1.0), st.floats(0.05, 0.99)),
    min_p=st.one_of(st.just(0.0), st.floats(0.01, 0.5)),
    repetition_penalty=st.sampled_from([1.0, 0.7, 1.3, 2.0]),
)


def logits_of(seed: int) -> np.ndarray:
    return (3 * np.random.default_rng(seed).standard_normal(VOCABULARY)).astype(np.float32)


def reference(logits: np.ndarray, context: list[int], params: SamplingParams) -> np.ndarray:
    """Probabilities [vocab] by transformers' processors, in the order of its generate."""
    chain = LogitsProcessorList()
    if params.repetition_penalty != 1:
        chain.append(RepetitionPenaltyLogitsProcessor(params.repetition_penalty))
    chain.append(TemperatureLogitsWarper(params.temperature))
    if params.top_k:
        chain.append(TopKLogitsWarper(params.top_k))
    if params.top_p < 1:
        chain.append(TopPLogitsWarper(params.top_p))
    if params.min_p:
        chain.append(MinPLogitsWarper(params.min_p))
    scores = chain(torch.tensor([context]), torch.tensor(logits, dtype=torch.float64)[None])
    return scores.softmax(-1)[0].numpy()


@settings(max_examples=200, deadline=None)
@given(
    params=sampled, seed=st.integers(0, 999), context=st.lists(st.integers(0, VOCABULARY - 1), min_size=1, max_size=9)
)
def test_probabilities_are_those_of_transformers(params: SamplingParams, seed: int, context: list[int]) -> None:
    logits = logits_of(seed)
    tokens, probabilities = filtered(penalize(logits, context, params.repetition_penalty), params)
    ours = np.zeros(VOCABULARY)
    ours[tokens] = probabilities
    np.testing.assert_allclose(ours, reference(logits, context, params), atol=1e-6)


@given(seed=st.integers(0, 99), top=st.integers(0, VOCABULARY))
def test_logprobs_are_the_log_softmax(seed: int, top: int) -> None:
    logits = logits_of(seed)
    expected = torch.tensor(logits, dtype=torch.float64).log_softmax(-1)
    found = logprob(logits, 5, top)
    assert found.logprob == pytest.approx(float(expected[5]), abs=1e-9)
    best = expected.topk(top)
    np.testing.assert_allclose([score for _, score in found.top], best.values.numpy(), atol=1e-9)
    assert [token for token, _ in found.top] == best.indices.tolist()


def test_draws_follow_the_probabilities() -> None:
    params, logits = SamplingParams(temperature=0.8, top_p=0.9, seed=3), logits_of(1)
    sampler, n = Sampler(params), 4000
    counts = np.bincount([sampler.choose(logits, [0]) for _ in range(n)], minlength=VOCABULARY)
    expected = reference(logits, [0], params)
    assert not counts[expected == 0].any()
    assert np.abs(counts / n - expected).max() < 4 * np.sqrt(0.25 / n)


def test_a_seed_fixes_the_stream_and_its_absence_does_not() -> None:
    logits, params = logits_of(2) / 9, SamplingParams(temperature=1.0, seed=7)
    first, second = Sampler(params), Sampler(params)
    assert [first.choose(logits, []) for _ in range(20)] == [second.choose(logits, []) for _ in range(20)]
    free = [Sampler(SamplingParams(temperature=1.0)) for _ in range(2)]
    assert len({tuple(s.choose(logits, []) for _ in range(20)) for s in free}) == 2


def test_greedy_is_the_maximum_after_the_penalty() -> None:
    logits = np.array([1.0, 3.0, 2.9, -1.0], np.float32)
    assert Sampler(SamplingParams()).choose(logits, [1]) == 1
    assert Sampler(SamplingParams(repetition_penalty=1.5)).choose(logits, [1]) == 2


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("temperature", -1),
        ("top_p", 0),
        ("top_p", 1.1),
        ("top_k", -1),
        ("min_p", 2),
        ("max_new_tokens", 0),
        ("seed", -1),
    ],
)
def test_values_out_of_range_are_refused(name: str, value: float) -> None:
    with pytest.raises(KvlatheError, match=name):
        SamplingParams(**{name: value})
