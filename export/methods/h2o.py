"""H2O (arXiv 2306.14048): half of the budget for the newest tokens, half for those that
all rows attended most.

For comparison. The paper evicts a token at every step; here a page of them when a page
is full.
"""

from __future__ import annotations

from kvlathe.export.methods.budgets import budgeted
from kvlathe.plan.token_score import ObservationWindow

METHOD = budgeted(
    "comparison: keep the newest tokens and those of most accumulated attention",
    ObservationWindow(recent=1.0),
    recent=0.5,
)
