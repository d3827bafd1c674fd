"""docs/migrating.md names flags of ours that there are, at the commands that have
them."""

from __future__ import annotations

import re

import click

from kvlathe.cli import main as cli
from tests.docs.pages import ROOT

PAGE = ROOT / "docs" / "migrating.md"
NAMED = re.compile(r"`([^`]+)`")
FLAG = re.compile(r"--[a-z][a-z-]+")
FEWEST = 50
"""Rows, at least."""


def rows(page: str) -> list[tuple[str, str]]:
    """(theirs, ours) of the rows of the page's tables, heads aside."""
    cells = [line.strip("| ").split(" | ") for line in page.splitlines()]
    found = [(row[0], row[1].strip(" |")) for row in cells if len(row) > 1]
    return [row for row in found if row[1] != "kvlathe"]


def flags_of(command: str) -> set[str]:
    """Every spelling of the flags of a command of ours."""
    parameters = cli.cli.commands[command].params
    options = [one for one in parameters if isinstance(one, click.Option)]
    return {flag for one in options for flag in (*one.opts, *one.secondary_opts)}


def unknown(page: str) -> list[str]:
    """What the page calls ours and no command has. A flag belongs to the command that
    its own code span names, or else the one before it."""
    wrong: list[str] = []
    for theirs, ours in rows(page):
        command = "serve"
        for span in NAMED.findall(ours):
            words = span.removeprefix("kvlathe ").split()
            command = words[0] if words[0] in cli.cli.commands else command
            flags = FLAG.findall(span)
            if ours.startswith("the same of"):
                flags += FLAG.findall(theirs)
            wrong += [flag for flag in flags if flag not in flags_of(command)]
    return wrong


def test_every_flag_of_ours_in_the_tables_exists() -> None:
    page = PAGE.read_text(encoding="utf-8")
    assert len(rows(page)) >= FEWEST and not unknown(page)


def test_a_flag_that_no_command_has_is_found() -> None:
    assert unknown("| `--x` | `serve --max-lanes` | |") == ["--max-lanes"]
    assert unknown("| `--x` | `build --port`, `--model` | |") == ["--port"]
    assert unknown("| `--tick`, `--host` | the same of `serve` | |") == ["--tick"]
    assert not unknown("| `--x` | `serve --max-num-seqs`, `--port` | |")
