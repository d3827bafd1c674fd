"""Engines of a model whose layers have heads of unlike shapes, and read one another's
cache (Gemma 3n and 4): what runs them computes the same, over pages of every kind."""

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
from kvlathe.export.methods.composition import CacheSettings, compose
from kvlathe.export.methods.compression import parse
from kvlathe.export.methods.options import RankOptions
from kvlathe.export.model.checkpoint import Checkpoint
from kvlathe.export.onnx.model import export_onnx
from kvlathe.plan.formats import Tier
from kvlathe.plan.groups import Group
from kvlathe.plan.layout import CacheLayout
from kvlathe.plan.lives import KEEP, SEAL
from kvlathe.plan.plan import CompressionPlan
from kvlathe.runtime.llm import LLM
from kvlathe.runtime.native.library import Native
from kvlathe.runtime.sessions.host.native import NativeSession
from kvlathe.runtime.sessions.host.onnx import OrtSession
from kvlathe.runtime.sessions.protocols import Session
from kvlathe.runtime.text.sampling_params import SamplingParams
from kvlathe.runtime.text.tokenizer import Tokenizer
from tests.support.checkpoints import random_basis, whole_plan
from tests.support.nightly import rest_nightly
from tests.support.runtime_cases import LIMITS, TorchSession, forced

Reference = Callable[[str], tuple[Path, torch.nn.Module]]
Logits = npt.NDArray[np.float32]
KINDS = ("onnx", "native")
SHARED, EXPERTS, ONCE = "gemma4-shared", "gemma4-experts", "gemma4"
STREAMS = "gemma3n"
NAMES = (SHARED, EXPERTS, ONCE, STREAMS)
OFTEN = (("onnx", SHARED), ("native", STREAMS), ("native", ONCE))
TOKENS = 70
SCHEDULE = [(32,), (32,), *[(1,)] * (TOKENS - 64)]
CODES = Tier(8, 8, "rank", "token", 16, 16)


def plan_of(checkpoint: Checkpoint, name: str, coded: bool) -> CompressionPlan:
    """Every lane in a basis of its own; full pages of layers without windows coded. Of
    ``ONCE``: values that keys are made of in those, as they are."""
    if name == ONCE:
        settings = CacheSettings(32, 32, 32, layer_windows=checkpoint.spec.windows)
        codes = "hack:bits=8,keys=token,group=32,arithmetic=float"
        request = parse(codes if coded else "none")
        none = None, RankOptions(), settings
        return compose(request, checkpoint.spec.shape, True, *none)[0]
    plan = whole_plan(checkpoint.spec, projected=True)
    if not coded:
        return plan
    groups: list[Group] = []
    for group in plan.groups:
        seals = group.life == KEEP
        groups.append(Group(group.lanes, group.hot, (CODES,), SEAL) if seals else group)
    return dataclasses.replace(plan, groups=tuple(groups))


class Engines:
    """Sessions of the checkpoints, exported once for each plan."""

    def __init__(self, reference: Reference, native: Native, folder: Path) -> None:
        self.reference, self.native, self.folder = reference, native, folder
        self._exported = cache(self._export)

    def _export(self, name: str, coded: bool) -> Path:
        out = self.folder / f"{name} {coded}"
        out.mkdir()
        checkpoint = Checkpoint(self.reference(name)[0])
        plan = plan_of(checkpoint, name, coded)
        folded = fold(checkpoint, plan, basis_of(plan))
        return export_onnx(checkpoint.spec, plan, folded, out).parent

    def llm(self, kind: str, name: str, coded: bool, tokens: int = 1024) -> LLM:
        checkpoint = Checkpoint(self.reference(name)[0])
        plan = plan_of(checkpoint, name, coded)
        layout = CacheLayout(plan)
        size = layout.bytes_for(tokens) + 2 * sum(layout.page_stride)
        session: Session
        if kind == "torch":
            decoder = decoder_from(checkpoint, plan, basis_of(plan))
            session = TorchSession(decoder, size)
        else:
            given = self._exported(name, coded), plan, LIMITS, size, 1
            session = OrtSession(*given)
            if kind == "native":
                session = NativeSession(*given, library=self.native)
        tokenizer = Tokenizer(checkpoint.path)
        return LLM(session, plan, LIMITS, tokenizer, size, share_prefixes=True)

    def logits(self, kind: str, name: str, coded: bool) -> Logits:
        """Logits of a prompt in two chunks, and then token by token."""
        return forced(self.llm(kind, name, coded), [ids(TOKENS)], SCHEDULE)[0]


def basis_of(plan: CompressionPlan) -> Basis:
    if plan.index.some_in_keys:
        return Basis()
    return random_basis(plan, 3, orthogonal=False)


def ids(count: int, seed: int = 1) -> list[int]:
    return np.random.default_rng(seed).integers(0, 97, count).tolist()


@pytest.fixture(scope="module")
def engines(
    native: Native, reference: Reference, tmp_path_factory: pytest.TempPathFactory
) -> Engines:
    return Engines(reference, native, tmp_path_factory.mktemp("unlike"))


@pytest.mark.parametrize(
    ("kind", "name"), rest_nightly([(x, y) for x in KINDS for y in NAMES], *OFTEN)
)
def test_pages_of_unlike_lanes_give_what_transformers_computes(
    kind: str, name: str, engines: Engines, reference: Reference
) -> None:
    """Past every window, in bases of their own; layers that read another's cache attend
    its pages."""
    found = engines.logits(kind, name, coded=False)
    with torch.no_grad():
        expected = reference(name)[1](torch.tensor([ids(TOKENS)])).logits[0].numpy()
    np.testing.assert_allclose(found, expected, rtol=0, atol=1e-3)


@pytest.mark.parametrize("name", [SHARED, ONCE])
@pytest.mark.parametrize("kind", rest_nightly(KINDS, "native"))
def test_coded_pages_of_unlike_lanes_are_read_as_the_definition_reads_them(
    kind: str, name: str, engines: Engines
) -> None:
    expected = engines.logits("torch", name, coded=True)
    found = engines.logits(kind, name, coded=True)
    np.testing.assert_allclose(found, expected, rtol=0, atol=2e-2)


def test_answers_do_not_depend_on_what_the_cache_does_meanwhile(
    engines: Engines,
) -> None:
    """Alone; together; with a prefix that was cached; and where memory ends, so that
    some are preempted."""
    prompts = [ids(40), ids(40)[:33] + ids(9, 2), ids(21, 3)]
    greedy = SamplingParams(20, ignore_eos=True)

    def said(llm: LLM, together: bool) -> list[list[int]]:
        batches = [prompts] if together else [[prompt] for prompt in prompts]
        answers = [
            answer for batch in batches for answer in llm.generate(batch, greedy)
        ]
        return [list(answer.token_ids) for answer in answers]

    alone = said(engines.llm("native", SHARED, coded=True), together=False)
    for tokens in (1024, 160):
        llm = engines.llm("native", SHARED, True, tokens)
        assert said(llm, together=True) == alone
        assert said(llm, together=True) == alone
