"""The eager op is softmax attention over everything that a plan's pages hold."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch
from attend_cases import Case, cases
from hypothesis import given, settings

from kvlathe.export.attend import AttendLayer


def eager(case: Case, dtype: torch.dtype = torch.float32) -> tuple[npt.NDArray[np.float64], npt.NDArray[np.float64]]:
    """o and rows of the real tokens."""
    layer = AttendLayer(case.plan, case.layer, case.scale, dtype)
    layer.load_state_dict(case.state(dtype))
    out, rows = layer(*case.packed(dtype), case.step(dtype))
    return out[: case.total].double().numpy(), rows[: case.total].double().numpy()


@settings(max_examples=100, deadline=None)
@given(cases())
def test_eager_is_plain_attention(case: Case) -> None:
    """A key may round to the next half: that is all that single precision may change."""
    out, rows = eager(case)
    expected_out, expected_rows = case.expected()
    np.testing.assert_allclose(rows, expected_rows, rtol=2e-3, atol=2e-3)
    np.testing.assert_allclose(out, expected_out, rtol=3e-3, atol=3e-3)
