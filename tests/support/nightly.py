"""Cases of a law that only a nightly run has."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest


def rest_nightly(every: Iterable[Any], *always: Any) -> list[Any]:  # noqa: ANN401
    """``every`` case, as parameters of a test: those not in ``always`` run nightly."""
    cases = list(every)
    assert all(case in cases for case in always), always
    return [
        pytest.param(
            *(case if isinstance(case, tuple) else [case]),
            marks=[] if case in always else pytest.mark.nightly,
        )
        for case in cases
    ]
