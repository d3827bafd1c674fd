"""The eager op is softmax attention over everything that a plan's pages hold."""

from __future__ import annotations

import numpy as np
import torch
from hypothesis import given, settings

from kvlathe.export.attend import AttendLayer
from attend_cases import Case, cases


def eager(case: Case, dtype: torch.dtype = torch.float32) -> tuple[np.ndarray, np.ndarray]:
    layer = AttendLayer(case.plan, case.layer, case.scale, dtype)
    layer.load_state_dict(case.state(dtype))
    out, rows = layer(*case.packed(dtype), case.step(dtype))
    return out[: case.total].double().numpy(), rows[: case.total].double().numpy()


@settings(max_examples=150, deadline=None)
@given(cases())
def test_eager_is_plain_attention(case: Case) -> None:
    out, rows = eager(case)
    expected_out, packed = case.expected()
    expected_rows = np.split(packed, np.cumsum([x.shape[1] for x in case.k]), 1)
    del expected_rows
    np.testing.assert_allclose(rows, packed, rtol=2e-3, atol=2e-3)
    np.testing.assert_allclose(out, expected_out, rtol=3e-3, atol=3e-3)
