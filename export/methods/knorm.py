"""Key norms (arXiv 2406.11430): keep the tokens whose keys are short, as these get most
attention.

For comparison. The paper leaves the first two layers whole; here all layers are alike.
The newest tokens stay.
"""

from __future__ import annotations

from kvlathe.export.methods.budgets import budgeted
from kvlathe.plan.token_score import KeyFormula

METHOD = budgeted(
    "comparison: keep the newest tokens and those of the shortest keys",
    KeyFormula("-norm(keys)"),
    recent=0.0625,
)
