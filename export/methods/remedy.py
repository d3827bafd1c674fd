"""Remedies: what to build instead, where a plan was measured to break the model."""

from __future__ import annotations

from kvlathe.export.methods.compression import Compression

GENTLE = "hack:bits=8"
"""A method that keeps nearly every model as it is."""


def remedy(compression: Compression) -> str:
    """A plan that loses less than ``compression``, in words."""
    if compression.measured:
        return "ask for a smaller --compression-ratio, or for an --accuracy"
    if compression.text == GENTLE:
        return "use auto, which measures what every head may lose"
    gentler = f"use {GENTLE}, or auto, which measures what every head may lose"
    if compression.choosing_ranks:
        return f"remove less (--removal-rate), or {gentler}"
    return gentler
