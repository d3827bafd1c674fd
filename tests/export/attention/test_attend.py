"""The eager op is softmax attention over everything that a plan's pages hold."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import numpy.typing as npt
import torch
from hypothesis import given, settings

from kvlathe.export.attention.eager import AttendLayer
from tests.support.attend_cases import Case, cases


def eager(
    case: Case, dtype: torch.dtype = torch.float32
) -> tuple[npt.NDArray[np.float64], npt.NDArray[np.float64]]:
    """o and rows of the real tokens."""
    layer = AttendLayer(case.plan, case.layer, case.scale, dtype)
    layer.load_state_dict(case.state(dtype))
    out, rows, *_ = layer(*case.packed(dtype), case.step(dtype))
    return out[: case.total].double().numpy(), rows[: case.total].double().numpy()


@settings(max_examples=100)
@given(cases())
def test_the_eager_op_is_softmax_attention_in_float64(case: Case) -> None:
    """A key may round to the next half: that is all that single precision may
    change."""
    out, rows = eager(case)
    expected_out, expected_rows = case.expected()
    np.testing.assert_allclose(rows, expected_rows, rtol=2e-3, atol=2e-3)
    np.testing.assert_allclose(out, expected_out, rtol=3e-3, atol=3e-3)


def observed_mass(case: Case) -> npt.NDArray[np.floating]:
    """mass [B, H, N] of the eager op."""
    layer = AttendLayer(case.plan, case.layer, case.scale)
    layer.load_state_dict(case.state())
    return layer(*case.packed(), case.step())[2].numpy()


@settings(max_examples=60)
@given(cases().filter(lambda case: case.plan.index.observes))
def test_probe_mass_is_what_observed_rows_attend(case: Case) -> None:
    found = observed_mass(case)
    np.testing.assert_allclose(found, case.expected_mass(), rtol=3e-3, atol=3e-3)
    if case.plan.index.compaction or case.plan.model.sinks:
        return
    starts = np.cumsum([0, *case.queries])
    rows = [case.weights[a:z].sum() for a, z in pairwise(starts)]
    heads = case.plan.model.group_size
    np.testing.assert_allclose(
        found.sum(-1), np.outer(rows, [heads] * len(case.lanes)), rtol=1e-4
    )
