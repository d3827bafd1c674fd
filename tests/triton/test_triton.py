"""The model repository, run by a real Triton server and called with NVIDIA's own
client."""

from __future__ import annotations

import queue
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvlathe.base.errors import KvlatheError
from kvlathe.engines.build import build
from kvlathe.engines.config import BuildConfig
from kvlathe.runtime.llm import LLM
from kvlathe.runtime.text.sampling_params import SamplingParams
from kvlathe.triton.repository import (
    TEXT_INPUTS,
    TOKEN_INPUTS,
    TOKEN_OUTPUTS,
    config_text,
    write_repository,
)

pytest.importorskip("triton_server")
from tests.support.triton_server import ROOT, SERVE, Server, until

grpc = pytest.importorskip(
    "tritonclient.grpc", reason="tritonclient is not installed: pip install '.[triton]'"
)
http = pytest.importorskip(
    "tritonclient.http", reason="tritonclient is not installed: pip install '.[triton]'"
)

GENERATED = "tritonclient.grpc.model_config_pb2"
CLIENTS = 32
PROMPTS = [
    "# How to install",
    "def main():",
    "import os",
    "The configuration file",
    "class Server:",
    "## Usage\n",
    "To build the project, run",
    "return self.",
]
NUMPY = {
    "INT32": np.int32,
    "FP32": np.float32,
    "BOOL": np.bool_,
    "UINT64": np.uint64,
    "BYTES": np.object_,
}
KINDS = {
    tensor.name: tensor.kind.replace("STRING", "BYTES")
    for tensor in (*TOKEN_INPUTS, *TEXT_INPUTS)
}


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The shipped model, room for CLIENTS sequences in a step."""
    target = tmp_path_factory.mktemp("engines") / "none"
    request = BuildConfig(
        ROOT / "models/lathe-5m", target, max_batch_size=CLIENTS, max_seq_len=1024
    )
    return build(request)


@pytest.fixture(scope="module")
def alone(engine: Path) -> LLM:
    """The same engine in this process: what each request gives by itself."""
    return LLM.load(engine, threads=1)


@pytest.fixture(scope="module")
def server(engine: Path) -> Iterator[Server]:
    yield from serving(engine, streaming=True)


@pytest.fixture(scope="module")
def plain_server(engine: Path) -> Iterator[Server]:
    yield from serving(engine, streaming=False)


def serving(engine: Path, streaming: bool) -> Iterator[Server]:
    if not SERVE.exists():
        pytest.skip("no Triton server is set up: run scripts/triton_env.sh")
    repository = engine.parent / f"repository-{streaming}"
    write_repository(
        engine,
        repository,
        streaming=streaming,
        settings={"threads": 1, "max_waiting": CLIENTS},
    )
    started = Server(repository)
    started.wait()
    yield started
    started.stop()


def tensors(values: dict[str, Any]) -> list[Any]:
    """``values`` as the client's inputs, each with a batch axis of 1."""
    made = []
    for name, value in values.items():
        array = np.array(value, NUMPY[KINDS[name]])
        array = array.reshape(1, *(array.shape or (1,)))
        made.append(grpc.InferInput(name, array.shape, KINDS[name]))
        made[-1].set_data_from_numpy(array)
    return made


def prompt_inputs(tokens: list[int], new: int, **more: Any) -> dict[str, Any]:  # noqa: ANN401
    return {
        "input_ids": tokens,
        "input_lengths": len(tokens),
        "request_output_len": new,
        "streaming": True,
        **more,
    }


