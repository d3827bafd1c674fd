"""Every command in an environment without a package that it may need: one line, before
any work, with the command that installs it."""

from __future__ import annotations

import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
OPTIONAL = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"][
    "optional-dependencies"
]
WITHOUT = """
import importlib.abc, sys

class Missing(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in {names!r}.split():
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)

for name in {names!r}.split():
    sys.modules[name] = None
sys.meta_path.insert(0, Missing())
from kvlathe.cli.main import run
for line in {lines!r}:
    print("ended with", run(line.split()), file=sys.stderr)
"""


def module(requirement: str) -> str:
    name = requirement.split(">")[0].split("[")[0].split("=")[0]
    return {"huggingface-hub": "huggingface_hub"}.get(name, name)


def said(names: list[str], *lines: str) -> list[str]:
    """What the commands print on stderr where none of the packages are installed."""
    program = WITHOUT.format(names=" ".join(names), lines=lines)
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, cwd=ROOT
    )
    assert done.returncode == 0, done.stderr
    return done.stderr.splitlines()


@pytest.mark.parametrize("name", [module(x) for x in OPTIONAL["export"]])
def test_a_build_without_a_package_is_refused_before_it_works(
    name: str, tmp_path: Path
) -> None:
    model = "models/lathe-5m"
    if name == "gguf":
        model = str(tmp_path / "model.gguf")
        Path(model).write_bytes(b"GGUF" + bytes(64))
    out = tmp_path / "out"
    lines = said([name], f"build --model {model} --output-dir {out} --no-cache")
    *_, refused, ended = [line for line in lines if not line.startswith("INFO read")]
    assert ended == "ended with 1" and not out.exists()
    assert refused.startswith("error: ") and f"{name} is not installed. Run " in refused
    assert "[export]'" in refused
    assert len(lines) <= 3 + (name == "gguf")


def test_every_command_says_what_it_lacks_where_only_the_runtime_is_installed(
    tmp_path: Path,
) -> None:
    """One line each and no traceback; what needs nothing optional runs."""
    refused = [
        f"build --model models/lathe-5m --output-dir {tmp_path}/a --dry-run",
        f"calibrate --model models/lathe-5m --output {tmp_path}/b",
        f"frontier --model models/lathe-5m --output {tmp_path}/c",
        f"serve {tmp_path}",
        f"bench-serve {tmp_path}",
    ]
    ran = ["build --help", "methods"]
    missing = {module(x) for own in OPTIONAL.values() for x in own} - {"kvlathe"}
    lines = said(sorted(missing), *refused, *ran)
    assert "Traceback" not in "\n".join(lines)
    ends = [line for line in lines if line.startswith("ended with")]
    assert ends == ["ended with 1"] * len(refused) + ["ended with 0"] * len(ran)
    errors = [line for line in lines if line.startswith("error:")]
    assert len(errors) == len(refused)
    assert all("is not installed. Run pip install '" in line for line in errors)
