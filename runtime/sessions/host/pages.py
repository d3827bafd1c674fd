"""HostPages: the arena in host memory and everything that changes pages between steps,
in numpy.

A page is one contiguous range, so each bucket sees the arena as a table [page id,
page_stride] of bytes; copying, swapping, sealing and moving tokens are operations on
rows of it. What computes a step (ONNX Runtime, a native library, a reference in a test)
is a subclass that adds ``run`` and calls ``append`` and, where the plan has an
observation window, ``page_scores``.
"""

from __future__ import annotations

import mmap
from collections.abc import Callable, Container, Iterator, Sequence
from dataclasses import dataclass
from math import gcd

import numpy as np
import numpy.typing as npt

from kvlathe.base.errors import KvlatheError
from kvlathe.plan.codec import FLOATS, Bytes, Positions, matrices
from kvlathe.plan.formula import INPUTS, inputs_of
from kvlathe.plan.layout import CacheLayout
from kvlathe.plan.plan import CompressionPlan
from kvlathe.plan.token_fields import token_fields
from kvlathe.plan.token_score import KeyFormula
from kvlathe.runtime.sessions.host import huge_pages
from kvlathe.runtime.sessions.host.page_scores import PageScores
from kvlathe.runtime.sessions.host.saliency import (
    by_formula,
    ranked,
    saliency,
    selected,
)
from kvlathe.runtime.sessions.page_moves import FullPage, PageMoves, PageSelection
from kvlathe.runtime.sessions.protocols import (
    Capability,
    PageMover,
    Region,
    Scores,
    StepPlan,
)

INT32_UNITS = 2**31 - 1


@dataclass(frozen=True, slots=True)
class _Scatter:
    """The places to which the cells of a token's row go in a fresh bucket: ``source``
    to ``base + place * step`` of its page."""

    bucket: int
    stride: int  # cells of a page
    source: npt.NDArray[np.intp]  # [n], ascending
    base: npt.NDArray[np.intp]  # [n]
    step: npt.NDArray[np.intp]  # [n]


