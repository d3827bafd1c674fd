"""``kvlathe serve``: an engine behind HTTP."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from kvlathe import console
from kvlathe.cli_common import ENGINE, PATH
from kvlathe.cli_run import DEVICE, THREADS
from kvlathe.errors import KvlatheError

UNITS = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30, "T": 1 << 40}


class Size(click.ParamType):
    """Bytes: a number, or one with K, M, G or T after it (powers of 1024; iB or B may follow)."""

    name = "size"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:  # noqa: ANN401
        if isinstance(value, int):
            return value
        number = value.strip().upper().removesuffix("B").removesuffix("I")
        unit = number[-1:] if number[-1:] in UNITS and not number[-1:].isdigit() else ""
        try:
            size = int(float(number.removesuffix(unit)) * UNITS[unit])
        except ValueError:
            size = 0
        if size <= 0:
            self.fail(f"{value!r} is not a size such as 512M or 8G", param, ctx)
        return size


@click.command("serve")
@ENGINE
@click.option("--host", default="127.0.0.1", show_default=True, help="Address to listen on; 0.0.0.0 is every one.")
@click.option("--port", type=click.IntRange(0, 65535), default=8000, show_default=True, help="0: any free one.")
@click.option("--served-model-name", "model", help="What clients call the model. [default: the checkpoint's name]")
@click.option("--chat-template", type=PATH, help="A file with one, in place of the checkpoint's.")
@click.option(
    "--api-key",
    "keys",
    multiple=True,
    envvar="KVLATHE_API_KEY",
    help="Clients must send one of these; may be given again, each is a tenant. Better set KVLATHE_API_KEY (separated "
    "by blanks): other users can read a command line.",
)
@click.option("--max-body", type=Size(), default="4M", show_default=True, help="Largest request, in bytes.")
@click.option(
    "--max-waiting",
    type=click.IntRange(0),
    default=256,
    show_default=True,
    help="Longest queue; then 429, Retry-After.",
)
@click.option(
    "--max-new-tokens", type=click.IntRange(1), help="Longest answer. [default: what the engine's limits leave]"
)
@click.option(
    "--cache-size", type=Size(), help="Memory of the KV cache. [default: a full batch, at most half of the machine's]"
)
@click.option(
    "--step-tokens",
    type=click.IntRange(1),
    default=512,
    show_default=True,
    help="Prompt tokens beside running answers in one step: fewer keep answers smoother, more start prompts sooner.",
)
@click.option(
    "--share-prefixes/--no-share-prefixes",
    default=None,
    help="Reuse common beginnings.  [default: where the engine's plan allows it]",
)
@click.option("--drain-seconds", type=click.FloatRange(0), default=30.0, show_default=True, help="After SIGTERM.")
@THREADS
@DEVICE
@click.option(
    "--log-level", type=click.Choice(console.LEVELS), default="info", show_default=True, help="What stderr says."
)
def serve_command(
    engine: Path,
    host: str,
    port: int,
    model: str | None,
    chat_template: Path | None,
    keys: tuple[str, ...],
    max_body: int,
    max_waiting: int,
    max_new_tokens: int | None,
    cache_size: int | None,
    step_tokens: int,
    share_prefixes: bool | None,
    drain_seconds: float,
    threads: int | None,
    device: str | None,
    log_level: str,
) -> None:
    """Serve an engine over HTTP, as the OpenAI API does. docs/serving.md says more.

    SIGTERM and Ctrl-C drain: new requests get 503, running ones are finished, then it exits with 0.
    """
    console.setup(log_level)
    try:
        from kvlathe.server.run import Settings, serve
    except ImportError as error:
        raise KvlatheError(
            "the server's packages are missing", f"{error.name} is not installed", "pip install 'kvlathe[serve]'"
        ) from error
    settings = Settings(
        host=host,
        port=port,
        model=model,
        keys=keys,
        max_body=max_body,
        max_waiting=max_waiting,
        max_new_tokens=max_new_tokens,
        cache_bytes=cache_size,
        prompt_tokens=step_tokens,
        share_prefixes=share_prefixes,
        threads=threads,
        drain_seconds=drain_seconds,
        chat_template=chat_template,
        device=device,
    )
    serve(engine, settings)


COMMANDS = (serve_command,)
