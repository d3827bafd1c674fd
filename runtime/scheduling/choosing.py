"""The tokens that follow a step: chosen on the host, or on their way from where the
logits are."""

from __future__ import annotations

from collections.abc import Sequence as Items
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from functools import cache

import numpy as np
import numpy.typing as npt

from kvlathe.base.errors import KvlatheError
from kvlathe.runtime.scheduling.sequence import Chunk, Sequence
from kvlathe.runtime.sessions.protocols import Choose, Sampling
from kvlathe.runtime.text.guide import masks_of
from kvlathe.runtime.text.masks import Masks
from kvlathe.runtime.text.sampler import Request, Sampled, StepRows, TokenLogprob

Rows = npt.NDArray[np.float32]
Choice = tuple[int | KvlatheError | None, TokenLogprob | None]
"""A sequence's next token, or why it has none, and its log-probability if reported."""
NO_TOKEN: Choice = (None, None)
"""Of a sequence that does not grow in a step."""


@dataclass(frozen=True, slots=True)
class Computed:
    """What a step gave a chunk: ``logits`` [rows wanted, vocab], where the host has them;
    and the tokens that follow, where the sequence grows."""

    logits: Rows
    choices: Items[Choice] = ()


@dataclass(slots=True)
class Flight:
    """A step whose tokens are not known yet: ``sequences`` [R] get one each.
    ``ahead``: it was launched while another one ran. ``counted``: their tokens are
    counted where they are chosen. ``choose``: how they are chosen; ``sampling``: once
    that was queued."""

    sequences: Items[Sequence]
    tokens: int
    chunks: Items[Chunk]
    ahead: bool
    counted: bool = False
    choose: Choose | None = None
    sampling: Sampling | None = None

    @property
    def rows(self) -> dict[Sequence, int]:
        """The row of logits from which each sequence's token is chosen."""
        return {sequence: row for row, sequence in enumerate(self.sequences)}

    @property
    def late(self) -> bool:
        """Whether a choice depends on tokens that are not known."""
        return any(sequence.late(self.counted) for sequence in self.sequences)

    def queue(self, asked: StepRows, known: bool) -> None:
        """Queue the choice of the tokens. ``known``: the host knows all before them; it
        must where that counts."""
        assert self.choose is not None
        requests = [sequence.request for sequence in self.sequences]
        if not known:
            for request, sequence in zip(requests, self.sequences, strict=True):
                request.pending = sequence.pending
        masks = masks_of([sequence.guide for sequence in self.sequences])
        self.sampling = self.choose(asked.of(requests, masks, self.counted))
        for sequence in self.sequences:
            sequence.sampler.drawn += 1


@cache
def masker() -> ThreadPoolExecutor:
    """Makes masks while the engine's thread computes a step."""
    return ThreadPoolExecutor(1, "kvlathe-masks")


class Masking:
    """The masks of rows, made while a step computes their logits. It ends before the
    block does, whatever happens in it."""

    def __init__(self, requests: Items[Request]) -> None:
        guides = [request.guide for request in requests]
        self._work: Future[Masks | None] | None = None
        if any(guides):
            self._work = masker().submit(masks_of, guides)

    def __enter__(self) -> Masking:
        return self

    def __exit__(self, *_: object) -> None:
        if self._work is not None:
            wait([self._work])

    def result(self) -> Masks | None:
        return self._work.result() if self._work else None


def chosen(sequences: Items[Sequence], sampled: Sampled) -> list[Choice]:
    """The token of each row, whose sequence is given, or why it has none, and its
    log-probability where it is reported."""
    choices: list[Choice] = []
    tokens: list[int] = sampled.tokens.tolist()
    for row, sequence in enumerate(sequences):
        top = sequence.params.logprobs
        try:
            token = sampled.token(row) if tokens[row] < 0 else tokens[row]
        except KvlatheError as error:
            choices.append((error, None))
            continue
        logprob = None if top is None else sampled.logprob(row, top)
        choices.append((token, logprob))
    return choices


def divided(rows: Rows, chunks: Items[Chunk]) -> list[Rows]:
    """The rows of each chunk."""
    parts: list[Rows] = []
    start = 0
    for chunk in chunks:
        parts.append(rows[start : start + len(chunk.wanted)])
        start += len(chunk.wanted)
    return parts


def needs_logits(chunk: Chunk) -> bool:
    """Whether the host needs logits of a chunk: to report the prompt's, or for others
    that continue the same prompt."""
    sequence = chunk.sequence
    in_prompt = sequence.cached < sequence.prompt_tokens
    return in_prompt and (sequence.reports_prompt or sequence.leads)


def logits_of_prompt(sequence: Sequence) -> Rows:
    """Logits [vocab] after a shared prompt that was computed."""
    shared = sequence.shared_prompt
    assert shared and shared.logits is not None
    return shared.logits
