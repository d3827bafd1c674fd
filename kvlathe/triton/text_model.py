"""The text model of a Triton repository: splits text into tokens and calls the token
model, which holds the engine.

Runs in Triton's Python backend. A thread waits for each open request; the work is the
token model's.
"""

from __future__ import annotations

import json
import threading
import uuid
from typing import Any

import numpy as np
import triton_python_backend_utils as pb  # pyright: ignore[reportMissingImports]

from kvlathe.base.errors import KvlatheError
from kvlathe.runtime.text.tokenizer import Tokenizer
from kvlathe.triton.call import Call, Watch, folder
from kvlathe.triton.token_model import settings

FORWARDED = {
    "max_tokens": ("request_output_len", np.int32),
    "temperature": ("temperature", np.float32),
    "top_k": ("runtime_top_k", np.int32),
    "top_p": ("runtime_top_p", np.float32),
    "repetition_penalty": ("repetition_penalty", np.float32),
    "seed": ("random_seed", np.uint64),
}
"""sampling_param_ name -> input of the token model."""


class TritonPythonModel:
    """Triton makes one, in a process of its own, and calls it by these names."""

    def initialize(self, args: dict[str, str]) -> None:
        self.token_model = settings(json.loads(args["model_config"]))["token_model"]
        self.tokenizer = Tokenizer(folder(args) / "tokenizer")
        self.watch = Watch()

    def execute(self, requests: list[Any]) -> None:
        for call in map(Call, requests):
            threading.Thread(target=self._serve, args=(call,), daemon=True).start()

    def finalize(self) -> None:
        self.watch.stop()

    def _serve(self, call: Call) -> None:
        request_id = uuid.uuid4().hex
        self.watch.add(call, lambda: self._stop(request_id))
        try:
            self._forward(call, request_id)
        except KvlatheError as error:
            call.refuse(error)
        except Exception as error:  # one request's fault is not the others'
            call.refuse(error, pb.TritonError.INTERNAL)
        finally:
            self.watch.remove(call)

    def _forward(self, call: Call, request_id: str) -> None:
        """Pass responses on as they come. The token model's refusals end the
        request."""
        prompt = call.one("text_input")
        before = (
            "" if call.one("sampling_param_exclude_input_from_output", True) else prompt
        )
        inputs = token_inputs(call, self.tokenizer.encode(prompt))
        for response in self._call(inputs, request_id, ["text", "finish_reason"]):
            if response.has_error():
                call.refuse(
                    Exception(response.error().message()), response.error().code()
                )
                # responses are read to their end, or this model could not be unloaded
                continue
            outputs = {
                tensor.name(): tensor.as_numpy().reshape(-1)[0]
                for tensor in response.output_tensors()
            }
            if outputs:  # the last response of a stream may be empty
                piece, reason = (
                    before.encode() + outputs["text"],
                    outputs["finish_reason"],
                )
                call.send(
                    {"text_output": strings(piece), "finish_reason": strings(reason)},
                    last=bool(reason),
                )
                before = ""

    def _stop(self, request_id: str) -> None:
        for _ in self._call(
            [pb.Tensor("stop", np.array([[True]]))], request_id, ["finish_reason"]
        ):
            pass

    def _call(self, inputs: list[Any], request_id: str, outputs: list[str]) -> Any:  # noqa: ANN401
        return pb.InferenceRequest(
            model_name=self.token_model,
            request_id=request_id,
            inputs=inputs,
            requested_output_names=outputs,
        ).exec(decoupled=True)


def strings(item: bytes) -> np.ndarray:
    return np.array([item], object)


def token_inputs(call: Call, tokens: list[int]) -> list[Any]:
    """The token model's inputs for a call of the text model."""
    values: dict[str, np.ndarray] = {
        "input_ids": np.array([tokens], np.int32),
        "input_lengths": np.array([[len(tokens)]], np.int32),
        "streaming": np.array([[call.one("streaming", False)]], np.bool_),
    }
    for name, (target, kind) in FORWARDED.items():
        if (value := call.one(f"sampling_param_{name}")) is not None:
            values[target] = np.array([[value]], kind)
    if stops := call.several("sampling_param_stop"):
        values["stop_strings"] = np.array([[stop.encode() for stop in stops]], object)
    if call.one("sampling_param_ignore_eos", False):
        values["end_id"] = np.array([[-1]], np.int32)
    return [pb.Tensor(name, value) for name, value in values.items()]
