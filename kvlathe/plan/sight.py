"""Sight: the tokens before it that a query sees, in three numbers: those of the mask."""

from __future__ import annotations

from dataclasses import dataclass

NO_END = 1 << 30
"""Tokens that no sequence has."""


@dataclass(frozen=True, slots=True)
class Sight:
    """The tokens before it that a query sees. The query at position p sees token t
    where

        t < sink   or   p // P * P - recent <= t <= p

    for pages of P tokens: its own page and ``recent`` tokens before that page. So what
    it sees follows from its position alone. Both numbers are whole pages. ``exact``:
    where it is not 0, the query sees at most so many of its newest tokens, its own
    included, and ``recent`` is the pages that hold them.

    Only whole pages between the two leave the cache. So the same rule holds for places
    among the tokens that are held, and nobody needs to know what is gone.
    """

    sink: int = 0
    recent: int = NO_END
    exact: int = 0

    @property
    def is_less(self) -> bool:
        """Whether it is less than all that came before."""
        return self.recent < NO_END or self.exact > 0

    @property
    def most(self) -> int:
        """Tokens of full pages that are seen at most."""
        return self.sink + self.recent

    def first_seen(self, place: int, page_tokens: int) -> int:
        """The first token after the sink that the query at ``place`` sees."""
        to_the_page = place // page_tokens * page_tokens - self.recent
        if not self.exact:
            return to_the_page
        return max(to_the_page, place - self.exact + 1)


SEES_ALL = Sight()
