"""Probes: which rows of a sequence are observed (plan.Probe), and how many have seen a token.

It follows from the plan, the length of the prompt and the token ids alone, never from how the rows were cut into steps.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from kvlathe.export.plan import CompressionPlan
from kvlathe.runtime.codec import noise, noise_key

DRAWS = 1
"""Of the hash that draws rows; apart from those of lanes, which have two numbers more."""


class Probes:
    """Of one sequence with a prompt of ``prompt`` tokens. None of its rows is observed where the plan has no probe."""

    def __init__(self, plan: CompressionPlan, prompt: int) -> None:
        self.probe, self.prompt, self.page = plan.probe, prompt, plan.page_tokens
        self._key = noise_key(plan.seed, DRAWS)
        self._flags = np.zeros(0, np.bool_)  # of all whole windows so far

    def weights(self, tokens: Sequence[int], start: int, stop: int) -> npt.NDArray[np.float32]:
        """[stop - start] float32: 1 for each observed row of ``tokens`` [start, stop)."""
        flags = self._known(stop)[start:stop]
        if self.probe is not None and self.probe.special:
            flags = flags | np.isin(np.array(tokens[start:stop]), self.probe.special)
        return flags.astype(np.float32)

    def seen(self, tokens: Sequence[int], stop: int) -> npt.NDArray[np.int64]:
        """[stop]: observed rows at or after each position, among those before ``stop``."""
        weights = self.weights(tokens, 0, stop).astype(np.int64)
        return weights[::-1].cumsum()[::-1]

    def _known(self, stop: int) -> npt.NDArray[np.bool_]:
        while len(self._flags) < stop:
            start = len(self._flags)
            end = self.prompt if start < self.prompt else (start // self.page + 1) * self.page
            self._flags = np.concatenate([self._flags, self._window(start, end)])
        return self._flags

    def _window(self, start: int, end: int) -> npt.NDArray[np.bool_]:
        """The observed rows of one window: its last ones, then others by lot."""
        flags, probe, size = np.zeros(end - start, np.bool_), self.probe, end - start
        if probe is None:
            return flags
        last = min(size, max(probe.last, round(probe.recent * size)))
        flags[size - last :] = True
        drawn = min(size - last, round(probe.random * size))
        lots = noise(self._key, start, size - last, 1)[:, 0]
        flags[np.argsort(lots, kind="stable")[:drawn]] = True
        return flags
