"""The text that a small model learns from: questions have one right answer, told
before, in tokens that the tokenizer itself would make; and what is written is a
checkpoint."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks import train_small
from benchmarks.support import any_text, recall
from kvlathe.export.model.checkpoint import Checkpoint
from kvlathe.tasks import tasks

ROOT = Path(__file__).parents[2]
TEXTS = any_text.documents([ROOT / "docs", ROOT / "runtime"], 1 << 18)
ENCODER = any_text.tokenizer(TEXTS, 1024)
RECORDS = recall.Records.of(ENCODER)
IDS = np.array(ENCODER.encode("\n".join(TEXTS[:3])).ids)


def pattern(form: str) -> re.Pattern[str]:
    before, rest = form.split("{key}")
    between, behind = rest.split("{value}")
    key, value = r"((?: [a-z]+){2})", r"(\d{4})"
    return re.compile(
        re.escape(before) + key + re.escape(between) + value + re.escape(behind)
    )


@given(st.integers(64, 600), st.sampled_from([None, 1]), st.integers(0, 1 << 20))
def test_answers_of_exercises_were_told_before(
    length: int, asked: int | None, seed: int
) -> None:
    rng = np.random.default_rng(seed)
    ids, is_answer = RECORDS.episode(length, asked, IDS, rng)
    text = ENCODER.decode(ids.tolist())
    told: dict[str, str] = {}
    answers: list[tuple[str, str]] = []
    for record, question in recall.FORMS:
        told |= pattern(record).findall(text)
        answers += pattern(question).findall(text)
    assert len(told) >= len(answers) == (asked or len(told)) > 0
    assert all(told[key] == value for key, value in answers)
    said = ENCODER.decode(ids[is_answer].tolist())
    assert said == "".join(value for _, value in answers)


@given(st.integers(64, 600), st.integers(0, 1 << 20))
def test_tokens_are_those_of_the_text(length: int, seed: int) -> None:
    """No text stands between records here, whose first and last tokens are cut."""
    rng = np.random.default_rng(seed)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(recall, "FILLERS", (0,))
        ids, _ = RECORDS.episode(length, None, IDS, rng)
    assert ENCODER.encode(ENCODER.decode(ids.tolist())).ids == ids.tolist()


def test_a_few_steps_write_a_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "model"
    monkeypatch.setattr(any_text, "places", lambda: [ROOT / "docs"])
    words = ["train_small", str(folder), "--tiny", "--steps", "2", "--workers", "0"]
    monkeypatch.setattr(sys, "argv", [*words, "--questions", "4"])
    train_small.main()
    assert "2 steps" in capsys.readouterr().out
    checkpoint = Checkpoint(folder)
    encoder = tasks.FolderEncoder(folder)
    questions = tasks.read_questions(folder / "retrieval.jsonl", encoder, every=1)
    assert [len(question.answer) for question in questions] == [4] * 4
    assert max(question.tokens for question in questions) <= train_small.TINY.length
    assert checkpoint.spec.shape.kv_heads == train_small.TINY.kv_heads
    for name in ("calibration", "text"):
        assert tasks.read_texts(folder / f"{name}.jsonl")
