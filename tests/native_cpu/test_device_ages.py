"""Tiers by age in a session on a GPU, in host memory: everything but the GPU's own
calls."""

from __future__ import annotations

import numpy as np
import pytest

from kvlathe.export.model.checkpoint import Checkpoint
from kvlathe.plan.formats import Tier
from kvlathe.plan.kernel_forms import UNPROVEN
from kvlathe.plan.plan import CompressionPlan
from kvlathe.runtime.llm import LLM
from kvlathe.runtime.native.library import Native
from kvlathe.runtime.text.tokenizer import Tokenizer
from tests.support.aged_laws import Engine, random_steps
from tests.support.device_engines import torch_session
from tests.support.ranking_laws import arena_bytes, on_cpu
from tests.support.runtime_cases import LIMITS, MODEL, forced, model_shape, plans
from tests.support.tiers import with_tiers


@pytest.fixture
def plan(monkeypatch: pytest.MonkeyPatch) -> CompressionPlan:
    """16-bit hot pages, sealed into 8 bit and 4."""
    monkeypatch.setenv(UNPROVEN, "1")
    return with_tiers(plans(model_shape(), chunk=128)["aged"], (Tier(16, 16),))


def as_on_a_gpu(
    native: Native, plan: CompressionPlan, size: int, share: bool = False
) -> LLM:
    session = torch_session(native, Checkpoint(MODEL), plan, LIMITS, size)
    return LLM(session, plan, LIMITS, Tokenizer(MODEL), size, share)


def test_logits_of_random_ragged_steps_are_those_of_the_cpu(
    native: Native, plan: CompressionPlan
) -> None:
    texts, schedule = random_steps(1, 128)
    ours = as_on_a_gpu(native, plan, arena_bytes(plan))
    found, expected = (forced(llm, texts, schedule) for llm in (ours, on_cpu(plan)))
    for a, b in zip(found, expected, strict=True):
        assert np.abs(a - b).max() < 2e-2 * np.abs(b).max()


@pytest.mark.nightly
def test_texts_do_not_depend_on_where_a_sequence_is(
    native: Native, plan: CompressionPlan, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = Engine(lambda size, share: as_on_a_gpu(native, plan, size, share), 1e-2)
    engine.together_and_guessed()
    engine.behind_prefixes()
    engine.preempted("computed again", monkeypatch)
    engine.preempted("kept on the host", monkeypatch)
    engine.moved()
    assert engine.parted == 0
