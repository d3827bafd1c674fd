"""Transfers that stall, fail or bring other bytes, with a NIXL of our own: what the
decode worker does."""

from __future__ import annotations

import asyncio
import base64
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from kvlathe.dynamo import link as linking
from kvlathe.dynamo.asked import Asked
from kvlathe.dynamo.decoding import Decoding
from kvlathe.dynamo.following import Following
from kvlathe.dynamo.handoff import Handoff
from kvlathe.dynamo.link import Link
from kvlathe.runtime.async_engine import AsyncEngine
from kvlathe.runtime.llm import LLM
from kvlathe.runtime.text.sampling_params import SamplingParams
from tests.support.runtime_cases import llm as engine_of

SAYS = {
    "PROC": "not there after 0.05 s",
    "ERR": "NIXL says ERR",
    "DONE": "page 0 of bucket 1 does not have its digest",
}
"""What transfers answer, and what the log says then. DONE: no byte came with it."""


class Agent:
    """NIXL's agent, whose transfers answer ``state`` for ever, and move nothing."""

    def __init__(self, state: str) -> None:
        self.state = state
        self.released = 0
        self.told: list[bytes] = []

    def get_agent_metadata(self) -> bytes:
        return b"here"

    def transfer(self, _: object) -> str:
        return self.state

    def check_xfer_state(self, _: object) -> str:
        return self.state

    def release_xfer_handle(self, _: object) -> None:
        self.released += 1

    def send_notif(self, _: str, message: bytes) -> None:
        self.told.append(message)

    def __getattr__(self, name: str) -> Any:  # noqa: ANN401
        return lambda *_: (name, *_)


@pytest.fixture(params=list(SAYS))
def agent(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Agent:
    made = Agent(request.param)
    library = SimpleNamespace(
        nixl_agent=lambda *_: made, nixl_agent_config=lambda **_: None
    )
    monkeypatch.setattr(linking, "_library", lambda: library)
    monkeypatch.setattr(linking, "MOST_SECONDS", 0.05)
    return made


@pytest.fixture
def pair() -> Iterator[tuple[LLM, LLM]]:
    with engine_of("torch", "sealed") as source, engine_of("torch", "sealed") as target:
        yield source, target


def test_a_bad_transfer_costs_the_transfer_alone(
    agent: Agent, pair: tuple[LLM, LLM], caplog: pytest.LogCaptureFixture
) -> None:
    """The decode worker computes the prompt itself, and no page is lost."""
    source, target = pair
    params = SamplingParams(max_new_tokens=8)
    tokens = [3 + i % 50 for i in range(150)]
    sequence = source.sequence(tokens, params)
    link = Link("decode", target.exchange.memory)
    meta = base64.b64encode(b"there").decode()
    departure = source.exchange.prefill(sequence)
    assert departure is not None
    with departure:
        memory = source.exchange.memory
        where = (memory.address, memory.size, memory.device)
        handoff = Handoff("name", "prefill", meta, *where, departure.parcel)
        with AsyncEngine(target) as engine:
            decoding = Decoding(engine, link, Following(engine))
            before = target.pool.bytes_in_use
            asked = Asked(tokens, params, "")
            arrival = asyncio.run(decoding.fetch(asked, handoff.to_fields()))
            assert arrival is None
            assert target.pool.bytes_in_use == before
    assert (
        SAYS[agent.state] in caplog.text and "a prompt is computed again" in caplog.text
    )
    assert agent.released == 1
    ended = agent.state == "DONE"
    assert bool(agent.told) == bool(link.bytes_read) == ended
