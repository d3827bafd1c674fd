"""Every benchmark is a line of its page, and a page of the documentation uses it."""

from __future__ import annotations

import ast
import re

import pytest

from benchmarks.support.commands import ROOT
from tests.docs.pages import pages

FOLDER = ROOT / "benchmarks"
PAGE = (FOLDER / "README.md").read_text(encoding="utf-8")
LINE = re.compile(r"^\| `(\w+)[^`]*` \| ([^|]+) \| ([^|]*) \| ", re.MULTILINE)
COMMANDS = sorted(path.stem for path in FOLDER.glob("*.py") if path.stem != "__init__")


def usage(name: str) -> re.Pattern[str]:
    """Words in which a page uses a benchmark: as a command, or by its file."""
    return re.compile(rf"\bbenchmarks[./]{name}\b")


def test_the_page_has_one_line_for_each_benchmark() -> None:
    names = [name for name, _, _ in LINE.findall(PAGE)]
    assert sorted(names) == COMMANDS


@pytest.mark.parametrize("name", COMMANDS)
def test_a_page_of_the_documentation_uses_the_benchmark(name: str) -> None:
    others = [page for page in pages() if page.parent != FOLDER]
    texts = [page.read_text(encoding="utf-8") for page in others]
    assert any(usage(name).search(text) for text in texts)


@pytest.mark.parametrize("name", COMMANDS)
def test_a_benchmark_is_a_command_whose_help_shows_its_use(name: str) -> None:
    source = (FOLDER / f"{name}.py").read_text(encoding="utf-8")
    tree = ast.parse(source)
    assert usage(name).search(ast.get_docstring(tree) or "")
    assert isinstance(last := tree.body[-1], ast.If)
    assert ast.unparse(last.test) == "__name__ == '__main__'"


def test_modules_without_a_command_lie_in_support() -> None:
    for path in (FOLDER / "support").glob("*.py"):
        assert "__main__" not in path.read_text(encoding="utf-8"), path.name


def test_a_name_within_another_is_no_use_of_it() -> None:
    assert usage("scale").search("python -m benchmarks.scale --gpus 8")
    assert not usage("scale").search("python -m benchmarks.scale_measured out/none")
