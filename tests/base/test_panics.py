"""Tokenizers whose library panics are refused in words, where they are read or where
they are used."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from kvlathe.base.errors import KvlatheError
from kvlathe.base.panics import refuse_fault
from kvlathe.runtime.text.tokenizer import TextStream, Tokenizer

Json = dict[str, Any]
WORDS: Json = {
    "type": "Unigram",
    "unk_id": 0,
    "vocab": [["<unk>", 0.0], ["a", -1.0], ["b", -1.0]],
}
LACKING: Json = {
    "type": "TemplateProcessing",
    "single": [{"SpecialToken": {"id": "X", "type_id": 0}}],
    "pair": [],
    "special_tokens": {},
}
CUTTING: Json = {"type": "Strip", "content": "a", "start": 10, "stop": 20}


def folder(path: Path, **parts: Json) -> Path:
    said: Json = {"version": "1.0", "added_tokens": [], "model": WORDS, **parts}
    (path / "tokenizer.json").write_text(json.dumps(said))
    return path


@pytest.mark.parametrize(
    "parts",
    [
        {"normalizer": {"type": "Precompiled", "precompiled_charsmap": "AAAA"}},
        {"post_processor": LACKING},
        {"decoder": CUTTING},
        {"pre_tokenizer": {"type": "FixedLength", "length": 0}},
    ],
    ids=lambda parts: next(iter(parts)),
)
def test_a_tokenizer_that_panics_is_refused_as_it_is_read(
    parts: dict[str, Json], tmp_path: Path
) -> None:
    with pytest.raises(KvlatheError, match=r"tokenizer\.json cannot be (read|used)"):
        Tokenizer(folder(tmp_path, **parts))


def test_a_panic_beside_the_first_texts_is_a_refusal_and_ends_a_stream(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvlathe.base.tokenizer_files._try", lambda *_: None)
    panics = Tokenizer(folder(tmp_path, post_processor=LACKING, decoder=CUTTING))
    with pytest.raises(KvlatheError, match="a text cannot be encoded"):
        panics.encode("a")
    with pytest.raises(KvlatheError, match="tokens cannot be decoded"):
        panics.decode([1])
    stream = TextStream(panics, [], ())
    with pytest.raises(KvlatheError, match="tokens cannot be decoded"):
        stream.push(1)
    assert stream.close() == ""


def test_only_panics_and_faults_without_a_class_become_refusals() -> None:
    for error in (KeyboardInterrupt(), ValueError("x"), KeyError("x")):
        refuse_fault(error, "fact", "remedy")
    with pytest.raises(KvlatheError, match="its library says: two lines"):
        refuse_fault(Exception("two\nlines"), "fact", "remedy")
