"""Sampling of a batch in one pass: the probabilities of transformers' processors, the
same tokens on the host and with torch, and rows that do not see their neighbours."""

from __future__ import annotations

import dataclasses
from typing import Any

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

from kvlathe.base.errors import KvlatheError
from kvlathe.runtime.sessions.torch_cuda.sampling import sampling
from kvlathe.runtime.text.masks import WORD, Masks, no_bits
from kvlathe.runtime.text.philox import uniform
from kvlathe.runtime.text.sampler import (
    NO_TOKEN,
    Request,
    Sampler,
    StepRows,
    apply_changes,
    at_least,
    kept,
    logprob,
    rows_of,
    sample,
)
from kvlathe.runtime.text.sampling_params import SamplingParams

VOCABULARY = 700

params = st.builds(
    SamplingParams,
    temperature=st.one_of(st.just(0.0), st.floats(0.05, 3)),
    top_k=st.integers(0, VOCABULARY + 5),
    top_p=st.one_of(st.sampled_from([1.0, 1e-50]), st.floats(0.05, 0.99)),
    min_p=st.one_of(st.just(0.0), st.floats(0.01, 0.5)),
    repetition_penalty=st.sampled_from([1.0, 0.7, 1.3]),
    presence_penalty=st.sampled_from([0.0, 0.5, -1.0]),
    frequency_penalty=st.sampled_from([0.0, 0.25]),
    logit_bias=st.sampled_from([(), ((3, 5.0), (9, -100.0)), ((3, 1.0), (3, 1.0))]),
    logprobs=st.sampled_from([None, 0, 3, 100]),
    seed=st.integers(0, 2**64 - 1),
)
contexts = st.lists(st.integers(0, VOCABULARY - 1), min_size=1, max_size=24)


@st.composite
def requests(draw: st.DrawFn) -> Request:
    context = draw(contexts)
    sampler = Sampler(draw(params))
    sampler.drawn = draw(st.integers(0, 10_000))
    return Request(sampler, context, draw(st.integers(0, len(context))))


batches = st.lists(requests(), min_size=1, max_size=6)


def request(asked: SamplingParams, drawn: int = 0) -> Request:
    sampler = Sampler(asked)
    sampler.drawn = drawn
    return Request(sampler, [0], 1)


def logits_of(seed: int, rows: int, equal: bool = False) -> np.ndarray:
    random = np.random.default_rng(seed)
    logits = 3 * random.standard_normal((rows, VOCABULARY))
    return (np.round(logits) if equal else logits).astype(np.float32)


def reference(
    logits: np.ndarray, context: list[int], params: SamplingParams
) -> np.ndarray:
    """Probabilities [vocab] by transformers' processors, in the order of its
    generate."""
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
    scores = chain(torch.LongTensor([context]), torch.DoubleTensor(logits)[None])
    return scores.softmax(-1)[0].numpy()


@settings(max_examples=60)
@given(seeds=st.lists(st.integers(0, 2**64 - 1), min_size=1, max_size=4))
def test_random_numbers_are_numpys_philox_streams(seeds: list[int]) -> None:
    for seed in seeds:
        stream = np.random.Generator(np.random.Philox(key=seed))
        wanted = [stream.random() for _ in range(11)]
        drawn = uniform(np.full(11, seed, np.uint64), np.arange(11, dtype=np.uint64))
        np.testing.assert_array_equal(drawn, wanted)


