"""Sessions on a GPU, in host memory: everything but the GPU's own calls, against the session on the CPU."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnxruntime as ort
import pytest

from kvlathe.export.checkpoint import Checkpoint
from kvlathe.export.fold import fold
from kvlathe.export.layout import CacheLayout
from kvlathe.export.plan import CompressionPlan
from kvlathe.export.to_onnx import export_onnx
from kvlathe.runtime.llm import LLM
from kvlathe.runtime.native import Native
from kvlathe.runtime.native_session import HalfSession
from kvlathe.runtime.ort_device_session import OrtDeviceSession
from kvlathe.runtime.sampler import SamplingParams
from kvlathe.runtime.tokenizer import Tokenizer
from tests.host_device import HostDevice, HostLibrary
from tests.native_cpu.test_session import turned
from tests.runtime_cases import LIMITS, MODEL, forced, text


class OnHost(OrtDeviceSession):
    """With the operator of the CPU provider, which reads what is bound where it lies."""

    place, entries = "cpu", {"kvlathe.element_bits": "16", "kvlathe.hot_bits": "16"}

    def open_graph(self, path: Path, options: ort.SessionOptions, stream: int) -> ort.InferenceSession:
        options.intra_op_num_threads = 1
        return ort.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, CompressionPlan]:
    """Q and K projected, 16-bit pages sealed into 8 bit, in float16."""
    folder, (plan, basis), checkpoint = tmp_path_factory.mktemp("half"), turned(), Checkpoint(MODEL)
    export_onnx(checkpoint.spec, plan, fold(checkpoint, plan, basis), folder, "float16")
    return folder, plan


def arena(plan: CompressionPlan) -> int:
    return CacheLayout(plan).bytes_for(8192)


def on_cpu(native: Native, engine: tuple[Path, CompressionPlan]) -> LLM:
    folder, plan = engine
    session = HalfSession(folder, plan, LIMITS, arena(plan), 1, native)
    return LLM(session, plan, LIMITS, Tokenizer(MODEL), arena(plan))


def on_host(native: Native, engine: tuple[Path, CompressionPlan]) -> LLM:
    folder, plan = engine
    session = OnHost.__new__(OnHost)
    session._start(HostDevice(), HostLibrary(native), folder, plan, LIMITS, arena(plan))  # type: ignore[arg-type]
    return LLM(session, plan, LIMITS, Tokenizer(MODEL), arena(plan))


def test_logits_are_those_of_the_cpu(native: Native, engine: tuple[Path, CompressionPlan]) -> None:
    """Chunks and decodes in one step, padded decodes, sealed pages; the pool stays where it is."""
    texts, schedule = (
        [text(90), text(130, 50), text(70, 9)],
        [(64, 128, 0), (1, 1, 64), (1, 1, 1), (24, 0, 1), (0, 0, 4)],
    )
    ours = on_host(native, engine)
    place = ours.session.memory.address
    found, expected = forced(ours, texts, schedule), forced(on_cpu(native, engine), texts, schedule)
    for a, b in zip(found, expected, strict=True):
        assert np.abs(a - b).max() < 1e-3 * np.abs(b).max()
    assert ours.session.memory.address == place
    assert ours.session.device.captures == 1  # three decodes in a graph of four


def test_greedy_answers_are_those_of_the_cpu(native: Native, engine: tuple[Path, CompressionPlan]) -> None:
    params = SamplingParams(max_new_tokens=40, ignore_eos=True)
    prompts = [list(text(100)), list(text(30, 400))]
    ours, theirs = (llm(native, engine).generate(prompts, params) for llm in (on_host, on_cpu))
    assert [answer.token_ids for answer in ours] == [answer.token_ids for answer in theirs]


def test_pages_move_and_come_back(native: Native, engine: tuple[Path, CompressionPlan]) -> None:
    session = on_host(native, engine).session
    data = bytes(np.random.default_rng(1).integers(0, 255, session.strides[0], np.uint8))
    session.write_page(0, 3, data)
    session.copy_page(0, 3, 5)
    assert session.read_page(0, 5) == data == session.read_page(0, 3)