class Stream:
    """A gRPC stream with one request on it. It closes at the request's end, or when
    told to."""

    def __init__(
        self, server: Server, model: str, inputs: dict[str, Any], request_id: str = ""
    ) -> None:
        self.answers: queue.Queue[tuple[Any, Any]] = queue.Queue()
        self.client = grpc.InferenceServerClient(f"127.0.0.1:{server.grpc_port}")
        self.client.start_stream(
            lambda result, error: self.answers.put((result, error))
        )
        self.client.async_stream_infer(
            model,
            tensors(inputs),
            request_id=request_id,
            enable_empty_final_response=True,
        )

    def __iter__(self) -> Iterator[Any]:
        """Results until the last. Raises the server's error."""
        last = False
        while not last:
            result, error = self.answers.get(timeout=60)
            if error is not None:
                self.close()
                raise error
            last = result.get_response().parameters["triton_final_response"].bool_param
            if result.get_response().outputs:
                yield result
        self.close()

    def ids(self) -> list[int]:
        """All tokens of the answer; each response says how many it holds."""
        found: list[int] = []
        for result in self:
            new = result.as_numpy("output_ids")[0, 0].tolist()
            assert result.as_numpy("sequence_length")[0].tolist() == [len(new)]
            found += new
        return found

    def close(self, cancel: bool = False) -> None:
        self.client.stop_stream(cancel_requests=cancel)
        self.client.close()


@cache
def greedy(llm: LLM, prompt: tuple[int, ...], new: int) -> list[int]:
    return llm.generate([prompt], SamplingParams(max_new_tokens=new, ignore_eos=True))[
        0
    ].token_ids


def same(llm: LLM, prompt: list[int], got: list[int], new: int) -> bool:
    """Whether ``got`` is the greedy answer: exactly, or up to a step where the two best
    logits differ by under 1e-3."""
    wanted = greedy(llm, tuple(prompt), new)
    differ = [i for i, (a, b) in enumerate(zip(got, wanted, strict=True)) if a != b]
    if not differ:
        return True
    text = prompt + wanted[: differ[0]]
    best = np.sort(llm.logits(text, [len(text) - 1])[0])[-2:]
    return float(best[1] - best[0]) < 1e-3


# -- the folder ------------------------------------------------------------------------
def test_the_configurations_are_what_triton_reads(engine: Path, tmp_path: Path) -> None:
    text_format = pytest.importorskip("google.protobuf.text_format")
    ModelConfig = pytest.importorskip(GENERATED).ModelConfig

    models = write_repository(
        engine, tmp_path / "repository", name="lathe", settings={"cache_bytes": 1 << 24}
    )
    assert list(models) == ["lathe", "lathe_text"]
    for name, folder in models.items():
        config = text_format.Parse((folder / "config.pbtxt").read_text(), ModelConfig())
        assert (config.name, config.backend, config.max_batch_size) == (
            name,
            "python",
            1,
        )
        assert (
            config.model_transaction_policy.decoupled
            and (folder / "1/model.py").is_file()
        )
    tokens = text_format.Parse(
        (models["lathe"] / "config.pbtxt").read_text(), ModelConfig()
    )
    assert {entry.name for entry in tokens.input} == {
        tensor.name for tensor in TOKEN_INPUTS
    }
    assert {entry.name for entry in tokens.output} == {
        tensor.name for tensor in TOKEN_OUTPUTS
    }
    assert (
        tokens.parameters["cache_bytes"].string_value == str(1 << 24)
        and "threads" not in tokens.parameters
    )
    text = text_format.Parse(
        (models["lathe_text"] / "config.pbtxt").read_text(), ModelConfig()
    )
    assert [entry.name for entry in text.input if not entry.optional] == ["text_input"]


def test_any_parameter_survives_as_protobuf_text() -> None:
    text_format = pytest.importorskip("google.protobuf.text_format")
    ModelConfig = pytest.importorskip(GENERATED).ModelConfig

    value = 'a "quoted" back\\slash\nline, ümlaut }'
    config = text_format.Parse(
        config_text("m", [], [], False, {"key": value}), ModelConfig()
    )
    assert config.parameters["key"].string_value == value


