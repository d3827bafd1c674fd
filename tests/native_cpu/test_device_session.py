"""Sessions on a GPU, in host memory: everything but the GPU's own calls, against the
session on the CPU."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime as ort
import pytest

from kvlathe.base.errors import KvlatheError
from kvlathe.engines.targets.tensorrt import Shapes, profiles
from kvlathe.plan.manifest import Limits
from kvlathe.plan.plan import CompressionPlan
from kvlathe.runtime.llm import LLM
from kvlathe.runtime.native.cuda import F16
from kvlathe.runtime.native.library import Native
from kvlathe.runtime.sessions import registry as sessions
from kvlathe.runtime.sessions.gpu import cuda_python
from kvlathe.runtime.sessions.gpu import tensorrt as trt_session
from kvlathe.runtime.sessions.gpu.onnx import (
    PROVIDER,
    open_graph,
)
from kvlathe.runtime.sessions.gpu.pages import allocate_pool
from kvlathe.runtime.sessions.gpu.session import DeviceSession
from kvlathe.runtime.sessions.gpu.step_buffer import graph_batch_sizes
from kvlathe.runtime.sessions.gpu.tensorrt import TensorRTCompute
from kvlathe.runtime.sessions.page_moves import FullPage
from kvlathe.runtime.sessions.torch_cuda.compute import TorchCompute
from kvlathe.runtime.sessions.torch_cuda.session import TorchSession
from kvlathe.runtime.text.sampler import Request, Sampler, rows_of
from kvlathe.runtime.text.sampling_params import SamplingParams
from tests.native_cpu.test_session import manifest
from tests.support.device_engines import (
    HostAttention,
    arena,
    as_llm,
    host_graph,
    in_torch,
    on_cpu,
    on_host,
)
from tests.support.drafts import whatever_is_guessed
from tests.support.host_device import HostDevice, HostLibrary
from tests.support.runtime_cases import LIMITS, forced, text
from tests.support.session_laws import (
    device_session,
    next_step,
    pages_move_and_come_back,
)
from tests.support.turned_cases import half_engine


@pytest.fixture
def engine() -> tuple[Path, CompressionPlan]:
    """Q and K projected, 16-bit pages sealed into 8 bit, in float16."""
    return half_engine()


ON_HOST = {"onnx": on_host, "torch": in_torch}
CLOSE = {"onnx": 1e-3, "torch": 1e-2}
"""Shares of the largest logit. In torch all products are rounded to 16 bit
otherwise."""


@pytest.mark.slow
@pytest.mark.parametrize("compute", ON_HOST)
def test_logits_are_those_of_the_cpu(
    compute: str, native: Native, engine: tuple[Path, CompressionPlan]
) -> None:
    """Chunks and decodes in one step, padded decodes, sealed pages; the pool stays
    where it is."""
    texts, schedule = (
        [text(90), text(130, 50), text(70, 9)],
        [(64, 128, 0), (1, 1, 64), (1, 1, 1), (24, 0, 1), (0, 0, 4)],
    )
    ours = ON_HOST[compute](native, engine)
    session = device_session(ours)
    place = session.pool.address
    found, expected = (
        forced(ours, texts, schedule),
        forced(on_cpu(native, engine), texts, schedule),
    )
    for a, b in zip(found, expected, strict=True):
        assert np.abs(a - b).max() < CLOSE[compute] * np.abs(b).max()
    assert session.pool.address == place
    assert isinstance(session.device, HostDevice)
    # Three decodes are in a graph of four; in torch four rows of a sequence, too.
    assert session.device.captures == {"onnx": 1, "torch": 2}[compute]


def test_a_warm_session_captures_nothing_more(
    native: Native, engine: tuple[Path, CompressionPlan]
) -> None:
    llm = in_torch(native, engine)
    session = device_session(llm)
    device = session.device
    assert isinstance(device, HostDevice)
    session.warm_up()
    captured = device.captures
    assert captured == len(graph_batch_sizes(LIMITS.max_batch_size))
    params = SamplingParams(max_new_tokens=8, ignore_eos=True)
    alone = on_cpu(native, engine).generate([list(text(40))], params)
    assert llm.generate([list(text(40))], params)[0].token_ids == alone[0].token_ids
    assert device.captures == captured


def test_greedy_answers_are_those_of_the_cpu(
    native: Native, engine: tuple[Path, CompressionPlan]
) -> None:
    params = SamplingParams(max_new_tokens=40, ignore_eos=True)
    prompts = [list(text(100)), list(text(30, 400))]
    ours, theirs = (
        llm(native, engine).generate(prompts, params) for llm in (on_host, on_cpu)
    )
    assert [answer.token_ids for answer in ours] == [
        answer.token_ids for answer in theirs
    ]


@pytest.mark.parametrize("compute", ON_HOST)
def test_pages_move_and_come_back(
    compute: str, native: Native, engine: tuple[Path, CompressionPlan]
) -> None:
    pages_move_and_come_back(device_session(ON_HOST[compute](native, engine)))


@pytest.mark.parametrize("compute", ON_HOST)
def test_the_full_pages_of_a_step_are_sealed_in_one_call(
    compute: str, native: Native, engine: tuple[Path, CompressionPlan]
) -> None:
    """Each of three pages gets the bytes that it gets alone."""
    session = device_session(ON_HOST[compute](native, engine))
    full = [FullPage(0, i, (60 + i,), 64 * i) for i in range(3)]
    stride = session.strides[0]
    for page in full:
        session.write_page(0, page.page, bytes([page.page + 1]) * stride)
    session.seal(full)
    library: object = session._kernels.library
    assert isinstance(library, HostLibrary) and library.sealed == [3]
    together = [session.read_page(1, 60 + i) for i in range(3)]
    assert len(set(together)) == 3
    for page in full:
        session.seal([page])
    assert [session.read_page(1, 60 + i) for i in range(3)] == together


def test_steps_of_torch_follow_each_other_on_the_device(
    native: Native, engine: tuple[Path, CompressionPlan]
) -> None:
    """Tokens that the host does not know are those of the step before; the others are
    the host's."""
    ours = in_torch(native, engine)
    table = ours.pool.open()
    session = device_session(ours)
    assert isinstance(session, TorchSession)
    greedy = rows_of([Request(Sampler(SamplingParams()), [], 0)])
    tokens, steps = [7], []
    for _ in range(8):
        steps.append(next_step(ours, table, tokens[-1]))
        chosen = session.start(steps[-1])(greedy).result()
        tokens.append(chosen.token(0))
    flights = [session.start(steps[0])(greedy)]
    for step in steps[1:]:
        unknown = np.zeros(1, np.int32)
        step = dataclasses.replace(step, input_ids=unknown, after=unknown)
        flights.append(session.start(step)(greedy))
    assert [flight.result().token(0) for flight in flights] == tokens[1:]


