"""The cuda backend's decoder is the exporter's, family by family; what its kernels
cannot run is refused at build."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from kvlathe.base.errors import KvlatheError
from kvlathe.engines.build import BuildConfig, build
from kvlathe.engines.targets import cuda
from kvlathe.export.attention.step import StepTensors
from kvlathe.export.bases.basis import Basis
from kvlathe.export.folding.fold import decoder_from
from kvlathe.export.model.checkpoint import Checkpoint
from kvlathe.export.model.decoder import Decoder
from kvlathe.export.model.weights_file import wiring
from kvlathe.layers.wiring import Wiring
from kvlathe.plan import manifest as manifests
from kvlathe.plan.formats import Tier
from kvlathe.plan.groups import Group
from kvlathe.plan.lives import SEAL, Divide
from kvlathe.plan.plan import CompressionPlan
from kvlathe.plan.token_score import ObservationWindow
from kvlathe.runtime.llm import LLM
from kvlathe.runtime.native.cuda import (
    APPENDED,
    BUNDLES,
    MAX_BUNDLE,
    OVERLAP,
    CudaLibrary,
)
from kvlathe.runtime.sessions.gpu.step_buffer import (
    ShortRows,
    StepArrays,
    StepForm,
    StepKind,
    kind_of,
)
from kvlathe.runtime.sessions.registry import attention
from kvlathe.runtime.sessions.torch_cuda import compute as cuda_compute
from kvlathe.runtime.sessions.torch_cuda import inputs as cuda_inputs
from kvlathe.runtime.sessions.torch_cuda.attention import attend as cuda_attend
from kvlathe.runtime.sessions.torch_cuda.attention.attend import Attention
from kvlathe.runtime.sessions.torch_cuda.inputs import StepInputs
from kvlathe.runtime.sessions.torch_cuda.model import rows
from kvlathe.runtime.sessions.torch_cuda.model.decoder import TorchDecoder
from kvlathe.runtime.sessions.torch_cuda.model.weights import read_decoder
from tests.support.checkpoints import ON_GPUS, WITH_STATES, whole_plan

MODEL = Path(__file__).resolve().parents[5] / "models" / "lathe-5m"
LOADS = [(2, 10_000, True), (2, 10, False), (8, 100, True), (1, 10_000, False)]
"""Rows and cached tokens of a sequence, and whether its rows are attended together."""
Reference = Callable[[str], tuple[Path, torch.nn.Module]]


def logits_of(twin: TorchDecoder, decoder: Decoder, ids: Tensor) -> Tensor:
    """All logits of one sequence, attention by the exporter's eager op."""
    count, starts = len(ids), torch.tensor([0, len(ids)], dtype=torch.int32)
    offsets, lengths = (
        torch.arange(count, dtype=torch.int32),
        torch.zeros(1, len(decoder.plan.index.buckets), dtype=torch.int32),
    )
    cached: dict[int, tuple[Tensor, Tensor]] = {}

    def attend(
        layer: int,
        q: Tensor,
        k: Tensor | None,
        v: Tensor | None,
        angles: tuple[Tensor, Tensor] | None,
        weights: Mapping[str, Tensor],
    ) -> Tensor:
        op = list(decoder.layers.values())[layer].attend
        assert isinstance(op, torch.nn.Module)
        assert {name for name, _ in op.named_parameters()} <= weights.keys()
        cos, sin = angles or (None, None)
        if k is not None and v is not None:
            cached[layer] = k, v
        k, v = cached[decoder.plan.model.source(layer)]
        return op(q, k, v, StepTensors(cos, sin, starts, offsets, lengths))[0]

    return twin(ids.int(), offsets, offsets, attend)


@pytest.mark.parametrize("name", ON_GPUS)
def test_every_family_computes_what_the_exporter_defines(
    name: str, reference: Reference
) -> None:
    checkpoint = Checkpoint(reference(name)[0])
    spec = checkpoint.spec
    plan = whole_plan(spec)
    decoder = decoder_from(checkpoint, plan, Basis())
    ids = torch.randint(
        0, spec.vocab_size, (90,), generator=torch.Generator().manual_seed(1)
    )
    as_json = json.dumps(dataclasses.asdict(wiring(spec, plan)))
    twin = TorchDecoder(
        Wiring.from_json(json.loads(as_json)), dict(decoder.state_dict())
    )
    expected = decoder.logits(ids.tolist(), range(90))
    torch.testing.assert_close(
        logits_of(twin, decoder, ids), expected, atol=1e-4, rtol=0
    )


@pytest.mark.parametrize("name", WITH_STATES)
def test_wiring_of_layers_with_states_is_json_without_infinities(
    name: str, reference: Reference
) -> None:
    spec = Checkpoint(reference(name)[0]).spec
    facts = wiring(spec, whole_plan(spec))
    text = json.dumps(dataclasses.asdict(facts), allow_nan=False)
    assert facts.mixing is not None
    assert Wiring.from_json(json.loads(text)) == facts


