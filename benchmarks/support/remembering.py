"""The uncompressed engine that others are compared with."""

from __future__ import annotations

from collections.abc import Generator, Sequence

import numpy as np
import numpy.typing as npt

from kvlathe.runtime.llm import LLM


class Remembering:
    """The uncompressed engine: it predicts each window once, however many engines are
    compared with it."""

    def __init__(self, llm: LLM) -> None:
        self.limits, self.tokenizer, self.manifest = (
            llm.limits,
            llm.tokenizer,
            llm.manifest,
        )
        self.plan, self._llm, self._known = llm.plan, llm, {}

    def logits(
        self, token_ids: Sequence[int], rows: Sequence[int]
    ) -> npt.NDArray[np.float32]:
        key = (tuple(token_ids), tuple(rows))
        if key not in self._known:
            self._known[key] = self._llm.logits(token_ids, rows)
        return self._known[key]

    def logits_in_blocks(
        self, texts: Sequence[Sequence[int]], blocks: Sequence[range]
    ) -> Generator[npt.NDArray[np.float32]]:
        """As LLM.logits_in_blocks. All of them stay in memory, to be known next time."""
        rows = [row for block in blocks for row in block]
        known = [self.logits(text, rows) for text in texts]
        start = 0
        for block in blocks:
            yield np.stack([one[start : start + len(block)] for one in known])
            start += len(block)

    def texts_at_once(self, tokens: int, most: int) -> int:
        """As LLM.texts_at_once."""
        return self._llm.texts_at_once(tokens, most)
