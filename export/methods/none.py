"""none: the uncompressed model. What every ratio is taken against."""

from __future__ import annotations

from kvlathe.export.methods.options import Decision, chosen

SUMMARY = "nothing is removed"


def plan(written: dict[str, str], page_tokens: int) -> Decision:
    """Nothing is decided, so everything stays. Raises KvlatheError: there are no
    options."""
    chosen(written, {})
    return Decision()
