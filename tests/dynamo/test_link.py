"""Transfers that stall, fail or bring other bytes, with a NIXL of our own: what the
decode worker does."""

from __future__ import annotations

import asyncio
import base64
import dataclasses
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from kvlathe.base.errors import KvlatheError
from kvlathe.dynamo import decoding as decodings
from kvlathe.dynamo import link as linking
from kvlathe.dynamo.asked import Asked
from kvlathe.dynamo.decoding import Decoding
from kvlathe.dynamo.following import Following
from kvlathe.dynamo.handoff import Handoff
from kvlathe.dynamo.link import Link
from kvlathe.runtime.async_engine import AsyncEngine
from kvlathe.runtime.cache.parcel import FORM, Origin, PageList, Parcel, history_of
from kvlathe.runtime.llm import LLM
from kvlathe.runtime.requests.held_pages import Piece
from kvlathe.runtime.sessions.protocols import Region
from kvlathe.runtime.text.sampling_params import SamplingParams
from tests.support.runtime_cases import llm as engine_of

SAYS = {
    "PROC": "not there after 0.05 s",
    "ERR": "NIXL says ERR",
    "DONE": "page 0 of bucket 1 does not have its digest",
}
"""Answers of transfers, and what the log says then. DONE: no byte came with it."""


PARCEL = Parcel(
    PageList(Origin("0" * 64, "0" * 64, FORM), (), ()),
    (),
    history_of([1]),
    1,
    (),
    (),
    (),
)


class Agent:
    """NIXL's agent, whose transfers answer ``state``, and move nothing."""

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
    monkeypatch.setattr(decodings, "MOST_SECONDS", 0.05)
    return made


@pytest.fixture
def pair() -> Iterator[tuple[LLM, LLM]]:
    with engine_of("torch", "sealed") as source, engine_of("torch", "sealed") as target:
        yield source, target


@pytest.mark.parametrize("agent", ["DONE"], indirect=True)
def test_nixl_is_told_which_gpu_has_each_address(agent: Agent) -> None:
    """By its number in its own process."""
    said: dict[str, list[Any]] = {}

    def note(name: str) -> Callable[..., object]:
        return lambda *arguments: said.setdefault(name, []).append(arguments)

    for name in ("register_memory", "get_xfer_descs"):
        setattr(agent, name, note(name))
    link = Link("decode", Region(4096, 1 << 20, "cuda:1"))
    assert said["register_memory"] == [([(4096, 1 << 20, 1, "")], "VRAM")]
    meta = base64.b64encode(b"there").decode()
    source = Handoff("name", "prefill", meta, 8192, 1 << 20, "cuda:3", PARCEL)
    asyncio.run(link.read(source, [Piece(8192, 4096, 256)]))
    (own, kind), (theirs, their_kind) = said["get_xfer_descs"]
    assert own.tolist() == [[4096, 256, 1]] and kind == "VRAM"
    assert theirs.tolist() == [[8192, 256, 3]] and their_kind == "VRAM"
    for wrong in ("cuda:x", "tpu:0", ""):
        other = dataclasses.replace(source, device=wrong)
        with pytest.raises(KvlatheError, match="names the device"):
            asyncio.run(link.read(other, [Piece(8192, 4096, 256)]))


@pytest.mark.parametrize("cancels", [False, True])
def test_a_bad_transfer_costs_the_transfer_alone(
    agent: Agent,
    pair: tuple[LLM, LLM],
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
    cancels: bool,
) -> None:
    """The decode worker computes the prompt itself, and no page is lost: one that may
    still be written to is given back once that has ended, and nobody waits for it.
    ``cancels``: the client leaves during the transfer."""
    if cancels:
        monkeypatch.setattr(decodings, "MOST_SECONDS", 60)
        if agent.state != "PROC":
            pytest.skip("it has ended before")
    source, target = pair
    state = agent.state
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

            async def fetched() -> None:
                fetch = decoding.fetch(asked, handoff.to_fields())
                if cancels and state == "PROC":
                    fetching = asyncio.create_task(fetch)
                    await asyncio.sleep(0.5)
                    fetching.cancel()
                    with pytest.raises(asyncio.CancelledError):
                        await fetching
                else:
                    assert await fetch is None
                if state == "PROC":
                    again = decoding.fetch(asked, handoff.to_fields())
                    assert await again is None
                    assert target.engine.scheduler._borrowers == 0
                    taken = target.pool.bytes_in_use
                    assert taken - before >= departure.parcel.page_bytes
                    agent.state = "DONE"
                    await asyncio.wait_for(asyncio.gather(*decoding._late), 10)
                assert target.pool.bytes_in_use == before

            asyncio.run(fetched())
    assert "a prompt is computed again" in caplog.text
    assert cancels or SAYS[state] in caplog.text
    if state == "PROC":
        assert "an earlier transfer from there has not ended" in caplog.text
        assert "stay reserved until a transfer from prefill ends" in caplog.text
    assert agent.released == 1
    ended = agent.state == "DONE"
    assert bool(agent.told) == bool(link.bytes_read) == ended


def test_a_nixl_for_another_cuda_is_passed_over(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The package ``nixl`` raises ImportError where the one that it wants is
    missing."""
    found = SimpleNamespace()
    *_, there = linking.MODULES

    def importing(name: str) -> object:
        if name == there:
            return found
        raise ImportError(f"{name} wants another CUDA")

    monkeypatch.setattr(linking.importlib, "import_module", importing)
    assert linking._library() is found
    monkeypatch.setattr(linking, "MODULES", linking.MODULES[:-1])
    with pytest.raises(KvlatheError, match=r"nixl\._api wants another CUDA"):
        linking._library()
