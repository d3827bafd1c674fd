"""ObservedRows: the rows of a sequence that are observed (token_score.ObservationWindow),
and how many have seen a token.

It follows from the plan, the length of the prompt and the token ids alone, never from
how the rows were cut into steps.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from kvlathe.plan.noise import noise, noise_key
from kvlathe.plan.plan import CompressionPlan

DRAWS = 1
"""The number of the hash that draws rows; apart from those of lanes, which have two
numbers more."""


class ObservedRows:
    """The observed rows of one sequence with a prompt of ``prompt`` tokens. None of its
    rows is observed where the plan has no observation window."""

    def __init__(self, plan: CompressionPlan, prompt: int) -> None:
        self.observation, self.prompt, self.page = (
            plan.index.observation,
            prompt,
            plan.page_tokens,
        )
        self._key = noise_key(plan.seed, DRAWS)
        self._flags = np.zeros(0, np.bool_)  # of all whole windows so far

    def weights(
        self, tokens: Sequence[int], start: int, stop: int
    ) -> npt.NDArray[np.float32]:
        """[stop - start] float32: 1 for each observed row of ``tokens`` [start,
        stop)."""
        flags = self._known(stop)[start:stop]
        if self.observation is not None and self.observation.special:
            flags = flags | np.isin(
                np.array(tokens[start:stop]), self.observation.special
            )
        return flags.astype(np.float32)

    def seen(self, tokens: Sequence[int], stop: int) -> npt.NDArray[np.int64]:
        """[stop]: observed rows at or after each position, among those before
        ``stop``."""
        return self.weights(tokens, 0, stop).astype(np.int64)[::-1].cumsum()[::-1]

    def _known(self, stop: int) -> npt.NDArray[np.bool_]:
        while len(self._flags) < stop:
            start = len(self._flags)
            window = self._window(start, self._window_end(start))
            self._flags = np.concatenate([self._flags, window])
        return self._flags

    def _window_end(self, start: int) -> int:
        """The end of the window that begins at ``start``: a slice of the prompt, or a
        page."""
        if start >= self.prompt:
            return (start // self.page + 1) * self.page
        size = self.observation.slice_tokens if self.observation else 0
        if not size:
            return self.prompt
        return min(self.prompt, (start // size + 1) * size)

    def _window(self, start: int, end: int) -> npt.NDArray[np.bool_]:
        """The observed rows of one window: its last ones, then others by lot."""
        flags, observation, size = (
            np.zeros(end - start, np.bool_),
            self.observation,
            end - start,
        )
        if observation is None:
            return flags
        last = min(size, max(observation.last, round(observation.recent * size)))
        flags[size - last :] = True
        drawn = min(size - last, round(observation.random * size))
        lots = noise(self._key, start, size - last, 1)[:, 0]
        flags[np.argsort(lots, kind="stable")[:drawn]] = True
        return flags
