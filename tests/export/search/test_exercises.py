"""Exercises: what is asked can be known from far alone, and is asked only where the
model knows it; a head that carries it is priced far above text's price."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvlathe.export.methods.forms import Part
from kvlathe.export.model.checkpoint import Checkpoint
from kvlathe.export.model.layered import LayeredModel
from kvlathe.export.search import exercises, readings, sensitivity
from kvlathe.plan.formats import Format
from kvlathe.plan.lives import Window
from kvlathe.tasks import tasks

LATHE = Path(__file__).resolve().parents[3] / "models" / "lathe-5m"
TEXT = LATHE.parents[1] / "data" / "calibration_text.jsonl"


@cache
def lathe() -> tuple[LayeredModel, list[int]]:
    encoder = tasks.FolderEncoder(LATHE)
    documents = tasks.encode_documents(encoder, tasks.read_texts(TEXT)[-40:])
    return LayeredModel(Checkpoint(LATHE)), [t for ids in documents for t in ids][:6000]


@pytest.mark.parametrize("length", [64, 100, 200, exercises.LEAST - 1])
def test_short_sequences_have_nothing_far(length: int) -> None:
    model, text = lathe()
    assert exercises.exercises(model, text, length, 1, 0) == []


@settings(max_examples=30)
@given(
    kind=st.sampled_from(exercises.KINDS),
    length=st.integers(300, 900),
    seed=st.integers(0, 99),
)
def test_answers_stand_in_what_came_before(
    kind: exercises.Kind, length: int, seed: int
) -> None:
    """The tokens before an answer, and the answer, came once already, before the
    start."""
    text = list(np.random.default_rng(1).integers(0, 5000, 2000))
    rng = np.random.default_rng(seed)
    exercise = kind(text, length, rng)
    assert len(exercise.ids) <= length and exercise.answers
    before = exercise.ids[: exercise.start]
    for place in exercise.answers:
        first = (place - exercise.start) % exercises.PASSAGE == 0
        context = 0 if kind is exercises.copying and first else 1
        asked = exercise.ids[place - context : place + 1]
        found = (before[i : i + len(asked)] for i in range(len(before)))
        assert asked in found


@settings(max_examples=20)
@given(length=st.integers(600, 3000), seed=st.integers(0, 99))
def test_a_passage_comes_once_before_it_is_asked_for(length: int, seed: int) -> None:
    """One in each equal part, however short the text that the rest is made of: else a
    window that has only the last part would find it."""
    text = list(range(1000))
    rng = np.random.default_rng(seed)
    exercise = exercises.copying(text, length, rng)
    before = exercise.ids[: exercise.start]
    asked = exercise.ids[exercise.start :]
    size = exercises.PASSAGE
    places: list[int] = []
    for start in range(0, len(asked), size):
        passage = asked[start : start + size]
        ends = range(len(before) - size + 1)
        found = [at for at in ends if before[at : at + size] == passage]
        assert len(found) == 1
        places += found
    parts = [at * exercises.PASSAGES // exercise.start for at in sorted(places)]
    for part, own in enumerate(parts):
        assert part - 1 <= own <= part + 1  # passages before it move it on


def test_only_what_the_model_knows_from_afar_is_asked() -> None:
    model, text = lathe()
    made = exercises.exercises(model, text, 512, 2, seed=0)
    assert 2 <= len(made) <= 4
    asked = sum(r.weight * r.draws * len(r.rows) for r in made)
    assert asked == pytest.approx(exercises.WEIGHT)
    for reading in made:
        assert len(reading.rows) >= exercises.FEW and len(reading.ids) <= 512
        logits = model.logits(reading.ids, reading.rows)
        answers = [reading.ids[row + 1] for row in reading.rows]
        assert logits.argmax(-1).tolist() == answers


def test_a_text_that_nobody_can_copy_gives_no_exercise() -> None:
    """There is nothing to protect where the model fails."""
    model, _ = lathe()
    assert exercises.exercises(model, [7], 300, 1, seed=0) == []


def test_exercises_price_the_head_that_looks_far() -> None:
    """lathe-5m has one head without which it finds nothing: windows cost it many times
    what they cost any other, and far more than text says."""
    model, text = lathe()
    windows = [Window(64, 128)]
    page, none = 64, lambda *_: []
    far = exercises.exercises(model, text, 1024, 2, seed=0, far=True)
    gone = exercises.exercises(model, text, 1024, 2, seed=0, far=True, gaps=512)
    for some, more in ((far, 1), (gone, exercises.TOGETHER)):
        weights = sum(x.weight * x.draws * len(x.rows) for x in some)
        assert weights == pytest.approx(exercises.WEIGHT * more)
    asked = sensitivity.losses(model, far, none, windows, page).windows[:, 0]
    read = readings.of_text([tuple(text[:1024])], far=True)
    said = sensitivity.losses(model, read, none, windows, page).windows[:, 0]
    order = np.argsort(asked)
    assert asked[order[-1]] > 5 * asked[order[-2]]
    assert asked[order[-1]] > 5 * exercises.WEIGHT * said.max()


def test_first_tokens_stay_as_they_are_in_every_layer() -> None:
    """2 bits cost nothing where all tokens are first ones, whichever the layer."""
    model, text = lathe()
    read = readings.of_text([tuple(text[:256])])
    size = model.spec.shape.head_dim
    whole = sensitivity.Candidate(
        torch.eye(size), torch.eye(size), torch.zeros(size), (Format(2, "rank", 64),)
    )
    parts = Part(), Part(skip=256)
    found = sensitivity.losses(model, read, lambda *_: [whole], [], 64, parts=parts)
    coded, kept = found.forms[..., 0]  # [2 lanes]
    assert coded.min() > 0 and (kept < 1e-6 * coded).all()


def test_draws_of_queries_have_no_bias() -> None:
    """The sum over drawn queries is the sum over all of them, on average; few are
    drawn."""
    pull = torch.randn(2, 1, 500, 4) * torch.rand(500)[:, None] ** 4
    worth = pull.square().sum((0, 1, 3)) + 0.01
    draw = torch.Generator().manual_seed(0)
    drawn = [sensitivity.Queries.drawn(pull, draw, 50) for _ in range(400)]
    sums = [float((worth[x.places] * x.weights).sum()) for x in drawn]
    counts = [len(x.places) for x in drawn]
    assert abs(np.mean(sums) / float(worth.sum()) - 1) < 0.03
    assert np.std(sums) < 0.3 * np.mean(sums) and np.mean(counts) <= 51
    assert len(sensitivity.Queries.drawn(pull, draw, 10**6).places) == 500