def test_an_engine_folder_holds_what_the_decoder_needs(tmp_path: Path) -> None:
    """Built without a GPU; the weights read back are those that were folded, and
    inspect says what is missing here."""
    folder = build(
        BuildConfig(
            MODEL, tmp_path / "engine", backend="cuda", max_seq_len=512, use_cache=False
        )
    )
    manifest = manifests.verify(folder)
    assert (
        manifest.backend == "cuda"
        and manifest.compute_dtype == "float16"
        and "sm_90" in manifest.architectures
    )
    assert not (folder / "model.onnx").exists()
    weights = manifests.WEIGHTS_FILE
    assert manifest.made_from[weights] == manifest.files[weights]
    facts, tensors = read_decoder(folder, manifests.DECODER_FILE, "cpu")
    checkpoint = Checkpoint(MODEL)
    spec, plan = (
        checkpoint.spec,
        CompressionPlan.from_json((folder / "plan.json").read_text()),
    )
    decoder = decoder_from(checkpoint, plan, Basis())
    assert tensors.keys() == decoder.state_dict().keys()
    ids = torch.arange(5, 60)
    twin = TorchDecoder(facts, {name: x.float() for name, x in tensors.items()})
    expected = decoder.logits(ids.tolist(), range(55))
    torch.testing.assert_close(
        logits_of(twin, decoder, ids), expected, atol=0.05, rtol=0
    )
    assert facts == wiring(spec, plan)
    if not torch.cuda.is_available():
        with pytest.raises(KvlatheError, match="needs a GPU"):
            LLM.load(folder)
        assert "NOT run here" in attention(manifest)


HOT = Tier(16, 16)


def one_group() -> CompressionPlan:
    plan = whole_plan(Checkpoint(MODEL).spec)
    return dataclasses.replace(plan, groups=(Group(plan.groups[0].lanes, HOT),))


def test_plans_that_the_kernels_do_not_run_are_refused_with_what_to_do() -> None:
    plan = one_group()
    every = plan.groups[0].lanes
    cuda.check_plan("cuda", plan)
    sums = Tier(8, 8, group_v=16, arithmetic="int", sums=True)
    stored = dataclasses.replace(plan, groups=(Group(every, HOT, (sums,), SEAL),))
    many = dataclasses.replace(
        plan,
        groups=(Group(every, HOT, (HOT, HOT, HOT), Divide((0.5, 0.25, 0.25))),),
        score=ObservationWindow(last=8),
    )
    hot = dataclasses.replace(plan, groups=(Group(every, Tier(32, 32)),))
    queries = dataclasses.replace(
        plan, model=dataclasses.replace(plan.model, query_heads=9 * plan.model.kv_heads)
    )
    layer = tuple(dataclasses.replace(plan.lanes[0], head=head) for head in range(65))
    wide = dataclasses.replace(
        plan,
        model=dataclasses.replace(plan.model, layers=1, query_heads=65, kv_heads=65),
        lanes=layer,
        groups=(Group(tuple(range(65)), HOT),),
    )
    pages = dataclasses.replace(
        plan,
        groups=(Group(every, HOT, (Tier(8, 8),), SEAL),),
        page_tokens=512,
        prefill_chunk=512,
    )
    for refused, words in (
        (stored, "sums of codes"),
        (many, "a head is in 4 buckets"),
        (hot, "32 bits"),
        (queries, "9 query heads a KV head, and the kernels take 8"),
        (wide, "a layer has 65 KV heads"),
        (pages, "pages have 512 tokens"),
    ):
        with pytest.raises(KvlatheError, match=words):
            cuda.check_plan("cuda", refused)


class SilentLibrary(CudaLibrary):
    """A CudaLibrary that does nothing, on a GPU with the kernel for prompt chunks or
    without it."""

    def __init__(self, chunks: bool = False) -> None:
        library: Any = SimpleNamespace(
            kvlathe_cuda_has_prompt_kernel=lambda: int(chunks),
            kvlathe_cuda_prompt_list_bytes=lambda *_: 64,
        )
        self.lib = library

    def call(self, name: str, *arguments: object) -> None: ...

    def workspace_bytes(self, batch: int, heads: int) -> int:
        return 128

    def plan_bytes(self) -> int:
        return 128


