"""Output for people: log lines, progress bars and messages on stderr, results on
stdout, tables in one style.

Standard output carries results alone, so that it can be piped; everything else goes to
standard error.
"""

from __future__ import annotations

import logging
import re
import sys
import time
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import TypeVar

from rich.console import Console
from rich.logging import RichHandler
from rich.progress import (
    BarColumn,
    Progress,
    ProgressColumn,
    Task,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from rich.table import Table
from rich.text import Text

Item = TypeVar("Item")

LEVELS = ("debug", "info", "warning", "error")
SLOW_SECONDS = 2.0
"""Work that takes longer than this says so: with a bar on a terminal, with log lines
elsewhere."""
LINE_SECONDS = 30.0
"""Seconds between two log lines about the same work."""

CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")
log = logging.getLogger("kvlathe")
_piped = sys.stdout is None or not sys.stdout.isatty()
out = Console(highlight=False, width=120 if _piped else None)
err = Console(stderr=True, highlight=False)

_bars: Progress | None = None


def setup(level: str = "info") -> None:
    """Send kvlathe's log to stderr from ``level`` (one of LEVELS) up. The command line
    calls this once."""
    if err.is_terminal:
        handler: logging.Handler = RichHandler(
            console=err, show_path=level == "debug", log_time_format="[%X]"
        )
    else:
        handler = logging.StreamHandler()
        handler.setFormatter(logging.Formatter("%(levelname)s %(message)s"))
    log.handlers[:] = [handler]
    log.setLevel(level.upper())
    log.propagate = False


def progress(
    items: Iterable[Item], description: str, total: int | None = None
) -> Iterator[Item]:
    """Yield ``items``, showing how far they are (``working``). ``total`` defaults to
    ``len(items)`` where there is one."""
    count = total if total is not None else _length(items)
    with working(description, count) as advance:
        for item in items:
            yield item
            advance(1)


Advance = Callable[[float], None]
"""Says how much more is done."""


@contextmanager
def working(
    description: str, total: float | None = None, unit: str = ""
) -> Generator[Advance]:
    """Show how far a piece of work is, as a bar on stderr: of ``total``, how much a
    second, and how long it still takes. ``unit``: what is counted; "bytes" are written
    in larger ones.

    The bar appears only on a terminal and leaves nothing behind; bars may nest.
    Elsewhere (pipes, CI) work slower than SLOW_SECONDS is told of in log lines: then,
    every LINE_SECONDS, and when it is done.
    """
    started = time.monotonic()
    with (_bar if err.is_terminal else _lines)(description, total, unit) as advance:
        yield advance
    seconds = time.monotonic() - started
    if seconds > SLOW_SECONDS:
        speed = f", {rate(total / seconds, unit)}" if unit and total else ""
        log.info("%s: %.1f s%s", description, seconds, speed)


@contextmanager
def _lines(description: str, total: float | None, unit: str) -> Generator[Advance]:
    done = 0.0
    started = time.monotonic()
    due = started + SLOW_SECONDS

    def advance(amount: float) -> None:
        nonlocal done, due
        done += amount
        now = time.monotonic()
        if now <= due:
            return
        due = now + LINE_SECONDS
        log.info("%s: %s", description, _how_far(done, total, unit, now - started))

    yield advance


def _how_far(done: float, total: float | None, unit: str, seconds: float) -> str:
    """``done`` of ``total``, and what that promises."""
    if total is None:
        return amount(done, unit)
    so_far = amount(done, "bytes" if unit == "bytes" else "")
    words = [f"{so_far} of {amount(total, unit)}"]
    if unit:
        words.append(rate(done / seconds, unit))
    if done:
        left = seconds * (total / done - 1)
        words.append(f"{left:.0f} s left")
    return ", ".join(words)


def amount(count: float, unit: str) -> str:
    if unit == "bytes":
        return human_bytes(count)
    return f"{count:,.0f} {unit}".rstrip()


def rate(a_second: float, unit: str) -> str:
    return f"{amount(a_second, unit)} a second"


@contextmanager
def _bar(description: str, total: float | None, unit: str) -> Generator[Advance]:
    """One live display serves all bars, because a terminal has one bottom line to draw
    on."""
    global _bars
    outermost = _bars is None
    bars = _bars = _bars or _new_bars()
    if outermost:
        bars.start()
    task = bars.add_task(description, total=total, unit=unit)
    try:
        yield lambda amount: bars.advance(task, amount)
    finally:
        bars.remove_task(task)
        if outermost:
            bars.stop()
            _bars = None


class Count(ProgressColumn):
    """Column "done/total"; only "done" where the total is not known."""

    def render(self, task: Task) -> Text:
        unit = "bytes" if task.fields.get("unit") == "bytes" else ""
        done = amount(task.completed, unit)
        if task.total is None:
            return Text(done)
        return Text(f"{done}/{amount(task.total, unit)}")


class Rate(ProgressColumn):
    """Column "so much a second", for tasks that have a unit."""

    def render(self, task: Task) -> Text:
        unit = task.fields.get("unit")
        if not unit or not task.speed:
            return Text("")
        return Text(rate(task.speed, unit))


def _new_bars() -> Progress:
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        Count(),
        Rate(),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
    )
    return Progress(*columns, console=err, transient=True)


def _length(items: Iterable[object]) -> int | None:
    try:
        return len(items)  # type: ignore[arg-type]
    except TypeError:
        return None


def print_table(
    title: str,
    columns: Sequence[str],
    rows: Iterable[Sequence[object]],
    console: Console = out,
) -> None:
    """Print ``rows`` under ``columns``; numbers are right-aligned, None is a dash."""
    rows = [tuple(row) for row in rows]
    table = Table(
        title=title, title_justify="left", title_style="bold", header_style="bold"
    )
    for i, column in enumerate(columns):
        numeric = any(isinstance(row[i], int | float) for row in rows)
        table.add_column(
            column, justify="right" if numeric else "left", overflow="fold"
        )
    for row in rows:
        table.add_row(*(cell(value) for value in row))
    console.print(table)


def print_pairs(
    title: str, pairs: Iterable[tuple[str, object]], console: Console = out
) -> None:
    """Print names and values, one pair a line."""
    table = Table.grid(padding=(0, 2))
    table.title, table.title_justify, table.title_style = title or None, "left", "bold"
    for name, value in pairs:
        table.add_row(name, cell(value))
    console.print(table)


def cell(value: object) -> str:
    """A value as people read it: four significant digits, thousands separated, a dash
    for nothing."""
    if value is None:
        return "-"
    if isinstance(value, bool) or not isinstance(value, int | float):
        return shown(str(value)) if out.is_terminal else str(value)
    if isinstance(value, int) or abs(value) >= 1000:
        return f"{value:,.0f}"
    return f"{value:.4g}"


def shown(text: str) -> str:
    """A text that others wrote, for a terminal: control characters, which it would
    obey, are written out, but for new lines and tabs."""
    return CONTROL.sub(_written_out, text)


def _written_out(found: re.Match[str]) -> str:
    return f"\\x{ord(found[0]):02x}"


def human_bytes(count: float) -> str:
    """Bytes in binary units, three significant digits."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(count) < 1000 or (unit == "B" and abs(count) < 1024):
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.3g} {unit}"
        count /= 1024
    return f"{count:,.3g} TiB"


def fail(message: str) -> None:
    """One line on stderr, as every command says why it stopped. Plain text: scripts
    read it too."""
    print(f"error: {message}", file=sys.stderr)
