"""The cuda backend's session on models whose layers differ (Gemma 4), in host memory:
steps of its decoder over pages of every kind are those of transformers and of the CPU."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import cast

import numpy as np
import numpy.typing as npt
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from kvlathe.engines.targets import cuda
from kvlathe.export.bases.basis import Basis
from kvlathe.export.folding.fold import decoder_from
from kvlathe.export.methods.composition import CacheSettings, compose
from kvlathe.export.methods.compression import parse
from kvlathe.export.methods.options import RankOptions
from kvlathe.export.model.checkpoint import Checkpoint
from kvlathe.plan.layout import CacheLayout
from kvlathe.plan.plan import CompressionPlan
from kvlathe.runtime.llm import LLM
from kvlathe.runtime.native.cuda import BUNDLES
from kvlathe.runtime.native.library import Native
from kvlathe.runtime.sessions.torch_cuda.attention import attend, bundles
from kvlathe.runtime.sessions.torch_cuda.attention.attend import Attention
from kvlathe.runtime.sessions.torch_cuda.compute import TorchCompute
from kvlathe.runtime.sessions.torch_cuda.device import bytes_of
from kvlathe.runtime.sessions.torch_cuda.inputs import StepInputs
from kvlathe.runtime.text.sampling_params import SamplingParams
from kvlathe.runtime.text.tokenizer import Tokenizer
from tests.native_cpu.test_many_buckets import RowAttention
from tests.support.device_engines import HostAttention, torch_session, turned
from tests.support.emulated import AttentionLibrary
from tests.support.nightly import rest_nightly
from tests.support.runtime_cases import LIMITS, forced
from tests.support.runtime_cases import TorchSession as Definition
from tests.support.session_laws import device_session
from tests.support.unlike_models import make_unlike

Reference = Callable[[str], tuple[Path, torch.nn.Module]]
Logits = npt.NDArray[np.float32]
NAMES = ("gemma4", "gemma4-shared", "gemma4-experts")
CODES = "hack:bits=8,keys=token,values=token,group=64,arithmetic=float"
FEW = "hack:bits=4,keys=token,values=token,group=32,arithmetic=float"
TOKENS, PAGE = 200, 64
SCHEDULE = [(64,), (64,), (60,), *[(1,)] * (TOKENS - 188)]


def plan_of(checkpoint: Checkpoint, compression: str) -> CompressionPlan:
    """In 16 bits; values that keys are made of are stored as a part of them."""
    windows = checkpoint.spec.windows
    settings = CacheSettings(16, PAGE, PAGE, layer_windows=windows)
    given = parse(compression), checkpoint.spec.shape, True
    return compose(*given, None, RankOptions(), settings)[0]


def on_device(native: Native, checkpoint: Checkpoint, compression: str) -> LLM:
    plan = plan_of(checkpoint, compression)
    cuda.check_plan("cuda", plan)
    size = arena(plan)
    session = torch_session(native, checkpoint, plan, LIMITS, size)
    return LLM(session, plan, LIMITS, Tokenizer(checkpoint.path), size)


class EmulatedAttention(HostAttention):
    """The library's op for the CPU appends, the CUDA kernels attend."""

    def __init__(self, rows: RowAttention, host: HostAttention) -> None:
        self.__dict__ |= host.__dict__
        self.rows = rows

    def prepare(
        self, step: StepInputs, tokens: int, layers: range | None = None
    ) -> StepInputs:
        self.calls = self.rows.prepare(step, tokens)
        return super().prepare(step, tokens)

    def run(
        self,
        step: StepInputs,
        layer: int,
        q: Tensor,
        k: Tensor | None,
        v: Tensor | None,
        angles: tuple[Tensor, Tensor] | None,
        weights: Mapping[str, Tensor],
    ) -> Tensor:
        super().run(step, layer, q, k, v, angles, weights)
        lanes = self.plan.index.active(self.plan.model.source(layer))
        if lanes[0].rope == "full" and angles is not None:
            q = turned(q, *angles, lanes[0].input_dim)
        heads = q.half().unflatten(1, (-1, lanes[0].input_dim))
        padded = F.pad(heads, (0, lanes[0].rank_k - lanes[0].input_dim))
        self.rows.queries = padded.flatten(1)
        given = self.calls, layer, q.half(), k, v, angles, weights
        return self.rows.run(*given).float()


