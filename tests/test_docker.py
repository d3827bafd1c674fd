"""The image's recipe, checked without Docker: its files exist, its wheel builds from them alone, root runs nothing."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from kvlathe import cli

ROOT = Path(__file__).resolve().parents[1]
RECIPE = (ROOT / "docker/Dockerfile").read_text(encoding="utf-8")


def instructions(kind: str) -> list[str]:
    joined = re.sub(r"\\\n\s*", "", RECIPE)
    return re.findall(rf"^{kind} (.*)$", joined, flags=re.MULTILINE)


def copied() -> list[str]:
    """What the recipe takes from the checkout."""
    lines = [line.split() for line in instructions("COPY") if not line.startswith("--from")]
    return [source for *sources, _target in lines for source in sources]


def test_every_copied_path_exists_and_reaches_the_build() -> None:
    allowed = set((ROOT / ".dockerignore").read_text(encoding="utf-8").split())
    for source in copied():
        assert (ROOT / source).exists() and f"!{source}" in allowed


def test_the_wheel_builds_from_the_copied_paths_alone(tmp_path: Path) -> None:
    pytest.importorskip("setuptools")
    for source in copied():
        whole = (ROOT / source).is_dir()
        (shutil.copytree if whole else shutil.copy)(
            ROOT / source, tmp_path / source, **{"symlinks": True} if whole else {}
        )
    command = [
        sys.executable,
        "-m",
        "pip",
        "wheel",
        "--quiet",
        "--no-deps",
        "--no-build-isolation",
        "--wheel-dir",
        "dist",
        ".",
    ]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    names = zipfile.ZipFile(next((tmp_path / "dist").glob("*.whl"))).namelist()
    for part in ("export", "engines", "runtime"):
        inside = {f"kvlathe/{path.relative_to(ROOT).as_posix()}" for path in (ROOT / part).rglob("*.py")}
        assert inside <= set(names)
    assert "kvlathe/export/report.html.j2" in names


def test_it_runs_pinned_and_not_as_root() -> None:
    assert instructions("USER") == ["kvlathe"]
    assert all(re.search(r":\d+\.\d+-slim", image) for image in instructions("FROM"))
    assert "--constraint" in "".join(instructions("RUN"))


def test_its_commands_exist() -> None:
    healthcheck = instructions("HEALTHCHECK")[0].partition("CMD ")[2]
    words = [re.findall(r'"([^"]+)"', line) for line in (healthcheck, instructions("CMD")[0])]
    assert words[0][0] == "kvlathe" and {words[0][1], words[1][0]} <= set(cli.cli.commands)
