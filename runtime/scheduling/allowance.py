"""Allowance: the time that guessing tokens may lose.

Guessing is a bet: rows cost time at once, and guesses may be wrong. So an account is
kept, in seconds. Each step adds a small share of its time. Looks, trials and drafts are
paid from it, and what right guesses save is paid in. It never holds more than the time of
MOST steps, whatever was gained before. So a thousand steps lose the time of about
MOST + 1000 SHARE of them at most.

What the account cannot pay is not guessed. One exception keeps guesses from never being
tried again: LENT of what they promise to save is lent, MOST_LENT of the time of steps at
most, and the promises of drafters that were wrong count less.
"""

from __future__ import annotations

from kvlathe.runtime.scheduling.admission import Mean

SHARE = 0.005
"""A part of the time of steps."""
MOST = 5.0
"""Steps whose time may be lost at once."""
LENT = 0.01
"""Of what guesses promise to save, while nothing is left for them."""
MOST_LENT = SHARE
"""A part of the time of steps, however much is promised."""
FADE, RETRY = 0.98, 0.999
"""Weight of a step with guesses relative to the next, and of all over a look."""
EVIDENCE = 4.0
"""Tokens that stand for what is not known yet of a drafter."""


class Allowance:
    """``left``: seconds that may be lost now; none before the first step."""

    def __init__(self) -> None:
        self.left = 0.0
        self._step = Mean()

    def ran(self, plain: float, lost: float) -> None:
        """A step has run that takes ``plain`` seconds without guesses; 0: nobody knows.
        Guessing has ``lost`` so many, or saved them where that is negative."""
        if plain:
            self._step.add(plain)
        most = MOST * self._step.value
        left = most if self._step.count == 1 else self.left
        self.left = min(most, left + SHARE * plain - lost)

    def lend(self, promised: float, steps: int) -> None:
        """Guesses promise to save so many seconds in each of so many steps, and more
        than is left is needed to try them."""
        most = MOST_LENT * self._step.value
        self.left += steps * min(LENT * promised, most)

    def rest(self, seconds: float) -> int:
        """Steps that bring in twice so many seconds."""
        income = SHARE * self._step.value
        return int(2 * seconds / income) if income else 0


class Trust:
    """The share of what a drafter expects that has come."""

    def __init__(self) -> None:
        self._expected = self._came = 0.0

    @property
    def share(self) -> float:
        """1 at most."""
        return min(1.0, (self._came + EVIDENCE) / (self._expected + EVIDENCE))

    def tried(self, expected: float, came: int) -> None:
        """A step had guesses."""
        self._expected = FADE * self._expected + expected
        self._came = FADE * self._came + came

    def looked(self) -> None:
        """Knowledge fades, so that guesses are tried again."""
        self._expected *= RETRY
        self._came *= RETRY