def test_the_engine_is_linked_or_copied(engine: Path, tmp_path: Path) -> None:
    linked = write_repository(engine, tmp_path / "linked")["kvlathe"] / "1/engine"
    copied = (
        write_repository(engine, tmp_path / "copied", copy=True)["kvlathe"] / "1/engine"
    )
    assert linked.is_symlink() and linked.resolve() == engine
    assert not copied.is_symlink() and {p.name for p in copied.iterdir()} == {
        p.name for p in engine.iterdir()
    }


def test_a_repository_appears_whole_or_not_at_all(engine: Path, tmp_path: Path) -> None:
    with pytest.raises(KvlatheError, match="cannot name a model"):
        write_repository(engine, tmp_path / "out", name="a/b")
    with pytest.raises(KvlatheError, match="is not an engine folder"):
        write_repository(tmp_path, tmp_path / "out")
    assert not list(tmp_path.iterdir())
    write_repository(engine, tmp_path / "out")
    with pytest.raises(KvlatheError, match="exists"):
        write_repository(engine, tmp_path / "out")
    write_repository(engine, tmp_path / "out", overwrite=True)
    (tmp_path / "mine").mkdir()
    with pytest.raises(KvlatheError, match=r"no kvlathe/config\.pbtxt"):
        write_repository(engine, tmp_path / "mine", overwrite=True)


# -- tokens ----------------------------------------------------------------------------
def test_tokens_stream_as_the_engine_gives_them(server: Server, alone: LLM) -> None:
    prompt = alone.encode(PROMPTS[0])
    params = SamplingParams(max_new_tokens=24, ignore_eos=True, logprobs=0)
    wanted = alone.generate([prompt], params)[0]
    inputs = prompt_inputs([*prompt, 7, 7], 24, end_id=-1, return_log_probs=True)
    results = list(
        Stream(server, "kvlathe", inputs | {"input_lengths": len(prompt)})
    )  # what follows is padding
    assert len(results) == 24
    assert [int(r.as_numpy("output_ids")[0, 0, 0]) for r in results] == wanted.token_ids
    logprobs = [float(r.as_numpy("output_log_probs")[0, 0, 0]) for r in results]
    assert wanted.logprobs is not None
    np.testing.assert_allclose(
        logprobs, [token.logprob for token in wanted.logprobs], atol=1e-3
    )
    np.testing.assert_allclose(
        results[-1].as_numpy("cum_log_probs")[0, 0], sum(logprobs), rtol=1e-4
    )
    assert [r.as_numpy("finish_reason")[0, 0] for r in results] == [b""] * 23 + [
        b"length"
    ]


def test_a_seed_decides_what_triton_samples(server: Server, alone: LLM) -> None:
    prompt = alone.encode(PROMPTS[1])
    sampled = {
        "temperature": 1.0,
        "runtime_top_k": 50,
        "runtime_top_p": 0.95,
        "end_id": -1,
    }
    runs = [
        Stream(
            server, "kvlathe", prompt_inputs(prompt, 16, random_seed=s, **sampled)
        ).ids()
        for s in (1, 1, 2)
    ]
    assert runs[0] == runs[1] != runs[2]
    params = SamplingParams(
        max_new_tokens=16,
        temperature=1.0,
        top_k=50,
        top_p=0.95,
        seed=1,
        ignore_eos=True,
    )
    assert runs[0] == alone.generate([prompt], params)[0].token_ids


