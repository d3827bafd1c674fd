"""Shards that see a part of the vocabulary each choose what one process chooses, and
exchange few numbers."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from kvlathe.runtime.sessions.torch_cuda.model.shard_group import shard_borders
from kvlathe.runtime.sessions.torch_cuda.sampling.sharded_sampling import (
    BINS,
    ShardedSampler,
)
from kvlathe.runtime.text.sampler import Request, Sampled, SamplingRows, rows_of, sample
from kvlathe.runtime.text.sampling_params import SamplingParams
from tests.runtime.text.test_sampler import (
    VOCABULARY,
    batches,
    logits_of,
    random_masks,
    request,
)
from tests.support.thread_group import ThreadGroup, on_shards

wait = torch.cuda.Event.synchronize  # there are no events on a CPU


def by_ranks(
    size: int,
    logits: np.ndarray,
    rows: SamplingRows,
    kind: type[ThreadGroup] = ThreadGroup,
) -> list[Sampled]:
    vocab = logits.shape[1]
    borders = shard_borders(vocab, size)

    def work(group: ThreadGroup) -> Sampled:
        first, end = borders[group.shard : group.shard + 2]
        own = torch.from_numpy(logits[:, first:end].copy())
        sampler = ShardedSampler(group, first, vocab, wait)
        return sampler.sample(own, rows).result()

    return on_shards(size, work, kind)


@settings(max_examples=100)
@given(
    batch=batches,
    seed=st.integers(0, 999),
    equal=st.booleans(),
    guided=st.booleans(),
    size=st.integers(1, 5),
)
def test_shards_draw_what_the_host_draws(
    batch: list[Request], seed: int, equal: bool, guided: bool, size: int
) -> None:
    masks = random_masks(seed, len(batch)) if guided else None
    logits, rows = logits_of(seed, len(batch), equal), rows_of(batch, masks)
    host = sample(logits, rows)
    every = by_ranks(size, logits, rows)
    for one in every:
        np.testing.assert_array_equal(one.tokens, host.tokens)
        np.testing.assert_allclose(one.logprobs, host.logprobs, atol=1e-9)
        np.testing.assert_allclose(one.top_logprobs, host.top_logprobs, atol=1e-9)
    scores = host.top_logprobs
    with np.errstate(invalid="ignore"):
        clear = np.diff(scores, axis=1, prepend=np.inf, append=np.inf) < -1e-9
    told = clear[:, :-1] & clear[:, 1:]
    if not equal:
        np.testing.assert_array_equal(every[0].top_tokens[told], host.top_tokens[told])


def test_logits_that_are_no_numbers_give_no_token() -> None:
    logits = logits_of(0, 3)
    logits[1, 5], logits[2, VOCABULARY - 7] = np.nan, np.inf
    asked = SamplingParams(temperature=1.0, top_p=0.5, logprobs=2)
    rows = rows_of([request(asked) for _ in range(3)])
    for one in by_ranks(3, logits, rows):
        assert one.tokens[0] == sample(logits, rows).tokens[0]
        assert (one.tokens[1:] == -1).all()


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(temperature=1.0, seed=1),
        SamplingParams(temperature=1.0, seed=1, top_k=40, top_p=0.9, min_p=0.01),
    ],
    ids=["plain", "cut"],
)
def test_numbers_that_shards_exchange_do_not_grow_with_the_vocabulary(
    params: SamplingParams,
) -> None:
    counts: list[list[int]] = []

    class Counted(ThreadGroup):
        def gather(self, x: Tensor) -> Tensor:
            counts[-1].append(x.numel())
            return super().gather(x)

    for vocab in (30_000, 60_000):
        logits = np.random.default_rng(0).normal(size=(1, vocab)).astype(np.float32)
        rows = rows_of([request(params)])
        counts.append([])

        found = by_ranks(2, logits, rows, Counted)
        assert [x.token(0) for x in found] == [sample(logits, rows).token(0)] * 2
    assert sorted(counts[0]) == sorted(counts[1])
    assert max(counts[0]) <= BINS and len(counts[0]) < 40
