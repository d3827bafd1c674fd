"""What guesses the tokens of an engine, by its name."""

from __future__ import annotations

from pathlib import Path

from kvlathe.base.errors import KvlatheError
from kvlathe.plan.plan import CompressionPlan
from kvlathe.plan.rank_plan import RankPlan
from kvlathe.runtime.drafting.lookup import PromptLookup
from kvlathe.runtime.scheduling.speculation import Drafter

NGRAM = "ngram"
"""Prompt look-up, as vLLM calls it."""


def check_speculation(plan: CompressionPlan) -> None:
    """Raises KvlatheError where guesses that are wrong would leave something behind."""
    if plan.ranked:
        fact = (
            "its plan ranks tokens by what all rows attend, those of wrong guesses too"
        )
        remedy = "leave --speculative out, or build without a token rule"
    elif isinstance(plan, RankPlan):
        fact = "it is spread over several GPUs"
        remedy = "leave --speculative out, or run it on one GPU"
    else:
        return
    raise KvlatheError("this engine cannot speculate", fact, remedy)


def drafter(name: str | Path, plan: CompressionPlan) -> Drafter:
    """Of an engine of ``plan``. Raises KvlatheError for a name that is none."""
    if name == NGRAM:
        return PromptLookup()
    raise KvlatheError(f"{name} guesses no tokens", "it is not known", f"give {NGRAM}")
