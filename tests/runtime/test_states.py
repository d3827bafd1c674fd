"""Engines of models whose layers keep states (docs/hybrids.md), against transformers, and
against themselves: whatever runs beside a sequence, and wherever it stops and goes on,
its text is the same."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from kvlathe.base.errors import KvlatheError
from kvlathe.engines.build import BuildConfig, build
from kvlathe.engines.targets import cuda, onnxruntime, tensorrt, vllm
from kvlathe.export.model.checkpoint import Checkpoint
from kvlathe.plan.deal import deal
from kvlathe.plan.engine_folder import open_engine
from kvlathe.plan.kernel_forms import UNPROVEN
from kvlathe.plan.layout import CacheLayout
from kvlathe.plan.memory import memory_table, states_room
from kvlathe.runtime.cache.block_store import StoreSizes
from kvlathe.runtime.drafters import draft_engine
from kvlathe.runtime.drafting.draft_model import DraftModel
from kvlathe.runtime.llm import LLM
from kvlathe.runtime.text.sampling_params import SamplingParams
from tests.support.checkpoints import WITH_STATES, whole_plan
from tests.support.drafts import Reader, trying
from tests.support.nightly import rest_nightly
from tests.support.preemption import preempt_all

Reference = Callable[[str], tuple[Path, torch.nn.Module]]
DAILY = "qwen3_5_moe_text"
"""It has gates of outputs, a part of RoPE, experts and delta rules."""
BATCH, CHUNK, PAGE, ANSWER = 6, 32, 16, 40


@pytest.fixture(scope="module", params=rest_nightly(WITH_STATES, DAILY))
def engine(
    request: pytest.FixtureRequest,
    reference: Reference,
    tmp_path_factory: pytest.TempPathFactory,
) -> tuple[Path, torch.nn.Module]:
    """An engine whose prompts pass in several chunks, and its model."""
    folder, model = reference(request.param)
    config = BuildConfig(
        folder,
        tmp_path_factory.mktemp("states") / "engine",
        kv_bits=32,
        use_cache=False,
        measure=False,
        max_seq_len=256,
        max_batch_size=BATCH,
        prefill_chunk=CHUNK,
        tokens_per_block=PAGE,
    )
    return build(config), model


def prompts() -> list[list[int]]:
    """24, some of which begin alike: within a block, and past two."""
    draw = np.random.default_rng(5)
    found = [draw.integers(0, 97, n).tolist() for n in draw.integers(1, 130, 24)]
    found[4] = found[3][:20] + found[4]
    found[7] = found[6][:96]
    found[8] = found[6][:70] + found[8][:60]
    return found


def texts(llm: LLM, asked: list[list[int]]) -> list[tuple[int, ...]]:
    answers = llm.generate(asked, max_new_tokens=ANSWER, ignore_eos=True)
    return [tuple(answer.token_ids) for answer in answers]


def test_logits_and_texts_are_those_of_the_model(
    engine: tuple[Path, torch.nn.Module],
) -> None:
    folder, model = engine
    ids = max(prompts(), key=len)
    assert len(ids) > 3 * CHUNK
    with LLM.load(folder) as llm:
        found = llm.logits(ids, range(len(ids)))
        (answer,) = texts(llm, [ids])
    whole = [*ids, *answer]
    with torch.no_grad():
        expected = model(torch.tensor([whole])).logits[0]
    np.testing.assert_allclose(found, expected[: len(ids)].numpy(), atol=1e-3)
    assert list(answer) == expected.argmax(-1)[len(ids) - 1 : -1].tolist()


def test_texts_are_equal_alone_together_with_prefixes_and_preempted(
    engine: tuple[Path, torch.nn.Module], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Preempted by giving pages up as well as by moving them to the host, and with a
    prefix that the sequence's own state was forgotten of."""
    folder, asked = engine[0], prompts()
    with LLM.load(folder) as llm:
        alone = [texts(llm, [one])[0] for one in asked]
        assert texts(llm, asked) == alone
        layout = CacheLayout(llm.plan)
    with LLM.load(folder, share_prefixes=True) as llm:
        prefixes = llm.engine.scheduler.prefixes
        assert prefixes is not None
        assert [texts(llm, [one])[0] for one in asked] == alone
        assert prefixes.hits > 3 * CHUNK
        assert texts(llm, asked) == alone
    size = states_room(layout, BATCH) + int(layout.bytes_for(180) * 2.2)
    preempted = 0
    for recomputes in (True, False):
        with LLM.load(folder, cache_bytes=size, share_prefixes=recomputes) as llm:
            scheduler = llm.engine.scheduler
            preempt_all(scheduler, recomputes, monkeypatch)
            assert texts(llm, asked) == alone
            preempted += scheduler.preemptions
    assert preempted > 10


