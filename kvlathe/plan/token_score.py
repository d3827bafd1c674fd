"""TokenScore: what tokens are ranked by, where a life chooses among them by saliency.

There are two kinds. An ObservationWindow adds up the attention that some query rows give
a token, so steps must report it. A KeyFormula computes a number from what is cached, so
nothing is reported and no kernel knows of it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from kvlathe.plan import formula

Problem = tuple[str, str]
"""A fact and the reason why it cannot be."""


@dataclass(frozen=True, slots=True)
class TokenScore:
    """Gives each cached token of a lane a number, its *saliency*. A life keeps the tokens
    of the largest ones; of two equal ones the older.

    Tokens are ranked when a prompt ends, cut into slices of ``slice_tokens`` tokens where
    that is not 0, then with every full page.
    """

    kind: str = field(default="", init=False)
    slice_tokens: int = field(default=0, kw_only=True)

    def problem(self) -> Problem | None:
        """A fault of its own numbers; None for none."""
        return None


@dataclass(frozen=True, slots=True)
class ObservationWindow(TokenScore):
    """The query rows that are observed, and how their attention probabilities become the
    saliency of a cached token.

    Windows are the prompt, or its slices, then every P later positions, from multiples of
    P on. Tokens are ranked when a window ends. Of each window these rows are observed: its
    last ones, as many as the larger of ``last`` and the share ``recent`` of the window;
    the share ``random`` of the window drawn from the others, by a hash of the plan's seed
    and the position; and the tokens whose ids are ``special``.

    The saliency of a token in a lane is the sum over the observed rows, and over the
    lane's query heads, of the probability that they give it. ``normalized``: divided by
    the number of observed rows at or after it; a token that none has observed then
    ranks first. Rows count from the token's arrival on or, where it is not
    ``accumulated``, from the last ranking on. ``pooling`` (odd): then the largest among
    so many neighbouring kept tokens. ``noise``: then its logarithm plus this many times
    a Gumbel variate (a hash of the plan's seed, the lane and the position).
    """

    recent: float = 0.0
    random: float = 0.0
    last: int = 0
    special: tuple[int, ...] = ()
    normalized: bool = False
    accumulated: bool = True
    pooling: int = 1
    noise: float = 0.0
    kind: str = field(default="attention", init=False)

    def problem(self) -> Problem | None:
        wrong = f"{self} cannot be computed"
        if not (0 <= self.recent <= 1 and 0 <= self.random <= 1 and self.last >= 0):
            return wrong, "recent and random are shares, last is a count"
        if not (self.recent or self.random or self.last):
            return f"{self} observes nothing", "every window needs rows that rank"
        if self.normalized and not self.accumulated:
            return wrong, "rows at or after a token are counted from its arrival on"
        if self.pooling < 1 or self.pooling % 2 == 0 or self.noise < 0:
            return wrong, "pooling is odd, noise at least 0"
        return None


@dataclass(frozen=True, slots=True)
class KeyFormula(TokenScore):
    """The saliency of a token is a formula of the keys and values that its lane has
    cached (formula.py has the words), as attention reads them: after RoPE, in the lane's
    basis, and dequantized.

    >>> KeyFormula("-norm(keys)").problem()
    >>> KeyFormula("norm(mean(keys))").problem()
    ("'norm(mean(keys))' ranks no tokens", 'it gives [], not one number for each token')
    """

    formula: str
    kind: str = field(default="formula", init=False)

    def problem(self) -> Problem | None:
        try:
            formula.check(self.formula)
        except ValueError as error:
            return f"{self.formula!r} ranks no tokens", str(error)
        return None


SCORES: Mapping[str, type[TokenScore]] = {
    "attention": ObservationWindow,
    "formula": KeyFormula,
}
"""The scores by their ``kind``."""
