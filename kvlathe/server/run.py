"""Serve an engine folder until a signal comes, then finish what was begun."""

from __future__ import annotations

import asyncio
import errno
import gc
import logging
import os
import signal
import socket
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

import uvicorn
from fastapi import FastAPI
from opentelemetry.trace import TracerProvider

from kvlathe.base import machine
from kvlathe.base.chat_template import read_template
from kvlathe.base.console import human_bytes
from kvlathe.base.devices import GPU_MEMORY_UTILIZATION
from kvlathe.base.errors import KvlatheError
from kvlathe.base.memory import LESS_MEMORY, within_memory
from kvlathe.engines.folder import sigterm_interrupts
from kvlathe.plan.memory import lengths_up_to
from kvlathe.runtime.async_engine import AsyncEngine
from kvlathe.runtime.cache.block_store import DISK_CACHE_BYTES, StoreSizes
from kvlathe.runtime.llm import LLM
from kvlathe.runtime.memory_account import host_bytes, memory_account
from kvlathe.runtime.scheduling.parts.speculation import MOST_DRAFTS
from kvlathe.server.app import create_app
from kvlathe.server.connection import (
    BACKLOG,
    Connection,
    out_of_files,
    raise_file_limit,
    taken_at_once,
)
from kvlathe.server.gate import BODY_SECONDS, KEYED, OPERATIONS
from kvlathe.server.metrics import Metrics
from kvlathe.server.tracing import exporting

log = logging.getLogger("kvlathe")
LOCAL = ("127.0.0.1", "::1", "localhost")


@dataclass(frozen=True, slots=True)
class Settings:
    """Settings of one server, in bytes, tokens and seconds. ``keys``: API keys, none if
    empty. ``cache_bytes`` None: LLM's default."""

    host: str
    port: int
    model: str | None
    keys: tuple[str, ...]
    max_body: int
    max_waiting: int
    max_new_tokens: int | None
    cache_bytes: int | None
    prompt_tokens: int | None
    share_prefixes: bool | None  # None: where the plan allows it
    threads: int | None
    drain_seconds: float
    chat_template: Path | None = None  # in place of the checkpoint's
    device: str | None = None  # cpu, cuda or auto; None: KVLATHE_DEVICE
    origins: tuple[str, ...] = ()  # whose web pages may call it
    allowed_hosts: tuple[str, ...] = ()  # more names that it may be called by
    key_for_operations: bool = False  # /metrics and /docs need a key, too
    body_seconds: float = BODY_SECONDS
    max_batch_size: int | None = None  # None: the engine's
    max_seq_len: int | None = None  # the same
    max_num_tokens: int | None = None  # the same
    gpu_memory_utilization: float = GPU_MEMORY_UTILIZATION
    tensor_parallel_size: int = 1
    cold_pages: bool = False  # pages that wait on the host are coded
    host_cache_bytes: int | None = None  # for evicted prefixes
    disk_cache: Path | None = None  # the same, a folder
    disk_cache_bytes: int = DISK_CACHE_BYTES
    speculative: str | None = None  # ngram, or the folder of a draft engine
    num_speculative_tokens: int = MOST_DRAFTS
    sleeps: bool = False  # clients may put the engine to sleep
    otlp_traces_endpoint: str | None = None  # where spans of requests go
    adapters: tuple[str, ...] = ()  # NAME=PATH of each that is loaded
    loads_adapters: bool = False  # clients may load more

    @property
    def hosts(self) -> tuple[str, ...]:
        """The names by which it may be asked; none: any. Without keys, whoever can make
        a browser of this machine ask could use it."""
        if self.keys or not (self.host in LOCAL or self.allowed_hosts):
            return ()
        return (*LOCAL, self.host, *self.allowed_hosts)

    @property
    def keyed(self) -> tuple[str, ...]:
        """Beginnings of the paths that need a key."""
        return (*KEYED, *OPERATIONS) if self.key_for_operations else KEYED

    @property
    def stores(self) -> StoreSizes | None:
        """Stores for evicted prefixes; None where nobody asked for one."""
        sizes = (self.host_cache_bytes, self.disk_cache, self.disk_cache_bytes)
        return StoreSizes(*sizes) if sizes[:2] != (None, None) else None


CLOSE_SECONDS = 60.0
"""Seconds that the last step may take once a server ends."""


