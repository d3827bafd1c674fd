"""Tasks that an engine answers in its own words: the next line of code, and the
continuation of a text.

A line of code is compared by edit similarity (normalized Indel distance of the stripped
lines, as in LongBench's code completion), a continuation by ROUGE-1 (F1 of single
words). Answers are greedy and run as any request does.
"""

from __future__ import annotations

import importlib
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import TYPE_CHECKING

import numpy as np

from kvlathe.base.console import log
from kvlathe.base.errors import KvlatheError
from kvlathe.base.extras import pip_install
from kvlathe.runtime.text.sampling_params import SamplingParams
from kvlathe.tasks.tasks import Encoder

if TYPE_CHECKING:
    from kvlathe.runtime.llm import LLM

CODE_ENDINGS = tuple("{};:,)")
CODE_SHARE = 0.5
"""Share of lines that end as lines of code do, from which a document counts as
code."""

BEFORE = 400
"""Characters of a document that stand before anything asked for."""

LINE = re.compile(r"\n[ \t]*(?=(\S.{8,98}\S)[ \t]*\n)")
WORD = re.compile(r"(?<=\S)[ \n]+(?=\w)")


@dataclass(frozen=True, slots=True)
class Opening:
    """Token ids to continue, and how the document goes on."""

    prompt: tuple[int, ...]
    text: str


def is_code(text: str) -> bool:
    lines = [line.rstrip() for line in text.splitlines() if line.strip()]
    if not lines:
        return False
    return sum(line.endswith(CODE_ENDINGS) for line in lines) >= CODE_SHARE * len(lines)


def openings(
    rng: np.random.Generator,
    encoder: Encoder,
    documents: Iterable[str],
    count: int,
    tokens: int,
    code: bool,
) -> list[Opening]:
    """``count`` places in documents that are code (ends of lines) or are not (ends of
    words), document by document, each behind up to ``tokens`` tokens. None where no
    document has such a place.
    """
    kind = LINE if code else WORD
    places: list[tuple[str, list[int]]] = []
    for text in documents:
        starts = [match.start() for match in kind.finditer(text, BEFORE)]
        if starts and is_code(text) == code:
            places.append((text, starts))
    drawn = []
    for i in range(count if places else 0):
        text, starts = places[i % len(places)]
        at = starts[int(rng.integers(len(starts)))]
        drawn.append(Opening(_last_tokens(encoder, text[:at], tokens), text[at:]))
    return drawn


def _last_tokens(encoder: Encoder, text: str, tokens: int) -> tuple[int, ...]:
    """The longest end of a text, more or less, that has at most ``tokens`` tokens,
    framed as any prompt is."""
    ids = encoder.encode(text)
    while len(ids) > tokens:
        share = tokens / len(ids)
        text = text[-min(len(text) - 1, int(len(text) * share)) :]
        ids = encoder.encode(text)
    return tuple(ids)


def write(llm: LLM, asked: Sequence[Opening], new_tokens: int, what: str) -> list[str]:
    """The engine's greedy continuations of ``new_tokens`` tokens."""
    params = SamplingParams(max_new_tokens=new_tokens, ignore_eos=True)
    log.info("%s: %d texts", what, len(asked))
    answers = llm.generate([list(opening.prompt) for opening in asked], params)
    return [answer.text for answer in answers]


def first_line(text: str) -> str:
    """The first line with something on it, without its indentation."""
    for line in text.split("\n"):
        if stripped := line.strip():
            return stripped
    return ""


def edit_similarity(texts: Sequence[str], references: Sequence[str]) -> float:
    """The mean over pairs of first lines, 1 where they are equal."""
    fuzz = _library("rapidfuzz.fuzz", "rapidfuzz")
    ratios = []
    for text, reference in zip(texts, references, strict=True):
        ratios.append(fuzz.ratio(first_line(text), first_line(reference)))
    return float(np.mean(ratios)) / 100


def rouge_1(texts: Sequence[str], references: Sequence[str]) -> float:
    """The mean F1 of single words, each reference cut to as many words as its text
    has."""
    scorer = _library("rouge_score.rouge_scorer", "rouge-score").RougeScorer(["rouge1"])
    measures = []
    for text, whole in zip(texts, references, strict=True):
        reference = " ".join(whole.split()[: len(text.split())])
        measures.append(scorer.score(reference, text)["rouge1"].fmeasure)
    return float(np.mean(measures))


def require_libraries() -> None:
    """Raises KvlatheError where texts cannot be compared: asked before hours of
    work."""
    _library("rapidfuzz.fuzz", "rapidfuzz")
    _library("rouge_score.rouge_scorer", "rouge-score")


def _library(module: str, package: str) -> ModuleType:
    """Raises KvlatheError where it is not installed."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise KvlatheError(
            "texts cannot be compared",
            f"{package} is missing",
            f"run {pip_install('eval')}",
        ) from error
