"""Options that several click commands have, and how their rows are written."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import click

from benchmarks.support.commands import LATHE_5M
from kvlathe.base.console import print_table

Command = TypeVar("Command", bound=Callable[..., None])


def one_model(command: Command) -> Command:
    """Give a command the option ``--model``, a checkpoint's folder."""
    folder = click.Path(exists=True, path_type=Path)
    return click.option("--model", type=folder, default=LATHE_5M)(command)


def several_models(command: Command) -> Command:
    """Give a command the option ``--model``, which may be repeated."""
    folder = click.Path(exists=True, path_type=Path)
    return click.option(
        "--model", "models", multiple=True, type=folder, default=(LATHE_5M,)
    )(command)


def json_lines(command: Command) -> Command:
    """Give a command the option ``--json-lines``, a file for ``tell``."""
    return click.option(
        "--json-lines",
        type=click.Path(path_type=Path),
        help="Append every row here as it is measured.",
    )(command)


def tell(row: Mapping[str, Any], file: Path | None = None) -> None:
    """Write a row to stderr as soon as it is measured, and append it to ``file``."""
    line = json.dumps(row)
    click.echo(line, err=True)
    if file is not None:
        with file.open("a", encoding="utf-8") as stream:
            stream.write(line + "\n")


def table_and_json(
    name: str,
    title: str,
    columns: Sequence[str],
    rows: list[dict[str, Any]],
    **about: object,
) -> None:
    """Print rows as a table of ``columns``, then all of them in one JSON line."""
    cells = [[row.get(column) for column in columns] for row in rows]
    print_table(title, columns, cells)
    print(json.dumps({"benchmark": name, **about, "rows": rows}))
