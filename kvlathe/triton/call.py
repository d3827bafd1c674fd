"""Calls of Triton, for both models: read a request's tensors, answer it, and notice
that its client has gone.

``triton_python_backend_utils`` exists only inside Triton's Python backend: this and its
users are imported there alone.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import triton_python_backend_utils as pb  # pyright: ignore[reportMissingImports]

from kvlathe.base.errors import KvlatheError

WATCH_SECONDS = 0.05
"""Most time that a request goes on after its client has gone."""


class Call:
    """One request of a client: its inputs by name, and the way back. The last response
    frees what Triton knows of it, and asking for it then ends the server, so answering
    and asking exclude each other."""

    def __init__(self, request: Any) -> None:  # noqa: ANN401 (pb.InferenceRequest)
        self.id: str = request.request_id()
        self._inputs = {tensor.name(): tensor.as_numpy() for tensor in request.inputs()}
        self._sender, self._lock, self._over = (
            request.get_response_sender(),
            threading.Lock(),
            False,
        )

    def given(self, name: str) -> np.ndarray | None:
        """An input without its batch axis; None where the client left it out."""
        value = self._inputs.get(name)
        return None if value is None else value[0]

    def one(self, name: str, default: Any = None) -> Any:  # noqa: ANN401
        """The only element of an input; bytes become text. Raises KvlatheError for
        several and for broken text."""
        value = self.given(name)
        if value is None:
            return default
        if value.size != 1:
            raise KvlatheError(
                f"{name} has {value.size} elements", "it is one value", "send one"
            )
        item = value.reshape(-1)[0]
        return text(name, item) if isinstance(item, bytes) else item.item()

    def several(self, name: str) -> tuple[str, ...]:
        """The texts of a string input, in order; () where it was left out."""
        value = self.given(name)
        return (
            ()
            if value is None
            else tuple(text(name, item) for item in value.reshape(-1))
        )

    def send(self, outputs: Mapping[str, np.ndarray], last: bool) -> None:
        """One response. ``outputs``: name -> value without the batch axis."""
        tensors = [pb.Tensor(name, value[None]) for name, value in outputs.items()]
        self._answer(pb.InferenceResponse(tensors), last)

    def refuse(self, error: Exception, code: int | None = None) -> None:
        """The only or last response: an error, by default that the request is wrong."""
        fault = pb.TritonError(
            str(error), pb.TritonError.INVALID_ARG if code is None else code
        )
        self._answer(pb.InferenceResponse(error=fault), last=True)

    def gone(self) -> bool:
        """Whether the client has cancelled the request or closed its connection."""
        with self._lock:
            return not self._over and self._sender.is_cancelled()

    def _answer(self, response: Any, last: bool) -> None:  # noqa: ANN401 (pb.InferenceResponse)
        with self._lock:
            self._over = self._over or last
            self._sender.send(response, flags=FINAL if last else 0)


FINAL = pb.TRITONSERVER_RESPONSE_COMPLETE_FINAL


def text(name: str, item: bytes) -> str:
    try:
        return item.decode()
    except UnicodeDecodeError as error:
        raise KvlatheError(
            f"{name} cannot be read", "it is not UTF-8", "send UTF-8"
        ) from error


class Watch:
    """Looks every WATCH_SECONDS which open calls have lost their client, and ends
    those. Then it calls ``also``."""

    def __init__(self, also: Callable[[], None] = lambda: None) -> None:
        self._open: dict[Call, Callable[[], None]] = {}
        self._also, self._over = also, threading.Event()
        self._thread = threading.Thread(target=self._look, name="watch", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Look no more: Triton takes away what would be looked at."""
        self._over.set()
        self._thread.join()

    def add(self, call: Call, end: Callable[[], None]) -> None:
        """``end`` is called once, in the watch's thread, if the client goes before
        ``remove``."""
        self._open[call] = end

    def remove(self, call: Call) -> None:
        self._open.pop(call, None)

    def end(self, request_id: str) -> None:
        """End the calls of this id, as if their clients had gone."""
        for call in [call for call in list(self._open) if call.id == request_id]:
            self._end(call)

    def _end(self, call: Call) -> None:
        if end := self._open.pop(call, None):
            end()

    def _look(self) -> None:
        while not self._over.wait(WATCH_SECONDS):
            self._also()
            for call in list(self._open):
                if call.gone():
                    self._end(call)


def folder(arguments: Mapping[str, str]) -> Path:
    """The version folder of the model that Triton loads."""
    return Path(arguments["model_repository"]) / arguments["model_version"]
