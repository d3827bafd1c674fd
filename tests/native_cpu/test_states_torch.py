"""The torch decoder's session of models whose layers keep states, in host memory: against
transformers, and against itself (docs/hybrids.md)."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from kvlathe.export.model.checkpoint import Checkpoint
from kvlathe.plan.layout import CacheLayout
from kvlathe.plan.manifest import Limits
from kvlathe.plan.plan import CompressionPlan
from kvlathe.runtime.llm import LLM
from kvlathe.runtime.native.library import Native
from kvlathe.runtime.text.tokenizer import Tokenizer
from tests.support.checkpoints import WITH_STATES, whole_plan
from tests.support.device_engines import torch_session
from tests.support.nightly import rest_nightly
from tests.support.preemption import preempt_all

Reference = Callable[[str], tuple[Path, torch.nn.Module]]
DAILY = "qwen3_5_moe_text"
CHUNK, PAGE, ANSWER = 96, 16, 20
LIMITS = Limits(
    max_batch_size=6, max_num_tokens=1024, max_input_len=200, max_seq_len=256
)


@pytest.fixture(scope="module", params=rest_nightly(WITH_STATES, DAILY))
def model(
    request: pytest.FixtureRequest, reference: Reference
) -> tuple[Path, torch.nn.Module]:
    return reference(request.param)


def plan_of(checkpoint: Checkpoint) -> CompressionPlan:
    whole = whole_plan(checkpoint.spec)
    return dataclasses.replace(whole, page_tokens=PAGE, prefill_chunk=CHUNK)


def loaded(
    native: Native, folder: Path, tokens: int = 2048, share_prefixes: bool = False
) -> LLM:
    checkpoint = Checkpoint(folder)
    plan = plan_of(checkpoint)
    layout = CacheLayout(plan)
    size = layout.bytes_for(tokens)
    session = torch_session(native, checkpoint, plan, LIMITS, size)
    tokenizer = Tokenizer(folder)
    return LLM(session, plan, LIMITS, tokenizer, size, share_prefixes=share_prefixes)


def prompts() -> list[list[int]]:
    """24, some of which begin alike: within a block, and past one."""
    draw = np.random.default_rng(5)
    found = [draw.integers(0, 97, n).tolist() for n in draw.integers(1, 180, 24)]
    found[4] = found[3][:20] + found[4]
    found[7] = found[6][:96] + found[7][:40]
    found[8] = found[6][:130] + found[8][:60]
    return found


def texts(llm: LLM, asked: list[list[int]]) -> list[tuple[int, ...]]:
    answers = llm.generate(asked, max_new_tokens=ANSWER, ignore_eos=True)
    return [tuple(answer.token_ids) for answer in answers]


def test_logits_and_texts_are_those_of_the_model(
    native: Native, model: tuple[Path, torch.nn.Module]
) -> None:
    folder, reference = model
    ids = np.random.default_rng(2).integers(0, 97, 200).tolist()
    with loaded(native, folder) as llm:
        found = llm.logits(ids, range(len(ids)))
        (answer,) = texts(llm, [ids])
    with torch.no_grad():
        expected = reference(torch.tensor([[*ids, *answer]])).logits[0]
    np.testing.assert_allclose(found, expected[: len(ids)].numpy(), atol=1e-3)
    assert list(answer) == expected.argmax(-1)[len(ids) - 1 : -1].tolist()


def test_texts_are_equal_alone_together_with_prefixes_and_preempted(
    native: Native,
    model: tuple[Path, torch.nn.Module],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    folder, asked = model[0], prompts()
    with loaded(native, folder) as llm:
        alone = [texts(llm, [one])[0] for one in asked]
        assert texts(llm, asked) == alone
    with loaded(native, folder, share_prefixes=True) as llm:
        prefixes = llm.engine.scheduler.prefixes
        assert prefixes is not None
        assert [texts(llm, [one])[0] for one in asked] == alone
        assert prefixes.hits >= 2 * CHUNK
        assert texts(llm, asked) == alone
    preempted = 0
    for recomputes in (True, False):
        with loaded(native, folder, 440, share_prefixes=recomputes) as llm:
            scheduler = llm.engine.scheduler
            preempt_all(scheduler, recomputes, monkeypatch)
            assert texts(llm, asked) == alone
            preempted += scheduler.preemptions
    assert preempted > 6
