"""scripts/setup.sh installs what is asked for, and nothing twice; --quick of the tests
takes each law once."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
FAKE = '#!/bin/sh\necho "$@" >> "$(dirname "$0")/../calls"\n'
"""Stands for .venv's programs: it writes down what it was asked for."""


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """What setup.sh reads of a checkout, and a .venv that installs nothing."""
    for name in ("pyproject.toml", "constraints.txt", "scripts/setup.sh"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        shutil.copy(ROOT / name, tmp_path / name)
    (tmp_path / "plugins_cpp").mkdir()
    (tmp_path / "plugins_cpp" / "a.cc").touch()
    (tmp_path / ".venv" / "bin").mkdir(parents=True)
    for name in ("python", "kvlathe"):
        program = tmp_path / ".venv" / "bin" / name
        program.write_text(FAKE)
        program.chmod(0o755)
    return tmp_path


def installed(checkout: Path, *flags: str) -> tuple[list[set[str]], str]:
    """(the extras of each install, what was said) of one run of setup.sh."""
    calls = checkout / ".venv" / "calls"
    calls.unlink(missing_ok=True)
    done = subprocess.run(
        ["bash", "scripts/setup.sh", *flags],
        cwd=checkout,
        env={**os.environ, "PYTHON": sys.executable},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    lines = calls.read_text().splitlines() if calls.exists() else []
    editable = [line for line in lines if "--editable" in line]
    extras = [line.partition("[")[2].rstrip("]").split(",") for line in editable]
    return [set(names) for names in extras], done.stderr


def test_the_demo_installs_no_tools_of_development_and_a_full_setup_the_rest(
    checkout: Path,
) -> None:
    (demo,), said = installed(checkout, "--demo")
    assert demo == {"export", "serve"} and "GB" in said and "[3 of 4" in said
    assert installed(checkout, "--demo")[0] == []
    (everything,), _ = installed(checkout)
    assert everything > demo | {"dev", "docs"}
    assert installed(checkout)[0] == [] == installed(checkout, "--demo")[0]


def test_a_full_setup_is_enough_for_the_demo(checkout: Path) -> None:
    assert len(installed(checkout)[0]) == 1
    assert installed(checkout, "--demo")[0] == []
    (checkout / "constraints.txt").write_text("torch==9\n")
    assert installed(checkout, "--demo")[0] == [{"export", "serve"}]


def test_scripts_ask_for_the_setup_that_they_need() -> None:
    lines = {
        name: (ROOT / "scripts" / name).read_text().splitlines()
        for name in ("demo.sh", "test.sh", "docs.sh")
    }
    assert "scripts/setup.sh --demo" in lines["demo.sh"]
    assert all("scripts/setup.sh" in lines[name] for name in ("test.sh", "docs.sh"))


LAWS = """
import pytest

@pytest.mark.parametrize("x", [1, 2])
@pytest.mark.parametrize("y", [3, 4])
def test_pairs(x, y): pass

@pytest.mark.slow
def test_slow(): pass

@pytest.mark.parametrize("x", [pytest.param(1, marks=pytest.mark.slow), 2])
def test_half_slow(x): pass

class TestIt:
    def test_pairs(self): pass
"""


def test_quick_takes_each_test_that_is_not_slow_once(tmp_path: Path) -> None:
    for name in ("test_a.py", "test_b.py"):
        (tmp_path / name).write_text(LAWS)
    command = [sys.executable, "-m", "pytest", "-p", "tests.conftest", "--quick", "-q"]
    options = ["--collect-only", "-p", "no:cacheprovider", f"--rootdir={tmp_path}"]
    done = subprocess.run(
        [*command, *options, "."],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
    )
    found = [line for line in done.stdout.splitlines() if "::" in line]
    once = ["test_pairs[3-1]", "test_half_slow[2]", "TestIt::test_pairs"]
    assert found == [
        f"{name}::{x}" for name in ("test_a.py", "test_b.py") for x in once
    ]
