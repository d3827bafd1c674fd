"""Tasks that measure accuracy, as token ids: windows of text to predict, and questions
with one right answer.

Text: documents joined by the end-of-text id and cut into windows, each predicted alone.
Retrieval: lines of ``{"prompt": ..., "answer": ...}``; the whole answer must come out.
An oracle gives the logits: the torch decoder while a plan is searched, an engine when
it is evaluated, so both measure the same thing.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import numpy as np
import numpy.typing as npt

from kvlathe.base import tokenizer_files
from kvlathe.base.errors import KvlatheError
from kvlathe.base.json_lines import read_rows
from kvlathe.base.panics import refuse_fault
from kvlathe.tasks import metrics

WINDOWS = 8
WINDOW_TOKENS = 2048
EVERY = 3


class LogitsOracle(Protocol):
    def logits(
        self, token_ids: Sequence[int], rows: Sequence[int]
    ) -> npt.NDArray[np.float32]:
        """Next-token logits [len(rows), vocab] float32 after the places ``rows`` of the
        sequence ``token_ids``."""
        ...


class Encoder(Protocol):
    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]: ...


class FolderEncoder:
    """The tokenizer of a checkpoint folder, as far as tasks need it. Raises
    KvlatheError where there is none."""

    def __init__(self, folder: Path) -> None:
        self._backend = tokenizer_files.read_backend(folder)
        self._eos_ids = tokenizer_files.eos_ids(folder, self._backend)

    @property
    def eos_id(self) -> int:
        """The token that separates documents. Raises KvlatheError where the model has
        no such token."""
        return tokenizer_files.separator(self._eos_ids)

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        try:
            made = self._backend.encode(text, add_special_tokens=add_special_tokens)
        except BaseException as error:
            refuse_fault(error, "a text cannot be encoded", "replace tokenizer.json")
            raise
        return made.ids


# -- text ------------------------------------------------------------------------------
def read_texts(path: Path) -> list[str]:
    """The ``text`` of every line of a .jsonl file."""
    return [row["text"] for row in read_rows(path, ("text",))]


def encode_documents(encoder: Encoder, texts: Iterable[str]) -> list[list[int]]:
    return [encoder.encode(text, add_special_tokens=False) for text in texts]


def windows(
    documents: Iterable[Sequence[int]],
    eos_id: int,
    count: int = WINDOWS,
    tokens: int = WINDOW_TOKENS,
) -> list[list[int]]:
    """The first ``count`` windows of ``tokens`` tokens of the documents, each followed
    by ``eos_id``.

    A text too short for that gives fewer windows; shorter than one window, it is one.
    Raises KvlatheError if it is empty.
    """
    stream = [token for document in documents for token in (*document, eos_id)]
    whole = [
        stream[at : at + tokens] for at in range(0, len(stream) - tokens + 1, tokens)
    ] or [stream]
    if len(whole[0]) < 2:
        raise KvlatheError(
            "the text has nothing to predict",
            "it is empty",
            "give a file with documents in it",
        )
    return whole[:count]


def text_sums(oracle: LogitsOracle, window: Sequence[int]) -> metrics.Sums:
    """Sums over one window: every token but the first is predicted from those before
    it."""
    return metrics.Sums.of(
        oracle.logits(window, range(len(window) - 1)), np.array(window[1:])
    )


# -- questions -------------------------------------------------------------------------
@dataclass(frozen=True, slots=True)
class Question:
    """Token ids: what the model reads, and what it must say next."""

    prompt: tuple[int, ...]
    answer: tuple[int, ...]

    @property
    def tokens(self) -> int:
        return len(self.prompt) + len(self.answer)


def read_questions(path: Path, encoder: Encoder, every: int = EVERY) -> list[Question]:
    """Every ``every``-th line of a .jsonl file of prompts with answers."""
    rows = read_rows(path, ("prompt", "answer"))[::every]
    questions = (question(encoder, row["prompt"], row["answer"]) for row in rows)
    return [asked for asked in questions if asked.prompt and asked.answer]


def question(encoder: Encoder, prompt: str, answer: str) -> Question:
    """The answer is split as it is behind the prompt, where the prompt's own tokens
    stay what they are."""
    asked = encoder.encode(prompt)
    both = encoder.encode(prompt + answer)
    behind = (
        both[len(asked) :]
        if both[: len(asked)] == asked
        else encoder.encode(answer, add_special_tokens=False)
    )
    return Question(tuple(asked), tuple(behind))


def answers(oracle: LogitsOracle, question: Question) -> bool:
    """Whether greedy decoding gives the whole answer."""
    ids = question.prompt + question.answer
    logits = oracle.logits(ids, range(len(question.prompt) - 1, len(ids) - 1))
    return metrics.exact(logits, np.array(question.answer))
