"""Tensor parallelism on a CPU: several processes are one, in numbers, in text, and when
one of them dies."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path

import numpy as np
import pytest
import torch

from kvlathe.base.errors import KvlatheError
from kvlathe.export.folding.fold import decoder_from
from kvlathe.export.model.checkpoint import Checkpoint
from kvlathe.runtime.drafters import check_speculation
from kvlathe.runtime.drafting.draft_model import DraftModel
from kvlathe.runtime.drafting.guessing_layer import GuessingLayer
from kvlathe.runtime.drafting.lookup import PromptLookup
from kvlathe.runtime.native.library import Native
from kvlathe.runtime.scheduling.parts.speculation import Speculation
from kvlathe.runtime.sessions.page_moves import Copy, PageMoves
from kvlathe.runtime.text.sampling_params import SamplingParams
from tests.support.checkpoints import ON_GPUS, UNGATED
from tests.support.device_engines import engine_of
from tests.support.drafts import whatever_is_guessed
from tests.support.guessing_cases import make_guessing
from tests.support.host_shards import (
    Engine,
    HostShards,
    alone,
    check,
    plan_and_basis,
)
from tests.support.nightly import rest_nightly
from tests.support.runtime_cases import MODEL, forced, text

pytestmark = pytest.mark.nightly
"""Kernels for GPUs, run on a CPU: minutes."""

SIZES = rest_nightly([2, 4], 2)
OTHER_HEADS = ("llama-biased-d80-mqa", "qwen2-g7", "falcon-40b")
DEALT = [name for name in ON_GPUS if name in UNGATED]
ARCHITECTURES = [name for name in DEALT if "-" not in name or name in OTHER_HEADS]
"""The variants of an architecture that scale positions, bind or bias weights otherwise
are dealt as it is; nightly, they run, too."""
Reference = Callable[[str], tuple[Path, torch.nn.Module]]


@pytest.fixture(scope="module")
def shards_of(native: Native) -> Iterator[Callable[[int], HostShards]]:
    """So many shards, which many tests may load engines on."""
    made: list[HostShards] = []

    @cache
    def shards(size: int) -> HostShards:
        made.append(HostShards(native, size))
        return made[-1]

    yield shards
    for one in made:
        one.workers.close()


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("name", rest_nightly(DEALT, *ARCHITECTURES))
def test_logits_are_those_of_one_process(
    name: str, size: int, reference: Reference, shards_of: Callable[[int], HostShards]
) -> None:
    """Prompts in chunks beside decodes, of every family: what the exporter defines."""
    folder = str(reference(name)[0])
    engine = Engine(folder, "projected")
    spec = Checkpoint(Path(folder)).spec
    most = spec.kv_heads if spec.family.wide_qk_norm else spec.query_heads
    if size > most:
        with pytest.raises(KvlatheError, match=f"give at most {most} shards|Give at"):
            check(engine, size)
        return
    llm = shards_of(size).llm(engine)
    rng = np.random.default_rng(size)
    texts = [rng.integers(0, 97, n).tolist() for n in (40, 21, 90)]
    schedule = [(17, 20, 64), (1, 1, 1), (22, 0, 25)]
    found = forced(llm, texts, schedule)
    decoder = decoder_from(Checkpoint(Path(folder)), *plan_and_basis(engine))
    for ids, logits in zip(texts, found, strict=True):
        expected = decoder.logits(ids, range(len(ids))).numpy()
        assert np.abs(logits - expected).max() < 2e-4 * np.abs(expected).max()
    llm.thread.stop()


LATHE = str(MODEL)
PROMPTS = [list(text(n, 40 * i)) for i, n in enumerate((700, 30, 200, 5))]
TEXTS = [text(90), text(130, 50), text(70, 9)]
SCHEDULE = [(64, 128, 0), (1, 1, 64), (1, 1, 1), (24, 0, 1), (0, 0, 4)]
CLOSE = {"one": 1e-5, "windowed": 1e-5, "sealed split": 0.02, "turned": 0.02}
"""Shares of the largest logit. Where pages are sealed, rounding may move a code by
one."""


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("kind", CLOSE)
def test_plans_of_every_kind_run_on_shards(
    kind: str, size: int, native: Native, shards_of: Callable[[int], HostShards]
) -> None:
    """Two buckets, sealed pages, windows, 16-bit pages with projections."""
    engine = Engine(LATHE, kind)
    ours, theirs = shards_of(size).llm(engine), alone(native, engine)
    found, expected = (forced(llm, TEXTS, SCHEDULE) for llm in (ours, theirs))
    for a, b in zip(found, expected, strict=True):
        assert np.abs(a - b).max() < CLOSE[kind] * np.abs(b).max()
    ours.thread.stop()


def test_guesses_change_no_text_on_shards(
    native: Native, shards_of: Callable[[int], HostShards]
) -> None:
    """By prompt look-up and by a draft engine of one process."""
    engine = Engine(LATHE, "sealed split")
    llm = shards_of(2).llm(engine)
    again = [*text(40), *text(60, 300), *text(40)]
    prompts = [again, list(text(150, 20)), again[7:]]
    asked = [
        SamplingParams(max_new_tokens=24, ignore_eos=True),
        SamplingParams(max_new_tokens=24, temperature=0.7, seed=5, ignore_eos=True),
        SamplingParams(max_new_tokens=24, frequency_penalty=0.2, ignore_eos=True),
    ]
    plain = [x.token_ids for x in llm.generate(prompts, asked)]
    check_speculation(llm.plan)
    for drafter in (PromptLookup(), DraftModel(alone(native, engine).engine)):
        made = llm.engine.speculate(whatever_is_guessed(Speculation(drafter, 4)))
        found = [x.token_ids for x in llm.generate(prompts, asked)]
        assert found == plain and made.accepted > 10
    llm.thread.stop()


def test_a_layer_that_guesses_reads_what_shards_give(
    native: Native, shards_of: Callable[[int], HostShards], tmp_path: Path
) -> None:
    """The layer is in one process, and its model in two."""
    make_guessing(tmp_path, quiet=True)
    llm = shards_of(2).llm(Engine(str(tmp_path), "full"))
    prompts = [[5, 60, 7], list(range(40))]
    params = SamplingParams(max_new_tokens=24, ignore_eos=True)
    plain = [x.token_ids for x in llm.generate(prompts, params)]
    drafter = GuessingLayer(engine_of(native, tmp_path, guesses=True).engine)
    made = llm.engine.speculate(whatever_is_guessed(Speculation(drafter, 4)))
    assert [x.token_ids for x in llm.generate(prompts, params)] == plain
    assert made.accepted > 10
    llm.thread.stop()


def test_text_is_that_of_one_process(
    native: Native, shards_of: Callable[[int], HostShards]
) -> None:
    """Greedy and drawn, with penalties and log-probabilities, prompts in chunks; and
    pages that are shared, forked, swapped out and back."""
    engine = Engine(LATHE, "one")
    ours = shards_of(2).llm(engine, share_prefixes=True)
    theirs = alone(native, engine)
    every = [
        SamplingParams(max_new_tokens=24, ignore_eos=True, logprobs=3),
        SamplingParams(max_new_tokens=24, temperature=0.9, seed=5, ignore_eos=True),
        SamplingParams(
            max_new_tokens=24, temperature=1.2, top_k=50, top_p=0.9, seed=6, min_p=0.01
        ),
        SamplingParams(
            max_new_tokens=24, repetition_penalty=1.3, temperature=0.7, seed=7
        ),
    ]
    for _ in range(2):  # the second time prompts are shared
        answers = [llm.generate(PROMPTS, every) for llm in (ours, theirs)]
        assert [x.token_ids for x in answers[0]] == [x.token_ids for x in answers[1]]
        told = [of_engine[0].logprobs or () for of_engine in answers]
        assert len(told[0]) == 24
        for a, b in zip(*told, strict=True):
            assert a.logprob == pytest.approx(b.logprob, abs=1e-3)
            assert [token for token, _ in a.top] == [token for token, _ in b.top]
    prefixes = ours.engine.scheduler.prefixes
    assert prefixes is not None and ours.pool.bytes_in_use > 0
    logits = [llm.logits(PROMPTS[1], range(20, 30)) for llm in (ours, theirs)]
    np.testing.assert_allclose(logits[0], logits[1], atol=1e-3)
    with pytest.raises(KvlatheError, match="stay in their engine"):
        _ = ours.exchange.memory  # each shard has a part of every page
    ours.thread.stop()


def test_pages_move_and_come_back(shards_of: Callable[[int], HostShards]) -> None:
    """Those of all shards, one after the other."""
    session = shards_of(2).session(Engine(LATHE, "turned"))
    size = 2 * session.strides[0]
    data = bytes(np.random.default_rng(1).integers(0, 255, size, np.uint8))
    session.write_page(0, 3, data)
    session.apply([PageMoves(copies=[Copy(0, 3, 5)])])
    assert session.read_page(0, 5) == data == session.read_page(0, 3)


@pytest.mark.slow
def test_a_sequence_that_was_swapped_out_is_answered_as_before(
    shards_of: Callable[[int], HostShards], monkeypatch: pytest.MonkeyPatch
) -> None:
    llm = shards_of(2).llm(Engine(LATHE, "turned"))
    params = SamplingParams(max_new_tokens=40, ignore_eos=True)
    prompts = PROMPTS[1:3]
    before = [llm.generate([prompt], params)[0].token_ids for prompt in prompts]
    scheduler, session = llm.engine.scheduler, llm.session
    read, sizes = session.read_page, []

    def counted(bucket: int, page: int) -> bytes:
        data = read(bucket, page)
        sizes.append(len(data) // llm.layout.page_stride[bucket])
        return data

    monkeypatch.setattr(session, "read_page", counted)
    scheduler.costs.token.add(1e9)  # dearer than a swap
    sequences = [llm.sequence(prompt, params) for prompt in prompts]
    request = llm.thread.submit(sequences)
    while not sizes:
        llm.thread.call(
            lambda: scheduler.preempt() if len(scheduler.running) > 1 else None
        )
    llm.thread.wait(request)
    assert set(sizes) == {2}  # of both shards
    assert [sequence.tokens[-40:] for sequence in sequences] == before
    llm.thread.stop()
