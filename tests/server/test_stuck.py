"""A step that does not end: the server says so, and ends when it is told to."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import httpx2 as httpx
import pytest

from kvlathe.runtime.requests import engine_thread
from kvlathe.runtime.sessions.protocols import Float32, StepPlan
from kvlathe.server import run
from tests.support.runtime_cases import llm
from tests.support.serving_cases import KEY, PROMPT, Served, post, serving, until

Held = tuple[Served, threading.Event]


@pytest.fixture
def held() -> Iterator[Held]:
    """A server in whose first step time stands still until the event is set."""
    goes_on, made = threading.Event(), llm("torch", "split")
    real = made.session.run

    def waits(step: StepPlan) -> Float32:
        assert goes_on.wait(30)
        return real(step)

    made.session.run = waits
    with serving(made, keys=[KEY]) as served, ThreadPoolExecutor(1) as asking:
        asking.submit(post, served, prompt=PROMPT, max_tokens=2)
        try:
            yield served, goes_on
        finally:
            goes_on.set()


def test_health_says_that_a_step_does_not_end(
    held: Held, monkeypatch: pytest.MonkeyPatch
) -> None:
    served, goes_on = held

    def health() -> tuple[int, str]:
        answer = httpx.get(f"{served.url}/health")
        return answer.status_code, answer.json()["status"]

    until(lambda: served.engine.running == 1)
    assert health() == (200, "ok")
    monkeypatch.setattr(engine_thread, "STUCK_SECONDS", 0.05)
    until(lambda: health() == (503, "stuck"))
    goes_on.set()
    until(lambda: health() == (200, "ok"))


def test_a_signal_ends_the_process_though_a_step_does_not_end(
    held: Held, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    served, goes_on = held
    codes: list[int] = []

    def ends(code: int) -> None:
        codes.append(code)
        goes_on.set()  # here the process goes on

    monkeypatch.setattr(os, "_exit", ends)
    monkeypatch.setattr(run, "CLOSE_SECONDS", 0.2)
    until(lambda: served.engine.running == 1)
    served.server.handle_exit(signal.SIGTERM, None)
    until(lambda: bool(codes))
    assert codes == [1]
    assert "a step has not ended for 0.2 s" in caplog.text
