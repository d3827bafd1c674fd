"""Each example runs as its first lines say, on the model that is shipped."""

from __future__ import annotations

import runpy
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from kvlathe.export.methods.registry import methods
from tests.support.runtime_cases import MODEL, built_folder, llm
from tests.support.serving_cases import MODEL_NAME, serving

ROOT = Path(__file__).resolve().parents[2]
EXAMPLES = ROOT / "examples"


def output(name: str, *arguments: object) -> str:
    """The output of an example."""
    done = subprocess.run(
        [sys.executable, EXAMPLES / name, *map(str, arguments)],
        cwd=ROOT,
        env={"PYTHONPATH": str(ROOT), "PATH": "/usr/bin:/bin"},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return built_folder(tmp_path_factory.mktemp("engine"))


def test_the_example_of_generate_prints_speeds_and_a_stream(engine: Path) -> None:
    said = output("generate.py", engine)
    assert said.count("tokens/s") == 3 and "-- a stream" in said


def test_the_example_of_an_openai_client_gets_an_answer() -> None:
    with serving(llm("torch", "one")) as served:
        said = output("openai_client.py", served.url)
    assert said.startswith(f"model: {MODEL_NAME}\n") and len(said.splitlines()) > 2


@pytest.fixture
def built_here(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> Iterator[Callable[[str], str]]:
    """The output of an example that builds an engine. It runs in this process, which
    has the libraries of a build already."""

    def ran(name: str) -> str:
        arguments = [EXAMPLES / name, MODEL, tmp_path / "engine"]
        monkeypatch.setattr(sys, "argv", [*map(str, arguments)])
        monkeypatch.setenv("KVLATHE_CACHE", str(tmp_path / "cache"))
        runpy.run_path(sys.argv[0], run_name="__main__")
        return capsys.readouterr().out

    before = dict(methods())
    yield ran
    methods().clear()
    methods().update(before)


@pytest.mark.slow
def test_the_example_of_a_compressed_stream_says_what_is_removed(
    built_here: Callable[[str], str],
) -> None:
    said = built_here("compressed_stream.py")
    assert "of the cache's bytes removed" in said and said.count("\n") == 3


@pytest.mark.slow
def test_the_example_of_an_own_method_removes_about_half(
    built_here: Callable[[str], str],
) -> None:
    said = built_here("own_method.py")
    removed = int(said.split("%")[0])
    assert 40 < removed < 80 and said.count("\n") == 2


def test_every_example_is_listed_and_tested() -> None:
    files = {path.name for path in EXAMPLES.glob("*.py")}
    listed = (EXAMPLES / "README.md").read_text("utf-8")
    tests = Path(__file__).read_text("utf-8")
    assert len(files) >= 4
    assert all(f"]({name})" in listed and f'"{name}"' in tests for name in files)