def random_masks(seed: int, rows: int) -> Masks:
    """Masks of some of the rows: a few tokens each, the last word's rest at random."""
    random = np.random.default_rng(seed)
    chosen = np.flatnonzero(random.random(rows) < 0.6)
    bits = no_bits(len(chosen), VOCABULARY)
    for own in bits:
        words = random.integers(-(2**31), 2**31, len(own))
        own[:] = np.where(random.random(len(own)) < 0.3, words, 0)
        own[random.integers(VOCABULARY // WORD)] |= 1 << int(random.integers(31))
    return Masks(chosen, bits)


@settings(max_examples=60)
@given(batch=batches, seed=st.integers(0, 999))
def test_a_mask_is_a_vocabulary_of_the_tokens_that_it_allows(
    batch: list[Request], seed: int
) -> None:
    """Against the same rows with the others' logits at -inf; and what it leaves out is
    never drawn."""
    logits, masks = logits_of(seed, len(batch)), random_masks(seed, len(batch))
    free = [dataclasses.replace(r, sampler=unchanged(r.sampler)) for r in batch]
    cut = logits.copy()
    for row, own in zip(masks.rows.tolist(), masks.bits, strict=True):
        for token in range(VOCABULARY):
            if not int(own[token // WORD]) >> token % WORD & 1:
                cut[row, token] = -np.inf
    found = sample(logits, rows_of(free, masks))
    np.testing.assert_array_equal(found.tokens, sample(cut, rows_of(free)).tokens)
    drawn = cut[np.arange(len(batch)), found.tokens]
    assert np.isfinite(drawn).all()
    plain = sample(logits, rows_of(free))
    others = np.setdiff1d(np.arange(len(batch)), masks.rows)
    np.testing.assert_array_equal(found.tokens[others], plain.tokens[others])


def unchanged(sampler: Sampler) -> Sampler:
    """The same without what changes logits before a mask."""
    params = dataclasses.replace(
        sampler.params,
        repetition_penalty=1.0,
        presence_penalty=0.0,
        frequency_penalty=0.0,
        logit_bias=(),
    )
    found = Sampler(params)
    found.drawn = sampler.drawn
    return found


@settings(max_examples=150)
@given(
    batch=batches, seed=st.integers(0, 999), equal=st.booleans(), guided=st.booleans()
)
def test_torch_draws_what_the_host_draws(
    batch: list[Request], seed: int, equal: bool, guided: bool
) -> None:
    masks = random_masks(seed, len(batch)) if guided else None
    logits, rows = logits_of(seed, len(batch), equal), rows_of(batch, masks)
    host, device = (
        sample(logits, rows),
        sampling.sample(torch.from_numpy(logits), rows).result(),
    )
    np.testing.assert_array_equal(device.tokens, host.tokens)
    np.testing.assert_allclose(device.logprobs, host.logprobs, atol=1e-9)
    np.testing.assert_allclose(device.top_logprobs, host.top_logprobs, atol=1e-9)
    # Scores that differ by rounding alone may change places.
    scores = host.top_logprobs
    clear = np.diff(scores, axis=1, prepend=np.inf, append=np.inf) < -1e-9
    if not equal:
        told = clear[:, :-1] & clear[:, 1:]
        np.testing.assert_array_equal(device.top_tokens[told], host.top_tokens[told])


@settings(max_examples=60)
@given(batch=batches, seed=st.integers(0, 999))
def test_a_row_does_not_see_its_neighbours(batch: list[Request], seed: int) -> None:
    logits = logits_of(seed, len(batch))
    together = sample(logits, rows_of(batch))
    for i, request in enumerate(batch):
        alone = sample(logits[i : i + 1], rows_of([request]))
        assert alone.tokens[0] == together.tokens[i]
        assert alone.logprobs[0] == together.logprobs[i]


@settings(max_examples=200)
@given(
    temperature=st.floats(0.1, 3),
    top_k=st.integers(0, VOCABULARY + 5),
    top_p=st.one_of(st.just(1.0), st.floats(0.05, 0.99)),
    min_p=st.one_of(st.just(0.0), st.floats(0.01, 0.5)),
    penalty=st.sampled_from([1.0, 0.7, 1.3, 2.0]),
    seed=st.integers(0, 999),
    context=contexts,
)
def test_kept_tokens_have_the_probabilities_of_transformers(
    temperature: float,
    top_k: int,
    top_p: float,
    min_p: float,
    penalty: float,
    seed: int,
    context: list[int],
) -> None:
    asked = SamplingParams(
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        min_p=min_p,
        repetition_penalty=penalty,
    )
    logits = logits_of(seed, 1)
    rows = rows_of([Request(Sampler(asked), context, len(context))])
    penalized = logits if rows.changes is None else apply_changes(logits, rows.changes)
    places, weights = kept(
        penalized[0],
        penalized.max(),
        rows.temperature[0],
        top_k,
        rows.top_p[0],
        rows.min_p[0],
    )
    ours = np.zeros(VOCABULARY)
    ours[slice(None) if places is None else places] = weights / weights.sum(dtype=float)
    np.testing.assert_allclose(ours, reference(logits[0], context, asked), atol=2e-6)


@settings(max_examples=40)
@given(seed=st.integers(0, 99), size=st.integers(1, 3000), data=st.data())
def test_the_largest_are_those_of_a_sort(
    seed: int, size: int, data: st.DataObject
) -> None:
    count = data.draw(st.integers(1, size))
    values = np.random.default_rng(seed).integers(0, 500, size).astype(np.float32)
    least = np.sort(values)[-count]
    np.testing.assert_array_equal(
        at_least(values, count), np.flatnonzero(values >= least)
    )


def test_logits_that_are_no_numbers_give_no_token() -> None:
    logits = logits_of(0, 3)
    logits[1, 5] = np.nan
    logits[2, 7] = np.inf
    asked = SamplingParams(temperature=1.0, logprobs=2)
    rows = rows_of([request(asked) for _ in range(3)])
    for sampled in (
        sample(logits, rows),
        sampling.sample(torch.from_numpy(logits), rows).result(),
    ):
        assert sampled.token(0) >= 0 and (sampled.tokens[1:] == NO_TOKEN).all()
        with pytest.raises(KvlatheError, match="not a number"):
            sampled.token(1)


@given(seed=st.integers(0, 99), top=st.integers(0, VOCABULARY))
def test_logprobs_are_the_log_softmax(seed: int, top: int) -> None:
    logits = logits_of(seed, 1)[0]
    expected = torch.tensor(logits, dtype=torch.float64).log_softmax(-1)
    ours = logprob(logits, 5, top)
    assert ours.logprob == pytest.approx(float(expected[5]), abs=1e-9)
    best = expected.topk(top)
    np.testing.assert_allclose(
        [score for _, score in ours.top], best.values.numpy(), atol=1e-9
    )
    assert [token for token, _ in ours.top] == best.indices.tolist()


def test_draws_follow_the_probabilities() -> None:
    asked = SamplingParams(temperature=0.8, top_p=0.9, seed=3)
    logits, n = logits_of(1, 1), 4000
    rows = rows_of([request(asked, drawn) for drawn in range(n)])
    tokens = sample(np.repeat(logits, n, axis=0), rows).tokens
    counts = np.bincount(tokens, minlength=VOCABULARY)
    expected = reference(logits[0], [0], asked)
    assert not counts[expected == 0].any()
    assert np.abs(counts / n - expected).max() < 4 * np.sqrt(0.25 / n)


def test_a_seed_fixes_the_stream_and_its_absence_does_not() -> None:
    logits = np.repeat(logits_of(2, 1) / 9, 20, axis=0)

    def stream(asked: SamplingParams) -> list[int]:
        sampler = Sampler(asked)
        drawn = []
        for row in logits:
            drawn.append(
                sample(row[None], rows_of([Request(sampler, [0], 1)])).token(0)
            )
            sampler.drawn += 1
        return drawn

    seeded = SamplingParams(temperature=1.0, seed=7)
    assert stream(seeded) == stream(seeded)
    free = SamplingParams(temperature=1.0)
    assert stream(free) != stream(free)


def test_penalties_and_biases_change_the_likeliest_token() -> None:
    logits = np.array([[1.0, 3.0, 2.9, -1.0]], np.float32)

    def greedy(**asked: Any) -> int:  # noqa: ANN401  (fields of SamplingParams)
        sampler = Sampler(SamplingParams(**asked))
        return sample(logits, rows_of([Request(sampler, [1, 2, 1], 1)])).token(0)

    assert greedy() == 1
    assert greedy(repetition_penalty=1.5) == 1  # both are divided
    assert greedy(presence_penalty=1.0) == 1  # both lose as much
    assert greedy(presence_penalty=2.0) == 0
    assert greedy(frequency_penalty=1.0, logit_bias=((2, 0.05),)) == 1
    assert greedy(frequency_penalty=1.0, logit_bias=((2, 0.95),)) == 2
    assert greedy(logit_bias=((0, 5.0),)) == 0
    assert greedy(logit_bias=((1, -0.2),)) == 2


@settings(max_examples=20, deadline=None)
@given(st.lists(batches, min_size=1, max_size=3), st.lists(st.integers(0, 2)))
def test_sampling_rows_kept_from_step_to_step_are_those_made_anew(
    parts: list[list[Request]], turns: list[int]
) -> None:
    rows = StepRows()
    for turn in turns:
        batch = parts[turn % len(parts)]
        batch[0].sampler.drawn += 1
        found, wanted = rows.of(batch, None), rows_of(batch)
        np.testing.assert_equal(dataclasses.asdict(found), dataclasses.asdict(wanted))
