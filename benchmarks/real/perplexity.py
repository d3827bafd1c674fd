"""The loss of text at a length: of each window the last quarter is scored, behind its
first three quarters, token by token as a decode would see them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np

from kvlathe.evaluation.evaluate import RANKED_PROMPT, cut_windows, row_blocks
from kvlathe.runtime.llm import LLM
from kvlathe.tasks.metrics import nll


def windows(llm: LLM, text: Path, tokens: int, count: int) -> list[list[int]]:
    """The first ``count`` windows of ``tokens`` tokens: fewer where the text ends."""
    cut = cut_windows(llm, text, count, tokens)
    return [window for window in cut if len(window) == tokens]


def prompt_of(window: list[int]) -> int:
    """Tokens of a window that come before those that are scored."""
    return int(RANKED_PROMPT * len(window))


def loss(llm: LLM, window: list[int]) -> float:
    """The mean loss of a window's last quarter, in nats a token."""
    scored = range(prompt_of(window) - 1, len(window) - 1)
    blocks = row_blocks(llm, scored)
    found = list(_losses(llm, window, blocks))
    return float(np.concatenate(found).mean())


def _losses(
    llm: LLM, window: list[int], blocks: list[range]
) -> Iterator[np.ndarray[tuple[int], np.dtype[np.float64]]]:
    for block, logits in zip(
        blocks, llm.logits_in_blocks([window], blocks), strict=True
    ):
        targets = np.array(window[block.start + 1 : block.stop + 1])
        yield nll(logits[0], targets)
