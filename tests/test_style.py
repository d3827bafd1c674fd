"""Laws of style that a linter cannot count: lengths, names for values that are read
once, first words of docstrings, and places that escape the type checker.

Every law has a ceiling: the number of places that break it today. Ceilings only fall.
``python -m tests.test_style`` prints the shares.
"""

from __future__ import annotations

import ast
import io
import tokenize
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest

from tests.test_architecture import ROOT, name_of, sources, tree_of

MOST_MODULE_LINES = 600
MOST_OF_NINE_IN_TEN = 350
"""Lines of nine modules in ten."""
MOST_FUNCTION_LINES = 50
MOST_LINE = 100
MOST_LONG_LINES = 0.005
"""The share of lines above MOST_LINE characters."""
MOST_ONE_USE = 0.2
"""The share of assignments whose name is read once, right after (``one_use``)."""
MOST_ODD_DOCSTRINGS = 0.011
"""The share of docstrings that begin with one of ODD_STARTS."""
ODD_STARTS = ("Of ", "What ", "Which ", "Who ", "Where ", "How ")
"""Starts without a subject or a verb: a reader must guess what the rest belongs to."""

COMPREHENSIONS = (ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)
FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)
Function = ast.FunctionDef | ast.AsyncFunctionDef
IGNORES = ("noqa", "type: ignore", "pyright: ignore")
TYPE_IGNORES = ("type: ignore", "pyright:")
FEWEST_TEST_WORDS = 3
HEADLESS = ("it", "its", "they", "their", "them", "this", "that", "what")
"""Words that a test's name does not begin with: only its file explains them."""
MOST_TYPE_IGNORES = 3
"""In tests and benchmarks: a class that is mixed into others, and two files of Triton kernels."""


def files_beside_the_product() -> list[Path]:
    """Every Python file of tests and benchmarks."""
    folders = (ROOT / "tests", ROOT / "benchmarks")
    return sorted(path for folder in folders for path in folder.rglob("*.py"))


def functions(path: Path) -> Iterator[Function]:
    """Every function of a file, methods and inner ones included."""
    for node in ast.walk(tree_of(path)):
        if isinstance(node, FUNCTIONS):
            yield node


def length(function: Function) -> int:
    """Lines of a function with its signature. Decorators and the docstring, which may
    hold an example, do not count."""
    lines = (function.end_lineno or function.lineno) - function.lineno + 1
    if ast.get_docstring(function) is None:
        return lines
    prose = function.body[0]
    return lines - ((prose.end_lineno or prose.lineno) - prose.lineno + 1)


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
    anys: 102,
    ignores: 46,
}
"""Law -> the number of places that break it today."""


@pytest.mark.parametrize("law", LAWS, ids=lambda law: law.__name__)
def test_no_more_places_break_a_law_than_today(
    law: Callable[[Path], list[str]],
) -> None:
    places = [f"{name_of(path)} {place}" for path in sources() for place in law(path)]
    assert len(places) <= LAWS[law], "\n".join(places)


def test_tests_silence_the_type_checker_no_more_than_today() -> None:
    """Wrong types that a test passes on purpose are ``Any``, and need no comment."""
    files = files_beside_the_product()
    places = [f"{name_of(x)} {at}" for x in files for at in comments(x, TYPE_IGNORES)]
    assert len(places) <= MOST_TYPE_IGNORES, "\n".join(places)


