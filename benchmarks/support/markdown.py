"""Tables of pages, as pages have them."""

from __future__ import annotations

from collections.abc import Sequence


def print_markdown(
    title: str, columns: Sequence[str], rows: Sequence[Sequence[str]]
) -> None:
    """A table in Markdown. ``title``: for tables on a terminal, which have one."""
    print(f"| {' | '.join(columns)} |")
    print("|---" * len(columns) + "|")
    for row in rows:
        print(f"| {' | '.join(row)} |")
    print()
