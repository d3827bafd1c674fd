"""Preemption that a test asks for."""

from __future__ import annotations

import pytest

from kvlathe.runtime.scheduling.scheduler import Scheduler
from kvlathe.runtime.scheduling.sequence import Sequence


def preempt_all(
    scheduler: Scheduler, recomputes: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every request begins at once, whether it fits or not. Those that make room for
    others are computed again, or else wait on the host."""

    def all_fit(sequences: list[Sequence]) -> bool:
        return True

    def chosen(sequence: Sequence, size: int) -> bool:
        return recomputes

    monkeypatch.setattr(scheduler.admission, "fits", all_fit)
    monkeypatch.setattr(scheduler, "_recomputes", chosen)