@pytest.mark.nightly
@pytest.mark.parametrize("name", ["31B", "E2B"])
@pytest.mark.parametrize("compression", ["none", CODES, FEW])
def test_kernels_attend_layers_of_unlike_heads(
    name: str,
    compression: str,
    native: Native,
    kernels: ctypes.CDLL,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Rows alone and bundled, of layers with other groups of query heads, in one plan of
    the step's work."""
    monkeypatch.setattr(attend, "current_stream", lambda: 0)
    monkeypatch.setattr(bundles.Bundling, "pays", lambda *_: True)
    make_unlike(tmp_path, name)
    checkpoint = Checkpoint(tmp_path)
    expected = forced(defined(checkpoint, compression), [ids(TOKENS)], SCHEDULE)[0]
    llm = on_device(native, checkpoint, compression)
    session = device_session(llm)
    compute, pool = session.compute, bytes_of(session.pool)
    assert isinstance(compute, TorchCompute)
    host: object = compute.attention
    assert isinstance(host, HostAttention)
    library = AttentionLibrary(native, kernels)
    most = LIMITS.max_num_tokens
    rows = RowAttention.of_plan(library, host.plan, host.scales, pool, most)
    compute.attention = cast(Attention, EmulatedAttention(rows, host))
    found = forced(llm, [ids(TOKENS)], SCHEDULE)[0]
    assert {bool(flags & BUNDLES) for flags in library.flags} == {False, True}
    # Queries and shares in halves; codes show them more.
    errors, largest = np.abs(found - expected), np.abs(expected).max()
    assert errors.mean() <= 4e-3 * largest
    assert errors.max() <= 6e-2 * largest


def defined(checkpoint: Checkpoint, compression: str) -> LLM:
    """The definition, in float32."""
    plan = plan_of(checkpoint, compression)
    size = arena(plan)
    session = Definition(decoder_from(checkpoint, plan, Basis()), size)
    return LLM(session, plan, LIMITS, Tokenizer(checkpoint.path), size)


def arena(plan: CompressionPlan) -> int:
    layout = CacheLayout(plan)
    return layout.bytes_for(2048) + 4 * sum(layout.page_stride)


def ids(count: int, seed: int = 1) -> list[int]:
    return np.random.default_rng(seed).integers(0, 97, count).tolist()


def near(found: Logits, expected: Logits, share: float) -> None:
    assert np.abs(found - expected).max() < share * np.abs(expected).max()


@pytest.mark.parametrize("name", NAMES)
def test_steps_over_unlike_layers_give_what_transformers_computes(
    name: str, native: Native, reference: Reference
) -> None:
    """Prompts in chunks, longer than every window; then token by token in a graph."""
    folder, model = reference(name)
    llm = on_device(native, Checkpoint(folder), "none")
    found = forced(llm, [ids(TOKENS)], SCHEDULE)[0]
    with torch.no_grad():
        expected = model(torch.tensor([ids(TOKENS)])).logits[0].numpy()
    near(found, expected, 2e-2)  # pages are halves
    assert llm.pool.bytes_in_use == 0


@pytest.mark.parametrize("name", rest_nightly(NAMES, "gemma4"))
def test_sealed_pages_of_unlike_layers_are_read_as_the_definition_reads_them(
    name: str, native: Native, reference: Reference
) -> None:
    checkpoint = Checkpoint(reference(name)[0])
    llms = on_device(native, checkpoint, CODES), defined(checkpoint, CODES)
    found, expected = (forced(llm, [ids(TOKENS)], SCHEDULE)[0] for llm in llms)
    near(found, expected, 2e-2)  # some number gets another code


def test_answers_of_unlike_layers_do_not_depend_on_what_runs_beside(
    native: Native, reference: Reference
) -> None:
    """Alone, together, and where rows leave for speculation."""
    checkpoint = Checkpoint(reference("gemma4-shared")[0])
    prompts = [ids(40) * 2, ids(33, 2), ids(90, 3)]
    greedy = SamplingParams(16, ignore_eos=True)

    def said(llm: LLM, batches: list[list[list[int]]]) -> list[list[int]]:
        answers = [one for batch in batches for one in llm.generate(batch, greedy)]
        return [list(answer.token_ids) for answer in answers]

    alone = said(on_device(native, checkpoint, CODES), [[one] for one in prompts])
    llm = on_device(native, checkpoint, CODES)
    assert said(llm, [prompts]) == alone
    llm.speculate("ngram", 4)
    assert said(llm, [prompts]) == alone
