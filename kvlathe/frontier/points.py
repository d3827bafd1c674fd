"""Parts of a frontier: candidates, their measured points, and the choice of one."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from kvlathe.base.errors import KvlatheError
from kvlathe.base.json_lines import read_rows

RETRIEVAL_MARGIN = 0.01
"""Share of all answers that a plan may lose beside the uncompressed model."""
ROUNDING = 1e-9


@dataclass(frozen=True, slots=True)
class Candidate:
    """A compression, and the share of the bytes that it is asked to remove."""

    compression: str
    ratio: float | None = None

    @property
    def name(self) -> str:
        return (
            self.compression
            if self.ratio is None
            else f"{self.compression} at {self.ratio:g}"
        )


@dataclass(frozen=True, slots=True)
class Point:
    """A candidate and what was measured of its engine.

    ``kv_bytes``: of a sequence of ``tokens`` tokens, the mean over where in its last
    page it stands. ``left``: that share of the uncompressed 16-bit cache. ``note``: why
    nothing was measured; the numbers are then None.
    """

    name: str
    compression: str
    ratio: float | None
    tokens: int | None = None
    kv_bytes: float | None = None
    left: float | None = None
    perplexity: float | None = None
    perplexity_ratio: float | None = None
    retrieval: float | None = None
    agreement: float | None = None
    kl: float | None = None
    note: str = ""

    @classmethod
    def refused(cls, candidate: Candidate, error: KvlatheError) -> Point:
        name, compression = candidate.name, candidate.compression
        return cls(name, compression, candidate.ratio, note=str(error))

    @property
    def measured(self) -> bool:
        return self.left is not None

    def to_json(self) -> dict[str, object]:
        return dataclasses.asdict(self)


@dataclass(frozen=True, slots=True)
class Bound:
    """Bound of a plan's loss: ``perplexity``, a ratio, and retrieval beside that of the
    ``uncompressed`` model."""

    perplexity: float
    uncompressed: Point

    def holds(self, point: Point) -> bool:
        """Whether a plan costs no more than that."""
        if point.perplexity_ratio is None or point.retrieval is None:
            return False
        least = (self.uncompressed.retrieval or 0.0) - RETRIEVAL_MARGIN
        is_fluent = point.perplexity_ratio <= self.perplexity + ROUNDING
        return is_fluent and point.retrieval >= least - ROUNDING


def choose(points: Sequence[Point], bound: Bound) -> Point:
    """The plan of fewest bytes that costs no more than ``bound`` allows; of equals the
    one with the lower perplexity. The uncompressed one always is allowed."""
    fitting = [point for point in points if bound.holds(point)]
    return min(fitting or [bound.uncompressed], key=_cheapest)


def _cheapest(point: Point) -> tuple[float, float]:
    assert point.left is not None and point.perplexity_ratio is not None
    return point.left, point.perplexity_ratio


def candidate(text: str) -> Candidate:
    """``compression`` or ``compression@ratio``. Raises KvlatheError."""
    compression, at, ratio = text.partition("@")
    if not at:
        return Candidate(compression)
    try:
        return Candidate(compression, float(ratio))
    except ValueError:
        raise KvlatheError(
            f"{text} cannot be used",
            f"{ratio!r} is no share of the bytes",
            "write COMPRESSION or COMPRESSION@0.9",
        ) from None


def questions_every(retrieval: Path, most: int) -> int:
    """The N of each N-th question of a file that asks at most ``most`` of them. Raises
    KvlatheError."""
    count = len(read_rows(retrieval, ("prompt", "answer")))
    return max(1, -(-count // most))
