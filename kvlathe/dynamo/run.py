"""Serve an engine folder as a worker of Dynamo until a signal comes."""

from __future__ import annotations

import asyncio
import importlib
import os
from dataclasses import dataclass
from pathlib import Path

from kvlathe.base.console import log
from kvlathe.base.errors import KvlatheError
from kvlathe.dynamo.card import card_of
from kvlathe.dynamo.worker import KvlatheWorker, Mode, Served, backend
from kvlathe.engines.folder import sigterm_interrupts
from kvlathe.runtime.async_engine import AsyncEngine
from kvlathe.runtime.llm import LLM

LOOPBACK = "127.0.0.1"
HOSTS = (
    "DYN_TCP_RPC_HOST",
    "DYN_TCP_RESPONSE_STREAM_HOST",
    "DYN_EVENT_PLANE_HOST",
    "DYN_SYSTEM_HOST",
)
"""Dynamo's variables of addresses to listen on."""
constants = importlib.import_module("dynamo.common.constants")


@dataclass(frozen=True, slots=True)
class Settings:
    """Settings of one worker. ``folder``: for discovery by file; None: Dynamo's own."""

    mode: Mode
    discovery: str
    folder: Path | None
    host: str
    namespace: str
    model: str | None
    max_waiting: int
    drain_seconds: float
    cache_bytes: int | None
    threads: int | None
    device: str | None
    max_batch_size: int | None


def serve(folder: Path, settings: Settings) -> None:
    """Load the engine and serve it until SIGTERM or SIGINT. Raises KvlatheError for
    what cannot be loaded."""
    with sigterm_interrupts():
        llm = _load(folder, settings)
    _environment(settings)
    name = settings.model or (llm.manifest.model if llm.manifest else folder.name)
    card = card_of(folder, llm)
    with AsyncEngine(llm, settings.max_waiting) as engine:
        served = Served(engine, name, card, settings.mode, settings.drain_seconds)
        worker = KvlatheWorker(served)
        config = _config(settings, served)
        log.info("%s is a %s worker of Dynamo", name, settings.mode)
        try:
            asyncio.run(backend.Worker(worker, config).run())
        except Exception as error:  # Dynamo's own, whose kinds are not told apart
            raise KvlatheError("the worker has stopped", str(error)) from error
    log.info("stopped")


def _load(folder: Path, settings: Settings) -> LLM:
    llm = LLM.load(
        folder,
        settings.cache_bytes,
        settings.threads,
        share_prefixes=None,
        device=settings.device,
        max_batch_size=settings.max_batch_size,
    )
    llm.session.warm_up()  # else the first users would wait
    return llm


def _environment(settings: Settings) -> None:
    """Set the variables that Dynamo and NIXL read. Those that are set stay."""
    for name in HOSTS:
        os.environ.setdefault(name, settings.host)
    if settings.host == LOOPBACK:  # UCX listens on every interface otherwise
        os.environ.setdefault("UCX_NET_DEVICES", "lo")
    if settings.folder is not None:
        os.environ["DYN_FILE_KV"] = str(settings.folder)
    os.environ.setdefault("HF_HUB_OFFLINE", "1")


def _config(settings: Settings, served: Served) -> object:
    has_template = served.engine.llm.tokenizer.chat_template is not None
    return backend.WorkerConfig(
        namespace=settings.namespace,
        component=f"kvlathe-{settings.mode}",
        model_name=str(served.card),
        served_model_name=served.name,
        endpoint_types="chat,completions" if has_template else "completions",
        discovery_backend=settings.discovery,
        request_plane="tcp",
        event_plane="zmq",
        disaggregation_mode=constants.DisaggregationMode(settings.mode),
    )
