"""Samples: what a model is asked, as JSON lines that every side of a comparison reads.

A sample is a context, which is cached and compressed, and a question behind it, which
nobody knew then. This module and results.py need the standard library alone: other
programs read the same samples in environments of their own.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Protocol

Check = Literal["contains", "program", "parting"]


class Checkpoint(Protocol):
    """A tokenizer, as far as samples are written with it: kvlathe's own."""

    @property
    def special(self) -> dict[str, str]: ...

    @property
    def chat_template(self) -> str | None: ...

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]: ...

    def chat_prompt(self, messages: list[dict[str, str]]) -> str: ...


@dataclass(frozen=True, slots=True)
class Sample:
    """``task`` names the cell that it counts in, ``number`` the sample in it.

    Texts are final: the chat template and the token that begins a text are in them. So
    ``context`` and ``question`` are encoded apart, without special tokens. ``new``:
    tokens of the answer, at most; it ends before a text of ``stop``. ``endless``: it
    goes on after an end-of-text token.

    ``check``: contains (the share of ``answers`` that it has), program (it runs between
    the two texts of ``program``), or parting (where it leaves the uncompressed one).
    """

    task: str
    number: int
    context: str
    question: str
    new: int
    check: Check
    answers: tuple[str, ...] = ()
    stop: tuple[str, ...] = ()
    program: tuple[str, ...] = ()
    endless: bool = False


def write(path: Path, samples: Iterable[Sample]) -> None:
    """Write samples, one a line."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", encoding="utf-8") as file:
        for sample in samples:
            file.write(json.dumps(dataclasses.asdict(sample)) + "\n")


def read(path: Path) -> list[Sample]:
    """The samples of a file."""
    with path.open(encoding="utf-8") as file:
        return [_sample(json.loads(line)) for line in file]


def _sample(row: dict[str, Any]) -> Sample:
    """JSON has no tuples."""
    values = dict(row)
    for name in ("answers", "stop", "program"):
        values[name] = tuple(row[name])
    return Sample(**values)


def split(
    tokenizer: Checkpoint, context: str, question: str, answer: str, chat: bool
) -> tuple[str, str]:
    """The texts of a sample's context and question, and the beginning of its ``answer``
    behind them. ``chat``: as the turn of a user, through the checkpoint's template;
    else plain text behind whatever the tokenizer begins texts with."""
    if not chat:
        first = tokenizer.special.get("bos_token", "")
        begins = bool(first) and tokenizer.encode("a")[:1] == tokenizer.encode(
            first, add_special_tokens=False
        )
        return (first if begins else "") + context, question + answer
    turn = {"role": "user", "content": context + question}
    text = tokenizer.chat_prompt([turn])
    at = text.rindex(question)
    return text[:at], text[at:] + answer.lstrip()


def contained(text: str, answers: Iterable[str]) -> float:
    """The share of ``answers`` that ``text`` has, in any case of letters: RULER's
    measure."""
    wanted = [answer.lower() for answer in answers]
    return sum(answer in text.lower() for answer in wanted) / len(wanted)


def parting(answer: Sequence[int], reference: Sequence[int]) -> int:
    """Tokens before the first that differs."""
    pairs = enumerate(zip(answer, reference, strict=False))
    differs = (place for place, (own, other) in pairs if own != other)
    return next(differs, min(len(answer), len(reference)))
