"""ONNX Runtime's CUDA provider end to end on a GPU: the logits and tokens of the same
engine on the CPU.

Needs onnxruntime-gpu and cuda-python beside a library with CUDA kernels.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvlathe.engines.build import BuildConfig, build
from kvlathe.runtime.llm import LLM
from kvlathe.runtime.native import library as native
from kvlathe.runtime.sessions.gpu import cuda_python
from kvlathe.runtime.sessions.gpu import onnx as ort_session
from kvlathe.runtime.sessions.gpu.cuda_python import CudaPythonDevice
from kvlathe.runtime.sessions.gpu.session import DeviceSession
from kvlathe.runtime.text.sampling_params import SamplingParams
from tests.native.library import Library
from tests.support.checkpoints import make_model
from tests.support.families.sizes import sizes
from tests.support.runtime_cases import forced, text
from tests.support.session_laws import device_session, pages_move_and_come_back

MODEL = Path(__file__).resolve().parents[2] / "models" / "lathe-5m"
CODED: dict[str, Any] = {"compression": "fdc+hack:bits=8", "removal_rate": 0.15}
PLANS: dict[str, dict[str, Any]] = {
    "none": {},
    "8 bit": CODED,
    "grouped": {"max_seq_len": 512},
    "chosen": {"compression": "auto", "compression_ratio": 0.8},
    "window": {"compression": "window:sink=64,recent=128"},
    "window of codes": {"compression": "hack:bits=8+window:sink=64,recent=64"},
    "kivi": {"compression": "kivi"},
    "3 bit": {"compression": "hack:bits=3"},
    "fixed levels": {"compression": "turboquant:bits=3"},
}
LIMITS: dict[str, Any] = {
    "max_batch_size": 3,
    "max_seq_len": 1024,
    "prefill_chunk": 128,
    "max_num_tokens": 320,
}
CLOSE = {"chosen": 4e-2, "kivi": 1e-1, "3 bit": 4e-2, "fixed levels": 4e-2}
"""Shares of the largest logit; 1e-2 otherwise: two ways to round to 16 bit, and q to 8
bits on one side where pages have 8. Numbers that were rounded otherwise to 16 bit may
get another of few codes, and of KIVI's four the next is a third of the range away."""
GROUPED = sizes(112, 14, 2, 16, tie_word_embeddings=True)
"""Seven query heads a lane, random weights."""