def test_guesses_are_verified_where_the_logits_are(
    native: Native, engine: tuple[Path, CompressionPlan]
) -> None:
    """Steps run ahead of their tokens, but for those with guesses; two answers in turn
    with one whose prompt has just come."""
    llm = in_torch(native, engine)
    params = [
        SamplingParams(max_new_tokens=24, ignore_eos=True, logprobs=1),
        SamplingParams(max_new_tokens=20, temperature=0.5, top_k=9, seed=4),
        SamplingParams(max_new_tokens=9, ignore_eos=True, repetition_penalty=1.1),
    ]
    again = [*text(40), *text(30, 400), *text(40)]
    prompts = [again, again[5:], list(text(150, 700))]
    plain = llm.generate(prompts, params)
    llm.speculate("ngram", 4)
    made = llm.engine.scheduler.speculation
    whatever_is_guessed(made)
    guessed = llm.generate(prompts, params)
    assert [one.token_ids for one in guessed] == [one.token_ids for one in plain]
    assert made.accepted > 8
    assert llm.pool.bytes_in_use == 0


def test_torch_is_told_what_the_sequences_of_a_step_bring(
    native: Native, engine: tuple[Path, CompressionPlan]
) -> None:
    """(one token each, rows before those of chunks) of every step that is not a
    graph."""
    ours = in_torch(native, engine)
    compute = device_session(ours).compute
    assert isinstance(compute, TorchCompute)
    attention: object = compute.attention
    assert isinstance(attention, HostAttention)
    kinds = attention.kinds
    texts = [text(90), text(130, 50), text(64)]
    forced(ours, texts, [(64, 100, 0), (1, 3, 64), (25, 1, 0), (0, 26, 0)])
    assert kinds == [(False, 0), (False, 4), (False, 26), (False, 0)]


