"""A build reads what ``--compression`` says once, and carries the value from there on."""

from __future__ import annotations

import ast
import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal, get_args, get_origin, get_type_hints

import pytest

from kvlathe.engines.build import BuildConfig, build, preview
from kvlathe.export.methods import compression
from kvlathe.export.methods.options import RankOptions, options_of
from kvlathe.plan import manifest as manifests
from kvlathe.plan.engine_folder import read_plan
from tests.test_architecture import name_of, sources, tree_of

Reference = Callable[[str], tuple[Path, object]]
READERS = {"engines/order.py", "kvlathe/frontier/run.py"}
"""A build, and a frontier, which sorts its candidates before it builds them."""


@pytest.fixture
def parsed(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Every method that is read from text."""
    texts: list[str] = []
    read = compression._read

    def counting(text: str) -> compression.RequestedMethod:
        texts.append(text)
        return read(text)

    monkeypatch.setattr(compression, "_read", counting)
    return texts


@pytest.mark.slow
def test_a_build_parses_its_compression_once(
    parsed: list[str], reference: Reference, tmp_path: Path
) -> None:
    """And the text comes through to plan and manifest as it was written."""
    asked = "fdc:removal_rate=0.3 + HACK:bits=8"
    request = BuildConfig(
        reference("llama-dynamic")[0],
        tmp_path / "engine",
        asked,
        calibration="random",
        use_cache=False,
    )
    engine = build(request)
    assert parsed == ["fdc:removal_rate=0.3", "HACK:bits=8"]
    assert read_plan(engine).compression == asked
    assert manifests.read(engine).compression == asked


@pytest.mark.parametrize(
    ("asked", "options"),
    [
        ("duo:share=0.5+hack:bits=8", {}),
        ("auto", {"compression_ratio": 0.5}),
        ("hack", {"accuracy": 0.5, "metric": "perplexity"}),
    ],
)
def test_measuring_parses_nothing_again(
    asked: str,
    options: dict[str, Any],
    parsed: list[str],
    reference: Reference,
    tmp_path: Path,
) -> None:
    """Neither to name heads, nor to try the values of an option, nor for what stands
    beside a plan for comparison."""
    request = BuildConfig(
        reference("llama-dynamic")[0],
        tmp_path / "engine",
        asked,
        calibration="random",
        use_cache=False,
        **options,
    )
    preview(request)
    assert parsed == asked.split("+")


def readers(path: Path) -> set[str]:
    """Modules whose ``parse`` a file imports."""
    imports = (x for x in ast.walk(tree_of(path)) if isinstance(x, ast.ImportFrom))
    return {
        str(one.module) for one in imports for name in one.names if name.name == "parse"
    }


def test_few_modules_read_compressions() -> None:
    module = compression.__name__
    found = {name_of(path) for path in sources() if module in readers(path)}
    assert found == READERS


def test_a_build_may_be_asked_what_methods_that_choose_ranks_declare() -> None:
    """Its fields have the same names, defaults and values."""
    kinds = get_type_hints(BuildConfig)
    fields = {field.name: field for field in dataclasses.fields(BuildConfig)}
    for option in options_of(RankOptions()):
        assert fields[option.name].default == option.default
        known: set[object] = set()
        for kind in (kinds[option.name], *get_args(kinds[option.name])):
            known |= set(get_args(kind)) if get_origin(kind) is Literal else set()
        is_flag = isinstance(option.default, bool)
        assert is_flag or known == set(option.kind.values)
