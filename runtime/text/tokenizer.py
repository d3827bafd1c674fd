"""Tokenizer of an engine folder: text to ids, chat to a prompt, ids to text as they
come, and stop strings.

tokenizer.json decides how text is split and which special tokens frame it (its
post-processor: transformers 5 reads it the same way and ignores add_bos_token beside
it); base/added_tokens.py says which special tokens there are; generation_config.json has
the ids that end a text. How a template runs: base/chat_template.py.
"""

from __future__ import annotations

import codecs
import contextlib
import functools
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import tokenizers

from kvlathe.base import tokenizer_files
from kvlathe.base.chat_template import (
    DEFAULT,
    TOOL_USE,
    chat_templates,
    sandbox,
    variables_of,
)
from kvlathe.base.errors import KvlatheError
from kvlathe.base.panics import refuse_fault

UNFINISHED = "\N{REPLACEMENT CHARACTER}"
"""The character that a decoder writes for bytes that are no character (yet)."""


OTHER_TEXT = "try another text, or replace tokenizer.json"
LONGEST = 8
"""Tokens that are held back at most while they may be the beginning of a character."""
CHARACTER = 4
"""Most bytes of a character."""
WHITE = " \t\r\n"

Turn = dict[str, Any]
"""A message: {"role": ..., "content": ..., ...}."""
Render = Callable[[Sequence[Turn]], str]
BRACKETS = re.compile("<.+>", re.DOTALL)
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
        self._backend = backend
        added = {} if backend is None else backend.get_added_tokens_decoder()
        self._pieces: dict[int, bytes] = {}
        self._alone: dict[int, str] = {}
        self.special_ids = frozenset(
            token for token, entry in added.items() if entry.special
        )
        self.chat_templates = chat_templates(folder)
        # Of each template, the roles whose messages it writes.
        self._roles: dict[str, set[object]] = {}

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
        except BaseException as error:
            refuse_fault(error, "a text cannot be encoded", OTHER_TEXT)
            raise
        return batch[0]

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        if self._backend is None:
            return ""
        try:
            return self._backend.decode(
                list(ids), skip_special_tokens=skip_special_tokens
            )
        except BaseException as error:
            refuse_fault(error, "tokens cannot be decoded", OTHER_TEXT)
            raise

    def inside(self, ids: Sequence[int]) -> int:
        """Bytes of the character that the tokens, none of them special, end inside of;
        0 where they end a character, or nothing could complete it."""
        characters = codecs.getincrementaldecoder("utf-8")("replace")
        characters.decode(b"".join(map(self.piece, ids[-CHARACTER:])))
        return len(characters.getstate()[0])

    def decode_whole(self, ids: Sequence[int]) -> str:
        """``decode`` without the character that the tokens end inside of: what follows
        them completes it."""
        text = self.decode(ids)
        if not text.endswith(UNFINISHED):
            return text
        plain = [token for token in ids if token not in self.special_ids]
        left = self.inside(plain)
        while left > 0:
            left -= len(self.piece(plain.pop()))
        if left < 0:  # a token that ends what came before, too
            return text[:-1]
        return self.decode(plain)

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

    def has_token(self, name: str) -> bool:
        """Whether the vocabulary has an entry of that name."""
        backend = self._backend
        return backend is not None and backend.token_to_id(name) is not None

    @functools.cached_property
    def marks(self) -> dict[int, str]:
        """Names, by id, of added tokens that are special or stand in angle brackets, as
        Qwen's <tool_call>. A model was taught each as one token."""
        added = (
            {} if self._backend is None else self._backend.get_added_tokens_decoder()
        )
        return {
            token: entry.content
            for token, entry in added.items()
            if entry.special or BRACKETS.fullmatch(entry.content)
        }

    def specials_in(self, *texts: str) -> dict[str, int]:
        """Marks that do not end a text, by name, that texts have."""
        said = "\0".join(texts)
        return {
            name: token
            for token, name in self.marks.items()
            if name in said and token not in self.eos_ids
        }

    @functools.cached_property
    def blanks(self) -> tuple[int, ...]:
        """Tokens that write nothing but white space."""
        alphabet = {byte: name for name, byte in byte_alphabet().items()}
        names = {"\u2581", *WHITE, *(alphabet[ord(one)] for one in WHITE)}
        vocabulary = self.backend.get_vocab(with_added_tokens=False)
        likely = [token for name, token in vocabulary.items() if {*name} <= names]
        pieces = {token: self.piece(token) for token in likely}
        return tuple(
            sorted(token for token, one in pieces.items() if one and not one.strip())
        )

    @functools.cached_property
    def longest_token(self) -> int:
        """Characters of the vocabulary's longest entry."""
        return max(map(len, self.backend.get_vocab()), default=1)

    @property
    def backend(self) -> tokenizers.Tokenizer:
        """Raises KvlatheError where there is none."""
        return self._backend or tokenizer_files.read_backend(self.folder)

    @property
    def chat_template(self) -> str | None:
        """The template of conversations without tools. Setting one sets all."""
        return self.template_for(None)

    @chat_template.setter
    def chat_template(self, template: str | None) -> None:
        self.chat_templates = {} if template is None else {DEFAULT: template}

    def template_for(self, tools: object) -> str | None:
        """The template of conversations with ``tools``; None: they have none."""
        named = self.chat_templates
        found = None if tools is None else named.get(TOOL_USE)
        return named.get(DEFAULT) if found is None else found

    def template_values(self, tools: object) -> frozenset[str]:
        """Names of the values that the template of such conversations reads."""
        template = self.template_for(tools)
        return frozenset() if template is None else variables_of(template)

    def chat_prompt(
        self,
        messages: Sequence[Turn],
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        **values: Any,  # noqa: ANN401
    ) -> str:
        """The prompt that the checkpoint's template makes of ``messages`` ({"role":
        ..., "content": ...}). ``continue_final_message``: it ends with the last
        message's text, which the answer goes on with.

        Encode it with ``add_special_tokens=False``: templates write their own. Raises
        KvlatheError where there is no template, it refuses the messages, or one of them
        makes no difference to the prompt.
        """
        template = self.template_for(values.get("tools"))
        if template is None:
            raise KvlatheError(
                "this engine cannot chat",
                "its checkpoint has no chat template",
                "give a plain prompt instead",
            )

        asks = add_generation_prompt and not continue_final_message

        def render(turns: Sequence[Turn]) -> str:
            return (
                sandbox()
                .from_string(template)
                .render(
                    messages=list(turns),
                    add_generation_prompt=asks,
                    **{**self.special, **values},
                )
            )

        try:
            whole = render(messages)
            said = continued(render, messages) if continue_final_message else whole
        except Exception as error:  # it is a program, and may raise anything
            raise KvlatheError(
                "the chat template refused the messages",
                str(error),
                "change the messages",
            ) from error
        place = missing(
            render, messages, whole, self._roles.setdefault(template, set())
        )
        if place is not None:
            raise KvlatheError(
                f"message {place + 1} ({messages[place].get('role')}) does not appear in "
                "the prompt",
                "the model's chat template leaves it out",
                "give its text another role that the template knows",
            )
        return said


