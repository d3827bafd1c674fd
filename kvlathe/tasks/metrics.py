"""Metrics of the loss by compression: perplexity, next-token agreement, KL divergence
and exact match, from logits. Numpy alone.

All of them take logits [n, vocab] of the same n places. ``nll`` and ``kl`` are in nats.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Logits = npt.NDArray[np.float32]
Values = npt.NDArray[np.float64]
Ids = npt.NDArray[np.int64]

LOGITS_AT_ONCE = 1 << 22
"""Logits whose float64 log-probabilities are in memory at a time: a vocabulary may have
250,000 entries, and a few arrays of this size are needed."""


def log_softmax(logits: Logits) -> Values:
    """[n, vocab] -> [n, vocab] float64."""
    shifted = logits.astype(np.float64) - logits.max(-1, keepdims=True)
    return shifted - np.log(np.exp(shifted).sum(-1, keepdims=True))


def nll(logits: Logits, targets: Ids) -> Values:
    """-log p(target) of each row: [n, vocab], [n] -> [n]."""
    targets = np.asarray(targets)
    return _joined(
        -log_softmax(logits[s])[np.arange(s.stop - s.start), targets[s]]
        for s in _slices(logits)
    )


def kl(reference: Logits, logits: Logits) -> Values:
    """KL(reference || logits) of each row: the nats lost by predicting with ``logits``
    what ``reference`` knows. [n].
    """

    def rows(s: slice) -> Values:
        p = log_softmax(reference[s])
        q = log_softmax(logits[s])
        return (np.exp(p) * (p - q)).sum(-1)

    return _joined(rows(s) for s in _slices(logits))


def agree(reference: Logits, logits: Logits) -> npt.NDArray[np.bool_]:
    """Whether both would say the same next token, row by row: [n]."""
    return reference.argmax(-1) == logits.argmax(-1)


def exact(logits: Logits, targets: Ids) -> bool:
    """Whether greedy decoding says all of ``targets``. Teacher forcing and greedy
    generation agree on this question."""
    return bool((logits.argmax(-1) == np.asarray(targets)).all())


@dataclass(frozen=True, slots=True)
class Sums:
    """Totals over ``tokens`` predicted tokens. They add up; ``kl`` and ``agreed`` stay
    0 without a reference."""

    tokens: int = 0
    nll: float = 0.0
    kl: float = 0.0
    agreed: int = 0

    def __add__(self, other: Sums) -> Sums:
        return Sums(
            self.tokens + other.tokens,
            self.nll + other.nll,
            self.kl + other.kl,
            self.agreed + other.agreed,
        )

    @classmethod
    def of(cls, logits: Logits, targets: Ids, reference: Logits | None = None) -> Sums:
        own = cls(len(targets), float(nll(logits, targets).sum()))
        if reference is None:
            return own
        return own + cls(
            0,
            0.0,
            float(kl(reference, logits).sum()),
            int(agree(reference, logits).sum()),
        )

    @property
    def perplexity(self) -> float:
        return float(np.exp(self.nll / self.tokens))


def _slices(logits: Logits) -> Iterator[slice]:
    rows, words = logits.shape
    size = max(1, LOGITS_AT_ONCE // words)
    return (slice(at, min(at + size, rows)) for at in range(0, rows, size))


def _joined(parts: Iterator[Values]) -> Values:
    return np.concatenate([np.zeros(0), *parts])
