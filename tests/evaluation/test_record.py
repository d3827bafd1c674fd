"""A measurement stays with the engine, is shown on its page, and breaks no digest."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path

import pytest

from kvlathe.base.console import cell
from kvlathe.base.errors import KvlatheError
from kvlathe.evaluation import record
from kvlathe.plan import manifest as manifests
from tests.plan.test_manifest import sample

PAGE = "<h2>Accuracy</h2><!--measured--><p>nothing yet</p><!--/measured--><p>end</p>"
RESULT = {
    "perplexity": 11.0,
    "perplexity_ratio": 1.0125,
    "agreement": None,
    "retrieval_exact_match": 0.98,
    "measured_on": {
        "text": {"file": "a.jsonl", "windows": 3, "window_tokens": 512},
        "retrieval": None,
    },
}


@pytest.fixture
def engine(tmp_path: Path) -> Path:
    folder = tmp_path / "engine"
    folder.mkdir()
    (folder / "report.html").write_text(PAGE)
    (folder / "plan.json").write_text("{}")
    (folder / "model.onnx").write_bytes(b"graph")
    manifests.write(folder, sample())
    return folder


def test_scores_are_kept_and_shown(engine: Path) -> None:
    record.keep(engine, RESULT, engine.parent / "<none>")
    scores = {name: RESULT[name] for name in record.SCORES if RESULT[name] is not None}
    kept = record.read(engine, manifests.read(engine))
    on = "3 windows of 512 tokens of a.jsonl"
    assert kept.scores == scores and kept.measured_on == on
    page = (engine / "report.html").read_text()
    assert "1.012" in page and "0.98" in page and "&lt;none&gt;" in page
    assert f"on {on}." in page
    assert "nothing yet" not in page and page.endswith("<p>end</p>")
    manifests.verify(engine)


def test_retrieval_is_shown_beside_the_uncompressed_engine(engine: Path) -> None:
    """With its number of questions; what the baseline was not asked is not claimed."""
    asked = {"file": "q.jsonl", "questions": 50, "every": 1, "too_long": 0}
    result = RESULT | {"measured_on": {"text": None, "retrieval": asked}}
    record.keep(engine, result, engine.parent / "none")
    page = (engine / "report.html").read_text()
    assert "of 50 questions</td>" in page and "not measured" in page
    record.keep(
        engine,
        result | {"retrieval_exact_match_baseline": 0.99},
        engine.parent / "none",
    )
    page = (engine / "report.html").read_text()
    assert '<td class="n">0.98</td><td class="n">0.99</td>' in page
    assert "not measured" not in page
    perplexity = cell(11.0 / 1.0125)
    assert f'<td class="n">11</td><td class="n">{perplexity}</td>' in page


def test_a_second_evaluation_replaces_the_first(engine: Path) -> None:
    record.keep(engine, RESULT, None)
    record.keep(engine, RESULT | {"retrieval_exact_match": 0.5}, None)
    page = (engine / "report.html").read_text()
    assert page.count("Measured by") == 1 and "0.98" not in page
    manifests.verify(engine)


def test_other_links_to_the_page_keep_their_bytes(engine: Path) -> None:
    other = engine.parent / "linked.html"
    other.hardlink_to(engine / "report.html")
    record.keep(engine, RESULT, None)
    assert other.read_text() == PAGE


def test_scores_of_another_plan_are_not_read(engine: Path) -> None:
    record.keep(engine, RESULT, None)
    other = dataclasses.replace(manifests.read(engine), plan_digest="other")
    assert record.read(engine, other) == record.Kept()
    (engine / "evaluation.json").write_text("[1, 2")
    assert record.read(engine, manifests.read(engine)) == record.Kept()


class Killed(BaseException):
    """No handler of the product sees it, as none sees SIGKILL."""


def dies_at(call: int, patch: pytest.MonkeyPatch) -> None:
    """From now on the process is killed at its ``call``-th write or rename, or half way
    through it."""
    calls = 0

    def counted(real: Callable[..., object], halves: bool) -> Callable[..., object]:
        def act(path: Path, text: str | Path, *more: str) -> object:
            nonlocal calls
            calls += 1
            if calls == call:
                if halves:
                    real(path, str(text)[: len(str(text)) // 2], *more)
                raise Killed
            return real(path, text, *more)

        return act

    patch.setattr(Path, "write_text", counted(Path.write_text, True))
    patch.setattr(Path, "replace", counted(Path.replace, False))


def test_a_killed_evaluation_leaves_an_engine_that_loads(engine: Path) -> None:
    """Wherever it is killed: the scores are the old ones or the new ones, the page and
    the record agree, and the next evaluation is kept."""
    record.keep(engine, RESULT, None)
    seen = set()
    for call in range(1, 20):
        share = round(0.01 * call, 2)
        before = record.read(engine, manifests.verify(engine)).scores[
            "retrieval_exact_match"
        ]
        killed = False
        with pytest.MonkeyPatch.context() as patch:
            dies_at(call, patch)
            try:
                record.keep(engine, RESULT | {"retrieval_exact_match": share}, None)
            except Killed:
                killed = True
        scores = record.read(engine, manifests.verify(engine)).scores
        kept = scores["retrieval_exact_match"]
        assert kept in (before, share)
        assert (
            f'<td class="n">{cell(kept)}</td>' in (engine / "report.html").read_text()
        )
        seen.add((killed, kept == share))
        if not killed:
            break
    assert seen == {(True, False), (True, True), (False, True)}


def test_a_reader_without_rights_loads_what_a_killed_evaluation_left(
    engine: Path,
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        dies_at(5, patch)  # two files and the manifest are written, one is renamed
        with pytest.raises(Killed):
            record.keep(engine, RESULT, None)

    def refuse(path: Path, target: Path) -> None:
        raise PermissionError(13, "Permission denied")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Path, "replace", refuse)
        manifests.verify(engine)
    (engine / "model.onnx").rename(engine / ".model.onnx.new")
    (engine / "model.onnx").write_bytes(b"other")
    with pytest.raises(KvlatheError, match=r"model\.onnx .* has changed"):
        manifests.verify(engine)


def test_the_scores_of_a_suite_are_kept_too(engine: Path) -> None:
    table = [
        {"task": "text", "metric": "perplexity", "engine": 12.0, "ratio": 1.25},
        {"task": "text", "metric": "agreement with the baseline", "engine": 0.9},
        {
            "task": "line retrieval",
            "metric": "exact match",
            "engine": 0.75,
            "baseline": 0.875,
        },
        {"task": "continuation", "metric": "ROUGE-1", "engine": 0.5},
    ]
    on = {"file": "a.jsonl", "windows": 2, "window_tokens": 64, "questions": 10}
    record.keep_suite(engine, table, on, engine.parent / "none")
    kept = record.read(engine, manifests.verify(engine))
    page = (engine / "report.html").read_text()
    assert '<td class="n">0.75</td><td class="n">0.875</td>' in page
    assert "of 10 questions" in page
    said = "2 windows of 64 tokens of a.jsonl; 10 questions of line retrieval"
    assert kept.measured_on == said
    assert kept.scores == {
        "perplexity": 12.0,
        "perplexity_ratio": 1.25,
        "agreement": 0.9,
        "retrieval_exact_match": 0.75,
    }


def test_a_folder_that_cannot_be_written_is_no_error(
    engine: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "write_text", refuse)
    record.keep(engine, RESULT, None)
    assert (engine / "report.html").read_text() == PAGE
