"""Keyformer (arXiv 2403.09054): accumulated attention with Gumbel noise, against the
bias of what was dropped.

For comparison. The paper perturbs logits with a temperature that rises; here the noise
is added to the logarithm of the accumulated attention, once for each token.
"""

from __future__ import annotations

from kvlathe.export.methods.budgets import budget
from kvlathe.export.methods.options import Decision
from kvlathe.plan.observation import ObservationWindow

SUMMARY = (
    "comparison: keep the newest tokens and those of most attention, with Gumbel noise"
)
NOISE = 0.5


def plan(written: dict[str, str], page_tokens: int) -> Decision:
    """Options ``budget`` (tokens) and ``recent`` (share of it). Raises KvlatheError."""
    observation = ObservationWindow(recent=1.0, noise=NOISE)
    return budget(written, page_tokens, observation, 0.3)
