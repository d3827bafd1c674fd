"""none: the uncompressed model. What every ratio is taken against."""

from __future__ import annotations

from kvlathe.export.methods.options import Part

SUMMARY = "nothing is removed"


def plan() -> Part:
    """Nothing is decided, so everything stays."""
    return Part()
