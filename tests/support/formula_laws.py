"""The law of formula scores, of any session: a lane keeps the tokens that a reference in
float64 keeps, computed by torch's own functions from the keys that pages hold."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
from torch import Tensor

from kvlathe.plan.codec import matrices
from kvlathe.plan.layout import CacheLayout
from kvlathe.runtime.llm import LLM
from kvlathe.runtime.sessions.page_moves import PageSelection
from kvlathe.runtime.sessions.protocols import PageMover

Rows = npt.NDArray[np.float32]
TIE = 1e-9
"""Numbers that differ less are in the order in which they were rounded."""


def likeness(keys: Tensor, values: Tensor) -> Tensor:
    """[n]: the negative cosine of each key float64 [n, r] to the mean direction."""
    anchor = F.normalize(keys, dim=-1).mean(0, keepdim=True)
    return -F.cosine_similarity(keys, anchor, dim=-1)


def shortness(keys: Tensor, values: Tensor) -> Tensor:
    """[n]: the negative length of each key float64 [n, r]."""
    return -torch.linalg.vector_norm(keys, dim=-1)


Reference = Callable[[Tensor, Tensor], Tensor]
REFERENCES: Mapping[str, Reference] = {"keydiff": likeness, "knorm": shortness}
"""By the method that keeps the tokens of the largest."""


def cached(
    session: PageMover, layout: CacheLayout, bucket: int, pages: Sequence[int], n: int
) -> list[tuple[Rows, Rows]]:
    """K and V [n, rank] of each lane of a bucket, read from the session's pages."""
    data = [np.frombuffer(session.read_page(bucket, x), np.uint8) for x in pages]
    return [
        (
            np.concatenate([k.read(page) for page in data])[:n],
            np.concatenate([v.read(page) for page in data])[:n],
        )
        for k, v in matrices(layout, bucket).values()
    ]


@dataclass
class Watched:
    """Watches the selections of an engine whose plan has budgets, and holds each to the
    law. ``kept``: how many tokens stayed in each lane and selection; ``dropped``."""

    llm: LLM
    reference: Reference
    kept: int = 0
    dropped: int = 0
    buckets: set[int] = field(default_factory=set[int])

    def __post_init__(self) -> None:
        session: Any = self.llm.session
        inner = session.select

        def select(one: PageSelection) -> None:
            pages, chosen = one.pages, one.selection
            before = self._cached(chosen.bucket, pages, chosen.length)
            inner(one)
            [target], [own] = chosen.targets, one.targets
            assert target.bucket == chosen.bucket
            after = self._cached(target.bucket, own, target.tokens)
            for old, new in zip(before, after, strict=True):
                self._hold(old, new, chosen.newest)
            self.buckets.add(chosen.bucket)

        session.select = select

    def _cached(
        self, bucket: int, pages: Sequence[int], tokens: int
    ) -> list[tuple[Rows, Rows]]:
        layout = CacheLayout(self.llm.plan)
        return cached(self.llm.session, layout, bucket, pages, tokens)

    def _hold(
        self, old: tuple[Rows, Rows], new: tuple[Rows, Rows], newest: int
    ) -> None:
        """One lane: what stays is bytes of what was, in order of age, and nothing that
        left has a larger number than something that stayed."""
        rows = [row.tobytes() for row in np.concatenate(old, axis=1)]
        stays = [row.tobytes() for row in np.concatenate(new, axis=1)]
        places: list[int] = []
        for row in stays:
            places.append(rows.index(row, places[-1] + 1 if places else 0))
        keys, values = (torch.from_numpy(side).double() for side in old)
        number = self.reference(keys, values).numpy()
        first = len(rows) - newest
        assert {*places} >= {*range(first, len(rows))}, "newest tokens have left"
        left = np.setdiff1d(np.arange(len(rows)), places)
        chosen = [place for place in places if place < first]
        if len(left) and chosen:
            assert number[chosen].min() >= number[left].max() - TIE
        self.kept += len(places)
        self.dropped += len(left)
