"""SnapKV (arXiv 2404.14469): the last 32 rows of a prompt choose what stays, pooled
over 7 neighbours.

For comparison. The paper leaves what is generated alone; here the last rows of a page
cut it to the budget too.
"""

from __future__ import annotations

from kvlathe.export.methods.budgets import budget
from kvlathe.export.methods.options import Decision
from kvlathe.plan.observation import ObservationWindow

SUMMARY = (
    "comparison: keep what the last rows of the prompt attend, with its neighbours"
)
WINDOW, POOLING = 32, 7


def plan(written: dict[str, str], page_tokens: int) -> Decision:
    """Options ``budget`` (tokens) and ``recent`` (share of it). Raises KvlatheError."""
    return budget(
        written,
        page_tokens,
        ObservationWindow(last=WINDOW, accumulated=False, pooling=POOLING),
        0.0625,
    )