def test_guesses_change_no_text(
    engine: tuple[Path, torch.nn.Module], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Right and wrong ones: alone, together, and with prefixes and preempted."""
    folder, asked = engine[0], prompts()
    with LLM.load(folder) as llm:
        plain = texts(llm, asked)
        whole = [[*one, *answer] for one, answer in zip(asked, plain, strict=True)]
        made = llm.engine.speculate(trying(Reader(3, 0.2, whole)))
        assert texts(llm, asked) == plain
        assert texts(llm, asked[:1]) == plain[:1]
        assert 0.3 < made.accepted / made.drafted < 0.8
        layout = CacheLayout(llm.plan)
    size = states_room(layout, BATCH) + int(layout.bytes_for(180) * 2.2)
    for recomputes in (True, False):
        with LLM.load(folder, cache_bytes=size, share_prefixes=recomputes) as llm:
            preempt_all(llm.engine.scheduler, recomputes, monkeypatch)
            llm.engine.speculate(trying(Reader(4, 0.2, whole)))
            assert texts(llm, asked) == plain
            assert llm.engine.scheduler.preemptions


def test_a_draft_engine_may_keep_states(
    engine: tuple[Path, torch.nn.Module],
) -> None:
    """The same engine: all its guesses are right."""
    asked = prompts()[:6]
    with LLM.load(engine[0]) as llm:
        plain = texts(llm, asked)
        guessing = draft_engine(open_engine(engine[0]), llm.tokenizer, llm.engine)
        made = llm.engine.speculate(trying(DraftModel(guessing)))
        assert texts(llm, asked) == plain
        assert made.accepted > 0.9 * made.drafted > 100


def test_sequences_and_prefixes_go_on_in_another_engine(
    engine: tuple[Path, torch.nn.Module],
) -> None:
    """Packed, with their states; those that were damaged or have not come are
    refused."""
    folder = engine[0]
    asked = [one for one in prompts() if len(one) > 2 * CHUNK][:3]
    params = SamplingParams(max_new_tokens=ANSWER, ignore_eos=True)
    with (
        LLM.load(folder, share_prefixes=True) as source,
        LLM.load(folder, share_prefixes=True) as target,
    ):
        expected = texts(source, asked)
        there = target.exchange
        for prompt, answer in zip(asked, expected, strict=True):
            departure = source.exchange.prefill(source.sequence(prompt, params))
            assert departure is not None
            with departure:
                packed = departure.packed()
            wrong = packed[:-1] + bytes([packed[-1] ^ 1])
            for cut in (wrong, packed[:-4]):
                with pytest.raises(KvlatheError, match="its state"):
                    there.unpack(cut)
            with pytest.raises(KvlatheError, match="has not come"):
                there.adopt_sequence(there.expect(departure.parcel))
            request = there.adopt_sequence(there.unpack(packed))
            target.thread.wait(request)
            assert request.sequences[0].answer == list(answer)
    with (
        LLM.load(folder, share_prefixes=True) as source,
        LLM.load(folder, share_prefixes=True) as target,
    ):
        source.generate(asked[0], max_new_tokens=1)
        with source.exchange.export_prefix(asked[0]) as departure:
            arrival = target.exchange.unpack(departure.packed())
        count = target.exchange.adopt_prefix(arrival)
        assert texts(target, asked[:1]) == expected[:1]
        assert target.engine.scheduler.prefixes is not None
        assert target.engine.scheduler.prefixes.hits == count >= 2 * CHUNK


def test_pages_without_their_state_are_refused(
    engine: tuple[Path, torch.nn.Module],
) -> None:
    with LLM.load(engine[0], share_prefixes=True) as llm:
        with pytest.raises(KvlatheError, match="which is in no page"):
            _ = llm.exchange.memory
        with pytest.raises(KvlatheError, match="a store has pages alone"):
            llm.keep_evicted(StoreSizes(host_bytes=1 << 20))


def test_states_count_in_the_memory_of_an_engine(
    engine: tuple[Path, torch.nn.Module],
) -> None:
    with LLM.load(engine[0]) as llm:
        layout, state = CacheLayout(llm.plan), llm.plan.model.state_bytes
    (row, *_) = memory_table(layout, 200, BATCH)
    assert row["state"] == state > 0
    assert row["steady"] == layout.bytes_for(200) + state
    with pytest.raises(KvlatheError, match="no room for pages"):
        LLM.load(engine[0], cache_bytes=states_room(layout, BATCH))


@pytest.mark.parametrize("name", WITH_STATES)
def test_other_backends_refuse_states_in_words(
    name: str, reference: Reference, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Torch's takes them."""
    plan = whole_plan(Checkpoint(reference(name)[0]).spec, bits=16)
    for target in (tensorrt, vllm):
        with pytest.raises(KvlatheError, match="keep a state"):
            target.check_plan(target.__name__.rpartition(".")[2], plan)
    assert onnxruntime.gpus(plan, "float16") == ()
    monkeypatch.delenv(UNPROVEN)
    cuda.check_plan("cuda", plan)
    with pytest.raises(KvlatheError, match="keep states"):
        deal(plan, 2)


@pytest.mark.parametrize("wrong", [(1,), (0, -1, 0)])
def test_a_plan_has_a_state_for_each_layer(
    wrong: tuple[int, ...], reference: Reference
) -> None:
    plan = whole_plan(Checkpoint(reference(DAILY)[0]).spec)
    with pytest.raises(KvlatheError, match="each layer has some, or none"):
        dataclasses.replace(plan, model=dataclasses.replace(plan.model, states=wrong))
