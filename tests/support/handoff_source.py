"""A process with an engine on a GPU of its own, that computes prompts and holds their
pages for another process: what a prefill worker is without Dynamo."""

from __future__ import annotations

import multiprocessing
import os
import time
from collections.abc import Generator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from kvlathe.dynamo.handoff import Handoff
from kvlathe.dynamo.link import Link
from kvlathe.runtime.llm import LLM
from kvlathe.runtime.requests.held_pages import Departure
from kvlathe.runtime.text.sampling_params import SamplingParams

START_SECONDS = 120


class Source:
    """The process, and what it does when it is asked."""

    def __init__(self, llm: LLM) -> None:
        self.llm, self.link = llm, Link("source", llm.exchange.memory)
        self.held: dict[str, Departure] = {}

    def prefill(self, tokens: list[int], params: SamplingParams) -> dict[str, object]:
        """The fields of a Handoff."""
        sequence = self.llm.sequence(tokens, params)
        departure = self.llm.exchange.prefill(sequence, whole=True)
        assert departure is not None
        name, region = str(len(self.held)), self.link.region
        self.held[name] = departure
        where = (region.address, region.size, region.device)
        link = self.link
        handoff = Handoff(name, link.name, link.metadata, *where, departure.parcel)
        return handoff.to_fields()

    def damage(self, name: str) -> None:
        """Change a bit of a page that is held."""
        ids, session = self.held[name].parcel.ids, self.llm.session
        bucket = max(range(len(ids)), key=lambda b: len(ids[b]))

        def change() -> None:
            page = bytearray(session.read_page(bucket, ids[bucket][-1]))
            page[len(page) // 2] ^= 1
            session.write_page(bucket, ids[bucket][-1], bytes(page))

        self.llm.thread.call(change)

    def release(self) -> tuple[list[str], int]:
        """Give back what was read, and say what is left: names, bytes in use."""
        until = time.monotonic() + 10
        names: list[str] = []
        while not names and time.monotonic() < until:
            names = self.link.released()
            time.sleep(0.01)
        for name in names:
            self.held.pop(name).close()
        return names, self.llm.pool.bytes_in_use


class SourceProcess:
    """The same, from another process: ``prefill`` and so on by name."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection

    def __call__(self, name: str, *arguments: object) -> Any:  # noqa: ANN401
        self._connection.send((name, arguments))
        assert self._connection.poll(START_SECONDS), "the process does not answer"
        return self._connection.recv()


@contextmanager
def source_on(gpu: str, engine: Path, cache_bytes: int) -> Generator[SourceProcess]:
    """A process that sees this GPU alone."""
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    arguments = (gpu, engine, cache_bytes, theirs)
    process = context.Process(target=_run, args=arguments, daemon=True)
    process.start()
    theirs.close()
    try:
        assert ours.poll(START_SECONDS) and ours.recv() == "ready"
        yield SourceProcess(ours)
    finally:
        ours.close()
        process.join(20)
        process.kill()


def _run(gpu: str, engine: Path, cache_bytes: int, asks: Connection) -> None:
    os.environ["CUDA_VISIBLE_DEVICES"] = gpu  # nobody has asked for GPUs before
    with LLM.load(engine, cache_bytes, share_prefixes=False) as llm:
        source = Source(llm)
        asks.send("ready")
        while True:
            try:
                name, arguments = asks.recv()
            except EOFError:
                return
            asks.send(getattr(source, name)(*arguments))
