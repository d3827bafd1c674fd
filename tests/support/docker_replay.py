"""Replays a Dockerfile's steps on this machine: its paths below a folder, root's
commands and the network left out.

COPY copies, ENV and WORKDIR apply, RUN runs in bash. What needs root or a network is
replaced by stand-ins that note their arguments: apt-get, useradd, and packages from an
index (cmake and numpy are empty wheels; cmake's program writes the two libraries that
it is asked for). Everything else is done as written.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import sysconfig
import zipfile
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
INSIDE = re.compile(r"(?<![\w.$}{-])/(src|dist|opt|tmp|var|engine|models)\b")
"""Absolute paths of the image that the steps write to or read from."""

CMAKE = """#!/bin/bash
echo "cmake $* $(env | grep -E '^(KVLATHE|TENSORRT)_' | sort | tr '\\n' ' ')" >> {log}
while [ $# -gt 0 ]; do
    if [ "$1" = --build ]; then echo none > "$2/libkvlathe.so"; echo none > "$2/libkvlathe_trt.so"; fi
    shift
done
"""
STANDINS = """
note() {{ echo "$*" >> {log}; }}
apt-get() {{ note apt-get "$@"; }}
useradd() {{ note useradd "$@"; }}
python3.11() {{ {python} "$@"; }}
python3() {{ command python3 "$@"; }}
"""


@dataclass(frozen=True)
class Step:
    kind: str
    text: str

    @property
    def words(self) -> list[str]:
        """The words of the JSON form where it is one."""
        return (
            json.loads(self.text)
            if self.text.startswith("[")
            else shlex.split(self.text)
        )


def steps(recipe: Path) -> list[Step]:
    """The instructions in order, their lines joined and comments left out."""
    lines = [
        line
        for line in recipe.read_text(encoding="utf-8").splitlines()
        if not line.lstrip().startswith("#")
    ]
    joined = re.sub(r"\\\n\s*", "", "\n".join(lines))
    return [Step(*line.split(" ", 1)) for line in joined.splitlines() if line.strip()]


def copied(recipe: Path) -> list[str]:
    """Files that the recipe takes from the checkout."""
    words = [
        step.words
        for step in steps(recipe)
        if step.kind == "COPY" and "--from" not in step.text
    ]
    return [source for *sources, _ in words for source in sources]


@dataclass
class Replay:
    """The image's file system is ``root``; ``log`` holds what stand-ins were asked."""

    root: Path
    env: dict[str, str] = field(default_factory=dict)
    workdir: Path = Path()

    def __post_init__(self) -> None:
        self.log, bin_folder = self.root / "log", self.root / "bin"
        for folder in (
            "src",
            "dist",
            "opt",
            "tmp",
            "engine",
            "models",
            "bin",
            "wheels",
        ):
            (self.root / folder).mkdir(parents=True)
        (bin_folder / "python3").symlink_to(sys.executable)
        write_wheel(self.root / "wheels", "cmake", "4.1.2", CMAKE.format(log=self.log))
        write_wheel(self.root / "wheels", "ninja", "1.13.0", "#!/bin/sh\n")
        write_wheel(self.root / "wheels", "numpy", "1.26.4", "")
        (bin_folder / "pip").write_text(
            f'#!/bin/sh\nexec {sys.executable} -m pip "$@"\n'
        )
        (bin_folder / "pip").chmod(0o755)
        self.fresh_stage()

    def fresh_stage(self) -> None:
        site = sysconfig.get_path("purelib")
        for name in ("src", "tmp"):
            shutil.rmtree(self.root / name)
            (self.root / name).mkdir()
        pip = {"INDEX": "1", "DEPS": "1", "BUILD_ISOLATION": "0"}
        self.env = {
            **{
                name: os.environ[name]
                for name in ("HOME", "LANG")
                if name in os.environ
            },
            # CMake and compilers of this machine stay out of it, so that the recipe's
            # own are what is found.
            "PATH": f"{self.root / 'bin'}:{shims(self.root / 'system')}",
            "PYTHONPATH": site,
            **{f"PIP_NO_{name}": value for name, value in pip.items()},
            "PIP_FIND_LINKS": str(self.root / "wheels"),
            "PIP_QUIET": "1",
            "PIP_TARGET_UPGRADE": "1",
            "PIP_DISABLE_PIP_VERSION_CHECK": "1",
        }

    def inside(self, text: str) -> str:
        return INSIDE.sub(lambda found: f"{self.root}/{found[1]}", text)

    def run(self, recipe: Path) -> list[Step]:
        """All steps; those that say how a container starts are returned."""
        start: list[Step] = []
        for step in steps(recipe):
            if step.kind == "FROM":
                self.fresh_stage()
            elif step.kind in ("COPY", "ENV", "WORKDIR", "RUN"):
                getattr(self, f"_{step.kind.lower()}")(step)
            else:
                start.append(step)
        return start

    def _copy(self, step: Step) -> None:
        *sources, target = step.words
        if sources[0].startswith("--from="):
            assert Path(self.inside(sources[1])).exists()  # stages share one root here
            return
        for source in sources:
            to = (self.workdir / self.inside(target)).resolve()
            to = to / Path(source).name if target.endswith("/") else to
            if (ROOT / source).is_dir():
                shutil.copytree(
                    ROOT / source,
                    to,
                    symlinks=True,
                    ignore=shutil.ignore_patterns("__pycache__", "*.so"),
                )
            else:
                shutil.copy(ROOT / source, to)

    def _env(self, step: Step) -> None:
        for word in step.words:
            name, value = word.split("=", 1)
            value = re.sub(
                r"\$(\w+)", lambda found: self.env[found[1]], self.inside(value)
            )
            self.env[name] = (
                f"{value}:{self.env[name]}" if name == "PYTHONPATH" else value
            )

    def _workdir(self, step: Step) -> None:
        self.workdir = Path(self.inside(step.text))

    def _run(self, step: Step) -> None:
        for part in step.text.split(
            "&&"
        ):  # nothing may be installed outside the image's folders
            assert (
                not re.search(r"\bpip install\b", part)
                or "--target /opt/" in part
                or "/opt/" in part.split()[0]
            )
        script = (
            STANDINS.format(log=self.log, python=sys.executable)
            + "set -e\n"
            + self.inside(step.text)
        )
        done = subprocess.run(
            ["/bin/bash", "-c", script],
            cwd=self.workdir,
            env=self.env,
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, f"{step.text}\n{done.stdout}{done.stderr}"

    @property
    def noted(self) -> list[str]:
        return (
            self.log.read_text(encoding="utf-8").splitlines()
            if self.log.exists()
            else []
        )


def shims(folder: Path) -> Path:
    """A folder with just the plain programs that steps use, and a compiler's name
    (cmake is a stand-in)."""
    if not folder.exists():
        folder.mkdir()
        for name in (
            "ls",
            "rm",
            "sed",
            "uname",
            "env",
            "grep",
            "sort",
            "tr",
            "bash",
            "sh",
            "cat",
            "mkdir",
        ):
            (folder / name).symlink_to(shutil.which(name) or f"/bin/{name}")
        (folder / "g++").symlink_to("/bin/true")
    return folder


def write_wheel(folder: Path, name: str, version: str, script: str) -> None:
    """A wheel of nothing but one program."""
    info = f"{name}-{version}.dist-info"
    with zipfile.ZipFile(folder / f"{name}-{version}-py3-none-any.whl", "w") as wheel:
        wheel.writestr(
            f"{info}/METADATA",
            f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n",
        )
        wheel.writestr(
            f"{info}/WHEEL",
            "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
        )
        if script:
            program = zipfile.ZipInfo(f"{name}-{version}.data/scripts/{name}")
            program.external_attr = 0o100755 << 16
            wheel.writestr(program, script)
        wheel.writestr(f"{info}/RECORD", "")
