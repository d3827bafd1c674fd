"""Request: sequences that were submitted together. Delta: what one step added to one of
them."""

from __future__ import annotations

import threading
from collections.abc import Callable
from collections.abc import Sequence as Items
from dataclasses import dataclass

from kvlathe.base.errors import KvlatheError
from kvlathe.runtime.scheduling.sequence import Sequence
from kvlathe.runtime.text.sampler import TokenLogprob


@dataclass(frozen=True, slots=True)
class Times:
    """Times of a sequence that has ended, in seconds of time.perf_counter():
    ``admitted`` is 0 where it never ran. Where it has no token, ``first_token`` and
    ``last_token`` are its end."""

    submitted: float
    admitted: float
    first_token: float
    last_token: float

    @classmethod
    def of(cls, sequence: Sequence) -> Times:
        return cls(
            sequence.started,
            sequence.admitted,
            sequence.first_token,
            sequence.last_token,
        )


@dataclass(frozen=True, slots=True)
class Delta:
    """The tokens and text that one step added to one sequence of a request.

    ``index``: place of the sequence in its request. ``text``: whole characters, without
    stop strings. It may be empty, because text that could begin a stop string is held
    back. ``logprobs``: one for each of ``token_ids`` where asked for, else empty.
    ``prompt_logprobs``: with a sequence's first delta, where asked for; one for each
    token of the prompt but the first. ``finish_reason``: None while the sequence goes
    on, then stop, length, cancelled, timeout (its deadline passed), moved (it goes on
    elsewhere) or error (``error`` says which). ``drafted``, ``accepted``: of the whole
    sequence so far, tokens that were guessed, and those that were right. ``reused``:
    tokens of its prompt that the prefix cache had. ``stop``: the stop string that ended
    it, where one did. ``times``: with the last delta.
    """

    index: int
    text: str
    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprob, ...] = ()
    prompt_logprobs: tuple[TokenLogprob, ...] = ()
    finish_reason: str | None = None
    error: Exception | None = None
    drafted: int = 0
    accepted: int = 0
    reused: int = 0
    stop: str | None = None
    times: Times | None = None


OnDelta = Callable[[Delta], None]


@dataclass(slots=True)
class Told:
    """The portion of a sequence that was passed on. ``at``: the time of its last
    token."""

    characters: int
    tokens: int
    at: float


class Request:
    """Sequences that were submitted together.

    ``on_delta``: called in the engine's thread with each delta. None: nobody follows
    the request, and one sequence that fails ends the others. ``done`` is set once every
    sequence has ended.
    """

    def __init__(self, sequences: Items[Sequence], on_delta: OnDelta | None) -> None:
        self.sequences = sequences
        self.on_delta = on_delta
        self.left = len(sequences)
        self.done = threading.Event()
        if not sequences:
            self.done.set()
        self._told = [_told(sequence) for sequence in sequences]

    def news(self, index: int) -> Delta:
        """The portion that was not passed on yet of the sequence at ``index``."""
        sequence, told = self.sequences[index], self._told[index]
        text = sequence.text.text if sequence.text else ""
        delta = Delta(
            index,
            text[told.characters :],
            tuple(sequence.tokens[sequence.prompt_tokens + told.tokens :]),
            tuple(sequence.logprobs[told.tokens :]),
            () if told.tokens else tuple(sequence.prompt_logprobs),
            sequence.finish_reason,
            sequence.error,
            sequence.drafted,
            sequence.accepted,
            max(0, sequence.reused),
            sequence.text.stopped_by if sequence.text else None,
            Times.of(sequence) if sequence.finish_reason else None,
        )
        told.characters = len(text)
        return delta

    def progress(self, index: int) -> tuple[int, float]:
        """New tokens of a sequence since the last call, and seconds since then."""
        sequence, told = self.sequences[index], self._told[index]
        tokens = sequence.answered - told.tokens
        seconds = sequence.last_token - told.at
        told.tokens, told.at = sequence.answered, sequence.last_token
        return tokens, seconds

    def raise_failure(self) -> None:
        """Raise what ended a sequence before its answer was whole."""
        for sequence in self.sequences:
            if sequence.error:
                raise sequence.error
        if any(sequence.finish_reason == "cancelled" for sequence in self.sequences):
            raise KvlatheError(
                "the answer is not whole",
                "the engine was closed while it was computed",
                "load the engine again",
            )
        if any(sequence.finish_reason == "moved" for sequence in self.sequences):
            raise KvlatheError(
                "the answer is not whole",
                "its sequence was exported",
                "go on with it where it was adopted",
            )


def _told(sequence: Sequence) -> Told:
    """Mark as passed on what a sequence that came from elsewhere had said there."""
    characters = len(sequence.text.text) if sequence.text else 0
    return Told(characters, sequence.answered, sequence.started)
