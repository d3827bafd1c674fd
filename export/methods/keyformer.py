"""Keyformer (arXiv 2403.09054): accumulated attention with Gumbel noise, against the
bias of what was dropped.

For comparison. The paper perturbs logits with a temperature that rises; here the noise
is added to the logarithm of the accumulated attention, once for each token.
"""

from __future__ import annotations

from kvlathe.export.methods.budgets import budgeted
from kvlathe.plan.token_score import ObservationWindow

METHOD = budgeted(
    "comparison: keep the newest tokens and those of most attention, with Gumbel noise",
    ObservationWindow(recent=1.0, noise=0.5),
    recent=0.3,
)
