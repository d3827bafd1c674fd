"""Flags of the command line, as one types them."""

from __future__ import annotations


def flag_of(field: str) -> str:
    """The flag of a build's field.

    >>> flag_of("tokens_per_block")
    '--tokens-per-block'
    """
    return f"--{field.replace('_', '-')}"
