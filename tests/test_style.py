"""What the linter cannot count: how dense code is, how long, and how much of it escapes
the type checker.

Every law has a ceiling: how many places break it today. Ceilings only fall.
"""

from __future__ import annotations

import ast
import io
import tokenize
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest

from tests.test_architecture import ROOT, name_of, sources, tree_of

MOST_MODULE_LINES = 600
MOST_FUNCTION_LINES = 50
MOST_LINE = 100
MOST_NODES = 10.2
"""Nodes of the syntax tree a line, over the bodies of all functions together."""
MOST_NODES_OF_A_FUNCTION = 11.1
"""The same, as the mean over functions: each of them counts once."""
MOST_LONG_LINES = 0.03
"""The share of lines above MOST_LINE characters."""

COMPREHENSIONS = (ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)
FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)
Function = ast.FunctionDef | ast.AsyncFunctionDef
IGNORES = ("noqa", "type: ignore", "pyright: ignore")
TYPE_IGNORES = ("type: ignore", "pyright:")
MOST_TYPE_IGNORES = 3
"""In tests: a class that is mixed into others, and two files of Triton kernels."""


def functions(path: Path) -> Iterator[Function]:
    """Every function of a file, methods and inner ones included."""
    for node in ast.walk(tree_of(path)):
        if isinstance(node, FUNCTIONS):
            yield node


def length(function: Function) -> int:
    """Lines of a function, its signature and docstring included, its decorators not."""
    return (function.end_lineno or function.lineno) - function.lineno + 1


def long_modules(path: Path) -> list[str]:
    """The file, where it is longer than MOST_MODULE_LINES."""
    lines = len(path.read_text(encoding="utf-8").splitlines())
    return [f"{lines} lines"] if lines > MOST_MODULE_LINES else []


def long_functions(path: Path) -> list[str]:
    """Functions longer than MOST_FUNCTION_LINES."""
    return [
        f"{function.name}: {length(function)} lines"
        for function in functions(path)
        if length(function) > MOST_FUNCTION_LINES
    ]


def nested_comprehensions(path: Path) -> list[str]:
    """Comprehensions that hold another one."""
    outer = [n for n in ast.walk(tree_of(path)) if isinstance(n, COMPREHENSIONS)]
    return [f"line {node.lineno}" for node in outer if _holds_one(node)]


def _holds_one(comprehension: ast.expr) -> bool:
    inner = (node for node in ast.walk(comprehension) if node is not comprehension)
    return any(isinstance(node, COMPREHENSIONS) for node in inner)


def anys(path: Path) -> list[str]:
    """Places that name ``Any``, its imports aside."""
    return [
        f"line {node.lineno}"
        for node in ast.walk(tree_of(path))
        if isinstance(node, ast.Name) and node.id == "Any"
    ]


def ignores(path: Path) -> list[str]:
    """Comments that silence the linter or the type checker."""
    return comments(path, IGNORES)


def comments(path: Path, words: Sequence[str]) -> list[str]:
    """Comments that hold one of ``words``."""
    source = io.StringIO(path.read_text(encoding="utf-8"))
    return [
        f"line {token.start[0]}"
        for token in tokenize.generate_tokens(source.readline)
        if token.type == tokenize.COMMENT
        if any(word in token.string for word in words)
    ]


LAWS: dict[Callable[[Path], list[str]], int] = {
    long_modules: 0,
    long_functions: 0,
    nested_comprehensions: 0,
    anys: 107,
    ignores: 53,
}
"""What breaks a law, and in how many places it is broken today."""


@pytest.mark.parametrize("law", LAWS, ids=lambda law: law.__name__)
def test_no_more_places_break_a_law_than_today(
    law: Callable[[Path], list[str]],
) -> None:
    places = [f"{name_of(path)} {place}" for path in sources() for place in law(path)]
    assert len(places) <= LAWS[law], "\n".join(places)


def test_tests_silence_the_type_checker_no_more_than_today() -> None:
    """Wrong types that a test passes on purpose are ``Any``, and need no comment."""
    files = sorted(ROOT.joinpath("tests").rglob("*.py"))
    places = [f"{name_of(x)} {at}" for x in files for at in comments(x, TYPE_IGNORES)]
    assert len(places) <= MOST_TYPE_IGNORES, "\n".join(places)


def code_lines(lines: list[str]) -> int:
    """Lines that are neither empty nor a comment."""
    stripped = (line.strip() for line in lines)
    return sum(bool(line) and not line.startswith("#") for line in stripped)


def body_of(function: Function) -> list[ast.stmt]:
    """The statements of a function after its docstring."""
    has_docstring = ast.get_docstring(function) is not None
    return function.body[1:] if has_docstring else function.body


def size(function: Function, lines: list[str]) -> tuple[int, int]:
    """(nodes, lines) of a function's body. ``lines`` are the file's."""
    body = body_of(function)
    if not body:
        return 0, 0
    end = body[-1].end_lineno or body[-1].lineno
    nodes = sum(1 for statement in body for _ in ast.walk(statement))
    return nodes, code_lines(lines[body[0].lineno - 1 : end])


def sizes(path: Path) -> list[tuple[int, int]]:
    """The size of every function of a file."""
    lines = path.read_text(encoding="utf-8").splitlines()
    return [size(function, lines) for function in functions(path)]


def test_lines_do_not_say_too_much() -> None:
    every = [pair for path in sources() for pair in sizes(path)]
    assert sum(n for n, _ in every) / sum(lines for _, lines in every) <= MOST_NODES


def test_functions_do_not_say_too_much_a_line() -> None:
    every = [pair for path in sources() for pair in sizes(path)]
    densities = [nodes / lines for nodes, lines in every if lines]
    assert sum(densities) / len(densities) <= MOST_NODES_OF_A_FUNCTION


def test_few_lines_are_long() -> None:
    texts = [path.read_text(encoding="utf-8") for path in sources()]
    lines = [line for text in texts for line in text.splitlines() if line.strip()]
    long = [line for line in lines if len(line) > MOST_LINE]
    assert len(long) <= MOST_LONG_LINES * len(lines), "\n".join(long)


def test_the_laws_can_be_broken(tmp_path: Path) -> None:
    bad = tmp_path / "bad.py"
    bad.write_text(
        "from typing import Any\n"
        "def f(x: Any):  # noqa: D1\n"
        "    return [[y for y in z] for z in x]\n"
        + "    # padding\n" * MOST_MODULE_LINES
        + "    pass\n"
    )
    assert all(law(bad) for law in LAWS if law is not long_functions)
    bad.write_text("def f():\n" + "    f()\n" * 60)
    assert long_functions(bad) == ["f: 61 lines"]
