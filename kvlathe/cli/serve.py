"""``kvlathe serve``: an engine behind HTTP."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import click

from kvlathe.base import console
from kvlathe.base.errors import KvlatheError
from kvlathe.base.extras import pip_install
from kvlathe.cli.common import (
    CACHE_SIZE,
    COMPRESSION_OF_MODEL,
    DEVICE,
    DRAIN_SECONDS,
    ENGINE_OR_MODEL,
    GPU_MEMORY,
    LOG_LEVEL,
    MAX_BATCH_SIZE,
    MAX_WAITING,
    NUM_SPECULATIVE_TOKENS,
    PATH,
    SERVED_MODEL_NAME,
    SPECULATIVE,
    TENSOR_PARALLEL,
    THREADS,
    Finite,
    Size,
    check_speculative,
    engine_to_run,
)

KEY_VARIABLE = "KVLATHE_API_KEY"


def check_keys(keys: tuple[str, ...], operations: bool = False) -> None:
    """Raises KvlatheError for a blank key, which would let anybody in, and where
    ``operations`` are to have one and there is none."""
    if operations and not keys:
        raise KvlatheError(
            "--key-for-operations asks for a key",
            "the server has none",
            "give --api-key, too",
        )
    variable = os.environ.get(KEY_VARIABLE)
    blank_variable = variable is not None and not variable.strip()
    if not all(key.strip() for key in keys):
        name = "an --api-key"
    elif blank_variable and not keys:
        name = KEY_VARIABLE
    else:
        return
    raise KvlatheError(
        f"{name} is blank",
        "a blank key keeps nobody out",
        "give it a key, or leave it out to serve without keys",
    )


@click.command("serve")
@ENGINE_OR_MODEL
@COMPRESSION_OF_MODEL
@click.option(
    "--host",
    default="127.0.0.1",
    show_default=True,
    help="Address to listen on; 0.0.0.0 is every one.",
)
@click.option(
    "--port",
    type=click.IntRange(0, 65535),
    default=8000,
    show_default=True,
    help="0: any free one.",
)
@SERVED_MODEL_NAME
@click.option(
    "--chat-template", type=PATH, help="A file with one, in place of the checkpoint's."
)
@click.option(
    "--api-key",
    "keys",
    multiple=True,
    envvar=KEY_VARIABLE,
    help="Clients must send one of these; may be given again, each is a tenant. Better set "
    "KVLATHE_API_KEY (separated by blanks): other users can read a command line.",
)
@click.option(
    "--key-for-operations",
    is_flag=True,
    help="Ask for a key at /metrics and /docs, too.",
)
@click.option(
    "--allowed-host",
    "allowed_hosts",
    multiple=True,
    help="One more name by which clients may call a server without keys; may be given "
    "again. Without any, one that listens on localhost answers to its own names alone.",
)
@click.option(
    "--cors-origin",
    "origins",
    multiple=True,
    help="Web pages of this origin may call the API, such as https://example.org; * is "
    "any; may be given again.",
)
@click.option(
    "--body-seconds",
    type=Finite(0, min_open=True),
    default=60.0,
    show_default=True,
    help="How long a client may take to send a request's body; then 408.",
)
@click.option(
    "--max-body",
    type=Size(),
    default="4M",
    show_default=True,
    help="Largest request, in bytes.",
)
@MAX_WAITING
@click.option(
    "--max-new-tokens",
    type=click.IntRange(1),
    help="Longest answer. [default: what the engine's limits leave]",
)
@CACHE_SIZE
@GPU_MEMORY
@TENSOR_PARALLEL
@click.option(
    "--cold-pages",
    is_flag=True,
    help="Code the pages of sequences that wait in the host's memory: fewer bytes, slower moves.",
)
@click.option(
    "--host-cache-size",
    "host_cache_bytes",
    type=Size(),
    help="Memory of the host for shared prefixes whose pages had to go. [default: none]",
)
@click.option(
    "--disk-cache",
    type=PATH,
    help="Folder for those that had to go from there, too. It outlives the server.",
)
@click.option(
    "--disk-cache-size",
    "disk_cache_bytes",
    type=Size(),
    default="16G",
    show_default=True,
    help="Bytes of files in that folder.",
)
@MAX_BATCH_SIZE
@click.option(
    "--max-seq-len",
    "--max-model-len",
    "max_seq_len",
    type=click.IntRange(1),
    help="Tokens of the longest sequence, prompt and answer. [default: the engine's]",
)
@click.option(
    "--max-num-tokens",
    "--max-num-batched-tokens",
    "max_num_tokens",
    type=click.IntRange(1),
    help="Tokens of a step, answers and prompts. [default: the engine's]",
)
@click.option(
    "--step-tokens",
    "prompt_tokens",
    type=click.IntRange(1),
    help="Prompt tokens beside running answers in one step: fewer keep answers smoother, "
    "more start prompts sooner.  [default: 512 on a CPU, 8192 on a GPU]",
)
@click.option(
    "--share-prefixes/--no-share-prefixes",
    "--enable-prefix-caching/--no-enable-prefix-caching",
    "share_prefixes",
    default=None,
    help="Reuse common prefixes.  [default: where the engine's plan allows it]",
)
@SPECULATIVE
@NUM_SPECULATIVE_TOKENS
@click.option(
    "--enable-sleep-mode",
    "sleeps",
    is_flag=True,
    help="Clients may put the engine to sleep (POST /sleep), which gives its memory "
    "back, and wake it (POST /wake_up).",
)
@click.option(
    "--lora",
    "adapters",
    multiple=True,
    metavar="NAME=PATH",
    help="LoRA adapter (a PEFT folder) that requests have whose model is NAME. May be given "
    "several times (docs/adapters.md).",
)
@click.option(
    "--enable-lora-updates",
    "loads_adapters",
    is_flag=True,
    help="Clients may load and unload adapters of this machine (POST "
    "/v1/load_lora_adapter).",
)
@click.option(
    "--otlp-traces-endpoint",
    metavar="URL",
    help="Where spans of requests go, by OTLP over HTTP, such as "
    "http://localhost:4318/v1/traces.  [default: nowhere]",
)
@DRAIN_SECONDS
@THREADS
@DEVICE
@LOG_LEVEL
def serve_command(
    engine: Path,
    compression: str | None,
    log_level: str,
    **settings: Any,  # noqa: ANN401
) -> None:
    """Serve an engine over HTTP, as the OpenAI API does. docs/serving.md says more.

    SIGTERM and Ctrl-C drain: new requests get 503, running ones are finished, then it
    exits with 0.
    """
    console.setup(log_level)
    check_keys(settings["keys"], settings["key_for_operations"])
    check_speculative()
    try:
        from kvlathe.server.run import Settings, listen, serve
    except ImportError as error:
        raise KvlatheError(
            "the server cannot be started",
            f"{error.name} is not installed",
            f"run {pip_install('serve')}",
        ) from error
    # A build may take minutes: what cannot be served is refused before it.
    listen(settings["host"], settings["port"]).close()
    share = settings["gpu_memory_utilization"]
    takes = bool(settings["adapters"] or settings["loads_adapters"])
    engine = engine_to_run(engine, compression, settings["device"], share, takes)
    serve(engine, Settings(**settings))


COMMANDS = (serve_command,)
