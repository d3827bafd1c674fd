"""Commands that pages show can be typed: every command of ours exists, and has the
flags that it is given."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import click
import pytest

from kvlathe.cli import main as cli
from tests.docs.pages import ROOT, name_of, pages

CODE = re.compile(r"^```[^\n]*\n(.*?)^```|^((?:    [^\n]*\n|\n)+)", re.M | re.S)
CALL = re.compile(r"(?<![\w./-])(?<!from )kvlathe ([a-z][\w-]*)([^\n#|;&<>]*)")
FLAG = re.compile(r"(?<!\S)--[a-z][\w-]*")
SYNOPSES = {"docs/cli.md", "CHANGELOG.md"}
"""Pages that show flags in another form, or those of the past."""
SHOWN = [page for page in pages() if name_of(page) not in SYNOPSES]


def calls(page: str) -> Iterator[tuple[str, str]]:
    """(command, arguments) of every call in the code blocks of a page. Lines that end
    with a backslash go on."""
    for fenced, indented in CODE.findall(page):
        for name, said in CALL.findall((fenced or indented).replace("\\\n", " ")):
            # An odd quote ends a string that the whole call stands in.
            yield name, said.partition('"')[0] if said.count('"') % 2 else said


def known(words: list[str]) -> click.Command | None:
    """The command that is called, of a group the one that is named."""
    command: click.Command | None = cli.cli
    for word in words:
        if not isinstance(command, click.Group):
            break
        command = command.commands.get(word)
    return command


def wrong(page: str) -> list[str]:
    """What cannot be typed."""
    found: list[str] = []
    for name, arguments in calls(page):
        command = known([name, *arguments.split()[:1]])
        if command is None:
            found.append(name)
            continue
        options = [one for one in command.params if isinstance(one, click.Option)]
        flags = {flag for one in options for flag in (*one.opts, *one.secondary_opts)}
        given = {flag.replace("_", "-") for flag in FLAG.findall(arguments)}
        found += [f"{name} {flag}" for flag in sorted(given - flags - {"--help"})]
    return found


@pytest.mark.parametrize("page", SHOWN, ids=name_of)
def test_commands_of_a_page_can_be_typed(page: Path) -> None:
    assert not wrong(page.read_text(encoding="utf-8"))


def test_commands_are_found_in_code_of_either_kind() -> None:
    page = "```\nkvlathe lathe x\n```\n\n    kvlathe serve out/a \\\n        --prot 1 --host h\n\n"
    assert wrong(page) == ["lathe", "serve --prot"]
    assert not wrong(
        "    A=1 kvlathe engines prune --all && kvlathe build --no_cache\n"
    )
    recipes = (ROOT / "docs" / "recipes.md").read_text(encoding="utf-8")
    assert len(list(calls(recipes))) > 10
