"""Engines of a model whose heads share a latent: V stored once computes what V stored
apart does, the native kernels compute what the definition does, and answers do not
depend on what the cache does meanwhile."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from functools import cache
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest
import torch

from kvlathe.export.bases.basis import Basis
from kvlathe.export.folding.fold import decoder_from, fold
from kvlathe.export.model.checkpoint import Checkpoint
from kvlathe.export.onnx.model import export_onnx
from kvlathe.plan.formats import Tier
from kvlathe.plan.groups import Group
from kvlathe.plan.layout import CacheLayout
from kvlathe.plan.lives import SEAL
from kvlathe.plan.plan import CompressionPlan
from kvlathe.runtime.llm import LLM
from kvlathe.runtime.native.library import Native
from kvlathe.runtime.sessions.host.native import NativeSession
from kvlathe.runtime.sessions.host.onnx import OrtSession
from kvlathe.runtime.sessions.protocols import Session
from kvlathe.runtime.text.sampling_params import SamplingParams
from kvlathe.runtime.text.tokenizer import Tokenizer
from tests.support.attend_cases import stored_once
from tests.support.checkpoints import whole_plan
from tests.support.runtime_cases import LIMITS, TorchSession, forced

Reference = Callable[[str], tuple[Path, torch.nn.Module]]
Logits = npt.NDArray[np.float32]
NAME = "youtu"
TOKENS = 70
SCHEDULE = [(32,), (16,), *[(1,)] * (TOKENS - 48)]
TIERS = {
    "channel": Tier(8, 8, "token", "token", 16, 16),
    "token": Tier(4, 4, "rank", "rank", 32, 32),
}
"""Tiers of full pages, by whose numbers share a scale."""
KINDS = ("torch", "onnx", "native")


def plan_of(checkpoint: Checkpoint, tier: Tier, once: bool) -> CompressionPlan:
    plan = stored_once(whole_plan(checkpoint.spec), once)
    (group,) = plan.groups
    sealed = Group(group.lanes, group.hot, (tier,), SEAL)
    return dataclasses.replace(plan, groups=(sealed,))


class Engines:
    """Sessions of one checkpoint, exported once for each plan."""

    def __init__(self, checkpoint: Checkpoint, native: Native, folder: Path) -> None:
        self.checkpoint, self.native, self.folder = checkpoint, native, folder
        self._exported = cache(self._export)

    def _export(self, tier: str, once: bool) -> Path:
        out = self.folder / f"{tier} {once}"
        out.mkdir()
        plan = plan_of(self.checkpoint, TIERS[tier], once)
        folded = fold(self.checkpoint, plan, Basis())
        return export_onnx(self.checkpoint.spec, plan, folded, out).parent

    def llm(self, kind: str, tier: str, once: bool = True, tokens: int = 2048) -> LLM:
        plan = plan_of(self.checkpoint, TIERS[tier], once)
        layout = CacheLayout(plan)
        size = layout.bytes_for(tokens) + 2 * sum(layout.page_stride)
        session: Session
        if kind == "torch":
            session = TorchSession(decoder_from(self.checkpoint, plan, Basis()), size)
        else:
            given = self._exported(tier, once), plan, LIMITS, size, 1
            session = OrtSession(*given)
            if kind == "native":
                session = NativeSession(*given, library=self.native)
        tokenizer = Tokenizer(self.checkpoint.path)
        return LLM(session, plan, LIMITS, tokenizer, size, share_prefixes=True)

    def logits(self, kind: str, tier: str, once: bool) -> Logits:
        """Logits of a prompt in two chunks, and then token by token."""
        return forced(self.llm(kind, tier, once), [ids(TOKENS)], SCHEDULE)[0]


def ids(count: int, seed: int = 1) -> list[int]:
    return np.random.default_rng(seed).integers(0, 97, count).tolist()


@pytest.fixture(scope="module")
def engines(
    native: Native, reference: Reference, tmp_path_factory: pytest.TempPathFactory
) -> Engines:
    checkpoint = Checkpoint(reference(NAME)[0])
    return Engines(checkpoint, native, tmp_path_factory.mktemp("latent"))


@pytest.mark.parametrize("kind", KINDS)
def test_values_stored_once_compute_what_values_apart_do(
    kind: str, engines: Engines
) -> None:
    """In new pages, and in full ones: groups of channels are the same either way."""
    once, apart = (engines.logits(kind, "channel", one) for one in (True, False))
    np.testing.assert_array_equal(once, apart)


@pytest.mark.parametrize("tier", TIERS)
def test_native_kernels_compute_what_the_definition_does(
    tier: str, engines: Engines, reference: Reference
) -> None:
    expected = engines.logits("torch", tier, True)
    for kind in ("onnx", "native"):
        found = engines.logits(kind, tier, True)
        np.testing.assert_allclose(found, expected, rtol=0, atol=2e-2)
    with torch.no_grad():
        exact = reference(NAME)[1](torch.tensor([ids(TOKENS)])).logits[0].numpy()
    lost = np.abs(expected - exact).mean() / np.abs(exact).mean()
    assert lost < {"channel": 0.02, "token": 0.2}[tier]


@pytest.mark.parametrize("tier", TIERS)
def test_answers_are_the_same_with_known_beginnings_and_after_a_swap(
    tier: str, engines: Engines
) -> None:
    params = SamplingParams(max_new_tokens=24, ignore_eos=True)
    prompts = [ids(40) + ids(n, n) for n in (0, 5, 21)]
    expected = [
        engines.llm("native", tier).generate([prompt], params)[0].token_ids
        for prompt in prompts
    ]
    shared = engines.llm("native", tier)
    for _ in range(2):
        found = [shared.generate([prompt], params)[0].token_ids for prompt in prompts]
        assert found == expected
    prefixes = shared.engine.scheduler.prefixes
    assert prefixes is not None and prefixes.hits > 0
    engine = engines.llm("native", tier)
    step, scheduler, calls = (
        engine.engine.step,
        engine.engine.scheduler,
        iter(range(99)),
    )

    def preempting() -> list:
        if next(calls) % 7 == 6 and scheduler.running:
            scheduler.preempt()
        return step()

    engine.engine.step = preempting
    together = engine.generate(prompts, params)
    assert [one.token_ids for one in together] == expected
    assert scheduler.preemptions > 0
