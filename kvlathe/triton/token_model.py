"""The token model of a Triton repository: TensorRT-LLM's tensors over one AsyncEngine.
Runs in Triton's Python backend.

The engine's thread batches all requests; one other thread owns everything else: it
submits, sends and cancels, in the order in which ``execute``, the engine and the watch
put such work down, so a slow client holds up no step. docs/triton.md says what each
tensor means.
"""

from __future__ import annotations

import functools
import itertools
import json
import queue
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import triton_python_backend_utils as pb  # pyright: ignore[reportMissingImports]

from kvlathe.base.errors import Busy, KvlatheError
from kvlathe.runtime.async_engine import MAX_WAITING, AsyncEngine
from kvlathe.runtime.llm import LLM
from kvlathe.runtime.requests.request import Delta, Request
from kvlathe.runtime.text.sampling_params import SamplingParams
from kvlathe.triton.call import Call, Watch, folder

GAUGES = {
    "kvlathe_num_requests_running": "Sequences in the batch",
    "kvlathe_num_requests_waiting": "Sequences that wait for their turn",
    "kvlathe_kv_cache_usage_perc": "Share of the KV cache's bytes in use by running sequences (0 to 1)",
}
"""Gauges in Triton's /metrics: how busy the engine is. ``kvlathe serve`` uses the same
names."""


class Gauges:
    """Gauges with the model's name as label: a server may hold several repositories of
    ours."""

    def __init__(self, engine: AsyncEngine, model: str) -> None:
        self._engine = engine
        self._families = [
            pb.MetricFamily(name, said, pb.MetricFamily.GAUGE)
            for name, said in GAUGES.items()
        ]
        self._gauges = [
            family.Metric(labels={"model": model}) for family in self._families
        ]

    def report(self) -> None:
        engine = self._engine
        values = (
            engine.running,
            engine.waiting,
            engine.bytes_used / engine.llm.pool.arena_bytes,
        )
        for gauge, value in zip(self._gauges, values, strict=True):
            gauge.set(float(value))


@dataclass(eq=False, slots=True)
class Answer:
    """The answer to a call so far. ``stops``: token sequences of two or more that end
    it."""

    call: Call
    streaming: bool
    stops: list[list[int]]
    request: Request | None = None
    ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    text: str = ""
    sent: int = 0  # tokens
    sent_text: int = 0  # characters
    over: bool = False

    def take(self, delta: Delta) -> str | None:
        """Add what one step brought; the finish reason if that was the last of it."""
        self.text += delta.text
        for token, logprob in itertools.zip_longest(delta.token_ids, delta.logprobs):
            self.ids.append(token)
            if logprob is not None:
                self.logprobs.append(logprob.logprob)
            if any(self.ids[-len(stop) :] == stop for stop in self.stops):
                return "stop"
        return delta.finish_reason

    def send(self, reason: str | None) -> None:
        """Send the tokens that were not sent yet; with ``reason``, as the last
        response."""
        new = self.ids[self.sent :]
        outputs = {
            "output_ids": np.array([new], np.int32),
            "sequence_length": np.array([len(new)], np.int32),
            "text": np.array([self.text[self.sent_text :].encode()], object),
            "finish_reason": np.array([(reason or "").encode()], object),
        }
        if self.logprobs:
            outputs["output_log_probs"] = np.array(
                [self.logprobs[self.sent :]], np.float32
            )
            outputs["cum_log_probs"] = np.array([sum(self.logprobs)], np.float32)
        self.sent, self.sent_text = len(self.ids), len(self.text)
        self.call.send(outputs, last=reason is not None)


