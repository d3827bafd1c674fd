"""Parts that the server's tests share: a real server over the shipped small model, in a
thread of this process."""

from __future__ import annotations

import contextlib
import dataclasses
import faulthandler
import json
import socket
import threading
import time
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from typing import Any

import httpx2 as httpx
from opentelemetry.trace import TracerProvider

from kvlathe.runtime.async_engine import AsyncEngine
from kvlathe.runtime.llm import LLM
from kvlathe.runtime.text.sampling_params import SamplingParams
from kvlathe.server.app import MAX_BODY, create_app
from kvlathe.server.gate import BODY_SECONDS, KEYED
from kvlathe.server.metrics import Metrics
from kvlathe.server.run import Server, http_config, listen
from tests.support.runtime_cases import llm as engine_of

MODEL_NAME = "lathe-5m"
KEY = "sk-test"
PROMPT = "def main():\n"
STDERR = 2
CLOSE_SECONDS = 120
"""A loaded machine stops a server in a few."""


@dataclass(frozen=True)
class Served:
    url: str
    engine: AsyncEngine
    server: Server

    @property
    def llm(self) -> LLM:
        return self.engine.llm

    def idle(self, seconds: float = 30) -> bool:
        """Whether everything has ended and every page came back within ``seconds``."""
        until = time.monotonic() + seconds
        while time.monotonic() < until:
            if not self.engine.open and not self.llm.pool.bytes_in_use:
                return True
            time.sleep(0.02)
        return False


@contextlib.contextmanager
def serving(
    llm: LLM,
    keys: Sequence[str] = (),
    max_body: int = MAX_BODY,
    max_waiting: int = 64,
    max_new_tokens: int | None = None,
    origins: Sequence[str] = (),
    body_seconds: float = BODY_SECONDS,
    name: str = MODEL_NAME,
    hosts: Sequence[str] = (),
    keyed: Sequence[str] = KEYED,
    tracer_provider: TracerProvider | None = None,
    sleeps: bool = False,
    loads_adapters: bool = False,
) -> Generator[Served]:
    """Serve until the block ends."""
    metrics = Metrics(name)
    engine = AsyncEngine(llm, max_waiting, metrics)
    metrics.watch(engine)
    app = create_app(
        engine,
        metrics,
        name,
        keys,
        max_body,
        max_new_tokens,
        origins,
        body_seconds,
        hosts,
        keyed,
        tracer_provider,
        sleeps,
        loads_adapters,
    )
    server = Server(http_config(app, close_seconds=2), engine, 0)
    bound = listen("127.0.0.1", 0)
    thread = threading.Thread(
        target=server.run, kwargs={"sockets": [bound]}, daemon=True
    )
    with engine, bound:
        thread.start()
        while not server.started:
            assert thread.is_alive(), "the server did not start"
            time.sleep(0.01)
        try:
            yield Served(f"http://127.0.0.1:{bound.getsockname()[1]}", engine, server)
        finally:
            server.should_exit = True
            thread.join(CLOSE_SECONDS)
            if thread.is_alive():
                faulthandler.dump_traceback(STDERR)
                raise AssertionError("the server does not stop; its threads are above")


CHATML = "{% for m in messages %}<{{ m.role }}>{{ m.content }}\n{% endfor %}<assistant>"


def until(true: Callable[[], bool]) -> None:
    """Wait until something is so, for 20 seconds at most."""
    end = time.monotonic() + 20
    while not true():
        assert time.monotonic() < end
        time.sleep(0.005)


def with_template(llm: LLM, template: str = CHATML) -> LLM:
    """The shipped model has no chat template; this one is a stand-in."""
    llm.tokenizer.chat_template = template
    return llm


def replaced(llm: LLM, **limits: int) -> LLM:
    llm.engine.scheduler.limits = dataclasses.replace(llm.limits, **limits)
    return llm


def alone(prompt: str, **params: Any) -> Any:  # noqa: ANN401
    return engine_of("torch", "split").generate([prompt], SamplingParams(**params))[0]


def post(
    served: Served,
    path: str = "completions",
    key: str = KEY,
    **body: Any,  # noqa: ANN401
) -> httpx.Response:
    headers = {"Authorization": f"Bearer {key}"}
    return httpx.post(
        f"{served.url}/v1/{path}",
        json={"model": MODEL_NAME, **body},
        headers=headers,
        timeout=60,
    )


def raw_request(served: Served, **body: Any) -> socket.socket:  # noqa: ANN401
    """A connection on which a request was sent and nothing was read."""
    content = json.dumps({"model": MODEL_NAME, "ignore_eos": True, **body}).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {KEY}\r\nContent-Length: {len(content)}"
    port = int(served.url.rsplit(":", 1)[1])
    connection = socket.create_connection(("127.0.0.1", port), timeout=60)
    connection.sendall(
        head.encode() + b"\r\nContent-Type: application/json\r\n\r\n" + content
    )
    return connection
