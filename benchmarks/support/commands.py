"""Parts that all commands of this folder share. They need the standard library alone,
so that child processes whose memory is measured stay small."""

from __future__ import annotations

import argparse
import threading
from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
DATA = ROOT / "data"
LATHE_5M = ROOT / "models" / "lathe-5m"


def parser_of(text: str | None) -> argparse.ArgumentParser:
    """A parser whose help is a module's docstring, line by line."""
    return argparse.ArgumentParser(
        description=text, formatter_class=argparse.RawDescriptionHelpFormatter
    )


def show(columns: Mapping[str, int], row: Mapping[str, Any], number: str) -> None:
    """Print a row in columns of so many characters, floats by the format ``number``. An
    error stands behind the cells."""
    cells: list[str] = []
    for key, width in columns.items():
        value = row.get(key, "")
        text = format(value, number) if isinstance(value, float) else str(value)
        cells.append(f"{text:>{width}}")
    print("".join(cells).rstrip(), row.get("error", ""), flush=True)


@contextmanager
def meanwhile(work: Callable[[], object], seconds: float = 0.0) -> Generator[None]:
    """Do ``work`` again and again on a thread of its own while the block runs, with so
    many seconds before each time."""
    over = threading.Event()

    def again() -> None:
        while not over.wait(seconds):
            work()

    thread = threading.Thread(target=again)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()
