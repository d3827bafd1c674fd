"""A measurement says what a plan loses: as the engine's own evaluation does, as float64
does, and on text that nothing has read."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from kvlathe.base.errors import KvlatheError
from kvlathe.engines.build import BuildConfig, build
from kvlathe.engines.job import prepare
from kvlathe.engines.order import accept
from kvlathe.engines.planning import plan_for
from kvlathe.evaluation.evaluate import text_scores
from kvlathe.export.folding.fold import decoder_from
from kvlathe.export.methods.composition import Made
from kvlathe.export.model.checkpoint import Checkpoint
from kvlathe.export.search.sealed import reading
from kvlathe.measuring import layerwise, losses
from kvlathe.measuring import measure as measuring
from kvlathe.measuring.layerwise import BothModels
from kvlathe.measuring.losses import exercise_sums, text_sums
from kvlathe.measuring.measure import measure, uncompressed
from kvlathe.measuring.sequences import Group, Passage
from kvlathe.plan.measurement import MOST
from kvlathe.runtime.llm import LLM
from kvlathe.tasks.held_out import HeldOut
from kvlathe.tasks.metrics import Sums
from tests.support.checkpoints import make_model
from tests.support.families import FAMILIES
from tests.support.families.sizes import sizes

LATHE = Path(__file__).parents[2] / "models" / "lathe-5m"
SIZED: dict[str, Any] = {"calibration": "random", "removal_rate": 0.3}
ENOUGH = 1e4
"""Seconds."""


class Recorded(HeldOut):
    """Random tokens, and the windows that were taken."""

    def __init__(self, vocabulary: int) -> None:
        super().__init__((), None, vocabulary, (), 3)
        self.windows: list[list[int]] = []

    def window(self, tokens: int) -> list[int]:
        self.windows.append(super().window(tokens))
        return self.windows[-1]


def asked_for(model: Path, folder: Path, compression: str) -> BuildConfig:
    sized = SIZED if compression == "fdc" else {}
    return BuildConfig(
        model, folder, compression, max_seq_len=256, prefill_chunk=64, **sized
    )


def planned(model: Path, folder: Path, compression: str) -> tuple[Checkpoint, Made]:
    """A plan as a build makes it."""
    job = prepare(accept(asked_for(model, folder, compression)))
    found = plan_for(job.order, job.checkpoint)
    return job.checkpoint, (found.plan, found.basis)


@pytest.fixture(scope="module", autouse=True)
def own_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Statistics are taken once."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("KVLATHE_CACHE", str(tmp_path_factory.mktemp("cache")))
        yield


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model with heads that are worth cutting."""
    folder = tmp_path_factory.mktemp("model")
    make_model(folder, "Llama", sizes(64, 2, 1, head_dim=64))
    return folder


@pytest.fixture(scope="module")
def whole(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LLM]:
    """The uncompressed engine of the tiny model."""
    folder = tmp_path_factory.mktemp("engines") / "whole"
    llm = LLM.load(build(asked_for(model, folder, "none")))
    yield llm
    llm.close()


@pytest.mark.parametrize("family", ["llama-dynamic", "gemma2"])
def test_a_plan_that_removes_nothing_loses_nothing(family: str, tmp_path: Path) -> None:
    make_model(tmp_path / "model", *FAMILIES[family])
    checkpoint, made = planned(tmp_path / "model", tmp_path / "engine", "none")
    found = measure(checkpoint, made, Recorded(97), ENOUGH)
    assert found is not None
    assert [one.tokens for one in found.lengths] == [256]
    assert found.whole.kl == 0 and found.whole.same_token == 1
    assert found.whole.perplexity_ratio == 1 and not found.breaks


@pytest.mark.slow
@pytest.mark.parametrize(
    "compression",
    ["hack:bits=2", "fdc", "window:recent=32", "h2o:budget=64", "zipcache"],
)
def test_a_measurement_says_what_the_evaluation_of_the_engine_says(
    compression: str, model: Path, whole: LLM, tmp_path: Path
) -> None:
    """Sealed plans layer by layer, ranked ones through pages: both beside the engine on
    its own backend."""
    checkpoint, made = planned(model, tmp_path / "engine", compression)
    held_out = Recorded(97)
    found = measure(checkpoint, made, held_out, ENOUGH)
    assert found is not None
    engine = LLM.load(build(asked_for(model, tmp_path / "engine", compression)))
    scores = text_scores(engine, whole, held_out.windows)
    engine.close()
    (one,) = found.lengths
    assert one.kl > 1e-6
    assert one.kl == pytest.approx(scores["kl"], rel=0.02)
    assert one.same_token == pytest.approx(scores["agreement"], abs=0.005)
    assert one.perplexity_ratio == pytest.approx(scores["perplexity_ratio"], rel=2e-3)


@pytest.mark.parametrize(
    "family", ["llama", "gemma2", "gpt2", "gpt_oss", "mixtral", "youtu"]
)
def test_layer_by_layer_gives_the_logits_of_the_whole_decoder(
    family: str, tmp_path: Path
) -> None:
    make_model(tmp_path / "model", *FAMILIES[family])
    checkpoint, made = planned(tmp_path / "model", tmp_path / "engine", "hack:bits=4")
    ids = tuple(np.random.default_rng(0).integers(97, size=200).tolist())
    rows = tuple(range(199))
    whole = uncompressed(checkpoint, made[0])
    models = BothModels(checkpoint, whole, made)
    (work,) = models.run([Group(200, (Passage(ids, rows),))], ENOUGH)
    (running,) = work.whole
    assert running.planned is not None
    with torch.inference_mode():
        for hidden, one in ((running.hidden, whole), (running.planned, made)):
            found = models.head(hidden[:199])
            known = reading(decoder_from(checkpoint, *one)).logits(ids, rows)
            assert (found - known).abs().max() < 1e-3


