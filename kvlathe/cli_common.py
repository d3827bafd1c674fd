"""What every command shares: --log-level, --json, and a standard output that carries results alone."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import json
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import click

from kvlathe import console
from kvlathe.errors import KvlatheError

PATH = click.Path(path_type=Path)
Result = dict[str, Any]
ENGINE = click.argument("engine", type=PATH)


def reports(show: Callable[[Result], None]) -> Callable[[Callable[..., Result]], Callable[..., None]]:
    """Decorate a command that returns its result: with --json it is printed as one object, else ``show`` prints it."""

    def decorate(command: Callable[..., Result]) -> Callable[..., None]:
        @click.option("--json", "as_json", is_flag=True, help="Print one JSON object on stdout, all else on stderr.")
        @click.option(
            "--log-level",
            type=click.Choice(console.LEVELS),
            default="info",
            show_default=True,
            help="What stderr says.",
        )
        @functools.wraps(command)
        def run(as_json: bool, log_level: str, **options: Any) -> None:  # noqa: ANN401
            console.setup(log_level)
            if not as_json:
                show(command(**options))
                return
            with only_results_on_stdout():
                result = command(**options)
            click.echo(json.dumps(result, default=str))

        return run

    return decorate


@contextlib.contextmanager
def only_results_on_stdout() -> Iterator[None]:
    """Inside, whatever is printed goes to stderr, by Python code and by C libraries alike."""
    sys.stdout.flush()
    kept = os.dup(1)
    os.dup2(2, 1)
    try:
        with contextlib.redirect_stdout(sys.stderr):
            yield
    finally:
        ctypes.CDLL(None).fflush(None)
        os.dup2(kept, 1)
        os.close(kept)


def show_pairs(result: Result) -> None:
    """A result as a table of names and values; nested ones are flattened, lists of records are left to --json."""
    rows: list[tuple[str, object]] = []
    for name, value in result.items():
        label = name.replace("_", " ")
        if isinstance(value, dict):
            rows += [(f"{label}: {inner.replace('_', ' ')}", v) for inner, v in value.items()]
        elif isinstance(value, list):
            rows.append((label, ", ".join(str(v) for v in value)))
        else:
            rows.append((label, value))
    console.print_pairs("", rows)


def read_text(path: Path) -> str:
    """A text file that the user named, its line ends as they are; ``-`` is standard input. Raises KvlatheError."""
    try:
        return (sys.stdin.buffer.read() if str(path) == "-" else path.read_bytes()).decode("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8 text"
        raise KvlatheError(f"{path} cannot be read", str(reason).lower(), "name a readable text file") from error
