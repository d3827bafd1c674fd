"""Hidden states that are remembered for layers that guess tokens."""

from __future__ import annotations

from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any, cast

import numpy as np

from kvlathe.runtime.drafting.hidden_rows import MOST, HiddenRows


@dataclass(eq=False)
class Known:
    cached: int = 0
    tokens: list[int] = field(default_factory=lambda: [0])


@dataclass(eq=False)
class Rows:
    """A chunk of a sequence's newest token and guesses, of which ``choices`` stay."""

    sequence: Any
    wanted: list[int]
    choices: list[int]
    drafts: list[int]


def rows_of(sequence: Known, count: int) -> Rows:
    wanted = [*range(count)]
    return Rows(sequence, wanted, [0] * (1 + (count - 1) // 2), wanted[1:])


def test_hidden_rows_keep_no_more_than_their_account_says() -> None:
    """Rows are parts of their steps' arrays. Sequences wait for any time, and come back
    to a trail without a gap."""
    random, most = np.random.default_rng(1), 4 * MOST
    kept, sequences = HiddenRows(most), [Known() for _ in range(12)]
    fullest = 0
    for _ in range(1500):
        chosen = random.choice(12, int(random.integers(1, 5)), replace=False)
        chunks = [rows_of(sequences[i], int(random.integers(1, 5))) for i in chosen]
        rows = np.empty((sum(len(chunk.wanted) for chunk in chunks), 2))
        session = SimpleNamespace(hidden=lambda rows=rows: rows)
        context = SimpleNamespace(session=session)
        step = SimpleNamespace(growing=chunks, chunks=chunks, context=context)
        kept.watch(cast("Any", step))
        for chunk in chunks:
            known = chunk.sequence
            known.cached += len(chunk.choices)
            known.tokens += chunk.choices
            trail = kept.of(known)
            assert trail is not None and trail.end == known.cached
            assert len(trail.rows) == len(trail.steps) <= MOST
        trails = kept._trails.values()
        arrays = {id(x): cast("Any", x) for t in trails for x, _ in t.rows}
        fullest = max(fullest, sum(map(len, arrays.values())))
    assert most / 2 < fullest <= most