class Server(uvicorn.Server):
    """Uvicorn, but a signal drains first: new requests get 503, running ones end, then
    it stops. A second one stops at once."""

    def __init__(
        self, config: uvicorn.Config, engine: AsyncEngine, drain_seconds: float
    ) -> None:
        super().__init__(config)
        self.engine, self.drain_seconds = engine, drain_seconds
        self._until: float | None = None

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        for bound in sockets or []:
            bound.listen(BACKLOG)  # asyncio has made it as long as it takes at once

    @property
    def fault(self) -> BaseException | None:
        """The error that ended the engine; None where it runs or was closed."""
        return self.engine.llm.thread.fault

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        if self._until is None:
            log.info(
                "%s: draining for at most %g s",
                signal.Signals(sig).name,
                self.drain_seconds,
            )
            self._until = time.monotonic() + self.drain_seconds
        else:
            self._until = 0

    async def on_tick(self, counter: int) -> bool:
        """Called by uvicorn ten times a second."""
        if counter == 0:
            asyncio.get_running_loop().set_exception_handler(out_of_files)
        if self.fault:  # those who wait are told so already
            self.should_exit = True
        if self._until is not None:
            self.engine.drain()
            if self.engine.idle or time.monotonic() > self._until:
                await self.close_engine()
                self.should_exit = True
        return await super().on_tick(counter)

    async def close_engine(self) -> None:
        """Close the engine once the step that runs has ended, and tell the requests that
        are left. A thread that waits for a GPU cannot be ended: where the step does not
        end within CLOSE_SECONDS, the process does, with 1."""
        closing = asyncio.ensure_future(asyncio.to_thread(self.engine.close))
        done, _ = await asyncio.wait([closing], timeout=CLOSE_SECONDS)
        if not done:
            log.error(
                "a step has not ended for %g s: the process ends without it",
                CLOSE_SECONDS,
            )
            os._exit(1)
        await closing


def listen(host: str, port: int) -> socket.socket:
    """A bound socket; port 0 is any that is free. Raises KvlatheError that says whether
    the host or the port is at fault."""
    try:
        return bind(host, port)
    except (OSError, UnicodeError) as error:
        missing = getattr(error, "errno", None) == errno.EADDRNOTAVAIL
        unknown = isinstance(error, socket.gaierror | UnicodeError)
        flag = "--host" if missing or unknown else "--port"
        raise KvlatheError(
            f"{host}:{port} cannot be listened on",
            getattr(error, "strerror", None) or str(error),
            f"choose another {flag}",
        ) from error


def bind(host: str, port: int) -> socket.socket:
    family, kind, _, _, address = socket.getaddrinfo(
        host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
    )[0]
    bound = socket.socket(family, kind)
    try:
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        bound.bind(address)
    except OSError:
        bound.close()
        raise
    return bound


def url_of(host: str, port: int) -> str:
    """The address of a server.

    >>> url_of("::1", 8000)
    'http://[::1]:8000'
    """
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def capacity(llm: LLM) -> str:
    """One line: the sequences that the cache holds at several lengths, how many run at
    once, and the device."""
    where = " on each GPU" if llm.plan.is_part else ""
    held = [
        f"{llm.pool.arena_bytes // llm.layout.bytes_for(tokens):,} of {tokens:,} tokens"
        for tokens in lengths_up_to(llm.most_tokens)
    ]
    return (
        f"{llm.pool.arena_bytes:,} bytes of KV cache{where} hold {_either(held)}; at most "
        f"{llm.limits.max_batch_size} sequences run at once; attention: {llm.attention}"
    )


def memory_said(llm: LLM) -> str:
    """One line: the account of memory."""
    account = memory_account(llm)
    parts = [
        f"{name.replace('_', ' ')} {human_bytes(size)}"
        for name, size in account.items()
    ]
    whole = human_bytes(sum(account.values()))
    return f"memory at most: {', '.join(parts)}, together {whole}, and what steps compute with"


def _either(counts: list[str]) -> str:
    """``96 sequences of 1,024 tokens, 24 of 4,096 tokens or 12 of 8,192 tokens``."""
    first, *others = counts
    first = first.replace(" of", " sequences of", 1)
    *middle, last = [first, *others]
    return f"{', '.join(middle)} or {last}" if middle else last


def http_config(app: FastAPI, close_seconds: int) -> uvicorn.Config:
    """``close_seconds``: how long connections may take to end when the server stops."""
    return uvicorn.Config(
        app,
        http=Connection,
        ws="none",
        log_config=None,
        access_log=False,
        server_header=False,
        timeout_graceful_shutdown=close_seconds,
        backlog=taken_at_once(Connection.most),
    )


def serve(folder: Path, settings: Settings) -> None:
    """Load the engine and serve it until SIGTERM or SIGINT. Raises KvlatheError for
    what cannot be loaded or bound, and where the engine fails for good."""
    endpoint = settings.otlp_traces_endpoint
    tracer_provider = None if endpoint is None else exporting(endpoint)
    with listen(settings.host, settings.port) as bound:
        with sigterm_interrupts():  # nobody waits for an answer yet
            llm = load(folder, settings)
        _serve(llm, settings, folder.name, bound, tracer_provider)
    log.info("stopped")