MARK = "\u2063kvlathe\u2063"
"""A text that no message and no template has."""
MOST_CHECKED = 8
"""Messages of one conversation that are tried alone: a template that changes every word
shows no mark."""


def continued(render: Render, messages: Sequence[Turn]) -> str:
    """The prompt up to the end of the last message's text. Raises ValueError where the
    template leaves that out."""
    *before, last = messages
    content = last.get("content")
    if not isinstance(content, str):
        raise ValueError("the last message has no text to continue")
    whole = render([*before, last | {"content": f"{content}{MARK} "}])
    text, found, rest = whole.rpartition(MARK)
    if not found:
        raise ValueError("it leaves out the last message, which was to be continued")
    if rest.startswith(" ") or not content.strip():
        return text
    # A template that takes off the blank at the end takes off those before it, too.
    return text.removesuffix(content[len(content.rstrip()) :])


def missing(
    render: Render, messages: Sequence[Turn], text: str, seen: set[object]
) -> int | None:
    """The place of a message that makes no difference to the prompt ``text``; None
    where there is none. ``seen``: roles whose messages the template is known to write;
    those that are found are added.

    A message whose words are in the prompt is there, if its role is a known one. The
    others are looked for in one more prompt, where marks stand in their places. So a
    conversation costs a second rendering where it is the first of its roles, or where
    the template changes what messages say. A message that calls tools may lose its
    text: templates of Llama 3 leave that out.
    """
    unsure = [
        place
        for place, message in enumerate(messages)
        if isinstance(content := message.get("content"), str)
        and content.strip()
        and not message.get("tool_calls")
        and not (message.get("role") in seen and content.strip() in text)
    ]
    if not unsure:
        return None
    marked = [*messages]
    for place in unsure:
        marked[place] = messages[place] | {"content": f"{MARK}{place}{MARK}"}
    try:
        said = render(marked)
    except Exception:  # it reads what they say
        said = ""
    hidden: list[int] = []
    for place in unsure:
        if f"{MARK}{place}{MARK}" in said:
            seen.add(messages[place].get("role"))
        else:
            hidden.append(place)
    for place in hidden[:MOST_CHECKED]:
        if _makes_no_difference(render, messages, place, text):
            return place
    return None


