"""HotRows: the tokens of a page that is filled in part, without the rest of the page.

The newest tokens are in 16 bit (32 where an engine is built so), and their page may be
larger than all sealed ones together. So what travels of it are the rows of its tokens:
of each lane K, V and, where tokens are ranked, scores.
"""

from __future__ import annotations

import numpy as np

from kvlathe.base.errors import KvlatheError
from kvlathe.plan.codec import matrices
from kvlathe.plan.layout import CacheLayout

Fields = list[tuple[int, int]]
"""(offset, bytes a token) of what a page holds of each of its tokens."""


class HotRows:
    """The rows of tokens in hot pages of one layout."""

    def __init__(self, layout: CacheLayout) -> None:
        self._layout = layout
        buckets = range(len(layout.page_stride))
        self._fields = [self._fields_of(bucket) for bucket in buckets]

    def _fields_of(self, bucket: int) -> Fields | None:
        """None where groups run along the tokens: such a page has no rows."""
        layout = self._layout
        plan = layout.plan
        fields: Fields = []
        for pair in matrices(layout, bucket).values():
            for matrix in pair:
                if not matrix.token_major:
                    return None
                fields += matrix.fields
        own = plan.index.buckets[bucket]
        if own.scored:
            lanes = len(own.lanes)
            kinds = 2 if plan.index.keeps_positions else 1
            first = layout.scores_at(bucket)
            for i in range(lanes * kinds):
                fields.append((first + 4 * plan.page_tokens * i, 4))
        return fields

    def cut(self, bucket: int, length: int) -> int:
        """Tokens in the last page of ``length`` tokens that travel as rows; 0 where the
        page goes whole."""
        if self._fields[bucket] is None:
            return 0
        return length % self._layout.plan.page_tokens

    def size(self, bucket: int, tokens: int) -> int:
        """Bytes of the rows of ``tokens`` tokens."""
        return tokens * sum(size for _, size in self._fields[bucket] or ())

    def take(self, bucket: int, page: bytes, tokens: int) -> bytes:
        """The rows of a page's first ``tokens`` tokens, field by field."""
        parts: list[bytes] = []
        for offset, size in self._fields[bucket] or ():
            parts.append(page[offset : offset + tokens * size])
        return b"".join(parts)

    def page(self, bucket: int, rows: bytes, tokens: int) -> bytes:
        """A page that begins with these tokens; zeros behind them. Raises KvlatheError
        for rows of another size."""
        wanted = self.size(bucket, tokens)
        if len(rows) != wanted:
            raise KvlatheError(
                "rows of pages cannot be read",
                f"{tokens} tokens of bucket {bucket} are {wanted:,} bytes, not {len(rows):,}",
                "send them again",
            )
        made = np.zeros(self._layout.page_stride[bucket], np.uint8)
        numbers = np.frombuffer(rows, np.uint8)
        at = 0
        for offset, size in self._fields[bucket] or ():
            count = tokens * size
            made[offset : offset + count] = numbers[at : at + count]
            at += count
        return made.tobytes()
