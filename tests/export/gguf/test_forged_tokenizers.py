"""A tokenizer in a GGUF file that somebody damaged or forged is refused in words, or is
one that encodes."""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvlathe.base.errors import KvlatheError
from kvlathe.base.tokenizer_files import read_backend

pytest.importorskip("gguf", reason="gguf is not installed")

import json

from kvlathe.export.gguf.file import GgufFile
from kvlathe.export.gguf.tokenizer import tokenizer_files
from tests.support import gguf_cases as cases

Metadata = dict[str, Any]
CHECKS: list[Any] = list(HealthCheck)
OWN = "tokenizer.ggml."
TEXTS = ("", "a", "ab", "a b", "\ud7ff\x00", "é", "<s>", "Ġ", "\u2581", "x" * 300)
WRONG: tuple[Any, ...] = (
    *(None, True, -1, 0, 1, 1 << 40, 0.5, math.nan, math.inf, "", "x", "llama", "gpt2"),
    *([], [-1], ["x"], ["a", "a"], ["x y", "y x"], [""], [math.nan] * 9, {}, {"a": 1}),
)
ENOUGH = 5.0
"""Seconds that no file of these sizes takes."""


def byte_level(writer: cases.Writer) -> None:
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("qwen2")
    letters = [chr(i) for i in range(33, 127)]
    writer.add_token_list([*letters, "ab", "abc", "<s>", "</s>"])
    writer.add_token_types([1] * (len(letters) + 2) + [3, 3])
    writer.add_token_merges(["a b", "ab c"])
    writer.add_eos_token_id(len(letters) + 3)


def pieces(writer: cases.Writer) -> None:
    tokens = ["<unk>", "<s>", "</s>", *"abc", "\u2581", "ab", "\u2581ab"]
    writer.add_tokenizer_model("llama")
    writer.add_tokenizer_pre("default")
    writer.add_token_list(tokens)
    writer.add_token_scores([-float(i) for i in range(len(tokens))])
    writer.add_token_types([2, 3, 3, *[1] * (len(tokens) - 3)])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_unk_token_id(0)


KINDS: dict[str, Callable[[cases.Writer], None]] = {
    "bytes": byte_level,
    "llama": pieces,
}


@pytest.fixture(scope="module", params=KINDS)
def whole(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Path:
    """A file with a tokenizer and no tensors."""
    path = tmp_path_factory.mktemp("gguf") / "whole.gguf"
    writer = cases.Writer(path, "llama")
    KINDS[request.param](writer)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def judge(file: GgufFile, folder: Path) -> None:
    """One refusal, in one line; or a tokenizer."""
    began = time.monotonic()
    try:
        for name, content in tokenizer_files(file).items():
            said = content if isinstance(content, str) else json.dumps(content)
            (folder / name).write_text(said, "utf-8")
        backend = read_backend(folder)
        for text in ("", "ab abc é日", "<s>"):
            with contextlib.suppress(TypeError):  # half a character is no text
                backend.decode(backend.encode(text).ids)
    except KvlatheError as refusal:
        assert refusal.fact and "\n" not in str(refusal) and len(str(refusal)) < 2000
    assert time.monotonic() - began < ENOUGH


@settings(max_examples=60, suppress_health_check=CHECKS)
@given(data=st.data())
def test_a_file_with_changed_bytes_is_one_refusal_or_a_tokenizer(
    whole: Path, tmp_path: Path, data: st.DataObject
) -> None:
    made = bytearray(whole.read_bytes())
    for _ in range(data.draw(st.integers(1, 3))):
        place = data.draw(st.integers(0, len(made) - 1))
        made[place] = data.draw(st.sampled_from([0, 1, 8, 9, 32, 65, 127, 128, 255]))
    path = tmp_path / "made.gguf"
    path.write_bytes(made[: data.draw(st.sampled_from([len(made), len(made) - 7]))])
    with contextlib.suppress(KvlatheError):
        judge(GgufFile(path), tmp_path)


@st.composite
def forged(draw: st.DrawFn, plain: Mapping[str, Any]) -> Metadata:
    """Metadata with one or two of the tokenizer's values, or items of lists, replaced or
    removed."""
    made: Metadata = {k: v[:] if isinstance(v, list) else v for k, v in plain.items()}
    for _ in range(draw(st.integers(1, 2))):
        key = draw(st.sampled_from(sorted(k for k in made if k.startswith(OWN))))
        value = made[key]
        if isinstance(value, list) and value and draw(st.integers(0, 3)):
            place = draw(st.integers(0, len(value) - 1))
            value[place] = draw(st.sampled_from([*TEXTS, *WRONG]))
        elif draw(st.integers(0, 4)):
            made[key] = draw(st.sampled_from(WRONG))
        else:
            del made[key]
    return made


@settings(max_examples=60, suppress_health_check=CHECKS)
@given(data=st.data())
def test_forged_values_are_one_refusal_or_a_tokenizer(
    whole: Path, tmp_path: Path, data: st.DataObject
) -> None:
    file = GgufFile(whole)
    file.metadata = data.draw(forged(file.metadata))
    judge(file, tmp_path)


def test_a_piece_as_long_as_a_book_costs_no_time(
    tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """Every cut of a piece may be a merge."""
    path = tmp_path_factory.mktemp("gguf") / "long.gguf"
    writer = cases.Writer(path, "llama")
    tokens = ["<unk>", "<s>", "</s>", "a", "a" * 2_000_000]
    writer.add_tokenizer_model("llama")
    writer.add_token_list(tokens)
    writer.add_token_scores([0.0] * len(tokens))
    writer.add_token_types([2, 3, 3, 1, 1])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    judge(GgufFile(path), tmp_path)