@pytest.fixture(scope="module", params=PLANS)
def pair(
    request: pytest.FixtureRequest,
    library: Library,
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[tuple[LLM, LLM]]:
    """One engine on the GPU and on the CPU."""
    if reason := cuda_python.obstacle() or ort_session.obstacle():
        pytest.skip(reason)
    if not library.has_cuda:
        pytest.skip("a library without CUDA kernels")
    folder, patch = tmp_path_factory.mktemp("engines"), pytest.MonkeyPatch()
    patch.setenv("KVLATHE_LIBRARY", str(library.path.resolve()))
    native.find.cache_clear()
    model = MODEL
    if request.param == "grouped":
        model = folder / "checkpoint"
        make_model(model, "Qwen2", GROUPED, seed=4)
    asked = {**LIMITS, **PLANS[request.param]}
    engine = build(
        BuildConfig(model, folder / "engine", dtype="float16", use_cache=False, **asked)
    )
    yield LLM.load(engine), LLM.load(engine, device="cpu")
    patch.undo()
    native.find.cache_clear()


@pytest.fixture
def close(request: pytest.FixtureRequest) -> float:
    return CLOSE.get(request.node.callspec.params["pair"], 1e-2)


def tokens_of(llm: LLM, count: int, start: int = 0) -> list[int]:
    vocab = llm.plan.model.vocab_size
    return [token % vocab for token in text(count, start)]


def test_a_float16_engine_runs_on_the_gpu_where_it_can(pair: tuple[LLM, LLM]) -> None:
    assert isinstance(pair[0].session, DeviceSession)
    assert not isinstance(pair[1].session, DeviceSession)
    assert (
        "ONNX Runtime's CUDA provider" in pair[0].attention
        and "NOT on a GPU" in pair[1].attention
    )


def test_logits_are_those_of_the_cpu(pair: tuple[LLM, LLM], close: float) -> None:
    """Chunks beside decodes, seals, batches that a graph pads; the pool stays where it
    is."""
    session = device_session(pair[0])
    place = session.pool.address
    texts = [tokens_of(pair[0], n, 100 * n) for n in (200, 131, 60)]
    schedule = [(128, 128, 40), (64, 1, 1), (1, 1, 1), (1, 1, 18), (1, 0, 0), (5, 0, 0)]
    on_gpu, on_cpu = (forced(llm, texts, schedule) for llm in pair)
    for ours, theirs in zip(on_gpu, on_cpu, strict=True):
        assert np.abs(ours - theirs).max() <= close * np.abs(theirs).max()
    assert session.pool.address == place
    assert set(session._graphs) == {1, 3}


def test_answers_are_those_of_the_cpu(pair: tuple[LLM, LLM], close: float) -> None:
    """Three requests at once, through chunks, graphs of shrinking batches and seals:
    greedy tokens, which part only where two of them are as good."""
    prompts = [tokens_of(pair[0], n, 50 * n) for n in (5, 40, 300)]
    params = [
        SamplingParams(max_new_tokens=n, temperature=0.0, ignore_eos=True)
        for n in (100, 90, 80)
    ]
    answers = [
        [list(answer.token_ids) for answer in llm.generate(prompts, params)]
        for llm in pair
    ]
    alike = 0
    for prompt, ours, theirs in zip(prompts, *answers, strict=True):
        same = next(
            (i for i, (a, b) in enumerate(zip(ours, theirs, strict=True)) if a != b),
            len(ours),
        )
        alike += same
        if same < len(ours):
            ids = prompt + ours[:same]
            logits = pair[1].logits(ids, [len(ids) - 1], prompt=len(prompt))[0]
            assert logits.max() - logits[ours[same]] <= 2 * close * np.abs(logits).max()
    assert alike >= 135  # half of them


def test_a_decode_step_moves_its_integers_and_its_logits(
    pair: tuple[LLM, LLM], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bytes of every copy that we queue, between the GPU and here: no page among
    them."""
    moved: list[int] = []
    plain = CudaPythonDevice.call

    def call(self: CudaPythonDevice, name: str, *arguments: object) -> object:
        if name == "cudaMemcpyAsync":
            size = arguments[2]
            assert isinstance(size, int)
            moved.append(size)
        return plain(self, name, *arguments)

    llm, texts = pair[0], [tokens_of(pair[0], 40, 10 * i) for i in range(3)]
    forced(llm, texts, [(30, 30, 30), (1, 1, 1)])
    monkeypatch.setattr(CudaPythonDevice, "call", call)
    forced(llm, texts, [(30, 30, 30), (1, 1, 1), (1, 1, 1)])
    block = 4 * device_session(llm)._graph_of(3).buffer.form.size
    assert moved[2:] == [block, 4 * 3 * llm.plan.model.vocab_size] * 2


def test_pages_move_and_come_back(pair: tuple[LLM, LLM]) -> None:
    pages_move_and_come_back(device_session(pair[0]))


def test_every_node_of_a_step_is_on_the_gpu(
    pair: tuple[LLM, LLM], tmp_path: Path
) -> None:
    """But for shapes: no node of standard operators that computes, and no copy between
    the two memories."""
    import json

    llm = pair[0]
    compute, device = device_session(llm).compute, device_session(llm).device
    assert isinstance(compute, ort_session.OnnxCompute)
    graph = compute.graph
    library = native.find().native
    assert library is not None
    assert graph.get_providers()[0] == "CUDAExecutionProvider"
    options = ort_session.session_options(library.path, ort_session.ON_GPU)
    options.enable_mem_pattern = True
    options.enable_profiling = True
    options.profile_file_prefix = str(tmp_path / "steps")
    path = Path(str(graph._model_path))
    compute.graph = ort_session.open_graph(path, options, device.stream)
    try:
        forced(llm, [tokens_of(llm, 40)], [(30,)])
        found = [
            e
            for e in json.loads(Path(compute.graph.end_profiling()).read_text())
            if e.get("cat") == "Node"
        ]
    finally:
        compute.graph = graph
    names = {
        (e["args"]["op_name"], e["args"]["provider"])
        for e in found
        if "provider" in e.get("args", {})
    }
    assert ("Attend", "CUDAExecutionProvider") in names
    on_cpu = {name for name, provider in names if provider == "CPUExecutionProvider"}
    assert not on_cpu & {
        "MatMul",
        "Gemm",
        "Gather",
        "Add",
        "Mul",
        "Softmax",
        "MemcpyToHost",
        "MemcpyFromHost",
    }, names