def test_words_and_end_ids_stop(server: Server, alone: LLM) -> None:
    prompt = alone.encode(PROMPTS[2])
    whole = alone.generate(
        [prompt], SamplingParams(max_new_tokens=32, ignore_eos=True)
    )[0].token_ids
    pair = whole[9:11]
    first = next(i for i in range(1, 32) if whole[i - 1 : i + 1] == pair)
    table = [[5, 6, 7, *pair], [3, 5, -1, -1, -1]]
    assert (
        Stream(
            server,
            "kvlathe",
            prompt_inputs(prompt, 32, end_id=-1, stop_words_list=table),
        ).ids()
        == whole[: first + 1]
    )
    end = whole[12]
    ended = Stream(server, "kvlathe", prompt_inputs(prompt, 32, end_id=end)).ids()
    assert ended == whole[: whole.index(end) + 1]


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"input_ids": None}, "input_ids is missing"),
        ({"input_lengths": 0}, "prompt is empty"),
        ({"input_lengths": 9}, "input_lengths is 9"),
        ({"input_ids": [99999]}, "out of range"),
        ({"request_output_len": 5000}, "max_seq_len"),
        ({"temperature": -1.0}, "temperature is -1"),
        ({"beam_width": 4}, "beam_width"),
        ({"stop_words_list": [[1, 2], [2, 1]]}, "stop_words_list is malformed"),
    ],
)
def test_wrong_requests_are_refused_and_harm_nobody(
    server: Server, changed: dict[str, Any], said: str
) -> None:
    inputs = {
        k: v for k, v in (prompt_inputs([5], 4) | changed).items() if v is not None
    }
    with pytest.raises(Exception, match=said):
        list(Stream(server, "kvlathe", inputs))
    assert (
        until(server.idle)
        and len(Stream(server, "kvlathe", prompt_inputs([5, 6], 4, end_id=-1)).ids())
        == 4
    )


# -- text ------------------------------------------------------------------------------
def test_text_is_the_engines_text(server: Server, alone: LLM) -> None:
    wanted = alone.generate(PROMPTS[3], SamplingParams(max_new_tokens=24))[0]
    asked = {"text_input": PROMPTS[3], "sampling_param_max_tokens": 24}
    status, answer = server.generate("kvlathe_text", **asked)
    assert (status, answer["text_output"], answer["finish_reason"]) == (
        200,
        wanted.text,
        wanted.finish_reason,
    )
    pieces = server.generate_stream("kvlathe_text", streaming=True, **asked)
    assert (
        len(pieces) > 8
        and "".join(piece["text_output"] for piece in pieces) == wanted.text
    )
    _, echoed = server.generate(
        "kvlathe_text", sampling_param_exclude_input_from_output=False, **asked
    )
    assert echoed["text_output"] == PROMPTS[3] + wanted.text


def test_stop_strings_end_text_across_tokens(server: Server, alone: LLM) -> None:
    whole = alone.generate(
        PROMPTS[4], SamplingParams(max_new_tokens=32, ignore_eos=True)
    )[0].text
    stop = whole[10:14]
    asked = {
        "text_input": PROMPTS[4],
        "sampling_param_max_tokens": 32,
        "sampling_param_ignore_eos": True,
    }
    _, answer = server.generate(
        "kvlathe_text", **asked, sampling_param_stop=[stop, "never said"]
    )
    assert (
        answer["text_output"] == whole[: whole.index(stop)]
        and answer["finish_reason"] == "stop"
    )


def test_text_errors_reach_the_client(server: Server) -> None:
    status, answer = server.generate(
        "kvlathe_text", text_input="x" * 20000, sampling_param_max_tokens=4
    )
    assert status >= 400 and "too long" in answer["error"]
    status, answer = server.generate(
        "kvlathe_text", text_input="", sampling_param_max_tokens=4
    )
    assert status >= 400 and "empty" in answer["error"]


