"""SnapKV (arXiv 2404.14469): the last 32 rows of a prompt choose what stays, pooled
over 7 neighbours.

For comparison. The paper leaves what is generated alone; here the last rows of a page
cut it to the budget too.
"""

from __future__ import annotations

from kvlathe.export.methods.budgets import budgeted
from kvlathe.plan.token_score import ObservationWindow

METHOD = budgeted(
    "comparison: keep what the last rows of the prompt attend, with its neighbours",
    ObservationWindow(last=32, accumulated=False, pooling=7),
    recent=0.0625,
)
