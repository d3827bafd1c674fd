"""Methods that keep a budget of tokens: their options, and the method that
follows from what tokens are ranked by.

>>> from kvlathe.export.methods.compression import parse
>>> (asked,) = parse("h2o:budget=256").methods
>>> (life,) = asked.outline(page_tokens=64).tokens
>>> life.recent
128
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

from kvlathe.base.errors import KvlatheError
from kvlathe.export.methods.method import Decision, Method
from kvlathe.export.methods.options import (
    MethodOptions,
    Number,
    count,
    option,
)
from kvlathe.plan.lives import Budget
from kvlathe.plan.token_score import TokenScore

SLICED = "Tokens of a prompt that are ranked together; 0 for a whole prompt."


@dataclass(frozen=True)
class BudgetOptions(MethodOptions):
    """The tokens that a lane keeps."""

    budget: int = option(
        512,
        count("a count of tokens", 1),
        "Tokens that each head keeps, in whole pages.",
    )
    recent: float = option(
        0.5,
        Number("a share of the budget"),
        "Share of the budget for the newest tokens.",
    )
    slice: int = option(512, count("a count of tokens"), SLICED)


def budgeted(summary: str, score: TokenScore, recent: float) -> Method[BudgetOptions]:
    """The method whose lanes keep ``budget`` tokens: the share ``recent`` of them, unless
    asked otherwise, is the newest, and ``score`` ranks the others."""

    def plan(options: BudgetOptions, page_tokens: int) -> Decision:
        return _kept(options, page_tokens, score)

    return Method(summary, BudgetOptions(recent=recent), plan=plan)


def _kept(options: BudgetOptions, page_tokens: int, score: TokenScore) -> Decision:
    """One budget for every lane, in whole pages. Raises KvlatheError for less than
    one."""
    if options.budget < page_tokens:
        raise KvlatheError(
            f"budget={options.budget} cannot be used",
            f"a page holds {page_tokens} tokens",
            f"write for example budget={max(512, page_tokens)}",
        )
    size = round(options.budget / page_tokens) * page_tokens
    return Decision(
        tokens=(Budget(size, recent=round(options.recent * size)),),
        score=dataclasses.replace(score, slice_tokens=options.slice),
    )
