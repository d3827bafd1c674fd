"""A session on a stand-in of a GPU that fails as CUDA does."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from kvlathe.runtime.llm import LLM
from kvlathe.runtime.sessions.gpu.step_buffer import Bindings, StepArrays
from kvlathe.runtime.sessions.torch_cuda.compute import TorchCompute
from kvlathe.runtime.sessions.torch_cuda.device import tensor_of
from tests.support.session_laws import device_session


def failing(llm: LLM, check: Callable[[torch.Tensor], None]) -> None:
    """Steps whose ``check`` of the input ids raises do so when half of the model has run:
    its pages and buffers are written."""
    session = device_session(llm)
    compute = session.compute
    assert isinstance(compute, TorchCompute)
    queue = compute.queue

    def queued(step: StepArrays, outputs: Bindings) -> None:
        queue(step, outputs)
        check(tensor_of(step.arrays["input_ids"]))

    compute.queue = queued


def lose(llm: LLM, words: str) -> Callable[..., Any]:
    """A function after which every call of the device fails, as after a CUDA error."""
    session = device_session(llm)
    device = session.device

    def gone(*_: object) -> Any:  # noqa: ANN401  (never)
        raise torch.AcceleratorError(words)

    def lost(*_: object) -> Any:  # noqa: ANN401  (never)
        for call in ("wait", "send", "copy", "fetch", "mark", "allocate"):
            setattr(device, call, gone)
        gone()

    return lost
