"""scripts/compile_all_archs.sh: what it says where it cannot compile and, nightly
(minutes), that the kernels do."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
needs_nvcc = pytest.mark.skipif(
    not shutil.which("nvcc"), reason="nvcc is not installed"
)


def compile_for(
    *architectures: str, **environment: str
) -> subprocess.CompletedProcess[str]:
    command = ["bash", str(ROOT / "scripts" / "compile_all_archs.sh"), *architectures]
    return subprocess.run(
        command,
        capture_output=True,
        text=True,
        env={**os.environ, **environment},
        check=False,
    )


def test_a_missing_compiler_is_said(tmp_path: Path) -> None:
    for tool in ("bash", "dirname"):
        (tmp_path / tool).symlink_to(str(shutil.which(tool)))
    done = compile_for("75", PATH=str(tmp_path))
    assert done.returncode == 127 and "nvcc is not installed" in done.stderr


@needs_nvcc
def test_an_architecture_that_the_compiler_does_not_know_fails(tmp_path: Path) -> None:
    done = compile_for("20")
    assert done.returncode == 1 and re.search(
        r"sm_20: FAILED, this nvcc knows only: .*\b90\b", done.stdout
    )


@pytest.mark.nightly
@needs_nvcc
@pytest.mark.parametrize("architecture", ["75", "90a"])
def test_the_kernels_compile_for_the_oldest_and_for_the_measured_gpu(
    architecture: str,
) -> None:
    done = compile_for(architecture)
    assert done.returncode == 0, done.stdout
