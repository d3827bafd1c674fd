"""Rows of the tables, and the engine folders that they are measured with.

A row is what ``--compression`` takes, and behind ``@`` what ``--compression-ratio``
takes: ``hack:bits=4``, ``auto@0.9``.
"""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

ROWS = (
    "none",
    "fdc",
    "zack",
    "hack:bits=8",
    "hack:bits=4",
    "hack:bits=2",
    "zipcache",
    "uncomp",
    "kvzip:keep=0.5,heads=same",
    "kvzip:keep=0.25,heads=same",
    "window",
    "duo",
    "turboquant",
    "kivi",
    "kvquant",
    "oscar",
    "auto@0.75",
    "auto@0.85",
    "auto@0.9",
    "auto@0.95",
)

"""The rows of the tables. ``kvzip`` keeps equally many pairs in every head: public
models have more KV heads than its page lists of single heads serve on a GPU."""


def folder_of(engines: Path, row: str) -> Path:
    """The folder of a row's engine."""
    return engines / re.sub(r"[^A-Za-z0-9.]+", "-", row)


def build(model: str, engines: Path, row: str, flags: Sequence[str]) -> str:
    """Build a row's engine by ``kvlathe build``, unless it is there. The reason where
    that refuses it, else nothing. ``flags``: more of its options."""
    folder = folder_of(engines, row)
    if folder.exists():
        return ""
    request, _, ratio = row.partition("@")
    command = [sys.executable, "-m", "kvlathe", "build", "--model", model]
    command += ["--output-dir", str(folder), "--compression", request, *flags]
    command += ["--compression-ratio", ratio] if ratio else []
    done = subprocess.run(command, stderr=subprocess.PIPE, text=True, check=False)
    if done.returncode == 0:
        return ""
    return (done.stderr.strip().splitlines() or ["it ended without a word"])[-1]
