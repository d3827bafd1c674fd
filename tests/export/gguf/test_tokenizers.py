"""The tokenizer of a GGUF file encodes as the one that it was made of, and as
sentencepiece does where it holds pieces with scores."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers
from tokenizers.trainers import BpeTrainer

from kvlathe.base.chat_template import chat_templates
from kvlathe.base.errors import KvlatheError
from kvlathe.base.tokenizer_files import eos_ids, read_backend, special_tokens
from kvlathe.engines.order import folder_of
from tests.support.checkpoints import make_model

pytest.importorskip("gguf", reason="gguf is not installed")

import itertools

from tests.support import gguf_cases as cases

TEXT = Path("data/calibration_text.jsonl")
Keys = Callable[[cases.Writer], None]
SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
QWEN2 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
LLAMA3 = QWEN2.replace(r"|\p{N}|", r"|\p{N}{1,3}|")
TEKKEN = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
BYTES = pre_tokenizers.ByteLevel(add_prefix_space=False)


def by(pattern: str) -> pre_tokenizers.PreTokenizer:
    """As tokenizer.json of these families splits."""
    return pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(pattern), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )


SPLITS = {
    "gpt-2": BYTES,
    "smollm": pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), BYTES]
    ),
    "qwen2": by(QWEN2),
    "llama-bpe": by(LLAMA3),
    "tekken": by(TEKKEN),
}
"""tokenizer.ggml.pre -> how the family's own tokenizer.json splits."""


def trained(name: str) -> Tokenizer:
    """A byte-level tokenizer of 600 tokens with the family's way to split."""
    whole = name in ("llama-bpe", "tekken")
    tokenizer = Tokenizer(models.BPE(ignore_merges=whole))
    tokenizer.pre_tokenizer = SPLITS[name]
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    special = [AddedToken(x, special=True, normalized=False) for x in SPECIAL]
    trainer = BpeTrainer(
        vocab_size=600,
        show_progress=False,
        initial_alphabet=alphabet,
        special_tokens=special,
    )
    texts = TEXT.read_text("utf-8").splitlines()[:40]
    tokenizer.train_from_iterator(["123 4567 don't HELLO\n\n", *texts], trainer)
    return tokenizer


def byte_level_keys(writer: cases.Writer, tokenizer: Tokenizer, pre: str) -> None:
    own = json.loads(tokenizer.to_str())["model"]
    tokens = sorted(own["vocab"], key=own["vocab"].get)
    kinds = [cases.CONTROL if x in SPECIAL else cases.NORMAL for x in tokens]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre)
    writer.add_token_list(tokens)
    writer.add_token_types(kinds)
    writer.add_token_merges([" ".join(pair) for pair in own["merges"]])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_add_bos_token(False)
    writer.add_chat_template("{{ messages[0].content }}")


def folder_with(
    tmp_path: Path, keys: Keys, arch: str = "qwen2", size: int = 600
) -> Path:
    """The checkpoint folder of a file with a tokenizer."""
    case = cases.CASES[arch]
    model = make_model(
        tmp_path / "model", case.kind, case.settings | {"vocab_size": size}
    )
    file = tmp_path / "tiny.gguf"
    cases.write_gguf(file, model, case, more=keys)
    return folder_of(file)


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVLATHE_CACHE", str(tmp_path / "cache"))


WRITTEN = st.text(
    st.sampled_from("abAB zZ'tTsS019²\n\r\t.,:/-_—é日本😀\u00a0"), max_size=40
)


@pytest.mark.parametrize("name", SPLITS)
def test_byte_level_tokenizers_encode_as_their_own(name: str, tmp_path: Path) -> None:
    own = trained(name)
    folder = folder_with(tmp_path, lambda w: byte_level_keys(w, own, name))
    found = read_backend(folder)

    @settings(max_examples=300, deadline=None)
    @given(WRITTEN)
    def same(text: str) -> None:
        text = f"<|im_start|>{text}<|im_end|> {text}"
        ids = found.encode(text).ids
        assert ids == own.encode(text).ids
        assert found.decode(ids, skip_special_tokens=False) == text

    same()
    assert eos_ids(folder, found) == (2, 0)
    assert special_tokens(folder)["eos_token"] == "<|im_end|>"
    assert chat_templates(folder) == {"default": "{{ messages[0].content }}"}


