"""Held-out text shares nothing with what was read before, and never ends."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from kvlathe.tasks.held_out import SHARED, HeldOut, runs, sentences
from kvlathe.tasks.tasks import FolderEncoder

MODEL = Path(__file__).parents[2] / "models" / "lathe-5m"


@pytest.fixture
def encoder() -> FolderEncoder:
    return FolderEncoder(MODEL)


def texts(folder: Path, count: int) -> tuple[Path, list[str]]:
    """A file of documents that differ."""
    random = np.random.default_rng(1)
    documents = [sentences(random, 30) for _ in range(count)]
    path = folder / "texts.jsonl"
    lines = (json.dumps({"text": document}) + "\n" for document in documents)
    path.write_text("".join(lines), "utf-8")
    return path, documents


def test_windows_share_no_run_with_what_was_read(
    tmp_path: Path, encoder: FolderEncoder
) -> None:
    """Neither a document that was read whole, nor a part of one from its middle."""
    path, documents = texts(tmp_path, 8)
    tokens = [encoder.encode(text, add_special_tokens=False) for text in documents]
    read = [tokens[-1], tokens[-2][100:200], tokens[-3][:64], tokens[-4][-70:]]
    held_out = HeldOut([path], encoder, 4096, read)
    known = {run for ids in read for run in runs(ids)}
    everything = {run for ids in tokens for run in runs(ids)}
    windows = [held_out.window(256) for _ in range(6)]
    found = [run for window in windows for run in runs(window)]
    assert not known.intersection(found)
    assert everything.intersection(found), "some of the file's own text is measured"
    assert held_out.described == "held-out text"


def test_without_enough_text_sentences_are_made_up(
    tmp_path: Path, encoder: FolderEncoder
) -> None:
    path, documents = texts(tmp_path, 1)
    read = [encoder.encode(documents[0], add_special_tokens=False)]
    held_out = HeldOut([path], encoder, 4096, read)
    window = held_out.window(3000)
    assert len(window) == 3000 and held_out.described == "made-up sentences"
    assert len(set(runs(window))) == 3000 - SHARED + 1, "no run comes twice"


def test_without_a_tokenizer_tokens_are_random() -> None:
    held_out = HeldOut((), None, 97)
    window = held_out.window(2000)
    assert set(window) == set(range(97)) and held_out.described == "random tokens"


def test_windows_begin_in_different_documents(
    tmp_path: Path, encoder: FolderEncoder
) -> None:
    path, documents = texts(tmp_path, 5)
    held_out = HeldOut([path], encoder, 4096)
    starts = [held_out.window(128)[:16] for _ in range(5)]
    firsts = [encoder.encode(x, add_special_tokens=False)[:16] for x in documents]
    assert starts == firsts[::-1]