@pytest.mark.parametrize("single", [True, False])
def test_pages_are_read_under_append_only_where_it_writes_one_row_a_sequence(
    single: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The rows of a prompt read what append writes for the rows before them."""
    monkeypatch.setattr(cuda_attend, "current_stream", lambda: 0)
    plan, tokens = one_group(), 2 if single else 40
    scales, pool = [1.0] * plan.model.layers, torch.zeros(1024, dtype=torch.uint8)
    attention = Attention.of_plan(SilentLibrary(), plan, scales, pool, tokens)
    starts, lengths = (
        torch.tensor([0, 1, tokens], dtype=torch.int32),
        torch.zeros(2, 1, dtype=torch.int32),
    )
    tables = [torch.zeros(2, 1, dtype=torch.int32)]
    step = StepInputs(starts, lengths, tables, StepKind(single, tokens, chunks=True))
    assert {call.flags for call in attention.prepare(step, tokens).calls} == {
        OVERLAP | (APPENDED if single else 0)
    }


@pytest.mark.parametrize(("each", "tokens", "bundled"), LOADS)
@pytest.mark.parametrize("chunks", [0, 1, 3])
def test_rows_are_bundled_where_they_pay(
    each: int, tokens: int, bundled: bool, chunks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever prompts come in the same step."""
    monkeypatch.setattr(cuda_attend, "current_stream", lambda: 0)
    counts = [each] * 5 + [100] * chunks
    starts = np.cumsum([0, *counts]).astype(np.int32)
    plan, rows_of_step = one_group(), int(starts[-1])
    step: Any = SimpleNamespace(
        cu_seqlens_q=starts,
        input_ids=range(rows_of_step),
        logit_rows=(),
        query_offsets=(0,),
        page_tables=(),
        lengths=np.array([[tokens]] * 5 + [[7000]] * chunks, np.int32),
    )
    kind = kind_of(step, [])
    assert kind.rows == 5 * each and kind.chunks == (chunks > 0)
    assert kind.short.rows.tolist() == [each] * 5
    assert kind.short.cached.tolist() == [[tokens]] * 5
    scales, pool = [1.0] * plan.model.layers, torch.zeros(1024, dtype=torch.uint8)
    attention = Attention.of_plan(SilentLibrary(True), plan, scales, pool, rows_of_step)
    attention.most_bundled = MAX_BUNDLE
    inputs = StepInputs(
        torch.from_numpy(starts),
        torch.zeros(len(counts), 1, dtype=torch.int32),
        [torch.zeros(len(counts), 1, dtype=torch.int32)],
        kind,
    )
    calls = attention.prepare(inputs, rows_of_step).calls
    assert {call.flags for call in calls} == {OVERLAP | (BUNDLES if bundled else 0)}
    assert {bool(call.prompts) for call in calls} == {chunks > 0}


@pytest.mark.parametrize(("rank", "tiled"), [(128, True), (256, False)])
def test_prompts_of_the_widest_ranks_are_bundles_of_rows(
    rank: int, tiled: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No kernel attends them in tiles, and alone each row would read all tokens."""
    monkeypatch.setattr(cuda_attend, "current_stream", lambda: 0)
    plan, tokens = one_group(), 40
    first = dataclasses.replace(plan.lanes[0], rank_v=rank, projected=True)
    lanes = (first, *(dataclasses.replace(x, projected=True) for x in plan.lanes[1:]))
    plan = dataclasses.replace(plan, lanes=lanes)
    scales, pool = [1.0] * plan.model.layers, torch.zeros(1024, dtype=torch.uint8)
    attention = Attention.of_plan(SilentLibrary(True), plan, scales, pool, tokens)
    attention.most_bundled = MAX_BUNDLE
    ints = partial(torch.zeros, dtype=torch.int32)
    starts = torch.tensor([0, tokens], dtype=torch.int32)
    kind = StepKind(False, 0, chunks=True)
    step = StepInputs(starts, ints(1, 1), [ints(1, 1)], kind)
    calls = attention.prepare(step, tokens).calls
    assert {bool(call.prompts) for call in calls} == {tiled}
    assert {bool(call.flags & BUNDLES) for call in calls} == {not tiled}


def test_attention_is_told_what_the_sequences_of_a_step_bring(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Told(Exception): ...

    def prepare(step: StepInputs, *_: object) -> None:
        assert step.kind is kind
        raise Told

    monkeypatch.setattr(cuda_inputs, "tensor_of", lambda array: array)
    form = StepForm(1, 1, 1, (1,))
    arrays: Any = dict.fromkeys(form.shapes, torch.zeros(1, 1, dtype=torch.int32))
    attention: Any = SimpleNamespace(prepare=prepare)
    decoder: Any = SimpleNamespace(layers=[SimpleNamespace(attends=True)])
    brought = ShortRows(np.array([2]), np.array([[7]]))
    for kind in (StepKind(False, 2, brought), StepKind(False, 2, brought, chunks=True)):
        step = cuda_inputs.TorchStep.of(StepArrays(arrays, form, kind))
        with pytest.raises(Told):
            cuda_compute.TorchCompute(decoder, attention).run(step, range(1))


def test_the_kernel_reads_gate_and_up_where_they_lie_side_by_side() -> None:
    """It is given one address: up must begin where gate ends, row by row."""
    both = torch.zeros(3, 32, dtype=torch.float16)
    gate, up = both.chunk(2, 1)
    assert rows.follows(gate, up)
    assert not rows.follows(up, gate)
    assert not rows.follows(gate, up.contiguous())
    assert not rows.follows(gate[:, :8], up[:, :8])
