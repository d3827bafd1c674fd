"""H2O (arXiv 2306.14048): half of the budget for the newest tokens, half for those that
all rows attended most.

For comparison. The paper evicts a token at every step; here a page of them when a page
is full.
"""

from __future__ import annotations

from kvlathe.export.methods.budgets import budget
from kvlathe.export.methods.options import Decision
from kvlathe.plan.observation import ObservationWindow

SUMMARY = "comparison: keep the newest tokens and those of most accumulated attention"


def plan(written: dict[str, str], page_tokens: int) -> Decision:
    """Options ``budget`` (tokens) and ``recent`` (share of it). Raises KvlatheError."""
    return budget(written, page_tokens, ObservationWindow(recent=1.0), 0.5)