def test_sums_of_blocks_are_those_of_float64(monkeypatch: pytest.MonkeyPatch) -> None:
    rng = np.random.default_rng(5)
    whole, plan = (rng.normal(size=(50, 301)).astype(np.float32) * 4 for _ in range(2))
    targets = rng.integers(301, size=50)
    monkeypatch.setattr(losses, "NUMBERS_AT_ONCE", 7 * 301)
    largest = 0

    def rows(logits: np.ndarray) -> Callable[[slice], torch.Tensor]:
        def of(block: slice) -> torch.Tensor:
            nonlocal largest
            largest = max(largest, block.stop - block.start)
            return torch.from_numpy(logits[block])

        return of

    found = text_sums(rows(whole), rows(plan), torch.from_numpy(targets), 301)
    known = Sums.of(plan, targets, whole)
    assert largest == 7
    assert found.kl == pytest.approx(known.kl, rel=1e-12)
    assert found.same == known.agreed and found.rows == known.tokens
    assert found.nll == pytest.approx(known.nll, rel=1e-12)
    assert found.whole_nll == pytest.approx(Sums.of(whole, targets).nll, rel=1e-12)


def test_logits_that_are_no_numbers_break_the_model() -> None:
    whole = torch.randn(8, 31)
    targets = torch.arange(8)
    plan = torch.full_like(whole, torch.nan)
    found = text_sums(whole.__getitem__, plan.__getitem__, targets, 31).loss(9)
    assert found.breaks and found.kl == found.perplexity_ratio == MOST
    with pytest.raises(KvlatheError, match="without any compression"):
        text_sums(plan.__getitem__, whole.__getitem__, targets, 31)


def test_a_ranked_plan_of_a_model_that_does_not_fit_is_not_measured(
    model: Path, tmp_path: Path, logged: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(measuring.machine, "memory_bytes", lambda: 10_000)
    checkpoint, made = planned(model, tmp_path / "engine", "h2o:budget=64")
    assert measure(checkpoint, made, Recorded(97), ENOUGH) is None
    assert "the whole model must be in memory" in logged[-1]


def test_exercises_count_answers_that_depend_on_what_is_far() -> None:
    """Of six answers: known from far and kept, known from far and lost, known from near
    as well, never known, and two more that are kept."""
    targets = torch.tensor([1, 1, 1, 1, 2, 2])
    sure, unsure, wrong = [0.0, 9.0, 0.0], [1.0, 1.0, 1.0], [9.0, 0.0, 0.0]
    two = [0.0, 0.0, 9.0]
    whole = torch.tensor([sure, sure, sure, wrong, two, two])
    near = torch.tensor([unsure, unsure, sure, unsure, unsure, unsure])
    plan = torch.tensor([sure, wrong, sure, sure, two, two])
    found = exercise_sums(
        whole.__getitem__, near.__getitem__, plan.__getitem__, targets, 3
    )
    assert (found.exercises, found.kept) == (4, 3)


def test_where_there_is_no_time_a_few_tokens_are_measured(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(layerwise, "LEAST_TOKENS", 128)
    checkpoint, made = planned(model, tmp_path / "engine", "hack:bits=2")
    found = measure(checkpoint, made, Recorded(97), 0.0)
    assert found is not None
    assert [one.tokens for one in found.lengths] == [128]
    assert "no time for 256 tokens" in found.line and found.is_short
    assert math.isfinite(found.whole.kl) and found.whole.scored > 0


@pytest.mark.parametrize(
    ("compression", "idle"),
    [
        ("hack:bits=8", False),
        ("window:sink=0,recent=64", False),
        ("window:sink=0,recent=128", True),
        ("window:sink=0,recent=128+hack:bits=2", True),
        ("knorm:budget=64", False),
        ("knorm:budget=128", True),
    ],
)
def test_a_measurement_is_idle_where_the_plan_keeps_all_that_was_read(
    model: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    compression: str,
    idle: bool,
) -> None:
    """Whatever it lost: bits lose at any length. Pages have 64 tokens."""
    monkeypatch.setattr(layerwise, "LEAST_TOKENS", 192)
    checkpoint, made = planned(model, tmp_path / "engine", compression)
    found = measure(checkpoint, made, Recorded(97), 0.0)
    assert found is not None and found.whole.tokens == 192
    assert found.is_idle == idle
    found = measure(checkpoint, made, Recorded(97), ENOUGH)
    assert found is not None and not found.is_idle


@pytest.mark.slow
def test_exercises_are_kept_by_a_plan_that_keeps_everything_and_lost_by_a_window(
    tmp_path: Path,
) -> None:
    """The trained model knows what it was told long before, and no window does."""
    counts = {}
    for compression in ("hack:bits=8", "window:recent=64"):
        asked = BuildConfig(LATHE, tmp_path / "engine", compression, max_seq_len=1024)
        job = prepare(accept(asked))
        plan = plan_for(job.order, job.checkpoint)
        held_out = HeldOut((), None, job.checkpoint.spec.vocab_size)
        made = plan.plan, plan.basis
        found = measure(job.checkpoint, made, held_out, ENOUGH)
        assert found is not None
        counts[compression] = found.whole.kept / found.whole.exercises
    assert counts["hack:bits=8"] > 0.9 > 0.5 > counts["window:recent=64"]
