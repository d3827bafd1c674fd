"""HACK, sections 5 and 6: full pages are quantized once, and attention multiplies the
codes as integers.

K is partitioned along the head dim, V along a page's tokens; each partition has a
minimum and a scale. The partial page of V (and of K) stays as it is computed until it
is full. Differences from the paper: codes are rounded to the nearest unless asked
otherwise, Q and P are quantized symmetrically, so no sums of codes are stored
(export/attention/integer.py) unless asked for, and where a projection of K exists the
kept subspace is rotated first (hadamard.py). docs/quantization.md has the measurements.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from kvlathe.base.errors import KvlatheError
from kvlathe.export.methods.options import Decision, chosen
from kvlathe.plan.formats import Coding, Tier

SUMMARY = "quantize full pages to 8, 4, 3 or 2 bit and compute on the codes"
CHOICES: dict[str, tuple[Any, ...]] = {
    "bits": (2, 3, 4, 8),
    "bits_k": (None, 2, 3, 4, 8, 16),
    "bits_v": (None, 2, 3, 4, 8, 16),
    "group": (64, 32, 128),
    "levels": ("even", "normal"),
    "rounding": ("nearest", "stochastic"),
    "arithmetic": ("int", "float"),
    "sums": ("none", "stored"),
    "hadamard": ("auto", "none", "k", "v", "kv"),
}
"""Every option with its values, the default first. ``bits_k`` and ``bits_v`` overrule
``bits`` (16: not quantized). ``levels=normal``: fixed levels and one scale a group; V's
groups then run along the rank, too. ``sums=stored`` is the paper's form: Q and P
asymmetric, sums of codes in the page.
"""

CODINGS: dict[str, Coding] = {"even": "affine", "normal": "normal"}
"""What the option ``levels`` says."""
SIZES = {"bits": ("2", "3", "4", "8")}


def plan(written: dict[str, str], page_tokens: int) -> Decision:
    """The tier that full pages are sealed in. Raises KvlatheError for unknown options
    and groups no page can hold."""
    settings = chosen(_renamed(written), CHOICES)
    group = settings["group"]
    bits = settings["bits"]
    if page_tokens % group:
        raise KvlatheError(
            f"group={group} cannot be used with pages of {page_tokens} tokens",
            "V's groups run along a page's tokens",
            f"choose a smaller group or --tokens-per-block {group}",
        )
    _check_products(settings)
    bits_k = settings["bits_k"] or bits
    bits_v = settings["bits_v"] or bits
    if bits_k == bits_v == 16:
        raise KvlatheError(
            "bits_k=16 contradicts bits_v=16",
            "nothing would be quantized",
            "give one of them 8, 4, 3 or 2",
        )
    levels = settings["levels"]
    if levels == "normal":
        _check_fixed(settings, bits_k, bits_v)
    tier = Tier(
        bits_k,
        bits_v,
        axis_k="rank",
        axis_v="rank" if levels == "normal" else "token",
        group_k=group,
        group_v=group,
        arithmetic=settings["arithmetic"],
        rounding=settings["rounding"],
        sums=settings["sums"] == "stored",
        coding_k=CODINGS[levels],
        coding_v=CODINGS[levels],
    )
    return Decision(cold=tier, hadamard=settings["hadamard"])


def _check_products(settings: Mapping[str, object]) -> None:
    """Raises KvlatheError for sums that nothing would read."""
    if settings["sums"] == "stored" and settings["arithmetic"] != "int":
        raise KvlatheError(
            "sums=stored contradicts arithmetic=float",
            "only products of integers read the sums",
            "drop one of them",
        )


def _check_fixed(settings: Mapping[str, object], *bits: int) -> None:
    """Raises KvlatheError for what fixed levels cannot be composed with."""
    if 8 in bits:
        raise KvlatheError(
            "levels=normal contradicts bits=8",
            "the tables are for 4, 3 and 2 bits",
            "choose fewer bits, or levels=even",
        )
    if settings["sums"] == "stored" or settings["rounding"] != "nearest":
        raise KvlatheError(
            "levels=normal contradicts sums=stored and rounding=stochastic",
            "its codes are the nearest, and nothing reads their sums",
            "leave both out",
        )


def _renamed(written: dict[str, str]) -> dict[str, str]:
    """``hadamard`` was called ``spin`` once."""
    if "spin" not in written or "hadamard" in written:
        return written
    renamed = dict(written)
    renamed["hadamard"] = renamed.pop("spin")
    return renamed
