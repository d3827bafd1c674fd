"""Exams: what a search scores its plans on, and how it scores them."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np
import numpy.typing as npt

from kvlathe.base.console import log, progress
from kvlathe.base.errors import KvlatheError
from kvlathe.export.model.checkpoint import Checkpoint
from kvlathe.export.model.decoder import Decoder
from kvlathe.tasks import metrics, tasks

Metric = Literal["retrieval", "perplexity", "agreement", "kl"]

SCORES = {
    "retrieval": "retrieval",
    "perplexity": "perplexity",
    "agreement": "agreement",
    "kl": "exp(-KL)",
}
"""The metrics as people read them."""

WINDOWS = 6
WINDOW_TOKENS = 1024
QUESTIONS = 16
"""A search scores many plans, so it reads less than an evaluation: these many windows,
and questions evenly spaced."""

FEW_TOKENS = 1024
"""Below this a text tells little."""


@dataclass(frozen=True)
class Exam:
    """Texts or questions that plans are scored on, as token ids: ``questions`` for
    retrieval, ``windows`` of text for the other metrics. The score of "kl" is exp(-KL),
    KL in nats a token.
    """

    metric: Metric
    questions: tuple[tasks.Question, ...] = ()
    windows: tuple[tuple[int, ...], ...] = ()

    @property
    def digest(self) -> str:
        return hashlib.sha256(json.dumps(dataclasses.asdict(self)).encode()).hexdigest()

    @property
    def fewer(self) -> Exam:
        """Every second question, for plans that only stand beside others."""
        if len(self.questions) < QUESTIONS:
            return self
        return dataclasses.replace(self, questions=self.questions[1::2])

    @property
    def described(self) -> str:
        """The exam in words, for people and reports."""
        if self.questions:
            return f"exact match of {len(self.questions)} answers"
        longest = max(map(len, self.windows))
        return f"{SCORES[self.metric]} over {len(self.windows)} windows of {longest} tokens"


def read_exam(
    checkpoint: Checkpoint, metric: Metric, text: Path | None, retrieval: Path | None
) -> Exam:
    """The exam of ``metric`` from its file; what is longer than the served length is
    cut or left out.

    Text is read from the file's end (calibration reads from its beginning), and every
    EVERY-th question is left to evaluations. Raises KvlatheError.
    """
    encoder = tasks.FolderEncoder(checkpoint.path)
    longest = checkpoint.spec.max_seq_len
    path = retrieval if metric == "retrieval" else text
    if path is None:
        option = "--retrieval" if metric == "retrieval" else "--text"
        raise KvlatheError(
            f"the metric {metric} has nothing to be measured on",
            "no file was given",
            f"give {option} FILE",
        )
    if metric == "retrieval":
        questions = _held_back(tasks.read_questions(path, encoder, every=1))
        fitting = [question for question in questions if question.tokens <= longest]
        if not fitting:
            raise KvlatheError(
                f"no question of {path} fits",
                f"sequences end at {longest} tokens",
                "give shorter ones",
            )
        even = np.linspace(0, len(fitting) - 1, min(QUESTIONS, len(fitting))).round()
        places = np.unique(even.astype(int))
        return Exam(metric, questions=tuple(fitting[place] for place in places))
    documents = tasks.encode_documents(encoder, tasks.read_texts(path)[::-1])
    windows = tasks.windows(
        documents, encoder.eos_id, WINDOWS, min(WINDOW_TOKENS, longest)
    )
    tokens = sum(map(len, windows))
    if tokens < FEW_TOKENS:
        log.warning(
            "%s gives %d tokens to measure accuracy on: too few to tell plans apart; give more text",
            path,
            tokens,
        )
    return Exam(metric, windows=tuple(map(tuple, windows)))


def _held_back(questions: list[tasks.Question]) -> list[tasks.Question]:
    """All but those that an evaluation asks, unless there are no others."""
    others = [question for i, question in enumerate(questions) if i % tasks.EVERY]
    return others or questions


class TorchOracle:
    """A folded decoder as a LogitsOracle."""

    def __init__(self, decoder: Decoder) -> None:
        self._decoder = decoder

    def logits(
        self, token_ids: Sequence[int], rows: Sequence[int]
    ) -> npt.NDArray[np.float32]:
        return self._decoder.logits(token_ids, rows).cpu().numpy()

    def logits_in_blocks(
        self, token_ids: Sequence[int], rows: Sequence[int]
    ) -> Iterator[tuple[slice, npt.NDArray[np.float32]]]:
        """The same, some rows after the other: (which of ``rows``, their logits)."""
        for block, logits in self._decoder.logits_in_blocks(token_ids, rows):
            yield block, logits.cpu().numpy()


# -- scores ----------------------------------------------------------------------------
def score(
    exam: Exam, oracle: TorchOracle, said: Sequence[npt.NDArray[np.int64]] = ()
) -> float:
    """Higher is better: share of questions answered, 1 / perplexity, or share of tokens
    equal to ``said``, what the uncompressed model says next in each window.
    """
    if exam.metric == "retrieval":
        return ask(exam, oracle, 0.0, []).most
    if exam.metric == "perplexity":
        windows = progress(exam.windows, "windows")
        first, *others = [text_sums(oracle, window) for window in windows]
        return 1 / sum(others, first).perplexity
    same = []
    for window, expected in zip(exam.windows, said, strict=True):
        same.append(says(oracle, window) == expected)
    return float(np.concatenate(same).mean())


@dataclass(frozen=True)
class Answered:
    """``most``: the share of questions that can have been answered, all of them if
    ``whole``, else those left open counted as answered."""

    most: float
    whole: bool


def ask(
    exam: Exam, oracle: tasks.LogitsOracle, needed: float, failed: list[int]
) -> Answered:
    """Asks until so many fail that ``needed`` is out of reach. Those in ``failed`` come
    first, which failed before, then shorter ones. What fails now is put before them."""
    count = len(exam.questions)
    tokens = [question.tokens for question in exam.questions]
    others = [place for place in range(count) if place not in failed]
    others.sort(key=lambda place: tokens[place])
    wrong = 0
    for done, place in enumerate(progress([*failed, *others], "questions"), 1):
        if tasks.answers(oracle, exam.questions[place]):
            continue
        wrong += 1
        if place in failed:
            failed.remove(place)
        failed.insert(0, place)
        most = (count - wrong) / count
        if most < needed and done < count:
            return Answered(most, False)
    return Answered((count - wrong) / count, True)


def text_sums(oracle: TorchOracle, window: Sequence[int]) -> metrics.Sums:
    """Sums over one window: every token but the first is predicted from those before
    it."""
    targets = np.array(window[1:])
    total = metrics.Sums()
    for block, logits in oracle.logits_in_blocks(window, range(len(targets))):
        total += metrics.Sums.of(logits, targets[block])
    return total


def says(oracle: TorchOracle, window: Sequence[int]) -> npt.NDArray[np.int64]:
    """The next token after every place of the window but its last."""
    blocks = oracle.logits_in_blocks(window, range(len(window) - 1))
    return np.concatenate([logits.argmax(-1) for _, logits in blocks])
