"""``kvlathe dynamo``: an engine as a worker of NVIDIA Dynamo."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from kvlathe.base import console
from kvlathe.base.errors import KvlatheError
from kvlathe.cli.common import (
    CACHE_SIZE,
    DEVICE,
    DRAIN_SECONDS,
    ENGINE,
    LOG_LEVEL,
    MAX_BATCH_SIZE,
    MAX_WAITING,
    PATH,
    SERVED_MODEL_NAME,
    THREADS,
)

if TYPE_CHECKING:
    from kvlathe.dynamo.worker import Mode


@click.command("dynamo")
@ENGINE
@click.option(
    "--mode",
    type=click.Choice(["agg", "prefill", "decode"]),
    default="agg",
    show_default=True,
    help="The worker's role: whole answers, prompts up to the first token, or what follows it.",
)
@click.option(
    "--discovery",
    type=click.Choice(["file", "etcd", "kubernetes"]),
    default="file",
    show_default=True,
    help="How workers and frontends find one another.",
)
@click.option(
    "--discovery-dir",
    type=PATH,
    help="Folder of --discovery file. [default: DYN_FILE_KV, or Dynamo's own]",
)
@click.option(
    "--host",
    default="127.0.0.1",
    show_default=True,
    help="Address to listen on, unless Dynamo's own variables say another.",
)
@click.option("--namespace", default="dynamo", show_default=True, help="Dynamo's.")
@SERVED_MODEL_NAME
@MAX_WAITING
@MAX_BATCH_SIZE
@DRAIN_SECONDS
@CACHE_SIZE
@THREADS
@DEVICE
@LOG_LEVEL
def dynamo_command(
    engine: Path,
    mode: Mode,
    discovery: str,
    discovery_dir: Path | None,
    host: str,
    namespace: str,
    model: str | None,
    max_waiting: int,
    max_batch_size: int | None,
    drain_seconds: float,
    cache_bytes: int | None,
    threads: int | None,
    device: str | None,
    log_level: str,
) -> None:
    """Serve an engine as a worker of NVIDIA Dynamo. docs/dynamo.md says more.

    SIGTERM drains: the worker leaves discovery, and what it has begun is finished.
    """
    console.setup(log_level)
    try:
        from kvlathe.dynamo.run import Settings, serve
    except ImportError as error:
        raise KvlatheError(
            "the worker cannot be started",
            f"{error.name} is not installed",
            "run scripts/dynamo_env.sh (docs/dynamo.md)",
        ) from error
    settings = Settings(
        mode=mode,
        discovery=discovery,
        folder=discovery_dir,
        host=host,
        namespace=namespace,
        model=model,
        max_waiting=max_waiting,
        drain_seconds=drain_seconds,
        cache_bytes=cache_bytes,
        threads=threads,
        device=device,
        max_batch_size=max_batch_size,
    )
    serve(engine, settings)


COMMANDS = (dynamo_command,)