def test_texts_begin_with_a_token_where_the_file_says_so(tmp_path: Path) -> None:
    own = trained("qwen2")

    def keys(writer: cases.Writer) -> None:
        byte_level_keys(writer, own, "qwen2")
        writer.kv_data[0]["tokenizer.ggml.add_bos_token"].value = True

    found = read_backend(folder_with(tmp_path, keys))
    assert found.encode("x").ids == [1, *own.encode("x").ids]
    assert found.encode("x", add_special_tokens=False).ids == own.encode("x").ids


PIECES = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
LETTERS = [*"abc", "\u2581", "é"]


def scored() -> dict[str, float]:
    """Pieces of up to four letters -> score, in an order of their own."""
    rng = random.Random(0)
    made = list(LETTERS)
    while len(made) < 60:
        piece = rng.choice(made) + rng.choice(made)
        if len(piece) <= 4 and piece not in made:
            made.append(piece)
    scores = [-float(x) for x in range(len(made))]
    rng.shuffle(scores)
    return dict(zip(made, scores, strict=True))


def merged(text: str, scores: dict[str, float]) -> list[str]:
    """Sentencepiece's BPE (Kudo and Richardson 2018): of all neighbours that are a
    piece together, those with the best score become one, the first of equals."""
    parts = list(text)
    while True:
        pairs = [
            (-scores[a + b], i)
            for i, (a, b) in enumerate(itertools.pairwise(parts))
            if a + b in scores
        ]
        if not pairs:
            return parts
        _, i = min(pairs)
        parts[i : i + 2] = [parts[i] + parts[i + 1]]


@pytest.mark.parametrize("prefix", [True, False])
def test_pieces_with_scores_merge_as_sentencepiece_merges(
    prefix: bool, tmp_path: Path
) -> None:
    scores = scored()
    tokens = [*PIECES, *scores]
    kinds = [cases.UNKNOWN, cases.CONTROL, cases.CONTROL]
    kinds += [cases.BYTE] * 256 + [cases.NORMAL] * len(scores)

    def keys(writer: cases.Writer) -> None:
        writer.add_tokenizer_model("llama")
        writer.add_tokenizer_pre("default")
        writer.add_token_list(tokens)
        writer.add_token_scores([0.0] * len(PIECES) + list(scores.values()))
        writer.add_token_types(kinds)
        writer.add_bos_token_id(1)
        writer.add_eos_token_id(2)
        writer.add_unk_token_id(0)
        writer.add_add_space_prefix(prefix)

    folder = folder_with(tmp_path, keys, "llama", len(tokens))
    found = read_backend(folder)

    @settings(max_examples=300, deadline=None)
    @given(st.text(st.sampled_from("abc é日"), min_size=1, max_size=20))
    def same(text: str) -> None:
        written = ("\u2581" if prefix else "") + text.replace(" ", "\u2581")
        expected = ["<s>"]
        for part in merged(written, scores):
            known = part in scores
            data = part.encode("utf-8")
            expected += [part] if known else [f"<0x{byte:02X}>" for byte in data]
        encoded = found.encode(text)
        assert encoded.tokens == expected
        assert found.decode(encoded.ids) == text

    same()
    assert eos_ids(folder, found) == (2,)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"pre": "falcon"}, "splits text in the way 'falcon'"),
        ({"model": "t5"}, "a tokenizer of the kind 't5'"),
        ({"eos_token_id": 10**6}, "is damaged"),
    ],
)
def test_a_tokenizer_that_is_not_read_is_refused(
    change: dict[str, Any], said: str, tmp_path: Path
) -> None:
    def keys(writer: cases.Writer) -> None:
        byte_level_keys(writer, trained("qwen2"), "qwen2")
        for name, value in change.items():
            writer.kv_data[0][f"tokenizer.ggml.{name}"].value = value

    with pytest.raises(KvlatheError, match=said):
        folder_with(tmp_path, keys)


def test_a_file_without_a_tokenizer_has_none(tmp_path: Path) -> None:
    folder = folder_with(tmp_path, lambda writer: None)
    assert not (folder / "tokenizer.json").exists()
