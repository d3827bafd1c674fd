"""The ``>>>`` examples of docstrings do what they show."""

from __future__ import annotations

import doctest
import importlib
from collections.abc import Iterator
from pathlib import Path

import pytest

import kvlathe
from tests.support.made_once import made_once
from tests.support.runtime_cases import built_folder
from tests.test_architecture import name_of, segments_of, sources

SHOWN = ("LLM", "SamplingParams", "Structure", "AsyncEngine")
"""Public classes, each of which shows its use."""


def fill(folder: Path) -> None:
    built_folder(folder)


def examples(path: Path) -> Iterator[doctest.DocTest]:
    """The docstrings of a file that hold examples."""
    parts = "kvlathe", *segments_of(name_of(path))
    if parts[1] == "integrations":  # packages of their own, each in its folder
        parts = parts[3:]
    module = importlib.import_module(".".join(parts))
    engine = made_once("examples", fill)
    for test in doctest.DocTestFinder().find(module, extraglobs={"engine": engine}):
        if test.examples:
            yield test


@pytest.mark.parametrize(
    "path",
    [path for path in sources() if ">>> " in path.read_text(encoding="utf-8")],
    ids=name_of,
)
def test_examples_do_what_they_show(path: Path) -> None:
    found = list(examples(path))
    assert found
    for test in found:
        said: list[str] = []
        doctest.DocTestRunner(verbose=False).run(test, out=said.append)
        assert not said, "".join(said)


def test_public_classes_show_their_use() -> None:
    without = [name for name in SHOWN if ">>> " not in getattr(kvlathe, name).__doc__]
    assert not without


def test_a_wrong_example_is_told() -> None:
    test = doctest.DocTestParser().get_doctest(">>> 1 + 1\n3\n", {}, "wrong", None, 0)
    said: list[str] = []
    doctest.DocTestRunner(verbose=False).run(test, out=said.append)
    assert "Expected:" in "".join(said)