class TritonPythonModel:
    """Triton makes one, in a process of its own, and calls it by these names."""

    def initialize(self, args: dict[str, str]) -> None:
        config = json.loads(args["model_config"])
        self.decoupled = bool(config["model_transaction_policy"]["decoupled"])
        self.engine = load(folder(args) / "engine", settings(config))
        self.watch = Watch(Gauges(self.engine, args["model_name"]).report)
        self.work: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        threading.Thread(target=self._work, name="work", daemon=True).start()

    def execute(self, requests: list[Any]) -> None:
        for call in map(Call, requests):
            self.work.put(functools.partial(self._begin, call))

    def finalize(self) -> None:
        self.watch.stop()
        self.engine.close()

    def _work(self) -> None:
        while True:
            do = self.work.get()
            try:
                do()
            except Exception as error:  # one request's fault is not the others'
                pb.Logger.log_error(f"a response could not be sent: {error!r}")

    def _begin(self, call: Call) -> None:
        try:
            if call.one("stop", False):
                self.watch.end(call.id)
                call.send({}, last=True)
            else:
                self._submit(call)
        except Busy as busy:
            call.refuse(busy, pb.TritonError.UNAVAILABLE)
        except KvlatheError as error:
            call.refuse(error)

    def _submit(self, call: Call) -> None:
        answer = Answer(
            call,
            bool(call.one("streaming", False)),
            [words for words in stop_words(call) if len(words) > 1],
        )
        if answer.streaming and not self.decoupled:
            raise KvlatheError(
                "this model does not stream",
                "its repository was written with --no-streaming",
                "leave 'streaming' out, or write the repository without it",
            )
        answer.request = self.engine.submit(
            [prompt(call)],
            sampling_params(call),
            lambda delta: self.work.put(
                functools.partial(self._pass_on, answer, delta)
            ),
        )
        self.watch.add(
            call, lambda: self.work.put(functools.partial(self._cancel, answer))
        )

    def _pass_on(self, answer: Answer, delta: Delta) -> None:
        if answer.over:
            return
        reason = answer.take(delta)
        answer.over = reason is not None
        if delta.error is not None:
            answer.call.refuse(delta.error, pb.TritonError.INTERNAL)
        elif answer.over or answer.streaming:
            answer.send(reason)
        if answer.over:
            self.watch.remove(answer.call)
            self._cancel(answer)

    def _cancel(self, answer: Answer) -> None:
        """Harmless where the engine has ended it."""
        assert answer.request is not None
        self.engine.cancel(answer.request)


def settings(config: Mapping[str, Any]) -> dict[str, str]:
    """The parameters of config.pbtxt."""
    return {
        key: entry["string_value"]
        for key, entry in config.get("parameters", {}).items()
    }


def load(engine: Path, given: Mapping[str, str]) -> AsyncEngine:
    """The engine as config.pbtxt asks for it; what it leaves out is as in ``kvlathe
    serve``."""
    numbers = {
        key: int(given[key])
        for key in ("cache_bytes", "threads", "max_waiting")
        if key in given
    }
    share = given["share_prefixes"] == "True" if "share_prefixes" in given else None
    llm = LLM.load(
        engine, numbers.get("cache_bytes"), numbers.get("threads"), share_prefixes=share
    )
    return AsyncEngine(llm, numbers.get("max_waiting", MAX_WAITING))


def prompt(call: Call) -> list[int]:
    """``input_ids`` up to ``input_lengths``: what follows is padding."""
    ids = call.given("input_ids")
    if ids is None:
        raise KvlatheError(
            "input_ids is missing", "a request continues a prompt", "send it"
        )
    length = call.one("input_lengths", ids.size)
    if not 0 <= length <= ids.size:
        raise KvlatheError(
            f"input_lengths is {length}",
            f"input_ids has {ids.size} tokens",
            "send no more than that",
        )
    return ids.reshape(-1)[:length].tolist()


def sampling_params(call: Call) -> SamplingParams:
    """TensorRT-LLM's inputs as our parameters. ``runtime_top_p`` 0 is off there; a
    negative ``end_id`` ends nothing."""
    if call.one("beam_width", 1) != 1:
        raise KvlatheError(
            "beam_width is not 1", "beams are not searched here", "leave it out"
        )
    end = call.one("end_id")
    ends = [] if end is None or end < 0 else [end]
    return SamplingParams(
        max_new_tokens=call.one("request_output_len", SamplingParams().max_new_tokens),
        temperature=call.one("temperature", 0.0),
        top_k=call.one("runtime_top_k", 0),
        top_p=call.one("runtime_top_p", 1.0) or 1.0,
        repetition_penalty=call.one("repetition_penalty", 1.0),
        seed=call.one("random_seed"),
        stop=call.several("stop_strings"),
        stop_ids=tuple(
            ends + [words[0] for words in stop_words(call) if len(words) == 1]
        ),
        logprobs=0 if call.one("return_log_probs", False) else None,
        ignore_eos=end is not None,
    )


def stop_words(call: Call) -> list[list[int]]:
    """``stop_words_list`` [2, n]: the words' tokens one after another, and where each
    word ends (then -1)."""
    table = call.given("stop_words_list")
    if table is None:
        return []
    tokens, ends = table.reshape(2, -1).tolist()
    borders = [0, *(end for end in ends if end >= 0)]
    is_rising = all(a < b for a, b in itertools.pairwise(borders))
    if not is_rising or borders[-1] > len(tokens):
        raise KvlatheError(
            "stop_words_list is malformed",
            "its second row does not ascend within the first",
            "mend it",
        )
    return [tokens[a:b] for a, b in itertools.pairwise(borders)]
