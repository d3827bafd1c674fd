"""KVzip (arXiv 2505.23416): a prefix that many requests begin with is compacted once. Its
KV pairs are scored by what the model attends to repeat it, whatever will be asked.

Everything else keeps all of its tokens. The runtime compacts when it is asked to
(runtime/requests/compaction.py).
"""

from __future__ import annotations

from kvlathe.base.errors import KvlatheError
from kvlathe.export.methods.options import Decision, chosen
from kvlathe.plan.lives import Compact

SUMMARY = "shared prefixes can be compacted to the KV pairs that repeating them needs"
KEEP = 0.3
"""Share of the KV pairs, unless asked otherwise: the paper loses nothing there."""


def plan(written: dict[str, str], page_tokens: int) -> Decision:
    """Options ``keep`` (share of a prefix's KV pairs) and ``heads``: ``each`` keeps as
    many as it needs, or all keep the ``same`` number. Raises KvlatheError."""
    own = dict(written)
    text = own.pop("keep", str(KEEP))
    settings = chosen(own, {"heads": ("each", "same")})
    try:
        life = Compact(float(text))
    except ValueError:
        life = Compact(0)
    if life.problem(page_tokens):
        raise KvlatheError(
            f"keep={text} cannot be used",
            "it is a share of the KV pairs, above 0 and at most 1",
            f"write keep={KEEP}",
        )
    return Decision(tokens=(life,), apart=settings["heads"] == "each")
