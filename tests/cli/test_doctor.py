"""The doctor: one line for all that kvlathe uses, and a remedy for what is missing."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from kvlathe.base import extras
from kvlathe.cli import doctor
from kvlathe.runtime.native import library

SMI = """#!/bin/sh
echo "NVIDIA H100 80GB HBM3, 81559 MiB, 4 MiB, 580.65, 9.0"
"""


def said(name: str) -> list[doctor.Finding]:
    return [found for found in doctor.findings() if found.name == name]


@pytest.fixture(autouse=True)
def offline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)


def test_every_part_has_a_line_and_what_is_missing_a_remedy() -> None:
    """As a user runs it, in JSON."""
    done = subprocess.run(
        [sys.executable, "-m", "kvlathe", "doctor", "--json"],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    found = {one["name"]: one for one in json.loads(done.stdout)["findings"]}
    for name in ("kvlathe", "Python", "CPU", "memory", "native kernels", "disk"):
        assert found[name]["found"]
    assert "--model a folder or a GGUF file" in found["hub"]["remedy"]


def test_kernels_that_are_turned_off_are_found_with_the_remedy(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("KVLATHE_NATIVE", "0")
    monkeypatch.setattr(library, "find", library.find.__wrapped__)
    (found,) = said("native kernels")
    assert "KVLATHE_NATIVE=0" in found.found and found.remedy == "Unset it"


@pytest.mark.slow
def test_a_gpu_that_torch_does_not_see_is_a_finding(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "nvidia-smi").write_text(SMI)
    (tmp_path / "nvidia-smi").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    (gpu,) = said("GPU 0")
    assert "H100" in gpu.found and "sm 9.0" in gpu.found and not gpu.remedy
    torch = pytest.importorskip("torch")
    if not torch.cuda.is_available():
        (finding,) = said("torch")
        assert "CUDA build" in finding.remedy


def test_a_missing_extra_names_the_command_that_installs_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    needed = ["nowhere>=1; extra == 'serve'", "numpy; extra == 'export'", "click"]
    monkeypatch.setattr(doctor.metadata, "requires", lambda _: needed)
    (lacking,) = said("extra serve")
    assert lacking.found == "lacks nowhere"
    assert lacking.remedy.endswith(extras.pip_install("serve"))
    (there,) = said("extra export")
    assert there.found.startswith("numpy ") and not there.remedy


def test_a_check_that_fails_ends_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails() -> None:
        raise OSError("no such disk")

    monkeypatch.setattr(doctor, "CHECKS", (fails, *doctor.CHECKS[:1]))
    first, *others = doctor.findings()
    assert first.found == "no such disk" and first.remedy and others
