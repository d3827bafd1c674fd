"""KeyDiff (arXiv 2504.15364): keep the tokens whose keys are least like the others, by the
cosine to the mean direction of all cached keys.

For comparison. The paper evicts when a block of a prompt or a token arrives; here a page
of tokens when a page is full. The newest tokens stay.
"""

from __future__ import annotations

from kvlathe.export.methods.budgets import budgeted
from kvlathe.plan.token_score import KeyFormula

METHOD = budgeted(
    "comparison: keep the newest tokens and those whose keys differ from the others",
    KeyFormula("-dot(unit(keys), unit(mean(unit(keys))))"),
    recent=0.0625,
)
