"""A session without a model: pages hold token ids, and the next token is a hash of all tokens that the pages give back.

So an answer is right only if the scheduler, the pool and the step's arrays led to exactly the sequence's own tokens.
"""

from __future__ import annotations

import itertools
import zlib
from collections.abc import Sequence as Items

import numpy as np
import numpy.typing as npt

from kvlathe.export.plan import CompressionPlan, ModelShape
from kvlathe.runtime.pool import PagePool
from kvlathe.runtime.session import Int32, StepPlan

VOCABULARY = 251
SHAPE = ModelShape(
    layers=1, query_heads=2, kv_heads=2, head_dim=16, hidden_size=32, vocab_size=VOCABULARY, max_positions=4096
)


def following(tokens: Items[int]) -> int:
    """The token after ``tokens``; never the last of the vocabulary."""
    return zlib.crc32(np.asarray(tokens, np.int32).tobytes()) % (VOCABULARY - 1)


def solo(prompt: Items[int], count: int) -> list[int]:
    """The answer of ``count`` tokens."""
    tokens = list(prompt)
    for _ in range(count):
        tokens.append(following(tokens))
    return tokens[len(prompt) :]


class FakeSession:
    """``broken``: steps that have this token in them raise. ``largest``: tokens and sequences of the largest step."""

    def __init__(self, plan: CompressionPlan, pool: PagePool, broken: int = -1) -> None:
        self.plan, self.broken, self.largest = plan, broken, (0, 0)
        p = plan.page_tokens
        self.pages = [np.full((pool.arena_bytes // stride, p), -1, np.int32) for stride in pool.strides]

    def run(self, step: StepPlan) -> npt.NDArray[np.float32]:
        starts = step.query_starts
        self.largest = max(self.largest[0], int(starts[-1])), max(self.largest[1], len(starts) - 1)
        logits = np.zeros((len(step.logit_rows), VOCABULARY), np.float32)
        row = 0
        for b, (start, end) in enumerate(itertools.pairwise(starts.tolist())):
            known = self._append(step, b, step.input_ids[start:end])
            assert step.positions[start:end].tolist() == list(range(len(known) - (end - start), len(known)))
            while row < len(logits) and step.logit_rows[row] < end:
                logits[row, following(known[: len(known) - (end - 1 - step.logit_rows[row])])] = 1
                row += 1
        if self.broken in step.input_ids:
            raise RuntimeError("broken")
        return logits

    def _append(self, step: StepPlan, b: int, fresh: Int32) -> Int32:
        """Write a sequence's tokens into its fresh buckets; every lane must give back the same tokens. All of them."""
        p, found = self.plan.page_tokens, {}
        for s, bucket in enumerate(self.plan.buckets):
            length, table = int(step.lengths[b, s]), step.page_tables[s][b]
            if bucket.source is None:
                places = np.arange(length, length + len(fresh))
                self.pages[s][table[places // p], places % p] = fresh
                length += len(fresh)
            places = np.arange(length)
            found[s] = self.pages[s][table[places // p], places % p]
        whole = [
            np.concatenate([*(found[c] for c in self.plan.cold(s)[:1]), found[s]])
            for s, bucket in enumerate(self.plan.buckets)
            if bucket.source is None
        ]
        assert all(np.array_equal(other, whole[0]) for other in whole[1:])
        return whole[0]

    def seal(self, fresh: int, page: int, cold_pages: tuple[int, ...], position: int) -> None:
        for cold, target in zip(self.plan.cold(fresh), cold_pages, strict=True):
            self.pages[cold][target] = self.pages[fresh][page]

    def evict(self, bucket: int, pages: Int32, keep: npt.NDArray[np.int64]) -> None:
        raise AssertionError("these plans keep all tokens")

    def copy_page(self, bucket: int, source: int, target: int) -> None:
        self.pages[bucket][target] = self.pages[bucket][source]

    def read_page(self, bucket: int, page: int) -> bytes:
        return self.pages[bucket][page].tobytes()

    def write_page(self, bucket: int, page: int, data: bytes) -> None:
        self.pages[bucket][page] = np.frombuffer(data, np.int32)