def test_a_gpu_without_room_for_a_layers_tiles_is_refused_at_once(
    native: Native, engine: tuple[Path, CompressionPlan]
) -> None:
    """Every layer is asked about, in the form in which it will be called."""
    asked: list[tuple[int, ...]] = []

    class Narrow(HostLibrary):
        def call(self, name: str, *given: Any) -> None:  # noqa: ANN401  (structures)
            super().call(name, *given)
            if name == "cuda_attend_decode":
                args = given[0]._obj
                asked.append(
                    (args.batch, args.element, args.part_count, args.parts[1].bits_k)
                )
            if len(asked) == engine[1].model.layers:
                raise KvlatheError(
                    "attend_decode",
                    "shared memory holds no tile of ranks and pages this large",
                )

    plan = engine[1]
    with pytest.raises(
        KvlatheError,
        match=r"does not run on this GPU[\s\S]*shared memory[\s\S]*ompress more",
    ):
        allocate_pool(HostDevice(), Narrow(native), plan, arena(plan))
    assert set(asked) == {(0, F16, 2, 8)} and len(asked) == plan.model.layers > 1


def test_onnx_runtime_that_would_go_on_with_the_cpu_is_refused(
    engine: tuple[Path, CompressionPlan],
) -> None:
    if PROVIDER in ort.get_available_providers():
        pytest.skip("this ONNX Runtime has a CUDA provider")
    with (
        pytest.warns(UserWarning),
        pytest.raises(KvlatheError, match="its CUDA provider did not start"),
    ):
        open_graph(engine[0] / "model.onnx", ort.SessionOptions(), 0)


# -- TensorRT --------------------------------------------------------------------------
class StandIn:
    """The parts that TensorRTCompute uses of a TensorRT engine and its contexts, with
    the profiles that engines are built with; steps are computed by ONNX Runtime, where
    the session has bound its memory."""

    nptype = staticmethod(np.dtype)

    def __init__(self, native: Native, folder: Path, plan: CompressionPlan) -> None:
        self.profiles, self.runs = profiles(plan, LIMITS), [0, 0]
        self.graph = host_graph(native, folder)
        kinds = {
            "int32": np.int32,
            "float16": np.float16,
            "uint8": np.int8,
            "float": np.float32,
        }
        nodes = (*self.graph.get_inputs(), *self.graph.get_outputs())
        self.kinds = {
            node.name: kinds[node.type.removeprefix("tensor(").removesuffix(")")]
            for node in nodes
        }
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
        return len(shape) == len(low) and all(
            a <= n <= b for a, n, b in zip(low, shape, high, strict=True)
        )

    def execute_async_v3(self, stream: int) -> bool:
        self.engine.runs[self.profile] += 1
        binding, graph = self.engine.graph.io_binding(), self.engine.graph
        for node in graph.get_inputs():
            kind = (
                np.uint8
                if self.engine.kinds[node.name] is np.int8
                else self.engine.kinds[node.name]
            )
            binding.bind_input(
                node.name,
                "cpu",
                0,
                kind,
                self.shapes[node.name],
                self.addresses[node.name],
            )
        for node, rows in zip(
            graph.get_outputs(), ("logit_rows", "input_ids"), strict=True
        ):
            shape = (*self.shapes[rows], node.shape[1])
            binding.bind_output(
                node.name,
                "cpu",
                0,
                self.engine.kinds[node.name],
                shape,
                self.addresses[node.name],
            )
        graph.run_with_iobinding(binding)
        return True


