"""Laws of a session that ranks tokens with the CUDA kernels, on a GPU or emulated: its
pages and answers are those of the session on the CPU."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from kvlathe.export.bases.basis import Basis
from kvlathe.export.folding.fold import decoder_from
from kvlathe.export.model.checkpoint import Checkpoint
from kvlathe.plan.formats import Tier
from kvlathe.plan.layout import CacheLayout
from kvlathe.plan.plan import CompressionPlan
from kvlathe.runtime.cache.page_table import PageTable
from kvlathe.runtime.llm import LLM
from kvlathe.runtime.sessions.gpu.device import BYTE
from kvlathe.runtime.sessions.gpu.side_memory import scratch_bytes
from kvlathe.runtime.sessions.host.pages import HostPages
from kvlathe.runtime.sessions.page_moves import FullPage
from kvlathe.runtime.sessions.torch_cuda.tokens.evicting import EvictingSession
from kvlathe.runtime.text.tokenizer import Tokenizer
from tests.support.runtime_cases import (
    LIMITS,
    MODEL,
    TorchSession,
    model_shape,
    ranked_plans,
)
from tests.support.session_laws import next_step
from tests.support.tiers import with_tiers

Places = npt.NDArray[np.int64]
KINDS = ("mixed", "budget", "sealed budget")


def ranked_plan(kind: str) -> CompressionPlan:
    """A plan of lathe-5m: 16-bit hot pages, and nothing that is rounded at random."""
    plan = ranked_plans(model_shape())[kind]
    tiers = [dataclasses.replace(t, rounding="nearest") for t in plan.index.tiers[1:]]
    return with_tiers(plan, (Tier(16, 16), *tiers))


def arena_bytes(plan: CompressionPlan, tokens: int = 4096) -> int:
    layout = CacheLayout(plan)
    size = sum(layout.page_stride) * (tokens // plan.page_tokens)
    return -(-size // 128) * 128


def on_cpu(plan: CompressionPlan) -> LLM:
    """The reference: the decoder in torch over pages in numpy."""
    size = arena_bytes(plan)
    session = TorchSession(decoder_from(Checkpoint(MODEL), plan, Basis()), size)
    return LLM(session, plan, LIMITS, Tokenizer(MODEL), size)


# -- pages -----------------------------------------------------------------------------


def moves_are_those_of_the_host(session: EvictingSession, seed: int) -> None:
    """Tokens of random pages: within each bucket that drops some, and into each that
    takes some; then sealed pages with their scores. Byte for byte."""
    plan, rng = session.plan, np.random.default_rng(seed)
    size = session.pool.nbytes - scratch_bytes(plan)
    host = HostPages(CacheLayout(plan), size)

    def filled() -> None:
        memory = rng.normal(size=size // 2).astype(np.float16).view(np.uint8)
        host.memory[:size] = memory
        session.device.send(session.pool.view(0, (size,), BYTE), memory)

    def compare() -> None:
        found = session.device.fetch(session.pool.view(0, (size,), BYTE))
        np.testing.assert_array_equal(found, host.memory[:size])

    for bucket in plan.index.buckets:
        source, cold = bucket.number, bucket.cold
        seals = bucket.life.seals
        into = [] if seals else [*cold]
        if bucket.stays and bucket.life.drops:
            into.append(source)
        for target in into:
            filled()
            _move(session, host, source, target, rng)
            compare()
        if cold and seals:
            filled()
            ids = _distinct_pages(host, (source, *cold), [3] * (1 + len(cold)), rng)
            columns = zip(*ids, strict=True)
            full = [FullPage(source, page, tuple(to), 0) for page, *to in columns]
            session.seal(full)
            host.seal(full)
            compare()


def _move(
    session: EvictingSession,
    host: HostPages,
    source: int,
    target: int,
    rng: np.random.Generator,
) -> None:
    plan, p = session.plan, session.plan.page_tokens
    held, taken = int(rng.integers(12, 14)) * p - 5, int(rng.integers(1, 12)) * p
    if source == target:
        taken -= int(rng.integers(0, p))
    counts = [-(-held // p), -(-taken // p)]
    pages, targets = _distinct_pages(host, (source, target), counts, rng)
    lanes = len(plan.index.buckets[target].lanes)
    rows = [np.sort(rng.permutation(held)[:taken]) for _ in range(lanes)]
    places = np.stack(rows)
    for side in (session, host):
        side.move(source, pages, target, targets, places)


def _distinct_pages(
    host: HostPages,
    buckets: Sequence[int],
    counts: Sequence[int],
    rng: np.random.Generator,
) -> list[list[int]]:
    """Page ids of some buckets whose bytes do not overlap, in random order."""
    found: list[list[int]] = []
    at = 0
    for bucket, count in zip(buckets, counts, strict=True):
        stride = host.layout.page_stride[bucket]
        first = -(-at // stride)
        ids = first + rng.permutation(count)
        at = (first + count) * stride
        assert at <= len(host.memory)
        found.append(ids.tolist())
    return found


def scores_are_those_of_the_host(session: EvictingSession, seed: int) -> None:
    """Check what is read of random pages, and what is left once some are forgotten."""
    plan, rng = session.plan, np.random.default_rng(seed)
    size = session.pool.nbytes - scratch_bytes(plan)
    host = HostPages(CacheLayout(plan), size)
    memory = rng.normal(size=size // 2).astype(np.float16).view(np.uint8)
    host.memory[:size] = memory
    session.device.send(session.pool.view(0, (size,), BYTE), memory)
    for bucket in range(len(plan.index.buckets)):
        if not plan.index.buckets[bucket].scored:
            continue
        ids = _distinct_pages(host, (bucket,), [9], rng)[0]
        tokens = 9 * plan.page_tokens - int(rng.integers(plan.page_tokens))
        found, expected = (x.scores(bucket, ids, tokens) for x in (session, host))
        np.testing.assert_array_equal(found.attention, expected.attention)
        assert (found.position is None) == (expected.position is None)
        if found.position is not None and expected.position is not None:
            np.testing.assert_array_equal(found.position, expected.position)
        for side in (session, host):
            side.forget(bucket, ids[:5])
    found = session.device.fetch(session.pool.view(0, (size,), BYTE))
    np.testing.assert_array_equal(found, host.memory[:size])


def a_step_that_is_rolled_back_leaves_no_score(ours: LLM, theirs: LLM) -> None:
    """Decodes whose rows are observed: scores are the other session's; what a step has
    added is gone when it is rolled back."""
    bucket = next(b for b in range(9) if ours.plan.index.buckets[b].scored)
    found: list[npt.NDArray[np.float32]] = []
    for llm in (ours, theirs):
        session, table = llm.session, llm.pool.open()
        assert isinstance(session, EvictingSession | HostPages)

        def scores(
            session: EvictingSession | HostPages = session, table: PageTable = table
        ) -> Any:  # noqa: ANN401
            return session.scores(bucket, table.pages[bucket], 6).attention.copy()

        weights = np.ones(1, np.float32)
        for token in range(6):
            step = next_step(llm, table, 50 + token)
            llm.session.run(dataclasses.replace(step, observation_weights=weights))
        before = scores()
        step = next_step(llm, table, 60)
        llm.session.run(dataclasses.replace(step, observation_weights=weights))
        assert (scores() > before).all()
        session.roll_back()
        np.testing.assert_array_equal(scores(), before)
        found.append(before)
        llm.pool.release(table)
    np.testing.assert_allclose(*found, rtol=2e-2, atol=2e-2)


# -- a whole engine --------------------------------------------------------------------


def recorded(llm: LLM) -> list[Places]:
    """Every move of an engine from now on: [lanes, n] places that stay."""
    moves: list[Places] = []
    session: Any = llm.session
    name = "place" if isinstance(session, EvictingSession) else "move"
    inner = getattr(session, name)

    def recording(*given: Any) -> None:  # noqa: ANN401  (as HostPages.move)
        places = torch.as_tensor(given[-1])
        moves.append(places.cpu().numpy().copy())
        inner(*given)

    setattr(session, name, recording)
    return moves


def alike(ours: Sequence[Places], theirs: Sequence[Places]) -> float:
    """The share of moved tokens that both sides move, over all moves and lanes."""
    assert [x.shape for x in ours] == [x.shape for x in theirs]
    same, total = 0, 0
    for a, b in zip(ours, theirs, strict=True):
        same += sum(len(np.intersect1d(x, y)) for x, y in zip(a, b, strict=True))
        total += a.size
    return same / total


OTHER_TOKEN = 5e-2
"""A share of the largest logit: how far one moves where another of two tokens stays."""


def tokens_stay_as_on_the_cpu(
    ours: LLM,
    theirs: LLM,
    ids: list[int],
    prompt: int,
    share: float = 0.98,
    of_prompt: float = 1e-2,
) -> None:
    """Prompt, ranking, sealing, decode, ranking again: the same tokens in the same
    buckets but where two are equally salient to 16 bit, and logits that are close.
    ``of_prompt``: how close those of the prompt are, of the largest, where all tokens
    are the same. Which of two stays is up to the processor's rounding."""
    moves = [recorded(llm) for llm in (ours, theirs)]
    found, expected = (
        llm.logits(ids, range(prompt - 1, len(ids)), prompt=prompt)
        for llm in (ours, theirs)
    )
    assert moves[0], "nothing was ranked"
    same = alike(*moves)
    assert same >= share, f"{same:.3f} of the tokens are the same"
    largest = np.abs(expected).max()
    difference = np.abs(found - expected)
    assert difference[0].max() <= (of_prompt if same == 1 else OTHER_TOKEN) * largest
    assert np.median(difference) <= 5e-3 * largest
    assert (found.argmax(-1) == expected.argmax(-1)).mean() >= 0.95
