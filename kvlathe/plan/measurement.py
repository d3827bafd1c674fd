"""Measurement: what a plan loses beside the uncompressed model, as its build measured it
on text that no price and no statistic read.

It stands in the manifest, so this module imports the standard library alone.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from kvlathe.plan.json_fields import Count, Positive

MOST_KL = 0.05
"""Nats a token above which a plan breaks the model."""
LEAST_SAME = 0.9
"""Share of equal next tokens below which it does."""
TIED_KL = 0.001
"""Nats a token below which other next tokens are ties of a model that says little: no
token's chance has moved by more than sqrt(KL / 2), a fiftieth."""
LEAST_KEPT = 0.5
"""Share of the exercises below which a plan breaks the model: text may read on well
where nothing from far back is known any more."""
ENOUGH = 8
"""Exercises from which on that share is no chance."""
LONG_ENOUGH = 1024
"""Tokens below which a measurement says little of a plan: its first page and the one that
is being filled, which are in 16 bit, are much of what was read."""
MOST = 1e12
"""Stands for numbers beyond it, and for those that are none: JSON has no
infinity."""
MOST_LOG = math.log(MOST) - 1e-9
"""Logarithm of what is as good as MOST: exp(log(MOST)) may be a little less."""
UNBOUNDED = "without bound"
UNMEASURED = "not measured"


@dataclass(frozen=True, slots=True)
class LengthLoss:
    """Losses on ``windows`` windows of ``tokens`` tokens, over the ``scored`` places of
    them: ``kl`` (uncompressed to compressed, nats a token), the share of places with the
    ``same_token`` next, and the ratio of perplexities. Of the ``exercises`` (answers that
    the uncompressed model knows from far back alone), ``kept`` are still given."""

    tokens: Positive
    windows: Positive
    scored: Positive
    kl: float
    same_token: float
    perplexity_ratio: float
    exercises: Count = 0
    kept: Count = 0

    @property
    def broken(self) -> frozenset[str]:
        """The fields whose losses break the model."""
        faults = {
            "kl": self.kl > MOST_KL,
            "same_token": self.same_token < LEAST_SAME and self.kl > TIED_KL,
            "kept": self.exercises >= ENOUGH
            and self.kept < LEAST_KEPT * self.exercises,
        }
        return frozenset(name for name, breaks in faults.items() if breaks)

    @property
    def breaks(self) -> bool:
        """Whether a plan that loses so much breaks the model."""
        return bool(self.broken)

    @property
    def words(self) -> str:
        """``KL 0.0021, same token 96.1 %, perplexity x1.004, exercises 22 of 22 kept``."""
        said = (
            f"KL {bounded(self.kl, '{:.2g}'.format)}, "
            f"same token {100 * self.same_token:.1f} %, "
            f"perplexity {bounded(self.perplexity_ratio, 'x{:.4g}'.format)}"
        )
        if self.exercises:
            said += f", exercises {self.kept:,} of {self.exercises:,} kept"
        return said


@dataclass(frozen=True, slots=True)
class Measurement:
    """``lengths``, shortest first; ``text`` says what was read, ``through`` what
    computed the plan, ``left_out`` which lengths were not measured and why (empty:
    none), ``remedy`` what loses less than this plan. ``is_idle``: tokens leave the
    plan's cache, but none did at these lengths, and longer ones were left out."""

    lengths: tuple[LengthLoss, ...]
    text: str
    through: str
    left_out: str
    seconds: float
    remedy: str = ""
    is_idle: bool = False

    @property
    def whole(self) -> LengthLoss:
        """All lengths together, every scored place alike."""
        scored = sum(one.scored for one in self.lengths)
        kl = sum(one.kl * one.scored for one in self.lengths) / scored
        same = sum(one.same_token * one.scored for one in self.lengths) / scored
        ratio = sum(math.log(one.perplexity_ratio) * one.scored for one in self.lengths)
        return LengthLoss(
            max(one.tokens for one in self.lengths),
            sum(one.windows for one in self.lengths),
            scored,
            kl,
            same,
            MOST if ratio / scored >= MOST_LOG else math.exp(ratio / scored),
            sum(one.exercises for one in self.lengths),
            sum(one.kept for one in self.lengths),
        )

    @property
    def worst(self) -> LengthLoss:
        """The length at which most is lost: of those that break the model, if any do."""
        return max(self.lengths, key=lambda one: (one.breaks, one.kl))

    @property
    def most_kl(self) -> float:
        """The largest KL of any length."""
        return max(one.kl for one in self.lengths)

    @property
    def broken(self) -> frozenset[str]:
        """The fields whose losses break the model at any length."""
        return frozenset[str]().union(*(one.broken for one in self.lengths))

    @property
    def breaks(self) -> bool:
        """Whether the plan breaks the model at any length."""
        return self.worst.breaks

    @property
    def is_short(self) -> bool:
        """Whether it ended before LONG_ENOUGH tokens for want of time."""
        return bool(self.left_out) and self.whole.tokens < LONG_ENOUGH

    @property
    def where(self) -> str:
        """``at 1,024 and 4,096 tokens of held-out text``."""
        lengths = listed([f"{one.tokens:,}" for one in self.lengths])
        return f"at {lengths} tokens of {self.text}"

    @property
    def line(self) -> str:
        """All of it in one line, for people."""
        left = f" ({self.left_out})" if self.left_out else ""
        if self.is_idle:
            left += ": too few for the plan to remove any"
        return f"measured: {self.whole.words}, {self.where}{left}"

    @property
    def warning(self) -> str:
        """The fault of a plan that breaks the model, in words; empty where it does not."""
        if not self.breaks:
            return ""
        worst = self.worst
        at = f"at {worst.tokens:,} tokens of {self.text}"
        remedy = f"; {self.remedy}" if self.remedy else ""
        return f"this plan breaks the model: {worst.words}, {at}{remedy}"


def listed(words: Sequence[str]) -> str:
    """``a, b and c``."""
    *others, last = words
    return f"{', '.join(others)} and {last}" if others else last


def finite(value: float) -> float:
    """``value`` as JSON can hold it."""
    return min(value, MOST) if math.isfinite(value) else MOST


def bounded(value: float, say: Callable[[float], str]) -> str:
    """A loss as ``say`` writes it, or in words that it has no bound."""
    return UNBOUNDED if value >= MOST else say(value)