def on_trt(
    native: Native, engine: tuple[Path, CompressionPlan], limits: Limits = LIMITS
) -> LLM:
    plan, stand_in = engine[1], StandIn(native, *engine)
    device, library = HostDevice(), HostLibrary(native)
    pool = allocate_pool(device, library, plan, arena(plan))
    compute = TensorRTCompute(stand_in, stand_in, plan, device.stream)
    session = DeviceSession(device, library, plan, limits, pool, compute)
    return as_llm(session, plan, limits)


def test_a_tensorrt_engine_is_bound_within_its_profiles_and_answers_as_the_cpu(
    native: Native, engine: tuple[Path, CompressionPlan]
) -> None:
    """Chunks in one context, decodes in the other; all that TensorRT would be told it
    would take."""
    params = SamplingParams(max_new_tokens=40, ignore_eos=True)
    prompts = [list(text(100)), list(text(600, 400)), list(text(64, 90))]
    ours = on_trt(native, engine)
    answers = [
        [x.token_ids for x in llm.generate(prompts, params)]
        for llm in (ours, on_cpu(native, engine))
    ]
    assert answers[0] == answers[1]
    compute = device_session(ours).compute
    assert isinstance(compute, TensorRTCompute)
    engine_run: object = compute._engine
    assert isinstance(engine_run, StandIn)
    decodes, mixed = engine_run.runs
    assert mixed >= 2 and decodes > 30


def test_steps_outside_the_tensorrt_profiles_are_refused_in_words(
    native: Native, engine: tuple[Path, CompressionPlan]
) -> None:
    wide = dataclasses.replace(LIMITS, max_num_tokens=2048)
    with pytest.raises(
        KvlatheError,
        match=r"TensorRT refuses input_ids of shape \(1500,\).* to \(1024,\)",
    ):
        forced(on_trt(native, engine, wide), [text(1500)], [(1500,)])


def test_an_engine_of_other_tensors_is_refused(
    native: Native,
    engine: tuple[Path, CompressionPlan],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(StandIn, "get_tensor_dtype", lambda self, name: np.float32)
    with pytest.raises(
        KvlatheError, match="the engine has a tensor input_ids of float32"
    ):
        on_trt(native, engine)


def test_why_a_tensorrt_engine_does_not_run_is_one_sentence() -> None:
    built = dataclasses.replace(manifest("float16"), backend="tensorrt")
    assert "tensorrt is not installed" in trt_session.obstacle(built)
    if not trt_session.obstacle(
        dataclasses.replace(built, backend="tensorrt_rtx")
    ).startswith("tensorrt_rtx"):
        without = dataclasses.replace(built, backend="tensorrt_rtx")
        assert "built without libkvlathe_trt.so" in trt_session.obstacle(without)
    with pytest.raises(KvlatheError, match="which runs on a GPU"):
        sessions.runner(built, "this engine", "cpu")


@pytest.mark.skipif(not cuda_python.obstacle(), reason="there is a GPU")
def test_an_engine_for_gpus_says_what_the_machine_lacks(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    both = dataclasses.replace(manifest("float16"), architectures=("cpu", "sm_90"))
    with pytest.raises(KvlatheError, match="cannot run on the GPU:"):
        sessions.runner(both, "this engine", "cuda")
    with pytest.raises(KvlatheError, match="it was built for the CPU"):
        sessions.runner(manifest("float32"), "this engine", "cuda")
    monkeypatch.setenv("KVLATHE_DEVICE", "tpu")
    with pytest.raises(KvlatheError, match="there is no device 'tpu'"):
        sessions.runner(both)
