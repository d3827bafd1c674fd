"""Statistics that nobody measured."""

from __future__ import annotations

import pytest

from kvlathe.export.calibration.stats import Stats
from tests.support import stats_cases


@pytest.fixture(scope="session")
def made_up() -> Stats:
    """Read only."""
    return stats_cases.stats(0)
