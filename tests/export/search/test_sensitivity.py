"""Gradients: the last layer computes few places, and all lanes' pulls
are those of a whole run."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from kvlathe.export.bases.basis import Basis
from kvlathe.export.folding.fold import decoder_from
from kvlathe.export.model import decoder as decoders
from kvlathe.export.model.checkpoint import Checkpoint
from kvlathe.export.search import readings, sensitivity
from tests.support.runtime_cases import MODEL, model_shape, plans, text


def test_gradients_of_few_places_are_those_of_a_whole_run(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Also where the answer's places are not at the end."""
    plan = plans(model_shape())["one"]
    decoder = decoder_from(Checkpoint(MODEL), plan, Basis())
    ids = tuple(text(150))
    rows = [40, 41, 90, 147, 148]
    score = readings.margin_score([ids[row + 1] for row in rows])
    reading = readings.Reading(ids, rows, score, 2, 1.0)

    def lanes() -> list[sensitivity.ObservedLane]:
        draw = torch.Generator().manual_seed(0)
        return sensitivity.observe(decoder, reading, draw)

    few = lanes()
    monkeypatch.setattr(decoders, "FEW", 0.0)
    whole = lanes()
    assert len(few) == len(whole) == plan.model.layers * plan.model.kv_heads
    for found, expected in zip(few, whole, strict=True):
        largest = float(expected.pull.abs().max())
        assert largest > 0
        torch.testing.assert_close(
            found.pull, expected.pull, rtol=1e-3, atol=1e-4 * largest
        )
        torch.testing.assert_close(found.q, expected.q)
    last = few[-1].pull.abs().sum((0, 1, 3))
    assert np.flatnonzero(last.numpy()).tolist() == rows
