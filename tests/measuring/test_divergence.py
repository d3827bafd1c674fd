"""The divergence by which a search scores plans is that of the two models' logits, at the
first positions and at the last ones."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest
import torch

from kvlathe.export.calibration.calibrate import calibrate_on, random_sequences
from kvlathe.export.folding.fold import decoder_from
from kvlathe.export.methods.composition import CacheSettings, Made, compose
from kvlathe.export.methods.compression import parse
from kvlathe.export.methods.options import RankOptions
from kvlathe.export.model.checkpoint import Checkpoint
from kvlathe.export.search.sealed import reading
from kvlathe.measuring.divergence import STRIDE, Divergence
from kvlathe.measuring.losses import Sums
from kvlathe.plan.measurement import MOST
from tests.support.checkpoints import make_model
from tests.support.families.sizes import sizes

IDS = np.random.default_rng(2).integers(0, 97, (2, 150)).tolist()


def made(checkpoint: Checkpoint, compression: str, rate: float | None) -> Made:
    spec = checkpoint.spec
    sequences = random_sequences(spec.vocab_size, 400, 0, 200)
    stats = calibrate_on(checkpoint, sequences, 0, {}, with_entropies=False)
    options = RankOptions(removal_rate=rate)
    settings = CacheSettings(32, prefill_chunk=64)
    return compose(parse(compression), spec.shape, True, stats, options, settings)


def kl(whole: torch.Tensor, planned: torch.Tensor) -> float:
    """The mean over the scored places of logits [T, V]."""
    rows = torch.arange(len(whole) - 2, -1, -STRIDE)
    p = whole[rows].double().log_softmax(-1)
    q = planned[rows].double().log_softmax(-1)
    return float((p.exp() * (p - q)).sum(-1).mean())


@pytest.fixture
def model(tmp_path: Path) -> tuple[Path, torch.nn.Module]:
    """A tiny model with heads that are worth cutting."""
    found = make_model(tmp_path / "model", "Llama", sizes(64, 2, 1, head_dim=64))
    return tmp_path / "model", found


def logits(
    model: torch.nn.Module, ids: list[int], start: int
) -> torch.Tensor:  # [T, V]
    places = torch.arange(start, start + len(ids))[None]
    with torch.no_grad():
        return model(torch.tensor([ids]), position_ids=places).logits[0]


@pytest.mark.parametrize(("compression", "rate"), [("fdc", 0.5), ("hack:bits=2", None)])
def test_a_divergence_is_that_of_the_logits_of_whole_decoders(
    compression: str, rate: float | None, model: tuple[Path, torch.nn.Module]
) -> None:
    """At the first positions, where a decoder begins."""
    checkpoint = Checkpoint(model[0])
    plan = made(checkpoint, compression, rate)
    found = Divergence(checkpoint, IDS[:1]).kl(plan)
    decoder = reading(decoder_from(checkpoint, *plan))
    planned = decoder.logits(IDS[0], range(len(IDS[0])))
    assert found == pytest.approx(kl(logits(model[1], IDS[0], 0), planned), rel=1e-3)
    assert found > 1e-6


def test_a_plan_that_removes_nothing_diverges_nowhere(
    model: tuple[Path, torch.nn.Module],
) -> None:
    checkpoint = Checkpoint(model[0])
    assert Divergence(checkpoint, IDS).kl(made(checkpoint, "fdc", 0.0)) < 1e-9


def test_every_second_window_lies_at_the_end_of_the_longest_sequence(
    model: tuple[Path, torch.nn.Module],
) -> None:
    """Its hidden states are the model's at those positions; the worse window counts."""
    checkpoint = Checkpoint(model[0])
    divergence = Divergence(checkpoint, IDS)
    last = checkpoint.spec.max_seq_len
    assert last > 300
    rows = list(range(0, 149, STRIDE))
    for window, hidden, start in zip(
        IDS, divergence._whole, (0, last - 150), strict=True
    ):
        theirs = logits(model[1], window, start)[rows]
        torch.testing.assert_close(
            divergence._model.head(hidden), theirs, atol=2e-4, rtol=1e-3
        )
    plan = made(checkpoint, "fdc", 0.5)
    each = [one.kl / one.rows for one in divergence.sums(plan)]
    assert divergence.kl(plan) == max(each) and each[0] != each[1]


def test_a_divergence_that_is_no_number_is_more_than_any(
    model: tuple[Path, torch.nn.Module], monkeypatch: pytest.MonkeyPatch
) -> None:
    divergence = Divergence(Checkpoint(model[0]), IDS)
    broken = [Sums(rows=1, kl=0.5), Sums(rows=1, kl=math.nan)]
    monkeypatch.setattr(divergence, "sums", lambda _: broken)
    assert divergence.kl(made(divergence._checkpoint, "fdc", 0.5)) == MOST
