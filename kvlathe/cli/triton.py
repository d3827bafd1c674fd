"""``kvlathe triton-repo``: an engine as a model repository of Triton Inference
Server."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from kvlathe.cli.common import (
    CACHE_SIZE,
    ENGINE,
    PATH,
    THREADS,
    Result,
    reports,
    show_pairs,
)


@click.command("triton-repo")
@ENGINE
@click.argument("out", type=PATH)
@click.option(
    "--name",
    default="kvlathe",
    show_default=True,
    help="Of the token model; the text model is NAME_text.",
)
@click.option(
    "--copy",
    is_flag=True,
    help="Copy the engine into the repository. [default: link to it]",
)
@click.option(
    "--streaming/--no-streaming",
    default=True,
    help="Decoupled models, which send tokens as they come; without, one response, which "
    "plain infer calls can take.",
)
@click.option(
    "--overwrite", is_flag=True, help="Replace a repository of the same name."
)
@CACHE_SIZE
@THREADS
@click.option(
    "--max-waiting",
    type=click.IntRange(0),
    help="Requests that may wait; further ones are refused.",
)
@click.option(
    "--share-prefixes/--no-share-prefixes",
    default=None,
    help="Keep pages for requests that begin alike.  [default: where the engine's plan allows it]",
)
@reports(show_pairs)
def triton_repo_command(
    engine: Path,
    out: Path,
    name: str,
    copy: bool,
    streaming: bool,
    overwrite: bool,
    **settings: Any,  # noqa: ANN401
) -> Result:
    """Write a model repository for Triton: a token model with TensorRT-LLM's tensors,
    and a text model."""
    from kvlathe.triton.repository import write_repository

    models = write_repository(engine, out, name, copy, streaming, overwrite, settings)
    return {
        "repository": str(out),
        "models": list(models),
        "engine": str(engine),
        "streaming": streaming,
    }


COMMANDS = (triton_repo_command,)
