"""The tokenizer of a folder, checkpoint or engine: its splitter, its special tokens,
and the ids that end a text.

A search reads a checkpoint and an evaluation reads an engine: both read them here, so
both see the same text.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path

import tokenizers

from kvlathe.base.added_tokens import ADDED_FILES, declared
from kvlathe.base.errors import KvlatheError
from kvlathe.base.json_files import REPLACE, read_object
from kvlathe.base.lfs_pointers import refuse_pointer
from kvlathe.base.panics import PANIC, refuse_fault

GENERATION = "generation_config.json"
CONFIG = "config.json"
FILES = (
    "tokenizer.json",
    *ADDED_FILES,
    "chat_template.jinja",
    GENERATION,
)
"""All that text is read and written by."""


def read_backend(folder: Path) -> tokenizers.Tokenizer:
    """Read tokenizer.json, without its truncation and padding, and make it know the
    tokens that the files beside it declare. Raises KvlatheError where there is none."""
    path = folder / "tokenizer.json"
    if not path.is_file():
        raise KvlatheError(
            f"{folder} has no tokenizer.json",
            "no other form of a tokenizer is read",
            "load it with transformers' AutoTokenizer and save_pretrained it into that folder",
        )
    refuse_pointer(path)
    fact = f"{path} cannot be read"
    try:
        backend = tokenizers.Tokenizer.from_str(path.read_text("utf-8"))
        backend.no_truncation()
        backend.no_padding()
        declared(folder).add_to(backend)
    except UnicodeError as error:
        raise KvlatheError(fact, str(error), REPLACE) from error
    except BaseException as error:
        refuse_fault(error, fact, REPLACE)
        raise
    settings = read_object(folder / "tokenizer_config.json")
    backend.encode_special_tokens = settings.get("split_special_tokens") is True
    _try(backend, f"{path} cannot be used")
    return backend


def _try(backend: tokenizers.Tokenizer, fact: str) -> None:
    """Raises KvlatheError where a few characters make it panic. Some cannot write
    these, which is no fault."""
    try:
        backend.decode(backend.encode("a b").ids)
    except BaseException as error:
        if type(error).__name__ == PANIC:
            refuse_fault(error, fact, REPLACE)
        if not isinstance(error, Exception):
            raise


def special_tokens(folder: Path) -> dict[str, str]:
    """Texts of special tokens by name: bos_token, eos_token, ..."""
    named = declared(folder).named
    return {name: token.content for name, token in named.items()}


def has_backend(folder: Path) -> bool:
    """Whether there is a tokenizer.json. Without it an engine takes and gives token ids
    only."""
    return (folder / "tokenizer.json").is_file()


def eos_ids(folder: Path, backend: tokenizers.Tokenizer | None) -> tuple[int, ...]:
    """The ids that end a text; the first also separates documents. Empty where nothing
    names one.

    The first of these that names any: eos_token_id (one or a list) of
    generation_config.json, then of config.json, then the tokenizer's eos_token. A null
    names none, nor does an id that the model has no embedding of: it can never say it.
    An engine folder holds what a build found in the first.
    """
    rows = vocabulary_size(folder)
    for ids in _named_ends(folder, backend):
        if said := tuple(one for one in ids if rows is None or one < rows):
            return said
    return ()


def unsaid_ends(folder: Path, backend: tokenizers.Tokenizer | None) -> tuple[int, ...]:
    """The ids that are named as ends and are no token of the model."""
    rows = vocabulary_size(folder)
    named = {one for ids in _named_ends(folder, backend) for one in ids}
    return tuple(sorted(one for one in named if rows is not None and one >= rows))


def vocabulary_size(folder: Path) -> int | None:
    """The rows of the embedding, by a checkpoint's config.json."""
    config = read_object(folder / CONFIG)
    inner = config.get("text_config")
    for one in (config, inner if isinstance(inner, dict) else {}):
        if type(size := one.get("vocab_size")) is int:
            return size
    return None


def _named_ends(
    folder: Path, backend: tokenizers.Tokenizer | None
) -> Iterator[Sequence[int]]:
    """The ids that each place names. Raises KvlatheError for what is no id."""
    for file in (GENERATION, CONFIG):
        given = read_object(folder / file).get("eos_token_id")
        ids = given if isinstance(given, list) else [] if given is None else [given]
        if any(type(one) is not int or one < 0 for one in ids):
            raise KvlatheError(
                f"{folder / file} gives eos_token_id {json.dumps(given)}",
                "token ids are whole numbers",
                REPLACE,
            )
        yield ids
    token = (
        None
        if backend is None
        else backend.token_to_id(special_tokens(folder).get("eos_token", ""))
    )
    yield () if token is None else (token,)


def separator(ids: Sequence[int]) -> int:
    """The id between documents, given ``eos_ids``. Raises KvlatheError where there is
    none."""
    if not ids:
        remedy = f"put eos_token_id into the checkpoint's {GENERATION}, and build its engines again"
        raise KvlatheError(
            "the model names no end-of-text token", "it separates documents", remedy
        )
    return ids[0]


def check(folder: Path, vocab_size: int) -> None:
    """Raise KvlatheError where one of FILES cannot be read, or where the tokenizer
    writes texts with ids that a model of ``vocab_size`` tokens does not have. Added
    tokens may have such ids (``unknown_tokens``)."""
    for name in FILES:
        if name.endswith(".json") and name != "tokenizer.json":
            read_object(folder / name)
    if not has_backend(folder):
        return
    backend = read_backend(folder)
    added = backend.get_added_tokens_decoder()
    ids = backend.get_vocab(with_added_tokens=False).values()
    most = max((one for one in ids if one not in added), default=0)
    if most >= vocab_size:
        raise KvlatheError(
            f"the tokenizer in {folder} gives ids up to {most}",
            f"the model has embeddings of the tokens 0 to {vocab_size - 1}",
            REPLACE,
        )


def unknown_tokens(folder: Path, vocab_size: int) -> list[str]:
    """Added tokens that a model of ``vocab_size`` tokens has no embedding of: it never
    says them, and a prompt that has one is refused."""
    if not has_backend(folder):
        return []
    added = read_backend(folder).get_added_tokens_decoder()
    return [added[one].content for one in sorted(added) if one >= vocab_size]
