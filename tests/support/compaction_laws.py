"""Laws of prefixes that are compacted on a GPU, or as if on one: what is kept and what
is answered behind it are those of the session on the CPU, and of float64."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from kvlathe.plan.formats import Tier
from kvlathe.plan.plan import CompressionPlan
from kvlathe.runtime.cache.prefix import PrefixCache
from kvlathe.runtime.llm import LLM
from kvlathe.runtime.requests.compaction import Compaction
from kvlathe.runtime.text.sampling_params import SamplingParams
from tests.support.compaction_cases import (
    PREFIX,
    attention_maxima,
    masked_logits,
    prompt,
)
from tests.support.prefix_cases import forget, prefixes
from tests.support.runtime_cases import compacting_plans, model_shape, text
from tests.support.tiers import with_tiers

Places = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float32]
KINDS = ("compacted", "compacted alike", "sealed compacted")
PARAMS = SamplingParams(max_new_tokens=12, temperature=0.0, ignore_eos=True)


def compacting_plan(kind: str) -> CompressionPlan:
    """A plan of lathe-5m, with 16-bit hot pages."""
    plan = compacting_plans(model_shape())[kind]
    return with_tiers(plan, (Tier(16, 16),))


def share_prefixes(llm: LLM) -> LLM:
    llm.engine.scheduler.prefixes = PrefixCache(llm.pool)
    return llm


def compacted(llm: LLM, ids: list[int], keep: float) -> tuple[Compaction, list[Places]]:
    """A prefix is compacted: what did it, and which places each lane has kept."""
    kept: dict[int, Places] = {}
    session: Any = llm.session
    move = session.move

    def recording(
        source: int, pages: list[int], target: int, targets: list[int], places: Places
    ) -> None:
        lanes = llm.plan.index.buckets[target].lanes
        kept.update(zip(lanes, places, strict=True))
        move(source, pages, target, targets, places)

    session.move = recording
    try:
        given = (llm.engine, llm._sequences, llm.tokenizer, ids, keep)
        work = Compaction(*given)
        for _ in work.steps():
            pass
    finally:
        del session.move
    nothing = np.zeros(0, np.int64)
    return work, [kept.get(lane, nothing) for lane in range(len(llm.plan.lanes))]


def overlap(ours: list[Places], theirs: list[Places]) -> float:
    """The share of pairs kept by both of those that one keeps."""
    pairs = list(zip(ours, theirs, strict=True))
    same = sum(len(np.intersect1d(a, b)) for a, b in pairs)
    return same / max(sum(map(len, ours)), sum(map(len, theirs)))


def scores_and_pairs_are_those_of_the_cpu(ours: LLM, theirs: LLM, keep: float) -> None:
    """Scores are float64's, too, but for activations in 16 bit. Pairs of which one is
    kept here and another there are scored about alike."""
    ids = prompt()[:PREFIX]
    work, kept = compacted(ours, ids, keep)
    reference, expected = compacted(theirs, ids, keep)
    for known in (attention_maxima(), reference.scores):
        np.testing.assert_allclose(work.scores, known, rtol=0.25, atol=1e-4)
        far = np.abs(work.scores - known) > 0.05 * known + 1e-4
        assert far.mean() < 0.01
    assert overlap(kept, expected) >= 0.97
    for llm in (ours, theirs):
        forget(llm)


def answers_are_those_of_masked_attention(
    llm: LLM, keep: float, close: float = 1e-2
) -> None:
    """In float64, where the dropped pairs are masked. ``close``: of the largest
    logit."""
    ids = prompt()
    _, places = compacted(llm, ids[:PREFIX], keep)
    kept: Mapping[int, Places] = dict(enumerate(places))
    found = llm.logits(ids, range(PREFIX, len(ids)))
    expected = masked_logits(ids, kept)
    assert np.abs(found - expected).max() <= close * np.abs(expected).max()
    held = sum(map(len, places)) / (len(places) * PREFIX)
    assert abs(held - keep) < 0.03
    forget(llm)


def nothing_changes_where_all_pairs_stay(llm: LLM) -> None:
    ids = prompt()
    rows = range(PREFIX, len(ids))
    [expected] = llm.generate([ids], PARAMS)
    forget(llm)
    plain = llm.logits(ids, rows)
    made = llm.compact(ids[:PREFIX], 1.0)
    assert made.kept == 1 and made.bytes == made.whole_bytes
    if not any(tier.is_coded for tier in llm.plan.index.tiers):
        difference = np.abs(llm.logits(ids, rows) - plain)
        assert difference.max() <= 1e-2 * np.abs(plain).max()
    [found] = llm.generate([ids], PARAMS)
    assert found.token_ids[:8] == expected.token_ids[:8]
    forget(llm)


def sure(logits: npt.NDArray[np.float32], close: float | Floats) -> int:
    """The number of rows [T, vocab] behind a greedy answer's tokens before the first
    whose two best logits are less than ``close`` (of a row, or of each) apart. Another
    order of sums may choose otherwise from there."""
    best = np.sort(logits)[:, -2:]
    near = best[:, 1] - best[:, 0] < close
    return int(np.argmax([*near, True]))


def answer_rows(ids: list[int], answer: list[int]) -> tuple[list[int], range]:
    """A prompt with its answer, and the places whose logits the answer is chosen by."""
    first = len(ids) - 1
    return [*ids, *answer], range(first, first + len(answer))


def requests_beside_a_compaction(llm: LLM, tokens: int) -> None:
    """A step of theirs flies while the compaction takes its own, with scratch memory.
    The first ``tokens`` of each answer and the prefix are what they are alone."""
    assert llm.engine.context.samples
    params = SamplingParams(max_new_tokens=40, temperature=0.0, ignore_eos=True)
    others = [list(text(60 + 30 * i, 4000)) for i in range(3)]
    alone = [answer.token_ids[:tokens] for answer in llm.generate(others, params)]
    made = llm.compact(prompt()[:PREFIX], 0.5)
    forget(llm)
    begun, taken = threading.Event(), itertools.count()
    requests = [llm.sequence(one, params) for one in others]
    pending = llm.thread.submit(
        requests, lambda _: begun.set() if next(taken) == 3 else None
    )
    assert begun.wait(60)
    beside = llm.compact(prompt()[:PREFIX], 0.5)
    running = [request.answered for request in requests]
    llm.thread.wait(pending)
    assert [request.answer[:tokens] for request in requests] == alone
    assert max(running) > 1
    assert (beside.lane_tokens, beside.bytes) == (made.lane_tokens, made.bytes)
    forget(llm)


def requests_share_the_pages(llm: LLM) -> None:
    """Side by side they answer as alone, a swapped one as one that stayed. All pages
    come back."""
    ids = prompt()
    llm.compact(ids[:PREFIX], 0.4)
    held = llm.pool.bytes_in_use
    first, cached = prefixes(llm).find(ids)
    fork = llm.pool.fork(first)
    assert cached == PREFIX and llm.pool.bytes_in_use == held
    for table in (first, fork):
        llm.pool.release(table)
    asked = [ids, [*ids[: PREFIX + 9], 7, 8], [*ids[:PREFIX], 30]]
    alone = [llm.generate([one], PARAMS)[0].token_ids for one in asked]
    together = [one.token_ids for one in llm.generate(asked, PARAMS)]
    for one, expected, found in zip(asked, alone, together, strict=True):
        logits = llm.logits(*answer_rows(one, expected))
        count = sure(logits, 5e-3 * np.abs(logits).max())
        assert count >= 2 and found[:count] == expected[:count]
    scheduler, core = llm.engine.scheduler, llm.engine
    sequence = llm.sequence(ids, PARAMS)
    scheduler.add(sequence)
    for _ in range(4):
        core.step()
    core.rest()
    scheduler.preempt()
    assert sequence.cached > PREFIX
    while not sequence.finish_reason:
        core.step()
    core.rest()
    assert sequence.answer == alone[0]
    forget(llm)
