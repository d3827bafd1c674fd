"""The tokens that follow a step: chosen on the host, or on their way from where the
logits are."""

from __future__ import annotations

from collections.abc import Sequence as Items
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from kvlathe.base.errors import KvlatheError
from kvlathe.runtime.scheduling.sequence import Sequence
from kvlathe.runtime.sessions.protocols import Sampling
from kvlathe.runtime.text.sampler import Sampled, TokenLogprob, rows_of, sample

Rows = npt.NDArray[np.float32]
Choice = tuple[int | KvlatheError | None, TokenLogprob | None]
"""A sequence's next token, or why it has none, and its log-probability if reported."""
NO_TOKEN: Choice = (None, None)
"""Of a sequence that does not grow in a step."""


@dataclass(frozen=True, slots=True)
class Flight:
    """A step whose tokens are not known yet: ``sequences`` [R] get one each."""

    sequences: Items[Sequence]
    sampling: Sampling
    tokens: int
    chunks: int
    started: float

    @property
    def rows(self) -> dict[Sequence, int]:
        """The row of logits from which each sequence's token is chosen."""
        return {sequence: row for row, sequence in enumerate(self.sequences)}


def on_host(sequences: Items[Sequence], logits: Rows) -> Sampled:
    """The next token of each sequence from its row of ``logits`` [n, vocab]."""
    return sample(logits, rows_of([sequence.request for sequence in sequences]))


def chosen(sequences: Items[Sequence], sampled: Sampled) -> list[Choice]:
    """Each sequence's token, or why it has none, and its log-probability where it is
    reported."""
    choices: list[Choice] = []
    for row, sequence in enumerate(sequences):
        top = sequence.params.logprobs
        try:
            token = sampled.token(row)
        except KvlatheError as error:
            choices.append((error, None))
            continue
        logprob = None if top is None else sampled.logprob(row, top)
        choices.append((token, logprob))
    return choices
