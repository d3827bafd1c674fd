"""What the methods share that keep a budget of tokens by attention: how their options
are written."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

from kvlathe.base.errors import KvlatheError
from kvlathe.export.methods.options import Decision, known_only
from kvlathe.plan.lives import Budget
from kvlathe.plan.observation import ObservationWindow

BUDGET = 512
"""Tokens, unless asked otherwise; and tokens of a slice."""

MOST = 1 << 31
"""Tokens that no sequence has."""


def budget(
    written: dict[str, str],
    page_tokens: int,
    observation: ObservationWindow,
    recent: float,
) -> Decision:
    """Every lane keeps ``budget`` tokens, whole pages, the share ``recent`` of them the
    newest. Raises KvlatheError."""
    known_only(written, ("budget", "recent", "slice"))
    tokens, share = (
        _number(written, key, default)
        for key, default in (("budget", BUDGET), ("recent", recent))
    )
    if not page_tokens <= tokens < MOST or not 0 <= share <= 1:
        raise KvlatheError(
            f"budget={tokens:g},recent={share:g} cannot be used",
            f"a page holds {page_tokens} tokens, and recent is a share of the budget",
            "write for example budget=512,recent=0.5",
        )
    size = round(tokens / page_tokens) * page_tokens
    return Decision(
        tokens=(Budget(size, recent=round(share * size)),),
        observation=sliced(observation, written, BUDGET),
    )


def sliced(
    observation: ObservationWindow, written: Mapping[str, str], default: int
) -> ObservationWindow:
    """Prompts are ranked in slices of ``slice`` tokens (0: whole), as written or by
    ``default``. Raises KvlatheError."""
    size = _number(written, "slice", default)
    if not 0 <= size < MOST or size != int(size):
        raise KvlatheError(
            f"slice={size:g} cannot be used",
            "it is a count of tokens, or 0 for whole prompts",
            f"write slice={default}",
        )
    return dataclasses.replace(observation, slice_tokens=int(size))


def _number(written: Mapping[str, str], key: str, default: float) -> float:
    try:
        return float(written.get(key, default))
    except ValueError:
        raise KvlatheError(
            f"{key}={written[key]} cannot be used",
            "it is no number",
            f"write {key}={default}",
        ) from None
