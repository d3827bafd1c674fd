"""Losses and scores that were measured before, in files that outlive a build."""

from __future__ import annotations

import json
import os
import zipfile
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from kvlathe.base.console import log
from kvlathe.export.methods.forms import Array


def recall(path: Path | None, count: int) -> list[Array] | None:
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


@dataclass
class Scores:
    """Scores by the ratio asked for, remembered in ``path`` (None: only here)."""

    path: Path | None
    known: dict[str, float] = field(default_factory=dict)

    @classmethod
    def open(cls, folder: Path | None, key: str) -> Scores:
        path = None if folder is None else folder / f"{key}.json"
        if path is None or not path.is_file():
            return cls(path)
        try:
            entries = json.loads(path.read_text("utf-8")).items()
            return cls(path, {str(name): float(value) for name, value in entries})
        except (OSError, ValueError, AttributeError):
            log.warning(
                "the remembered scores %s are damaged and will be measured again", path
            )
            return cls(path)

    def get(self, name: str, measure: Callable[[], float]) -> float:
        if name not in self.known:
            self.known[name] = measure()
            self._write()
        return self.known[name]

    def put(self, name: str, value: float) -> None:
        self.known[name] = value
        self._write()

    def forget(self, name: str) -> None:
        """Remove a score, if it is known."""
        if self.known.pop(name, None) is not None:
            self._write()

    def _write(self) -> None:
        if self.path is None:
            return
        self.path.parent.mkdir(parents=True, exist_ok=True)
        fresh = self.path.with_suffix(".tmp")
        fresh.write_text(json.dumps(self.known, indent=1), "utf-8")
        fresh.replace(self.path)
