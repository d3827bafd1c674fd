"""The tokenizer as llguidance gets it: without tokens that the model never says, and with
names of added tokens that no text has.

llguidance takes added tokens for special where they are flagged so, and where they stand
in angle brackets (``<tool_call>`` of Qwen, ``<table>`` of Gemma): a structure may name
such a token by its id, and no text is written by it. What a structure forces it writes as
the tokenizer does, which reads the name in a text as the token. It then refuses its own
token. Under another name the tokenizer does not read it, and the text is written in
pieces.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, cast

from kvlathe.runtime.text.tokenizer import Tokenizer

Json = dict[str, Any]
HIDDEN = "\U0010fffd"
"""A character that no text has: it stands for nothing and never will."""


def walked_tokens(tokenizer: Tokenizer, vocabulary: int, rename: bool = True) -> str:
    """tokenizer.json of a model with ``vocabulary`` tokens, as llguidance gets it.
    ``rename``: added tokens get names that no text has."""
    said: Json = json.loads(tokenizer.backend.to_str())
    added = [one for one in said["added_tokens"] if one["id"] < vocabulary]
    marks = tokenizer.marks if rename else dict[int, str]()
    names = {name: f"<{HIDDEN}{id_}>" for id_, name in marks.items()}
    for one in added:
        one["content"] = names.get(one["content"], one["content"])
    model = named(said["model"], names)
    return json.dumps({**said, "added_tokens": added, "model": model})


def named(model: Json, names: Mapping[str, str]) -> Json:
    """The tokenizer's model with other ``names`` of entries (old -> new). Merges that
    build or use a renamed entry are left out: its own text is written in pieces, too."""
    entries = model["vocab"]
    kept: object
    if isinstance(entries, dict):
        ids = cast("dict[str, int]", entries)
        kept = {names.get(name, name): token for name, token in ids.items()}
    else:  # of unigrams: names with scores, in the order of ids
        kept = [[names.get(name, name), score] for name, score in entries]
    renamed: Json = {**model, "vocab": kept}
    if (unknown := model.get("unk_token")) is not None:
        renamed["unk_token"] = names.get(unknown, unknown)
    if merges := model.get("merges"):
        prefix = model["continuing_subword_prefix"] or ""
        renamed["merges"] = [
            [left, right]
            for left, right in merges
            if names.keys().isdisjoint([left, right, left + right.removeprefix(prefix)])
        ]
    return renamed
