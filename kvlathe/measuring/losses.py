"""Losses: what logits say of a plan beside the uncompressed model, summed up row by row.

Logits come in blocks of rows, of both models, and are gone with the block: a vocabulary
of 262,144 takes no more memory than a small one.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from torch import Tensor

from kvlathe.base.errors import KvlatheError
from kvlathe.export.search.exercises import FEW, GAIN
from kvlathe.plan.measurement import MOST, LengthLoss, finite

NUMBERS_AT_ONCE = 1 << 22
"""Logits of one model in memory at a time."""

Rows = Callable[[slice], Tensor]
"""Logits [r, V] of some of a passage's scored rows."""


@dataclass(frozen=True)
class Sums:
    """Totals over ``rows`` places: ``kl`` and both models' negative log-likelihoods in
    nats, and how many next tokens are the same. Of ``exercises`` answers ``kept`` are
    still given. They add up."""

    rows: int = 0
    kl: float = 0.0
    same: int = 0
    nll: float = 0.0
    whole_nll: float = 0.0
    windows: int = 0
    exercises: int = 0
    kept: int = 0

    def __add__(self, other: Sums) -> Sums:
        return Sums(
            self.rows + other.rows,
            self.kl + other.kl,
            self.same + other.same,
            self.nll + other.nll,
            self.whole_nll + other.whole_nll,
            self.windows + other.windows,
            self.exercises + other.exercises,
            self.kept + other.kept,
        )

    def loss(self, tokens: int) -> LengthLoss:
        """The means over windows of ``tokens`` tokens."""
        more = (self.nll - self.whole_nll) / self.rows
        kl = self.kl / self.rows
        if kl < 0:  # of equal models, by rounding
            kl = 0.0
        return LengthLoss(
            tokens,
            self.windows,
            self.rows,
            finite(kl),
            self.same / self.rows,
            finite(math.exp(max(-20.0, min(more, 700.0)))) if more == more else MOST,
            self.exercises,
            self.kept,
        )


def blocks(rows: int, vocabulary: int) -> Iterator[slice]:
    """The rows, so many at a time that NUMBERS_AT_ONCE holds."""
    step = max(1, NUMBERS_AT_ONCE // vocabulary)
    for start in range(0, rows, step):
        yield slice(start, min(start + step, rows))


def text_sums(whole: Rows, planned: Rows, targets: Tensor, vocabulary: int) -> Sums:
    """A window's sums; ``targets`` [R] are the tokens that follow its scored rows.
    Raises KvlatheError where the uncompressed model's logits are no numbers."""
    total = Sums(windows=1)
    for block in blocks(len(targets), vocabulary):
        of_whole, of_plan = whole(block), planned(block)
        same = int((of_whole.argmax(-1) == of_plan.argmax(-1)).sum())
        _check_sound(of_whole)
        p = of_whole.double().log_softmax(-1)
        q = of_plan.double().log_softmax(-1)
        labels = targets[block, None]
        total += Sums(
            len(labels),
            float((p.exp() * (p - q)).sum()),
            same,
            -float(q.gather(-1, labels).sum()),
            -float(p.gather(-1, labels).sum()),
        )
    return total


def _check_sound(whole: Tensor) -> None:
    """No plan is to blame for what the model itself does."""
    if not bool(whole.isfinite().all()):
        raise KvlatheError(
            "the model's logits are NaN or infinite without any compression",
            "its weights or settings are damaged, or its numbers are too large",
            "run it with transformers, and download it again where that fails, too",
        )


def exercise_sums(
    whole: Rows, near: Rows, planned: Rows, targets: Tensor, vocabulary: int
) -> Sums:
    """The count of an exercise's answers that depend on what is far (the uncompressed model
    is right, and GAIN nats less sure where it reads only what is ``near``), and how many
    of these the plan's model still gives."""
    asked = kept = 0
    for block in blocks(len(targets), vocabulary):
        labels = targets[block]
        of_whole = whole(block).log_softmax(-1)
        of_near = near(block).log_softmax(-1)
        gain = (of_whole - of_near).gather(-1, labels[:, None])[:, 0]
        depends = (of_whole.argmax(-1) == labels) & (gain > GAIN)
        still = planned(block).argmax(-1) == labels
        asked += int(depends.sum())
        kept += int((depends & still).sum())
    return Sums(exercises=asked, kept=kept) if asked >= FEW else Sums()