# -- many, and gone --------------------------------------------------------------------
def test_many_clients_share_steps_and_get_what_they_get_alone(
    server: Server, alone: LLM
) -> None:
    prompts = [
        alone.encode(PROMPTS[i % len(PROMPTS)])[: 1 + i // 16] for i in range(CLIENTS)
    ]
    got: dict[int, list[int]] = {}

    def client(i: int) -> None:
        got[i] = Stream(
            server, "kvlathe", prompt_inputs(prompts[i], 96, end_id=-1)
        ).ids()

    threads = [threading.Thread(target=client, args=(i,)) for i in range(CLIENTS)]
    for thread in threads:
        thread.start()
    together = 0.0
    while any(thread.is_alive() for thread in threads):
        together = max(together, server.gauge("kvlathe_num_requests_running"))
        time.sleep(0.02)
    assert len(got) == CLIENTS and together > CLIENTS / 4
    assert all(same(alone, prompts[i], got[i], 96) for i in range(CLIENTS))
    assert until(server.idle)


@pytest.mark.parametrize("model", ["kvlathe", "kvlathe_text"])
def test_a_triton_client_that_leaves_frees_its_place(
    server: Server, model: str
) -> None:
    asked = {
        "kvlathe": prompt_inputs([5, 6, 7], 1000, end_id=-1),
        "kvlathe_text": {
            "text_input": PROMPTS[5],
            "streaming": True,
            "sampling_param_max_tokens": 1000,
            "sampling_param_ignore_eos": True,
        },
    }
    streams = [Stream(server, model, asked[model]) for _ in range(4)]
    for stream in streams:
        next(iter(stream))
    assert until(lambda: server.gauge("kvlathe_num_requests_running") > 0)
    for stream in streams:
        stream.close(cancel=True)
        assert stream.answers.qsize() < 900  # it was far from its end
    assert until(server.idle)
    assert until(
        lambda: not server.gauge("kvlathe_kv_cache_usage_perc")
    )  # pages that are only kept do not count


def test_a_triton_request_is_stopped_by_its_id(server: Server) -> None:
    stream = Stream(
        server,
        "kvlathe",
        prompt_inputs([5, 6, 7], 1000, end_id=-1),
        request_id="long one",
    )
    results = iter(stream)
    next(results)
    stopper = Stream(server, "kvlathe", {"stop": True}, request_id="long one")
    assert list(stopper) == []
    rest = list(results)
    assert len(rest) < 900 and rest[-1].as_numpy("finish_reason")[0, 0] == b"cancelled"
    assert until(server.idle)


def test_plain_inference_calls_take_a_repository_without_streaming(
    plain_server: Server, alone: LLM
) -> None:
    client = http.InferenceServerClient(
        f"127.0.0.1:{plain_server.http_port}", concurrency=4
    )
    assert (
        client.is_model_ready("kvlathe")
        and client.get_model_config("kvlathe_text")["max_batch_size"] == 1
    )
    values = {"text_input": PROMPTS[6], "sampling_param_max_tokens": 16}
    inputs = []
    for tensor in tensors(values):
        inputs.append(
            http.InferInput(tensor.name(), list(tensor.shape()), tensor.datatype())
        )
        inputs[-1].set_data_from_numpy(
            np.array([[values[tensor.name()]]], NUMPY[tensor.datatype()])
        )
    calls = [client.async_infer("kvlathe_text", inputs) for _ in range(4)]
    wanted = alone.generate(PROMPTS[6], SamplingParams(max_new_tokens=16))[0].text
    assert [
        call.get_result().as_numpy("text_output")[0, 0].decode() for call in calls
    ] == [wanted] * 4
    unary = grpc.InferenceServerClient(f"127.0.0.1:{plain_server.grpc_port}")
    prompt = alone.encode(PROMPTS[7])
    result = unary.infer(
        "kvlathe", tensors(prompt_inputs(prompt, 16, end_id=-1) | {"streaming": False})
    )
    assert same(alone, prompt, result.as_numpy("output_ids")[0, 0].tolist(), 16)
    with pytest.raises(Exception, match="does not stream"):
        unary.infer("kvlathe", tensors(prompt_inputs(prompt, 16)))


def test_the_command_writes_a_repository(engine: Path, tmp_path: Path) -> None:
    command = [
        sys.executable,
        "-m",
        "kvlathe",
        "triton-repo",
        str(engine),
        str(tmp_path / "out"),
        "--json",
    ]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert (
        tmp_path / "out/kvlathe/config.pbtxt"
    ).is_file() and '"kvlathe_text"' in done.stdout
