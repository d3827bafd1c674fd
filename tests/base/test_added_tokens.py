"""Tokens that files beside tokenizer.json declare, against transformers' reading of the
same folder."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st
from tokenizers import models, normalizers, pre_tokenizers, trainers
from transformers import AutoTokenizer

from kvlathe.base.errors import KvlatheError
from kvlathe.base.tokenizer_files import read_backend, special_tokens
from kvlathe.runtime.text.tokenizer import Tokenizer

WORDS = ("<a>", "<b>", "<C>", "user", "hello")
"""Two of them are in the vocabulary."""
TEXTS = ("<a> hi<b>user", " <C>\n x <a>y", "hello<A> user <b> <b>", "<c>hellouser <a>")
Json = dict[str, Any]


def backend_json(added: list[Json]) -> str:
    """A byte-level tokenizer that writes small letters, and knows ``added``."""
    backend = tokenizers.Tokenizer(models.BPE())
    backend.normalizer = normalizers.Lowercase()
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    trainer = trainers.BpeTrainer(
        vocab_size=280,
        show_progress=False,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )
    backend.train_from_iterator(["user hello user hello"] * 9, trainer)
    made = json.loads(backend.to_str())
    ids = made["model"]["vocab"]
    following = iter(range(len(ids), 999))
    made["added_tokens"] = [
        {"id": ids.get(token["content"]) or next(following), **token} for token in added
    ]
    return json.dumps(made)


FLAGS = st.fixed_dictionaries(
    {
        "special": st.booleans(),
        "lstrip": st.booleans(),
        "rstrip": st.booleans(),
        "single_word": st.booleans(),
        "normalized": st.booleans(),
    }
)
CONTENT = st.sampled_from(WORDS)
TOKENS = st.tuples(CONTENT, FLAGS).map(lambda x: {"content": x[0], **x[1]})
TYPED = TOKENS.map(lambda token: {"__type": "AddedToken", **token})
ADDED = st.lists(TOKENS, max_size=3, unique_by=lambda token: token["content"])
EXTRA = st.lists(CONTENT | TYPED, max_size=3, unique_by=str)
BY_ID = st.dictionaries(st.integers(270, 290).map(str), TOKENS, max_size=3)


def some(**fields: st.SearchStrategy[Any]) -> st.SearchStrategy[Json]:
    return st.fixed_dictionaries({}, optional=fields)


SETTINGS = some(
    added_tokens_decoder=BY_ID,
    additional_special_tokens=EXTRA,
    extra_special_tokens=EXTRA | st.dictionaries(st.just("image_token"), CONTENT),
    bos_token=CONTENT | TYPED,
    eos_token=CONTENT | st.none(),
    video_token=CONTENT | TYPED,
)
OLDER = some(
    additional_special_tokens=st.lists(CONTENT, max_size=2, unique=True),
    extra_special_tokens=st.lists(CONTENT, max_size=2, unique=True),
    bos_token=CONTENT | TOKENS,
    unk_token=CONTENT,
    audio_token=CONTENT,
)
OLDER_TOKENS = st.lists(CONTENT, max_size=3, unique=True).map(
    lambda texts: {text: 270 + 2 * place for place, text in enumerate(texts)}
)


def agree(*files: Json | None) -> bool:
    """Whether names and lists give each token one form. Where they do not, the order in
    which transformers meets them decides."""
    forms: dict[str, set[str]] = {}
    for name, entry in [pair for file in files for pair in (file or {}).items()]:
        several = (
            entry.values()
            if isinstance(entry, dict) and not entry.get("content")
            else [entry]
        )
        entries = entry if isinstance(entry, list) else several
        for one in entries if name != "added_tokens_decoder" else []:
            if one is not None:
                text = one if isinstance(one, str) else one["content"]
                forms.setdefault(text, set()).add(json.dumps(one, sort_keys=True))
    return all(len(form) == 1 for form in forms.values())


def written(folder: Path, added: list[Json], **files: Json | None) -> Path:
    (folder / "tokenizer.json").write_text(backend_json(added))
    for name, content in files.items():
        if content is not None:
            (folder / f"{name}.json").write_text(json.dumps(content))
    return folder


@settings(max_examples=150, suppress_health_check=[HealthCheck.filter_too_much])
@given(
    added=ADDED,
    config=SETTINGS,
    older=st.none() | OLDER,
    tokens=st.none() | OLDER_TOKENS,
)
def test_declared_tokens_are_those_of_transformers(
    added: list[Json], config: Json, older: Json | None, tokens: Json | None
) -> None:
    assume(agree(config, older))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", **config}
    with tempfile.TemporaryDirectory() as name:
        folder = written(
            Path(name),
            added,
            tokenizer_config=config,
            special_tokens_map=older,
            added_tokens=tokens,
        )
        theirs, ours = AutoTokenizer.from_pretrained(folder), Tokenizer(folder)
    assert ours.special == theirs.special_tokens_map
    mine = ours.backend.get_added_tokens_decoder()
    assert {one: str(token) for one, token in mine.items()} == {
        one: str(token) for one, token in theirs.added_tokens_decoder.items()
    }
    for text in TEXTS:
        ids = ours.encode(text)
        assert ids == theirs(text)["input_ids"]
        assert ours.decode(ids) == theirs.decode(ids, skip_special_tokens=True)


@pytest.mark.parametrize("split", [True, False])
def test_special_tokens_in_texts_are_split_where_the_checkpoint_says_so(
    tmp_path: Path, split: bool
) -> None:
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "extra_special_tokens": ["<a>"],
        "split_special_tokens": split,
    }
    folder = written(tmp_path, [], tokenizer_config=config)
    theirs = AutoTokenizer.from_pretrained(folder)
    assert Tokenizer(folder).encode("<a>hi") == theirs("<a>hi")["input_ids"]


@pytest.mark.parametrize(
    ("file", "content"),
    [
        ("tokenizer_config", {"added_tokens_decoder": ["<a>"]}),
        ("tokenizer_config", {"added_tokens_decoder": {"x": {"content": "<a>"}}}),
        ("tokenizer_config", {"added_tokens_decoder": {"270": {"special": True}}}),
        ("tokenizer_config", {"extra_special_tokens": 5}),
        ("tokenizer_config", {"bos_token": 5}),
        ("special_tokens_map", {"bos_token": {"content": "<a>", "lstrip": "yes"}}),
        ("added_tokens", {"<a>": "270"}),
    ],
)
def test_declarations_that_are_none_are_refused_by_the_file_name(
    tmp_path: Path, file: str, content: Json
) -> None:
    written(tmp_path, [], **{file: content})
    with pytest.raises(KvlatheError, match=rf"{file}\.json"):
        read_backend(tmp_path)


def test_a_folder_without_declarations_names_no_special_token(tmp_path: Path) -> None:
    assert not special_tokens(tmp_path)
