"""Allowance: the time that guessing tokens may lose.

Guessing is a bet: rows cost time at once, and guesses may be wrong. So an account is
kept, in seconds. Steps add a small share of their time to it. Looks, trials and drafts
are paid from it, and what right guesses save is paid in. Nothing is guessed that it
cannot pay. It holds the time of a few steps at most, whatever was gained before: so no
thousand steps lose more than MOST + 1000 SHARE of their time, about.
"""

from __future__ import annotations

from kvlathe.runtime.scheduling.admission import Mean

SHARE = 0.005
"""Of the time of steps."""
MOST = 8.0
"""Steps whose time may be lost at once."""


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
