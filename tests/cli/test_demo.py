"""The demo from any folder: refused at once where it cannot run, and it ends with one
table and where to look."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

from kvlathe.base import console

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def demo() -> ModuleType:
    spec = importlib.util.spec_from_file_location("demo", ROOT / "scripts/demo.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
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


def test_the_demo_ends_with_a_table_and_two_files_to_open(
    demo: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    scores = dict.fromkeys(demo.COLUMNS, 0.5)
    results = {"none": scores, "fdc": scores}
    with console.out.capture() as shown:
        demo.show("title", results, tmp_path)
    *_, page, numbers = shown.get().strip().splitlines()
    assert page == f"open {tmp_path / 'fdc' / 'report.html'}"
    assert numbers == f"open {tmp_path / 'results.json'}"
    assert "50.0%" in shown.get()
    assert json.loads((tmp_path / "results.json").read_text()) == results
