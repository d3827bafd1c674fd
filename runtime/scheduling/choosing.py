"""The tokens that follow a step: which rows of logits choose them, under which masks,
and what came of it."""

from __future__ import annotations

from collections.abc import Sequence as Items
from concurrent.futures import Future, ThreadPoolExecutor, wait
from functools import cache
from itertools import islice

import numpy as np

from kvlathe.base.errors import KvlatheError
from kvlathe.runtime.scheduling.sequence import Choice, Chunk, Rows, Sequence
from kvlathe.runtime.text.guide import masks_of
from kvlathe.runtime.text.masks import Masks
from kvlathe.runtime.text.sampler import Request, Sampled, rows_of, sample


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


def give_choices(growing: Items[Chunk], sampled: Sampled) -> None:
    """Give chunks the tokens that were sampled: each has a row for its next token, and
    one behind each of its guesses."""
    owners: list[Sequence] = []
    for chunk in growing:
        owners += [chunk.sequence] * (1 + len(chunk.drafts))
    choices = iter(chosen(owners, sampled))
    for chunk in growing:
        chunk.choices = list(islice(choices, 1 + len(chunk.drafts)))


def chosen(sequences: Items[Sequence], sampled: Sampled) -> list[Choice]:
    """The token of each row, whose sequence is given, or why it has none, and its
    log-probability where it is reported."""
    choices: list[Choice] = []
    tokens: list[int] = sampled.tokens.tolist()
    for row, sequence in enumerate(sequences):
        top = sequence.sampler.params.logprobs
        try:
            token = sampled.token(row) if tokens[row] < 0 else tokens[row]
        except KvlatheError as error:
            choices.append((error, None))
            continue
        choices.append((token, None if top is None else sampled.logprob(row, top)))
    return choices


def give_logits(chunks: Items[Chunk], logits: Rows) -> None:
    """Give chunks whose logits the host needs their rows of a step's."""
    start = 0
    for chunk in chunks:
        end = start + len(chunk.wanted)
        if chunk.needs_logits:
            chunk.logits = logits[start:end]
        start = end


def choosing_rows(chunks: Items[Chunk], growing: Items[Chunk], logits: Rows) -> Rows:
    """The logits of a step that choose tokens: the last rows of ``growing``."""
    if sum([1 + len(chunk.drafts) for chunk in growing]) == len(logits):
        return logits
    wanted = set(growing)
    places: list[int] = []
    end = 0
    for chunk in chunks:
        end += len(chunk.wanted)
        if chunk in wanted:
            places += range(end - 1 - len(chunk.drafts), end)
    return logits[np.array(places, np.intp)]


def first_choices(forked: Items[Sequence]) -> dict[Sequence, Choice]:
    """The first token of each sequence that grows, from the logits after a prompt that
    another one has computed."""
    growing = [sequence for sequence in forked if sequence.grows]
    if not growing:
        return {}
    requests = [sequence.request for sequence in growing]
    logits = np.stack([_logits_of_prompt(sequence) for sequence in growing])
    with Masking(requests) as masking:
        sampled = sample(logits, rows_of(requests, masking.result()))
    for sequence in growing:
        sequence.sampler.drawn += 1
    return dict(zip(growing, chosen(growing, sampled), strict=True))


def _logits_of_prompt(sequence: Sequence) -> Rows:
    """Logits [vocab] after a shared prompt that was computed."""
    shared = sequence.shared_prompt
    assert shared and shared.logits is not None
    return shared.logits