def _makes_no_difference(
    render: Render, messages: Sequence[Turn], place: int, text: str
) -> bool:
    """Whether the prompt is the same with other words in a message."""
    other = [*messages]
    other[place] = messages[place] | {"content": MARK}
    try:
        return render(other) == text
    except Exception:  # it reads what the message says
        return False


class TextStream:
    """The text of one answer, token by token: whole characters only, and cut before the
    first stop string.

    ``skip_special`` False: special tokens are written by their names, but for those
    that end a text. ``least``: tokens before which no stop string counts.

    Text that may be the beginning of a stop string is held back until it is not. The
    pieces that ``push`` and ``close`` return add up to ``text``, which goes on where
    ``Tokenizer.decode_whole`` of the prompt ends.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        prompt: Sequence[int] = (),
        stop: Sequence[str] = (),
        skip_special: bool = True,
        least: int = 0,
    ) -> None:
        self._tokenizer, self._stop = tokenizer, tuple(stop)
        self._least = least  # tokens that come before a stop string counts
        self._ids = self._end_of(prompt)
        self._shown = len(self._ids)  # ids whose text is complete
        self._anchor = 0  # where decoding begins
        # Characters of the text from there that were given out, where that is not all
        # of the shown ids.
        self._given: int | None = len(tokenizer.decode_whole(self._ids))
        self._held = ""
        self._shown_names = {} if skip_special else tokenizer.special_names
        self.text = ""
        self.stopped_by: str | None = None

    @property
    def stopped(self) -> bool:
        """Whether a stop string ended the text: ``stopped_by``."""
        return self.stopped_by is not None

    def _end_of(self, prompt: Sequence[int]) -> list[int]:
        """The last tokens of the prompt, from the beginning of a character on: what a
        token reads as can depend on the one before it."""
        special, piece = self._tokenizer.special_ids, self._tokenizer.piece
        ids = [token for token in prompt[-2 * LONGEST :] if token not in special]
        start = max(0, len(ids) - CHARACTER)
        for _ in range(CHARACTER - 1):
            if start and piece(ids[start])[:1] and 0x80 <= piece(ids[start])[0] < 0xC0:
                start -= 1
        return ids[start:]

    def push(self, token: int) -> str:
        """The text that ``token`` completes, maybe empty. Sets ``stopped_by`` where a
        stop string ended the text."""
        self._least -= 1
        name = self._shown_names.get(token, "")
        if token not in self._tokenizer.special_ids:
            self._ids.append(token)
        elif not name:
            return ""
        piece = self._new_text()
        held = self._ids[self._anchor :]
        if not name and piece.endswith(UNFINISHED) and self._tokenizer.inside(held):
            return self._broken(piece)
        return self._accept(piece + name)

    def _broken(self, piece: str) -> str:
        """Nothing while the held ids may become a character. Where they are too many
        for that, all but their last bytes never will."""
        if len(self._ids) - self._shown < LONGEST:
            return ""
        self._anchor, self._shown = len(self._ids) - CHARACTER, len(self._ids)
        self._given = len(self._tokenizer.decode_whole(self._ids[self._anchor :]))
        return self._say(piece[:-1])

    def close(self) -> str:
        """End the stream: the text that was held back, broken characters included."""
        if self.stopped:
            return ""
        piece = ""
        with contextlib.suppress(KvlatheError):  # the last token's was raised
            piece = self._accept(self._new_text())
        self.text += self._held
        return piece + self._held

    def _new_text(self) -> str:
        tokenizer, anchor = self._tokenizer, self._anchor
        text = tokenizer.decode(self._ids[anchor:])
        if self._given is not None:
            return text[self._given :]
        if self._shown - anchor == 1:  # nearly always
            return text[len(tokenizer.alone(self._ids[anchor])) :]
        return text[len(tokenizer.decode(self._ids[anchor : self._shown])) :]

    def _accept(self, piece: str) -> str:
        if self._given is None and self._shown < len(self._ids):
            self._anchor = self._shown
        self._shown, self._given = len(self._ids), None
        return self._say(piece)

    def _say(self, piece: str) -> str:
        """Give out a text, but for what may begin a stop string."""
        if not self._stop or self._least > 0:
            self.text += piece
            return piece
        held = self._held + piece
        found = [(held.find(stop), stop) for stop in self._stop]
        cuts = [(place, stop) for place, stop in found if place >= 0]
        end, self.stopped_by = (
            min(cuts) if cuts else (len(held) - self._possible_stop(held), None)
        )
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
