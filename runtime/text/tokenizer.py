"""Tokenizer of an engine folder: text to ids, chat to a prompt, ids to text as they
come, and stop strings.

tokenizer.json decides how text is split and which special tokens frame it (its
post-processor: transformers 5 reads it the same way and ignores add_bos_token beside
it); tokenizer_config.json names the special tokens and may hold the chat template;
generation_config.json has the ids that end a text. How a template runs:
base/chat_template.py.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import tokenizers

from kvlathe.base import tokenizer_files
from kvlathe.base.chat_template import chat_template, sandbox
from kvlathe.base.errors import KvlatheError

UNFINISHED = "\N{REPLACEMENT CHARACTER}"
"""The character that a decoder writes for bytes that are no character (yet)."""


BYTE = re.compile("<0x([0-9A-F]{2})>")
"""The form in which SentencePiece's vocabularies write a byte that is no character."""


@functools.cache
def byte_alphabet() -> dict[str, int]:
    """Byte-level vocabularies write bytes as printable characters (GPT-2's
    bytes_to_unicode): character -> byte."""
    plain = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in plain]
    return {chr(byte): byte for byte in plain} | {
        chr(256 + i): byte for i, byte in enumerate(others)
    }


class Tokenizer:
    """Reads an engine folder's tokenizer.json, the files that name its special tokens,
    and its chat template.

    ``eos_ids`` end a text; the first separates documents. Raises KvlatheError where a
    file is unreadable. An engine without tokenizer.json takes token ids: encoding is
    refused, and ids decode to no text.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        backend = (
            tokenizer_files.read_backend(folder)
            if tokenizer_files.has_backend(folder)
            else None
        )
        self.eos_ids = tokenizer_files.eos_ids(folder, backend)
        self.special = tokenizer_files.special_tokens(folder)
        if backend is not None:
            backend.add_special_tokens(
                [t for t in self.special.values() if backend.token_to_id(t) is None]
            )
        self._backend = backend
        added = {} if backend is None else backend.get_added_tokens_decoder()
        self._pieces: dict[int, bytes] = {}
        self._alone: dict[int, str] = {}
        self.special_ids = frozenset(
            token for token, entry in added.items() if entry.special
        )
        self.chat_template = chat_template(folder)

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        return self._encoded(text, add_special_tokens).ids

    def starts(self, text: str) -> list[int]:
        """Offsets in the text, in characters, at which the tokens of ``encode(text)``
        begin."""
        return [start for start, _ in self._encoded(text, True).offsets]

    def _encoded(self, text: str, add_special_tokens: bool) -> tokenizers.Encoding:
        """Encode as a batch: unlike ``encode``, that lets other threads run meanwhile.

        Raises KvlatheError for a lone surrogate, as JSON can spell one: it is no text.
        """
        try:
            batch = self.backend.encode_batch(
                [text], add_special_tokens=add_special_tokens
            )
        except TypeError as error:
            raise KvlatheError(
                "a text cannot be encoded",
                "it has half of a character (a lone surrogate)",
                "leave it out",
            ) from error
        return batch[0]

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        if self._backend is None:
            return ""
        return self._backend.decode(list(ids), skip_special_tokens=skip_special_tokens)

    def alone(self, token: int) -> str:
        """``decode`` of one token, remembered."""
        text = self._alone.get(token)
        if text is None:
            text = self._alone[token] = self.decode((token,))
        return text

    def piece(self, token: int) -> bytes:
        """Bytes that a token writes after others, maybe part of a character. A special
        token writes nothing: its name is given. Empty without tokenizer.json."""
        if token not in self._pieces:
            self._pieces[token] = self._piece(token)
        return self._pieces[token]

    def _piece(self, token: int) -> bytes:
        if self._backend is None:
            return b""
        first = self._first  # what begins a text may lose its space
        text = self.decode([*first, token], skip_special_tokens=False)[
            len(self.decode(first)) :
        ]
        name = self._backend.id_to_token(token) or ""
        if UNFINISHED not in text:
            return text.encode()
        if found := BYTE.fullmatch(name):
            return bytes.fromhex(found[1])
        alphabet = byte_alphabet()
        return (
            bytes(alphabet[c] for c in name)
            if all(c in alphabet for c in name)
            else text.encode()
        )

    @functools.cached_property
    def _first(self) -> list[int]:
        return self.encode("a", add_special_tokens=False)

    @functools.cached_property
    def special_names(self) -> dict[int, str]:
        """Names of the special tokens that do not end a text, by id."""
        ids = self.special_ids.difference(self.eos_ids)
        return {token: self.backend.id_to_token(token) or "" for token in ids}

    @functools.cached_property
    def longest_token(self) -> int:
        """Characters of the vocabulary's longest entry."""
        return max(map(len, self.backend.get_vocab()), default=1)

    @property
    def backend(self) -> tokenizers.Tokenizer:
        """Raises KvlatheError where there is none."""
        return self._backend or tokenizer_files.read_backend(self.folder)

    def chat_prompt(
        self,
        messages: Sequence[dict[str, Any]],
        add_generation_prompt: bool = True,
        **values: Any,  # noqa: ANN401
    ) -> str:
        """The prompt that the checkpoint's template makes of ``messages`` ({"role":
        ..., "content": ...}).

        Encode it with ``add_special_tokens=False``: templates write their own. Raises
        KvlatheError where there is no template or it refuses the messages.
        """
        if self.chat_template is None:
            raise KvlatheError(
                "this engine cannot chat",
                "its checkpoint has no chat template",
                "give a plain prompt instead",
            )
        try:
            template = sandbox().from_string(self.chat_template)
            return template.render(
                messages=list(messages),
                add_generation_prompt=add_generation_prompt,
                **self.special,
                **values,
            )
        except Exception as error:  # it is a program, and may raise anything
            raise KvlatheError(
                "the chat template refused the messages",
                str(error),
                "change the messages",
            ) from error


