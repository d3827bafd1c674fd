"""KIVI (arXiv 2402.02750): keys by channel, values by token, in 2 bit; the newest
tokens as they are. For comparison.

A group is ``group`` tokens of one channel of K, or ``group`` channels of one token of
V. The window of recent tokens is the page that is being filled: as in the paper for K,
whose window empties every R tokens; the paper slides that of V. With
``--tokens-per-block 128`` it is the paper's R. Codes are dequantized, then multiplied.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from kvlathe.base.errors import KvlatheError
from kvlathe.export.methods.method import Decision, Method
from kvlathe.export.methods.options import (
    Choice,
    MethodOptions,
    option,
)
from kvlathe.plan.formats import Tier


@dataclass(frozen=True)
class KiviOptions(MethodOptions):
    """The number format of full pages."""

    bits: Literal[2, 4, 8] = option(2, Choice(2, 4, 8), "Bits of a code.", sizes=True)
    group: int = option(32, Choice(32, 64, 128), "Numbers that share a scale.")


def plan(options: KiviOptions, page_tokens: int) -> Decision:
    """The tier that full pages are sealed in. Raises KvlatheError for groups that no
    page can hold."""
    bits, group = options.bits, options.group
    if page_tokens % group:
        raise KvlatheError(
            f"group={group} cannot be used with pages of {page_tokens} tokens",
            "K's groups run along a page's tokens",
            f"choose a smaller group or --tokens-per-block {group}",
        )
    return Decision(
        cold=Tier(
            bits, bits, axis_k="token", axis_v="rank", group_k=group, group_v=group
        )
    )


METHOD = Method(
    "comparison: quantize K by channel and V by token to 2, 4 or 8 bit",
    KiviOptions(),
    plan=plan,
)
