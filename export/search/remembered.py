"""Losses that were measured before, in files that outlive a build."""

from __future__ import annotations

import os
import zipfile
from pathlib import Path

import numpy as np

from kvlathe.base.console import log
from kvlathe.export.methods.forms import Array


def recalled(path: Path | None, count: int) -> list[Array] | None:
    """The ``count`` arrays of a file; None where there is none that can be read."""
    if path is None or not path.is_file():
        return None
    try:
        with np.load(path, allow_pickle=False) as kept:
            return [kept[f"arr_{i}"] for i in range(count)]
    except (OSError, ValueError, EOFError, KeyError, zipfile.BadZipFile):
        log.warning("%s is damaged: its losses are measured again", path)
        return None


def remember(path: Path | None, *arrays: Array) -> None:
    """Write a file as a whole or not at all."""
    if path is None:
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    fresh = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with fresh.open("wb") as file:
            np.savez(file, *arrays)
        fresh.replace(path)
    finally:
        fresh.unlink(missing_ok=True)