TURN_SECONDS = 0.0005
"""Longest turn of a Python thread while others wait. The engine's thread prepares a
step in a millisecond or two; by default each wait for its turn may take five."""


def _serve(
    llm: LLM,
    settings: Settings,
    folder: str,
    bound: socket.socket,
    tracer_provider: TracerProvider | None,
) -> None:
    name = served_name(llm, settings, folder)
    metrics = Metrics(name)
    engine = AsyncEngine(llm, settings.max_waiting, metrics)
    metrics.watch(engine)
    sys.setswitchinterval(TURN_SECONDS)
    app = create_app(
        engine,
        metrics,
        name,
        settings.keys,
        settings.max_body,
        settings.max_new_tokens,
        settings.origins,
        settings.body_seconds,
        settings.hosts,
        settings.keyed,
        tracer_provider,
        settings.sleeps,
        settings.loads_adapters,
    )
    # What is here now stays. A pass of the collector over all of it would hold every
    # answer up for a tenth of a second.
    gc.collect()
    gc.freeze()
    Connection.most = raise_file_limit()
    with engine:
        say_what_is_served(llm, settings)
        bound.listen(BACKLOG)  # who reads the next line may connect
        address = url_of(settings.host, bound.getsockname()[1])
        log.info("serving %s on %s (API: %s/docs)", name, address, address)
        server = Server(
            http_config(app, close_seconds=5), engine, settings.drain_seconds
        )
        asyncio.run(server.serve([bound]))
    if server.fault:
        raise KvlatheError(
            "the server has stopped", str(server.fault), "start it again"
        ) from server.fault


def load(folder: Path, settings: Settings) -> LLM:
    llm = LLM.load(
        folder,
        settings.cache_bytes,
        settings.threads,
        share_prefixes=settings.share_prefixes,
        device=settings.device,
        max_batch_size=settings.max_batch_size,
        gpu_memory_utilization=settings.gpu_memory_utilization,
        stores=settings.stores,
        tensor_parallel_size=settings.tensor_parallel_size,
        max_seq_len=settings.max_seq_len,
        max_num_tokens=settings.max_num_tokens,
    )
    if settings.chat_template:
        llm.tokenizer.chat_template = read_template(settings.chat_template)
    if settings.cold_pages:
        llm.code_cold_pages()
    if settings.speculative is not None:
        llm.speculate(settings.speculative, settings.num_speculative_tokens)
    taken = served_name(llm, settings, folder.name)
    for asked in settings.adapters:
        llm.load_adapter(*named_adapter(asked, taken))
    if settings.prompt_tokens is not None:
        llm.engine.scheduler.prompt_tokens = settings.prompt_tokens
    fact = "there is no memory for the CUDA graphs of decode steps"
    within_memory(llm.session.warm_up, fact, LESS_MEMORY)  # else first users wait
    return llm


def served_name(llm: LLM, settings: Settings, folder: str) -> str:
    """The name that requests give of the model itself."""
    return settings.model or (llm.manifest.model if llm.manifest else folder)


def named_adapter(asked: str, taken: str) -> tuple[str, str]:
    """Name and path of ``NAME=PATH``. Raises KvlatheError for anything else, and for
    the name that is ``taken`` by the model."""
    name, divider, path = asked.partition("=")
    if not (divider and name.strip() and path):
        raise KvlatheError(
            f"--lora {asked} cannot be read",
            "it does not say by which name requests ask for the adapter",
            "write --lora NAME=PATH",
        )
    if name == taken:
        raise KvlatheError(
            f"--lora {asked} cannot be used",
            f"the model itself has the name {name}",
            "give the adapter another one",
        )
    return name, path


def say_what_is_served(llm: LLM, settings: Settings) -> None:
    """Log the capacity, and warn of settings that may surprise whoever started the
    server."""
    log.info("%s", capacity(llm))
    log.info("%s", memory_said(llm))
    needed, total = host_bytes(llm), machine.memory_bytes()
    if needed > total:
        log.warning(
            "the engine may take %s, and this machine, or container, has %s: give it "
            "less --cache-size",
            human_bytes(needed),
            human_bytes(total),
        )
    if llm.most_tokens < llm.limits.max_seq_len:
        log.warning(
            "the cache holds sequences of at most %s tokens, and the engine takes %s: "
            "give it more --cache-size",
            f"{llm.most_tokens:,}",
            f"{llm.limits.max_seq_len:,}",
        )
    if settings.host not in LOCAL and not settings.keys:
        log.warning(
            "anybody who reaches %s may use the server: there is no --api-key",
            settings.host,
        )
