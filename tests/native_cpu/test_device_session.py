"""Sessions on a GPU, in host memory: everything but the GPU's own calls, against the session on the CPU."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy as np
import onnxruntime as ort
import pytest

from kvlathe.engines.manifest import Limits
from kvlathe.engines.tensorrt import Shapes, profiles
from kvlathe.errors import KvlatheError
from kvlathe.export.layout import CacheLayout
from kvlathe.export.plan import CompressionPlan
from kvlathe.runtime import device, ort_device_session, sessions, trt_session
from kvlathe.runtime.cuda_abi import F16
from kvlathe.runtime.llm import LLM
from kvlathe.runtime.native import Native
from kvlathe.runtime.native_session import HalfSession
from kvlathe.runtime.ort_device_session import OrtDeviceSession
from kvlathe.runtime.sampler import SamplingParams
from kvlathe.runtime.tokenizer import Tokenizer
from kvlathe.runtime.trt_session import TrtSession
from tests.host_device import HostDevice, HostLibrary
from tests.native_cpu.test_session import half_engine, manifest
from tests.runtime_cases import LIMITS, MODEL, forced, text
from tests.session_laws import pages_move_and_come_back


class OnHost(OrtDeviceSession):
    """With the operator of the CPU provider, which reads what is bound where it lies."""

    place, entries = "cpu", {"kvlathe.element_bits": "16", "kvlathe.hot_bits": "16"}

    def open_graph(self, path: Path, options: ort.SessionOptions, stream: int) -> ort.InferenceSession:
        options.intra_op_num_threads = 1
        return ort.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])


@pytest.fixture
def engine() -> tuple[Path, CompressionPlan]:
    """Q and K projected, 16-bit pages sealed into 8 bit, in float16."""
    return half_engine()


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
    pages_move_and_come_back(on_host(native, engine).session)


def test_a_gpu_without_room_for_a_layers_tiles_is_refused_at_once(
    native: Native, engine: tuple[Path, CompressionPlan]
) -> None:
    """Every layer is asked about, in the form in which it will be called."""
    asked: list[tuple[int, ...]] = []

    class Narrow(HostLibrary):
        def call(self, name: str, *given: object) -> None:
            super().call(name, *given)
            if name == "cuda_attend_decode":
                args = given[0]._obj  # type: ignore[attr-defined]
                asked.append((args.batch, args.element, args.part_count, args.parts[1].bits_k))
            if len(asked) == engine[1].model.layers:
                raise KvlatheError("attend_decode", "shared memory holds no tile of ranks and pages this large")

    folder, plan = engine
    session = OnHost.__new__(OnHost)
    with pytest.raises(KvlatheError, match=r"does not run on this GPU, because shared memory.*: compress more"):
        session._start(HostDevice(), Narrow(native), folder, plan, LIMITS, arena(plan))  # type: ignore[arg-type]
    assert set(asked) == {(0, F16, 2, 8)} and len(asked) == plan.model.layers > 1


def test_onnx_runtime_that_would_go_on_with_the_cpu_is_refused(engine: tuple[Path, CompressionPlan]) -> None:
    if ort_device_session.PROVIDER in ort.get_available_providers():
        pytest.skip("this ONNX Runtime has a CUDA provider")
    session = OrtDeviceSession.__new__(OrtDeviceSession)
    with pytest.warns(UserWarning), pytest.raises(KvlatheError, match="its CUDA provider did not start"):
        session.open_graph(engine[0] / "model.onnx", ort.SessionOptions(), 0)


# -- TensorRT ----------------------------------------------------------------------------------------------------------
class StandIn:
    """What TrtSession uses of a TensorRT engine and its contexts, with the profiles that engines are built with; steps
    are computed by ONNX Runtime, where the session has bound its memory."""

    nptype = staticmethod(np.dtype)

    def __init__(self, native: Native, folder: Path, plan: CompressionPlan) -> None:
        self.profiles, self.runs = profiles(plan, LIMITS), [0, 0]
        options = ort.SessionOptions()
        for name, value in OnHost.entries.items():
            options.add_session_config_entry(name, value)
        options.register_custom_ops_library(str(native.path))
        self.graph = OnHost.open_graph(OnHost.__new__(OnHost), folder / "model.onnx", options, 0)
        kinds = {"int32": np.int32, "float16": np.float16, "uint8": np.int8, "float": np.float32}
        nodes = (*self.graph.get_inputs(), *self.graph.get_outputs())
        self.kinds = {node.name: kinds[node.type.removeprefix("tensor(").removesuffix(")")] for node in nodes}
        self.num_io_tensors = len(self.kinds)

    def get_tensor_name(self, place: int) -> str:
        return list(self.kinds)[place]

    def get_tensor_dtype(self, name: str) -> type:
        return self.kinds[name]

    def is_shape_inference_io(self, name: str) -> bool:
        return False

    def get_tensor_profile_shape(self, name: str, profile: int) -> Shapes:
        return self.profiles[profile][name]

    def create_execution_context(self) -> StandInContext:
        return StandInContext(self)


class StandInContext:
    def __init__(self, engine: StandIn) -> None:
        self.engine, self.shapes, self.addresses = engine, {}, {}

    def set_optimization_profile_async(self, profile: int, stream: int) -> bool:
        self.profile = profile
        return True

    def set_tensor_address(self, name: str, address: int) -> bool:
        self.addresses[name] = address
        return True

    def set_input_shape(self, name: str, shape: tuple[int, ...]) -> bool:
        low, _, high = self.engine.get_tensor_profile_shape(name, self.profile)
        self.shapes[name] = shape
        return len(shape) == len(low) and all(a <= n <= b for a, n, b in zip(low, shape, high, strict=True))

    def execute_async_v3(self, stream: int) -> bool:
        self.engine.runs[self.profile] += 1
        binding, graph = self.engine.graph.io_binding(), self.engine.graph
        for node in graph.get_inputs():
            kind = np.uint8 if self.engine.kinds[node.name] is np.int8 else self.engine.kinds[node.name]
            binding.bind_input(node.name, "cpu", 0, kind, self.shapes[node.name], self.addresses[node.name])
        for node, rows in zip(graph.get_outputs(), ("logit_rows", "input_ids"), strict=True):
            shape = (*self.shapes[rows], node.shape[1])
            binding.bind_output(node.name, "cpu", 0, self.engine.kinds[node.name], shape, self.addresses[node.name])
        graph.run_with_iobinding(binding)
        return True


def on_trt(native: Native, engine: tuple[Path, CompressionPlan], limits: Limits = LIMITS) -> LLM:
    plan, stand_in = engine[1], StandIn(native, *engine)
    session = TrtSession.__new__(TrtSession)
    session._start(stand_in, stand_in, HostDevice(), HostLibrary(native), plan, limits, arena(plan))  # type: ignore[arg-type]
    return LLM(session, plan, limits, Tokenizer(MODEL), arena(plan))


def test_a_tensorrt_engine_is_bound_within_its_profiles_and_answers_as_the_cpu(
    native: Native, engine: tuple[Path, CompressionPlan]
) -> None:
    """Chunks in one context, decodes in the other; all that TensorRT would be told it would take."""
    params = SamplingParams(max_new_tokens=40, ignore_eos=True)
    prompts = [list(text(100)), list(text(600, 400)), list(text(64, 90))]
    ours = on_trt(native, engine)
    answers = [[x.token_ids for x in llm.generate(prompts, params)] for llm in (ours, on_cpu(native, engine))]
    assert answers[0] == answers[1]
    decodes, mixed = ours.session._engine.runs
    assert mixed >= 2 and decodes > 30


def test_what_no_profile_holds_is_refused_in_words(native: Native, engine: tuple[Path, CompressionPlan]) -> None:
    wide = dataclasses.replace(LIMITS, max_num_tokens=2048)
    with pytest.raises(KvlatheError, match=r"TensorRT refuses input_ids of shape \(1500,\).* to \(1024,\)"):
        forced(on_trt(native, engine, wide), [text(1500)], [(1500,)])


def test_an_engine_of_other_tensors_is_refused(
    native: Native, engine: tuple[Path, CompressionPlan], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(StandIn, "get_tensor_dtype", lambda self, name: np.float32)
    with pytest.raises(KvlatheError, match="the engine has a tensor input_ids of float32"):
        on_trt(native, engine)


def test_why_a_tensorrt_engine_does_not_run_is_one_sentence() -> None:
    built = dataclasses.replace(manifest("float16"), backend="tensorrt")
    assert "tensorrt is not installed" in trt_session.obstacle(built)
    if not trt_session.obstacle(dataclasses.replace(built, backend="tensorrt_rtx")).startswith("tensorrt_rtx"):
        without = dataclasses.replace(built, backend="tensorrt_rtx")
        assert "built without libkvlathe_trt.so" in trt_session.obstacle(without)
    with pytest.raises(KvlatheError, match="which runs on a GPU"):
        sessions.runner(built, "this engine", "cpu")


@pytest.mark.skipif(not device.obstacle(), reason="there is a GPU")
def test_what_is_missing_for_a_gpu_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    both = dataclasses.replace(manifest("float16"), architectures=("cpu", "sm_90"))
    with pytest.raises(KvlatheError, match="cannot run on the GPU, because"):
        sessions.runner(both, "this engine", "cuda")
    with pytest.raises(KvlatheError, match="it was built for the CPU"):
        sessions.runner(manifest("float32"), "this engine", "cuda")
    monkeypatch.setenv("KVLATHE_DEVICE", "tpu")
    with pytest.raises(KvlatheError, match="there is no device 'tpu'"):
        sessions.runner(both)