class TextStream:
    """The text of one answer, token by token: whole characters only, and cut before the
    first stop string.

    ``skip_special`` False: special tokens are written by their names, but for those
    that end a text.

    Text that may be the beginning of a stop string is held back until it is not. The
    pieces that ``push`` and ``close`` return add up to ``text``.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        prompt: Sequence[int] = (),
        stop: Sequence[str] = (),
        skip_special: bool = True,
    ) -> None:
        # A few tokens of the prompt come first: what a token reads as can depend on the
        # one before it.
        self._tokenizer, self._stop = tokenizer, tuple(stop)
        self._ids = list(prompt[-4:])
        self._shown = len(self._ids)  # ids whose text is complete
        self._anchor = 0  # where decoding begins
        self._held = ""
        self._shown_names = {} if skip_special else tokenizer.special_names
        self.text = ""
        self.stopped = False

    def push(self, token: int) -> str:
        """The text that ``token`` completes, maybe empty. Sets ``stopped`` where a stop
        string ended the text."""
        self._ids.append(token)
        piece = self._new_text()
        name = self._shown_names.get(token, "")
        if piece.endswith(UNFINISHED) and not name:
            return ""
        return self._accept(piece + name)

    def close(self) -> str:
        """End the stream: the text that was held back, broken characters included."""
        if self.stopped:
            return ""
        piece = self._accept(self._new_text())
        self.text += self._held
        return piece + self._held

    def _new_text(self) -> str:
        tokenizer, anchor = self._tokenizer, self._anchor
        if self._shown - anchor == 1:  # nearly always
            before = tokenizer.alone(self._ids[anchor])
        else:
            before = tokenizer.decode(self._ids[anchor : self._shown])
        return tokenizer.decode(self._ids[anchor:])[len(before) :]

    def _accept(self, piece: str) -> str:
        self._anchor, self._shown = self._shown, len(self._ids)
        if not self._stop:
            self.text += piece
            return piece
        held = self._held + piece
        places = [held.find(stop) for stop in self._stop]
        cuts = [place for place in places if place >= 0]
        self.stopped = bool(cuts)
        end = min(cuts) if cuts else len(held) - self._possible_stop(held)
        self._held = "" if cuts else held[end:]
        self.text += held[:end]
        return held[:end]

    def _possible_stop(self, text: str) -> int:
        """Length of the longest end of ``text`` that begins a stop string."""
        longest = max((len(stop) for stop in self._stop), default=1) - 1
        for size in range(min(longest, len(text)), 0, -1):
            if any(stop.startswith(text[-size:]) for stop in self._stop):
                return size
        return 0
