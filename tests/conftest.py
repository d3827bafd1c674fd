"""Fixtures that several test files share."""

from __future__ import annotations

import signal
from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest

signal.signal(signal.SIGINT, signal.default_int_handler)
"""A shell runs what is in its background with interrupts ignored; processes that tests interrupt would inherit that."""


@pytest.fixture(scope="session")
def reference(tmp_path_factory: pytest.TempPathFactory) -> Callable:
    """``reference(name)`` -> (folder, transformers model) of the checkpoint FAMILIES[name], made once a session.

    The folder is shared: tests read it only.
    """
    checkpoints = pytest.importorskip("checkpoints")

    @cache
    def made(name: str) -> tuple[Path, object]:
        folder = tmp_path_factory.mktemp(name)
        return folder, checkpoints.make(folder, name)

    return made
