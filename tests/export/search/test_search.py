"""Laws of the accuracy search."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvlathe.base.errors import KvlatheError
from kvlathe.export.bases.basis import Basis
from kvlathe.export.calibration.calibrate import calibrate_on, random_sequences
from kvlathe.export.calibration.stats import Stats
from kvlathe.export.folding.fold import decoder_from
from kvlathe.export.methods.composition import compose
from kvlathe.export.methods.compression import UNCOMPRESSED, parse
from kvlathe.export.methods.options import RankOptions
from kvlathe.export.methods.variants import removed, variants
from kvlathe.export.model.checkpoint import Checkpoint
from kvlathe.export.search import exams, search
from kvlathe.export.search.remembered import Scores
from kvlathe.plan.plan import CompressionPlan
from kvlathe.tasks import tasks
from tests.support.method_cases import FORM, LATHE


@given(st.floats(0, 1), st.floats(0.1, 0.9), st.one_of(st.none(), st.floats(-0.1, 1.1)))
def test_bisection_finds_the_largest_ratio_that_keeps_the_accuracy(
    edge: float, most: float, guess: float | None
) -> None:
    """Wherever it begins."""
    found = search.largest_ratio(lambda ratio: ratio <= edge, 0.0, most, 0.01, guess)
    assert found is not None and found <= edge
    assert found >= min(edge, most) - 0.01 - 1e-6
    floor = search.largest_ratio(
        lambda ratio: ratio <= edge, most / 2, most, 0.01, guess
    )
    assert (floor is None) == (edge < most / 2)


def test_ends_are_not_scored_where_the_middle_decides() -> None:
    asked: list[float] = []

    def reaches(ratio: float) -> bool:
        asked.append(ratio)
        return ratio <= 0.6

    assert search.largest_ratio(reaches, 0.2, 0.9, 0.01) == pytest.approx(0.6, abs=0.01)
    assert len(asked) == 7 and not {0.2, 0.9} & set(asked)


@pytest.mark.parametrize(("guess", "scores"), [(0.595, 2), (0.607, 2), (0.575, 4)])
def test_a_good_guess_saves_scores(guess: float, scores: int) -> None:
    asked: list[float] = []

    def reaches(ratio: float) -> bool:
        asked.append(ratio)
        return ratio <= 0.6

    found = search.largest_ratio(reaches, 0.2, 0.99, 0.01, guess)
    assert found is not None and 0.59 <= found <= 0.6
    assert len(asked) == scores


@given(
    st.floats(0.02, 1.2),
    st.floats(0.8, 5),
    st.floats(0, 0.3),
    st.floats(0.4, 0.9),
)
def test_a_search_by_loss_finds_the_largest_ratio_in_few_steps(
    edge: float, power: float, least: float, most: float
) -> None:
    """Whatever the power by which losses grow."""
    asked: list[float] = []

    def loss(ratio: float) -> float:
        asked.append(ratio)
        return 0.01 * (ratio / edge) ** power

    found = search.largest_within(loss, 0.01, least, most)
    assert len(asked) <= 6
    if found is None:
        assert least > edge
        return
    assert least <= found <= min(edge * (1 + 1e-9), most)
    assert found >= min(edge, most) - search.FINER - 1e-6


class Oracle:
    """Answers some of the questions, and counts them."""

    def __init__(self, exam: exams.Exam, right: set[int]) -> None:
        self.right = {exam.questions[place].prompt for place in right}
        self.asked: list[tuple[int, ...]] = []

    def logits(
        self, token_ids: Sequence[int], rows: Sequence[int]
    ) -> npt.NDArray[np.float32]:
        (row,) = rows
        prompt = tuple(token_ids[: row + 1])
        self.asked.append(prompt)
        said = np.zeros((1, 100), np.float32)
        said[0, token_ids[-1] if prompt in self.right else 0] = 1.0
        return said


@given(st.sets(st.integers(0, 9)), st.integers(1, 10))
def test_questions_end_where_too_many_have_failed(right: set[int], needed: int) -> None:
    """The verdict is that of all of them; what failed is asked first the next time."""
    made = [tasks.Question((5,) * (20 - i), (7,)) for i in range(10)]
    exam = exams.Exam("retrieval", tuple(made))
    failed: list[int] = []
    first = Oracle(exam, right)
    found = exams.ask(exam, first, needed / 10, failed)
    reached = len(right) >= needed
    assert (found.most >= needed / 10) == reached
    assert found.most >= len(right) / 10 - 1e-9
    if found.whole:
        assert found.most == pytest.approx(len(right) / 10)
        assert set(failed) == set(range(10)) - right
    again = Oracle(exam, right)
    assert exams.ask(exam, again, needed / 10, failed).most == found.most
    if not reached:
        assert len(again.asked) == 11 - needed <= len(first.asked)


def test_a_plan_left_early_is_scored_again_for_a_weaker_accuracy(
    tmp_path: Path,
) -> None:
    """By what a weaker accuracy needs; and then no more. Scored whole, it was not left."""
    made = tuple(tasks.Question((5,) * (20 - i), (7,)) for i in range(10))
    exam = exams.Exam("retrieval", made)
    variant: Any = SimpleNamespace(name="auto", plan=lambda ratio: (ratio, None))
    read: list[Oracle] = []

    class Counting(search.Searcher):
        def oracle(self, made: object) -> Any:  # noqa: ANN401
            read.append(Oracle(exam, {0, 1, 2, 3, 4, 5}))
            return read[-1]

    nothing: Any = None
    scores = Scores.open(tmp_path, "key")
    searcher = Counting(nothing, [variant], exam, scores)
    assert not searcher.reaches(variant, 0.5, 0.9) and len(read) == 1
    assert searcher.left() == ["auto 0.5"]
    assert not searcher.reaches(variant, 0.5, 0.9) and len(read) == 1
    least = min(scores.known.values())
    assert not searcher.reaches(variant, 0.5, 0.7)
    assert min(scores.known.values()) <= least
    asked = len(read)
    assert not searcher.reaches(variant, 0.5, 0.7) and len(read) == asked
    assert searcher.reaches(variant, 0.5, 0.6) and searcher.left() == []
    assert Scores.open(tmp_path, "key").known == scores.known == {"auto 0.5": 0.6}


@pytest.fixture(scope="module")
def lathe() -> tuple[Checkpoint, Stats]:
    checkpoint = Checkpoint(LATHE)
    return checkpoint, calibrate_on(
        checkpoint, random_sequences(checkpoint.spec.vocab_size, 2048, 0, 512), 0, {}
    )


def searched(
    lathe: tuple[Checkpoint, Stats],
    request: str,
    accuracy: float,
    exam: search.Exam,
    kept: Path | None = None,
) -> tuple[CompressionPlan, Basis]:
    checkpoint, stats = lathe
    options = RankOptions(basis="balanced")
    found = variants(parse(request), stats.shape, stats.rope, stats, options, FORM)
    return search.search(
        checkpoint, found, accuracy, exam, (stats.digest, options, FORM), kept
    )


def exam_of(metric: exams.Metric) -> search.Exam:
    rng = np.random.default_rng(0)
    windows = tuple(tuple(rng.integers(2, 8192, 40).tolist()) for _ in range(2))
    questions = tuple(tasks.Question(window[:30], (window[5],)) for window in windows)
    return search.Exam(
        metric,
        questions if metric == "retrieval" else (),
        () if metric == "retrieval" else windows,
    )


@pytest.mark.parametrize("metric", ["perplexity", "agreement"])
def test_a_search_keeps_its_promise_and_is_a_lookup_afterwards(
    metric: exams.Metric,
    lathe: tuple[Checkpoint, Stats],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    exam = exam_of(metric)
    plan, basis = searched(lathe, "fdc", 0.5, exam, tmp_path)
    curve = plan.notes["curve"]
    whole = search.TorchOracle(
        decoder_from(
            lathe[0],
            *compose(UNCOMPRESSED, plan.model, True, None, RankOptions(), FORM),
        )
    )
    said = [search.says(whole, window) for window in exam.windows]
    reached = search.score(
        exam, search.TorchOracle(decoder_from(lathe[0], plan, basis)), said
    )
    assert curve["baseline"] == pytest.approx(search.score(exam, whole, said), rel=1e-4)
    assert reached >= curve["target"] == 0.5 * curve["baseline"]
    removed = 1 - plan.index.kept_dims
    assert (
        max(
            point["removed"]
            for point in curve["points"]
            if point["score"] >= curve["target"]
        )
        == removed
        > 0
    )
    monkeypatch.setattr(search, "decoder_from", None)
    again, _ = searched(lathe, "fdc", 0.5, exam, tmp_path)
    assert again == plan


def test_a_search_chooses_bits_that_a_request_leaves_open(
    lathe: tuple[Checkpoint, Stats],
) -> None:
    """Random tokens, so nothing is predicted well: 8 bit keeps all of it, and the
    fewest bits that do win."""
    checkpoint, stats = lathe
    form = dataclasses.replace(FORM, page_tokens=32, prefill_chunk=32)
    found = variants(
        parse("hack:group=32,arithmetic=float"),
        stats.shape,
        True,
        None,
        RankOptions(),
        form,
    )
    names = [family.name for family in found]
    assert names == [
        f"hack:group=32,arithmetic=float,bits={bits}" for bits in (2, 3, 4, 8)
    ]
    assert all(family.least == family.most for family in found)
    plan, _ = search.search(checkpoint, found, 0.8, exam_of("perplexity"), ())
    assert {point["of"] for point in plan.notes["curve"]["points"]} == {
        "hack:group=32,arithmetic=float"
    }
    scores = {point["plan"]: point["score"] for point in plan.notes["curve"]["points"]}
    enough = [
        name for name in names if scores.get(name, 0.0) >= plan.notes["curve"]["target"]
    ]
    assert plan.compression == enough[0] and plan.index.tiers[1].bits_k == int(
        enough[0][-1]
    )


def test_accuracy_out_of_reach_names_the_best_there_is(
    lathe: tuple[Checkpoint, Stats],
) -> None:
    with pytest.raises(KvlatheError, match=r"already leaves .* or less"):
        searched(lathe, "fdc", 10.0, exam_of("perplexity"))
    with pytest.raises(KvlatheError, match="scores 0 on retrieval"):
        searched(lathe, "fdc", 0.9, exam_of("retrieval"))


@pytest.mark.parametrize(
    "request_name", ["fdc", "fdc+hack:bits=4", "hack", "zack+hack"]
)
def test_plans_of_a_method_remove_the_bytes_that_were_asked(
    request_name: str, made_up: Stats
) -> None:
    for family in variants(
        parse(request_name), made_up.shape, True, made_up, RankOptions(), FORM
    ):
        for ratio in {family.least, (family.least + family.most) / 2, family.most}:
            assert removed(family.plan(ratio)[0], FORM.bits) >= ratio - 1e-9
