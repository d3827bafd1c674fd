"""The tokenizer of a folder, checkpoint or engine: its splitter, its special tokens,
and the ids that end a text.

A search reads a checkpoint and an evaluation reads an engine: both read them here, so
both see the same text.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import tokenizers

from kvlathe.base.errors import KvlatheError

SPECIAL_TOKENS = (
    "bos_token",
    "eos_token",
    "unk_token",
    "sep_token",
    "pad_token",
    "cls_token",
    "mask_token",
)
GENERATION = "generation_config.json"
FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "chat_template.jinja",
    GENERATION,
)
"""All that text is read and written by."""

REPLACE = "replace it with the checkpoint's own file"


def read_backend(folder: Path) -> tokenizers.Tokenizer:
    """Read tokenizer.json, without its truncation and padding. Raises KvlatheError
    where there is none."""
    path = folder / "tokenizer.json"
    if not path.is_file():
        raise KvlatheError(
            f"{folder} has no tokenizer.json",
            "no other form of a tokenizer is read",
            "load it with transformers' AutoTokenizer and save_pretrained it into that folder",
        )
    try:
        backend = tokenizers.Tokenizer.from_str(path.read_text("utf-8"))
    except Exception as error:  # tokenizers raises bare Exception
        raise KvlatheError(f"{path} cannot be read", str(error), REPLACE) from error
    backend.no_truncation()
    backend.no_padding()
    return backend


def special_tokens(folder: Path) -> dict[str, str]:
    """Texts by name (of SPECIAL_TOKENS): tokenizer_config.json, else
    special_tokens_map.json, the older place."""
    texts: dict[str, str] = {}
    for file in ("special_tokens_map.json", "tokenizer_config.json"):
        entries = read_object(folder / file)
        texts |= {
            name: text for name in SPECIAL_TOKENS if (text := _text(entries.get(name)))
        }
    return texts


def _text(entry: object) -> str | None:
    """Special tokens are written as strings or as {"content": string, ...}."""
    text = entry.get("content") if isinstance(entry, dict) else entry
    return text if isinstance(text, str) else None


def has_backend(folder: Path) -> bool:
    """Whether there is a tokenizer.json. Without it an engine takes and gives token ids
    only."""
    return (folder / "tokenizer.json").is_file()


def eos_ids(folder: Path, backend: tokenizers.Tokenizer | None) -> tuple[int, ...]:
    """The ids that end a text; the first also separates documents. Empty where nothing
    names one.

    The first of these that names any: eos_token_id (one or a list) of
    generation_config.json, then of config.json, then the tokenizer's eos_token. A null
    names none. An engine folder holds what a build found in the first.
    """
    for file in (GENERATION, "config.json"):
        given = read_object(folder / file).get("eos_token_id")
        ids = given if isinstance(given, list) else [] if given is None else [given]
        if any(type(one) is not int or one < 0 for one in ids):
            raise KvlatheError(
                f"{folder / file} gives eos_token_id {json.dumps(given)}",
                "token ids are whole numbers",
                REPLACE,
            )
        if ids:
            return tuple(ids)
    token = (
        None
        if backend is None
        else backend.token_to_id(special_tokens(folder).get("eos_token", ""))
    )
    return () if token is None else (token,)


def separator(ids: Sequence[int]) -> int:
    """The id between documents, given ``eos_ids``. Raises KvlatheError where there is
    none."""
    if not ids:
        remedy = f"put eos_token_id into the checkpoint's {GENERATION}, and build its engines again"
        raise KvlatheError(
            "the model names no end-of-text token", "it separates documents", remedy
        )
    return ids[0]


def read_object(path: Path) -> dict[str, Any]:
    """The JSON object in ``path``; empty if there is no such file. Raises KvlatheError
    where it holds anything else."""
    if not path.is_file():
        return {}
    try:
        value = json.loads(path.read_text("utf-8"))
    except RecursionError as error:
        raise KvlatheError(
            f"{path} cannot be read", "it is nested too deep", REPLACE
        ) from error
    except (OSError, ValueError) as error:
        raise KvlatheError(f"{path} cannot be read", str(error), REPLACE) from error
    if not isinstance(value, dict):
        raise KvlatheError(f"{path} cannot be read", "it is not a JSON object", REPLACE)
    return value


def check(folder: Path, vocab_size: int) -> None:
    """Raise KvlatheError where one of FILES cannot be read, or where the tokenizer
    gives ids that a model of ``vocab_size`` tokens does not have."""
    for name in FILES:
        if name.endswith(".json") and name != "tokenizer.json":
            read_object(folder / name)
    if not has_backend(folder):
        return
    ids = read_backend(folder).get_vocab(with_added_tokens=True).values()
    most = max(ids, default=0)
    if most >= vocab_size:
        raise KvlatheError(
            f"the tokenizer in {folder} gives ids up to {most}",
            f"the model has embeddings of the tokens 0 to {vocab_size - 1}",
            REPLACE,
        )