class HostPages(PageMover):
    """The pool's memory for a plan: ``arena_bytes`` of zeroed, page-aligned memory that
    costs nothing until touched.

    ``views`` holds it as typed arrays [n, unit] of the formats that Attend reads
    (pool_f32, pool_f16, pool_u8).
    """

    capabilities: frozenset[Capability] = frozenset({"moves_tokens", "pool_memory"})

    def __init__(self, layout: CacheLayout, arena_bytes: int) -> None:
        check_supported(layout.plan)
        self.layout, self.plan = layout, layout.plan
        unit = self.plan.index.unit
        size = -(-max(arena_bytes, 1) // mmap.PAGESIZE) * mmap.PAGESIZE
        self.memory = np.frombuffer(huge_pages.reserve(size), np.uint8)
        self.rows = [
            self.memory[: size // stride * stride].reshape(-1, stride)
            for stride in layout.page_stride
        ]
        self.matrices = [matrices(layout, b) for b in range(len(layout.page_stride))]
        self.page_scores = PageScores(layout, self.rows)
        self.hot = FLOATS[self.plan.index.hot_bits]
        self.row_width = sum(lane.numbers for lane in self.plan.lanes)
        self.views = typed_views(self.memory, unit)
        if size // (unit * self.hot.itemsize) > INT32_UNITS:
            most = f"{INT32_UNITS * unit * self.hot.itemsize:,} bytes"
            raise KvlatheError(
                f"a cache of {size:,} bytes is too large",
                f"addresses reach {most}",
                "ask for less",
            )
        # Rows are scattered in cells as wide as every rank and page allows, each one
        # opaque element for numpy.
        ranks = (
            rank for lane in self.plan.lanes for rank in (lane.rank_k, lane.rank_v)
        )
        fresh = (
            stride
            for b, stride in zip(
                self.plan.index.buckets, layout.page_stride, strict=True
            )
            if b.is_hot
        )
        self._grain = gcd(*ranks, *(stride // self.hot.itemsize for stride in fresh))
        self._cell = np.dtype((np.void, self._grain * self.hot.itemsize))
        self._cells = self.memory[
            : size // self._cell.itemsize * self._cell.itemsize
        ].view(self._cell)
        self._scatters = [
            self._scatters_of(stage) for stage in range(self.plan.index.graphs)
        ]

    def _scatters_of(self, stage: int) -> list[_Scatter]:
        """The scatters of the fresh buckets in the layers of a stage."""
        starts = row_offsets(self.plan, stage)
        index = self.plan.index
        hot = [b for b in index.buckets_of(stage) if index.buckets[b].is_hot]
        return [self._scatter(b, starts) for b in hot]

    def _scatter(self, bucket: int, starts: dict[int, tuple[int, int]]) -> _Scatter:
        size, cells = self._cell.itemsize, []
        for index, pair in self.matrices[bucket].items():
            for matrix, start in zip(pair, starts[index], strict=True):
                if matrix.beginning:
                    continue
                n = matrix.rank // self._grain
                cells += [
                    (start // self._grain + i, matrix.data // size + i, n)
                    for i in range(n)
                ]
        source, base, step = np.array(sorted(cells), np.intp).reshape(-1, 3).T
        return _Scatter(
            bucket, self.layout.page_stride[bucket] // size, source, base, step
        )

    def append(
        self, step: StepPlan, rows: npt.NDArray[np.floating], stage: int = 0
    ) -> None:
        """Write ``rows`` [T, width of the stage's lanes] in the hot format to the
        places after ``step.lengths`` in its fresh buckets."""
        starts, p = step.cu_seqlens_q, self.plan.page_tokens
        sequence = np.repeat(np.arange(len(starts) - 1), starts[1:] - starts[:-1])
        nth = np.arange(len(sequence)) - starts[sequence]
        cells = np.ascontiguousarray(rows[: len(sequence)]).view(self._cell)
        for scatter in self._scatters[stage]:
            place = step.lengths[sequence, scatter.bucket] + nth
            page = step.page_tables[scatter.bucket][sequence, place // p].astype(
                np.intp
            )
            target = (
                (page * scatter.stride)[:, None]
                + scatter.base
                + (place % p)[:, None] * scatter.step
            )
            whole = len(scatter.source) == cells.shape[1]
            self._cells[target.ravel()] = (
                cells if whole else cells.take(scatter.source, axis=1)
            ).ravel()

    @property
    def region(self) -> Region:
        """As Session.region."""
        return Region(self.memory.ctypes.data, self.memory.nbytes, "cpu")

    def mark(self) -> Callable[[], None]:
        """As Session.mark: nothing is left to do once a call returns."""
        return lambda: None

    # -- pages change between steps ----------------------------------------------------
    def apply(self, moves: Sequence[PageMoves]) -> None:
        """As Session.apply."""
        for one in moves:
            for copy in one.copies:
                self.copy_page(copy.bucket, copy.source, copy.target)
        self.seal([full for one in moves for full in one.seals])
        for one in moves:
            for selection in one.selections:
                self.select(selection)
            for x in one.relocations:
                self.move(x.source, x.pages, x.target, x.target_pages, x.places)
        for one in moves:
            for reset in one.resets:
                self.forget(reset.bucket, reset.pages)

    def seal(self, pages: Sequence[FullPage]) -> None:
        """Quantize each page into one page of each of its cold buckets."""
        for full in pages:
            self._seal_one(full)

    def _seal_one(self, full: FullPage) -> None:
        fresh = full.fresh
        source = self.rows[fresh][full.page]
        cold = self.plan.index.buckets[fresh].cold
        for bucket, target in zip(cold, full.cold_pages, strict=True):
            positions = [full.position] * len(self.matrices[bucket])
            self.encode(fresh, source, bucket, target, positions)
            self.page_scores.carry(fresh, source, bucket, self.rows[bucket][target])

    def encode(
        self,
        fresh: int,
        source: Bytes,
        cold: int,
        target: int,
        positions: Sequence[Positions],
    ) -> None:
        """Write the lanes of bucket ``cold`` from the bytes of a full page of bucket
        ``fresh`` into page ``target``, in its number format. ``positions`` of each
        lane's tokens, as in codec.PageMatrix.write."""
        for (index, pair), position in zip(
            self.matrices[cold].items(), positions, strict=True
        ):
            for matrix, hot in zip(pair, self.matrices[fresh][index], strict=True):
                matrix.write(self.rows[cold][target], hot.read(source), position)

    def select(self, one: PageSelection) -> None:
        """Order the tokens of a bucket by saliency, and move them to their targets."""
        selection = one.selection
        parts = selected(selection, ranked(self._salient(one), selection.newest))
        for target, pages, places in zip(
            selection.targets, one.targets, parts, strict=True
        ):
            self.move(selection.bucket, one.pages, target.bucket, pages, places)

    def _salient(self, one: PageSelection) -> npt.NDArray[np.floating]:
        """[lanes, tokens]: the saliency of a bucket's tokens, by the plan's score."""
        bucket, length = one.selection.bucket, one.selection.length
        if isinstance(self.plan.score, KeyFormula):
            text = self.plan.score.formula
            lanes = self.cached(bucket, one.pages, length, inputs_of(text))
            return by_formula(text, lanes)
        observation = self.plan.index.observation
        assert observation is not None
        scores = self.scores(bucket, one.pages, length)
        return saliency(observation, scores, one.seen, one.keys)

    def cached(
        self, bucket: int, pages: Sequence[int], tokens: int, names: Container[str]
    ) -> Iterator[dict[str, npt.NDArray[np.float64]]]:
        """Those of formula.INPUTS that have one of ``names``, of each lane: [tokens,
        rank], from the first ``tokens`` tokens in ``pages`` of a bucket."""
        rows = [self.rows[bucket][page] for page in pages]
        for pair in self.matrices[bucket].values():
            yield {
                name: np.concatenate([*map(matrix.read, rows)])[:tokens].astype(float)
                for name, matrix in zip(INPUTS, pair, strict=True)
                if name in names
            }

    def move(
        self,
        source: int,
        pages: Sequence[int],
        target: int,
        target_pages: Sequence[int],
        places: npt.NDArray[np.int64],
    ) -> None:
        """As Relocation. Raises KvlatheError if the source's tokens cannot leave
        their groups."""
        lanes = list(self.matrices[target])
        if source == target:
            self._gather(source, pages, lanes, places, self.rows[source], target_pages)
            return
        full = aligned_bytes(len(target_pages), self.layout.page_stride[source])
        self._gather(source, pages, lanes, places, full, range(len(target_pages)))
        for page, data in zip(target_pages, full, strict=True):
            self.encode(
                source,
                data,
                target,
                page,
                self.page_scores.positions(source, data, lanes),
            )
            self.page_scores.carry(source, data, target, self.rows[target][page])

    def _gather(
        self,
        bucket: int,
        pages: Sequence[int],
        lanes: Sequence[int],
        places: npt.NDArray[np.int64],
        into: npt.NDArray[np.uint8],
        targets: Sequence[int],
    ) -> None:
        """Copy the tokens ``places`` [lanes, n] of some lanes of a bucket into the rows
        ``targets`` of ``into``, which are laid out like its pages."""
        every = token_fields(self.layout, bucket)
        fields = [every[lane] for lane in lanes]
        self.copy_tokens(
            self.rows[bucket], pages, into, targets, np.array(fields, np.int64), places
        )

    def copy_tokens(
        self,
        source: npt.NDArray[np.uint8],
        pages: Sequence[int],
        target: npt.NDArray[np.uint8],
        targets: Sequence[int],
        fields: npt.NDArray[np.int64],
        places: npt.NDArray[np.int64],
    ) -> None:
        """Copy the tokens ``places`` [lanes, n] of ``pages`` of ``source`` into the
        rows ``targets`` of ``target``, and zeros behind them. ``fields`` [lanes,
        fields, 2]: offset and bytes a token of what a lane has in a page."""
        p, from_rows, rows = (
            self.plan.page_tokens,
            np.array(pages, np.intp),
            np.array(targets, np.intp),
        )
        for of_lane, kept in zip(fields.tolist(), places, strict=True):
            for offset, size in of_lane:
                columns = slice(offset, offset + p * size)
                tokens = source[from_rows, columns].reshape(-1, size)
                packed = np.zeros((len(rows) * p, size), np.uint8)
                packed[: len(kept)] = tokens[kept]
                target[rows, columns] = packed.reshape(len(rows), -1)

    def scores(self, bucket: int, pages: Sequence[int], tokens: int) -> Scores:
        """Scores of the first ``tokens`` tokens in ``pages`` of a bucket."""
        return self.page_scores.read(bucket, pages, tokens)

    def roll_back(self) -> None:
        """As Session.roll_back."""
        self.page_scores.undo()

    def forget(self, bucket: int, pages: Sequence[int]) -> None:
        """Set the observed attention of all tokens in ``pages`` to 0."""
        self.page_scores.forget(bucket, pages)

    def copy_page(self, bucket: int, source: int, target: int) -> None:
        pages = self.rows[bucket]
        pages[target] = pages[source]

    def read_page(self, bucket: int, page: int) -> bytes:
        return self.rows[bucket][page].tobytes()

    def write_page(self, bucket: int, page: int, data: bytes) -> None:
        pages = self.rows[bucket]
        pages[page] = np.frombuffer(data, np.uint8)


def aligned_bytes(rows: int, stride: int) -> npt.NDArray[np.uint8]:
    """Zeroed bytes [rows, stride], each row as aligned as a page is if ``stride`` is a
    page's."""
    size = rows * stride
    memory = np.zeros(size + 128, np.uint8)
    first = -memory.ctypes.data % 128
    return memory[first : first + size].reshape(rows, stride)


def row_offsets(plan: CompressionPlan, stage: int = 0) -> dict[int, tuple[int, int]]:
    """The places where K and V of each kept lane of a stage begin in a token's row:
    layer by layer, K of all lanes, then V. V that is a part of K has no place of its
    own, and begins where K does."""
    offsets, at = {}, 0
    for layer in plan.index.layers_of(stage):
        active = plan.index.active(layer)
        indices = [plan.index.number(layer, lane.head) for lane in active]
        k, v = at, at + sum(plan.lanes[i].rank_k for i in indices)
        for i in indices:
            lane = plan.lanes[i]
            offsets[i] = (k, k if lane.values_in_keys else v)
            k, v = k + lane.rank_k, v + lane.numbers - lane.rank_k
        at = v
    return offsets


def typed_views(memory: npt.NDArray[np.uint8], unit: int) -> dict[str, np.ndarray]:
    """The arena as Attend reads it: arrays [n, unit] of every format."""
    return {
        "pool_f32": memory.view(np.float32).reshape(-1, unit),
        "pool_f16": memory.view(np.float16).reshape(-1, unit),
        "pool_u8": memory.view(np.uint8).reshape(-1, unit),
    }


def check_supported(plan: CompressionPlan) -> None:
    """Refuse a plan whose pages this runtime cannot keep: raises KvlatheError."""
    tier = plan.index.hot_tier
    if tier.k.name != tier.v.name:
        raise KvlatheError(
            f"new K has {tier.k.bits} bits and new V {tier.v.bits}",
            "a step writes one format",
            "build the engine with another plan",
        )
