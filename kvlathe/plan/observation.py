"""ObservationWindow: which query rows decide what a token is ranked by, where a life
chooses tokens by saliency."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ObservationWindow:
    """The query rows that are observed, and how their attention probabilities become the
    saliency of a cached token.

    Windows are the prompt, cut into slices of ``slice_tokens`` tokens where that is not
    0, then every P later positions, from multiples of P on. Tokens are ranked when a
    window ends. Of each window these rows are observed: its last ones, as many as the
    larger of ``last`` and the share ``recent`` of the window; the share ``random`` of
    the window drawn from the others, by a hash of the plan's seed and the position; and
    the tokens whose ids are ``special``.

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
    slice_tokens: int = 0
