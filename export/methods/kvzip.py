"""KVzip (arXiv 2505.23416): a prefix that many requests begin with is compacted once. Its
KV pairs are scored by what the model attends to repeat it, whatever will be asked.

Everything else keeps all of its tokens. The runtime compacts when it is asked to
(runtime/requests/compaction.py).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from kvlathe.export.methods.method import Decision, Method
from kvlathe.export.methods.options import (
    Choice,
    MethodOptions,
    Number,
    option,
)
from kvlathe.plan.lives import Compact


@dataclass(frozen=True)
class KvzipOptions(MethodOptions):
    """The part of a compacted prefix that stays. The paper loses nothing at the default."""

    keep: float = option(
        0.3,
        Number("a share of the KV pairs", above=True),
        "Share of a prefix's KV pairs that stays.",
    )
    heads: Literal["each", "same"] = option(
        "each",
        Choice("each", "same"),
        "Whether each head keeps as many as it needs, or all keep the same number.",
    )


def plan(options: KvzipOptions, page_tokens: int) -> Decision:
    """The life of prefixes, for every lane."""
    return Decision(tokens=(Compact(options.keep),), apart=options.heads == "each")


METHOD = Method(
    "shared prefixes can be compacted to the KV pairs that repeating them needs",
    KvzipOptions(),
    plan=plan,
)
