"""TOVA (arXiv 2401.06104): keep what the last row attends.

For comparison. The paper evicts a token at every step and takes the mean over heads; here
a page of tokens when a page is full, by the last row of that page, each KV head by itself.
"""

from __future__ import annotations

from kvlathe.export.methods.budgets import budgeted
from kvlathe.plan.token_score import ObservationWindow

METHOD = budgeted(
    "comparison: keep the tokens that the last row attends",
    ObservationWindow(last=1, accumulated=False),
    recent=0.0,
)
