"""Added tokens of a checkpoint: those that a tokenizer knows beside its vocabulary, and
which of them have a name (bos_token, ...).

Checkpoints declare them in five places: tokenizer.json, tokenizer_config.json
(added_tokens_decoder, additional_special_tokens, extra_special_tokens, and bos_token and
the like as texts or objects), special_tokens_map.json and added_tokens.json. What counts
where they differ is decided as transformers 5 does, so that ids are the same.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import cast

import tokenizers
from tokenizers import AddedToken

from kvlathe.base.errors import KvlatheError
from kvlathe.base.json_files import REPLACE, read_object

SPECIAL_TOKENS = (
    "bos_token",
    "eos_token",
    "unk_token",
    "sep_token",
    "pad_token",
    "cls_token",
    "mask_token",
)
"""The names that every tokenizer has. Others end with _token, too."""
SETTINGS = "tokenizer_config.json"
OLDER_NAMES = "special_tokens_map.json"
OLDER_TOKENS = "added_tokens.json"
ADDED_FILES = (SETTINGS, OLDER_NAMES, OLDER_TOKENS)
FLAGS = ("single_word", "lstrip", "rstrip", "normalized", "special")
EXTRA = "extra_special_tokens"
OLDER_EXTRA = "additional_special_tokens"
BY_ID = "added_tokens_decoder"
Named = dict[str, AddedToken]


@dataclass(frozen=True, slots=True)
class Declared:
    """The tokens that the files beside tokenizer.json declare.

    ``named``: special tokens by name; ``extra``: special tokens without one; ``by_id``:
    tokens with their flags, by the ids that were given to them. ``yields``: what
    tokenizer.json says of an id goes before that.
    """

    named: Named
    extra: tuple[AddedToken, ...]
    by_id: Mapping[int, AddedToken]
    yields: bool

    def add_to(self, backend: tokenizers.Tokenizer) -> None:
        """Make ``backend`` know them all. One that it knows gets the flags that are
        declared here; a new one gets the next id, whatever was written.
        Where names give a token other flags each, the last that are new count."""
        known = backend.get_added_tokens_decoder()
        given = {**self.by_id, **known} if self.yields else self.by_id
        new = [given[one] for one in sorted(given)]
        names = {token.content for token in (*known.values(), *new)}
        named = dict[str, AddedToken]()
        for token in (*self.named.values(), *self.extra):
            named.setdefault(repr(token), token)
        new += [token for token in named.values() if token.content not in names]
        special = {token.content for token in self.named.values()}
        for token in new:
            token.special = token.special or token.content in special
        backend.add_tokens(new)


def declared(folder: Path) -> Declared:
    """The tokens that the folder's files declare. Raises KvlatheError where one cannot
    be read."""
    path = folder / SETTINGS
    settings = read_object(path)
    if not settings.get(EXTRA) and OLDER_EXTRA in settings:
        settings[EXTRA] = settings.pop(OLDER_EXTRA)
    own = _names_in_extra(settings)
    if BY_ID in settings:
        named, extra = _names(settings, {}, own, path)
        return Declared(named, extra, _by_id(settings[BY_ID], path), yields=False)
    later: dict[str, object] = {
        name: {**entry, "special": True}
        if isinstance(entry, dict) and name != EXTRA
        else entry
        for name, entry in read_object(folder / OLDER_NAMES).items()
    }
    settings = _with_older_names(settings, later)
    own |= _names_in_extra(settings)
    named, extra = _names(settings, later, own, path)
    more = settings.get(EXTRA)
    special = [*map(settings.get, SPECIAL_TOKENS)]
    special += more if isinstance(more, list) else []
    texts = {text for text in special if isinstance(text, str)}
    texts |= {named[name].content for name in SPECIAL_TOKENS if later.get(name)}
    by_id = _older_tokens(folder / OLDER_TOKENS, texts)
    return Declared(named, extra, by_id, yields=True)


def _names_in_extra(settings: dict[str, object]) -> dict[str, object]:
    """Take out special tokens that have names of their own."""
    if isinstance(settings.get(EXTRA), dict):
        return cast("dict[str, object]", settings.pop(EXTRA))
    return {}


def _with_older_names(
    settings: dict[str, object], older: dict[str, object]
) -> dict[str, object]:
    """The settings with what special_tokens_map.json says: it counts where
    tokenizer_config.json has no tokens by id."""
    found, extra = {**settings, **older}, settings.get(EXTRA)
    if isinstance(extra, list) and isinstance(later := older.get(EXTRA), list):
        found[EXTRA] = [*extra, *(token for token in later if token not in extra)]
    return found


def _names(
    settings: Mapping[str, object],
    later: Mapping[str, object],
    own: Mapping[str, object],
    path: Path,
) -> tuple[Named, tuple[AddedToken, ...]]:
    """Special tokens with a name and without: first the usual names, then the others,
    those that are objects or of the older file before those of texts, and last those of
    ``own``."""
    usual: dict[str, object] = {name: settings.get(name) for name in SPECIAL_TOKENS}
    others = {
        name: entry
        for name, entry in settings.items()
        if name.endswith("_token")
        and name not in usual
        and isinstance(entry, str | dict)
    }
    early = [n for n, x in others.items() if n in later or not isinstance(x, str)]
    entries = {**usual, **dict.fromkeys(early), **others, **own}
    extra = settings.get(EXTRA, settings.get(OLDER_EXTRA))
    if not isinstance(extra, list | None):
        raise _wrong(EXTRA, extra, path)
    named = {
        name: _token(
            entry, name, path.with_name(OLDER_NAMES) if name in later else path
        )
        for name, entry in entries.items()
        if entry is not None
    }
    return named, tuple(_token(entry, EXTRA, path) for entry in extra or [])


def _by_id(entries: object, path: Path) -> dict[int, AddedToken]:
    if not isinstance(entries, dict) or not all(map(_is_id, entries)):
        raise _wrong(BY_ID, entries, path)
    return {
        int(one): _token(entry, BY_ID, path, special=False)
        for one, entry in entries.items()
    }


def _is_id(text: str) -> bool:
    return text.isascii() and text.isdigit()


def _older_tokens(path: Path, special: set[str]) -> dict[int, AddedToken]:
    """Tokens of added_tokens.json: text -> id."""
    entries = read_object(path)
    if not all(type(one) is int for one in entries.values()):
        raise _wrong("an entry", entries, path)
    return {
        one: AddedToken(text, normalized=text not in special, special=text in special)
        for text, one in entries.items()
    }


def _token(entry: object, name: str, path: Path, special: bool = True) -> AddedToken:
    """A token is written as its text or as {"content": text, FLAG: true or false}."""
    if isinstance(entry, str):
        return AddedToken(entry, special=special)
    fields = cast("dict[str, object]", entry if isinstance(entry, dict) else {})
    text = fields.get("content")
    flags = {flag: fields[flag] for flag in FLAGS if flag in fields}
    if not isinstance(text, str) or not all(type(x) is bool for x in flags.values()):
        raise _wrong(name, entry, path)
    return AddedToken(text, **cast("dict[str, bool]", {"special": special, **flags}))


def _wrong(name: str, entry: object, path: Path) -> KvlatheError:
    return KvlatheError(
        f"{name} of {path} is {entry!r:.60}",
        "tokens are texts, or objects with a text as content and flags",
        REPLACE,
    )