def test_nine_modules_in_ten_are_short() -> None:
    lengths = sorted(
        len(path.read_text(encoding="utf-8").splitlines()) for path in sources()
    )
    assert lengths[len(lengths) * 9 // 10] <= MOST_OF_NINE_IN_TEN


class Names(ast.NodeVisitor):
    """Stores of each name of a function, and lines of its reads. Inner functions are
    included."""

    def __init__(self, function: Function) -> None:
        self.stored: Counter[str] = Counter()
        self.read: dict[str, list[int]] = {}
        self.visit(function)

    def visit_Name(self, node: ast.Name) -> None:
        if isinstance(node.ctx, ast.Load):
            self.read.setdefault(node.id, []).append(node.lineno)
        else:
            self.stored[node.id] += 1


def own_statements(body: Sequence[ast.AST]) -> Iterator[ast.AST]:
    """The nodes of a function's body, those of inner functions and classes left out."""
    for node in body:
        yield node
        if not isinstance(node, (*FUNCTIONS, ast.ClassDef)):
            yield from own_statements(list(ast.iter_child_nodes(node)))


def assigned_names(function: Function) -> Iterator[tuple[str | None, int]]:
    """(name, last line) of every assignment of a function; None where it is not to one
    plain name."""
    for node in own_statements(function.body):
        if not isinstance(node, ast.Assign | ast.AnnAssign) or node.value is None:
            continue
        targets = node.targets if isinstance(node, ast.Assign) else [node.target]
        target = targets[0] if len(targets) == 1 else None
        name = target.id if isinstance(target, ast.Name) else None
        yield name, node.end_lineno or node.lineno


def one_use(path: Path) -> tuple[int, list[str]]:
    """(count, places) of a file: the number of assignments in functions, and those of
    them to a name that is stored once in the function and read once, at most two lines
    after the assignment."""
    count = 0
    found: list[str] = []
    for function in functions(path):
        names = Names(function)
        for name, end in assigned_names(function):
            count += 1
            read = names.read.get(name, []) if name else []
            if (
                name
                and names.stored[name] == 1 == len(read)
                and 0 <= read[0] - end <= 2
            ):
                found.append(f"{path}:{end} {name}")
    return count, found


def test_few_names_are_read_once_right_after_they_are_given() -> None:
    """A name for what is read once, in the next line, is one more thing to remember. It
    pays where it explains more than the expression does."""
    every = [one_use(path) for path in sources()]
    found = [place for _, places in every for place in places]
    assert len(found) <= MOST_ONE_USE * sum(count for count, _ in every), "\n".join(
        found
    )


def names_of_tests() -> Iterator[tuple[str, list[str]]]:
    """Each test of the repository, and the words of its name."""
    for path in sorted((ROOT / "tests").rglob("test_*.py")):
        for function in functions(path):
            if function.name.startswith("test_"):
                words = function.name.removeprefix("test_").split("_")
                yield f"{name_of(path)} {function.name}", words


def test_names_of_tests_say_the_law_without_their_file() -> None:
    every = list(names_of_tests())
    assert not [name for name, words in every if len(words) < FEWEST_TEST_WORDS]
    assert not [name for name, words in every if words[0] in HEADLESS]


def docstrings(path: Path) -> Iterator[str]:
    """The docstrings of a file: of modules, classes, functions, and the strings below
    constants and fields."""
    for node in ast.walk(tree_of(path)):
        if not isinstance(node, ast.Expr) or not isinstance(node.value, ast.Constant):
            continue
        if isinstance(node.value.value, str):
            yield node.value.value.strip()


def test_docstrings_begin_with_a_subject_or_a_verb() -> None:
    for files in (sources(), files_beside_the_product()):
        texts = [text for path in files for text in docstrings(path)]
        odd = [text.splitlines()[0] for text in texts if text.startswith(ODD_STARTS)]
        assert len(odd) <= MOST_ODD_DOCSTRINGS * len(texts), "\n".join(odd)


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
        + "    # padding\n" * 600
        + "    pass\n"
    )
    assert all(law(bad) for law in LAWS if law is not long_functions)
    bad.write_text("def f():\n" + "    f()\n" * 60)
    assert long_functions(bad) == ["f: 61 lines"]
    bad.write_text("def f():\n    x = g()\n    y = g()\n    y += x\n    return y\n")
    count, found = one_use(bad)
    assert count == 2 and [place.split()[-1] for place in found] == ["x"]


def comment_lines(path: Path) -> tuple[int, int]:
    """(lines that are a comment, lines of code) of a file."""
    lines = [x.strip() for x in path.read_text(encoding="utf-8").splitlines()]
    comment = sum(line.startswith("#") for line in lines)
    return comment, sum(map(bool, lines)) - comment


def show_shares() -> None:
    """Print what the laws measure, and how many lines are comments."""
    files = sources()
    counts, once = zip(*map(one_use, files), strict=True)
    texts = [text for path in files for text in docstrings(path)]
    comment, code = map(sum, zip(*map(comment_lines, files), strict=True))
    print(f"names read once: {sum(map(len, once)) / sum(counts):.1%}")
    odd = sum(text.startswith(ODD_STARTS) for text in texts)
    print(f"docstrings without a subject or a verb: {odd / len(texts):.1%}")
    print(f"comment lines a 100 lines of code: {100 * comment / code:.1f}")


if __name__ == "__main__":
    show_shares()
