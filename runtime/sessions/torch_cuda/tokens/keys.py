"""Keys and values in pages, as numbers, by torch where the pages are, and what a formula
gives each token (kvlathe/plan/token_score.py, KeyFormula).

The slow form: a kernel may do the same later. Nothing waits for a GPU.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

import numpy as np
import torch
from torch import Tensor

from kvlathe.plan import formula
from kvlathe.plan.codec import PageMatrix, matrices, worths
from kvlathe.plan.formats import Format
from kvlathe.plan.layout import CacheLayout
from kvlathe.plan.packing import byte_codes, piece_places
from kvlathe.plan.token_score import KeyFormula
from kvlathe.runtime.sessions.torch_cuda.device import int64_on, tensor_on

FLOATS = {16: torch.float16, 32: torch.float32}


class FormulaScores:
    """A formula of the cached tokens of a plan. ``pool``: uint8, the pages."""

    def __init__(self, layout: CacheLayout, score: KeyFormula, pool: Tensor) -> None:
        self._formula = score.formula
        self._reads = formula.inputs_of(score.formula)
        buckets = range(len(layout.page_stride))
        self._matrices = [matrices(layout, bucket) for bucket in buckets]
        self._pages = [
            pool[: pool.numel() // stride * stride].view(-1, stride)
            for stride in layout.page_stride
        ]

    def of(self, bucket: int, pages: Sequence[int], tokens: int) -> Tensor:
        """float64 [lanes, tokens]: of the first ``tokens`` tokens in ``pages``, lane by
        lane, so that little more than one lane's keys is in memory at a time."""
        table = self._pages[bucket]
        own = int64_on(pages, table.device)
        lanes: list[Tensor] = []
        for pair in self._matrices[bucket].values():
            sides = zip(formula.INPUTS, pair, strict=True)
            inputs = {
                name: read_matrix(table, own, matrix)[:tokens].double()
                for name, matrix in sides
                if name in self._reads
            }
            lanes.append(formula.evaluate(self._formula, inputs))
        return torch.stack(lanes).nan_to_num(nan=-torch.inf, neginf=-torch.inf)


def read_matrix(table: Tensor, pages: Tensor, matrix: PageMatrix) -> Tensor:
    """K or V of one lane in the rows ``pages`` int64 [m] of ``table`` uint8 [.., page
    stride]: float32 [m * P, rank], the numbers that PageMatrix.read gives."""
    form = matrix.format
    tokens, rank = matrix.tokens, matrix.rank
    data = _bytes(table, pages, matrix.data, form.element_bytes(tokens * rank))
    if not form.is_coded:
        return data.view(FLOATS[form.bits]).float().view(-1, rank)
    tables = _tables(form, rank, tokens, table.device)
    rows = tokens if form.along_rank else rank
    by_row = data.unflatten(1, (rows, -1)).int()  # [m, rows, bytes]
    shares = tables.codes[tables.runs, by_row[..., tables.places]]
    codes = shares.sum(-2).flatten(-2)  # [m, rows, columns]
    size = rows * len(matrix.groups) * form.group_bytes
    halves = _bytes(table, pages, matrix.meta, size).view(torch.float16).float()
    groups = halves.unflatten(1, (rows, len(matrix.groups), form.halves))
    scale, minimum = _spread(form, groups[:, :, tables.group_of])
    values = tables.worths[codes] * scale + minimum
    return (values if form.along_rank else values.mT).reshape(-1, rank)


def _bytes(table: Tensor, pages: Tensor, first: int, size: int) -> Tensor:
    """[m, size] contiguous, so that it can be viewed as other numbers."""
    return table[:, first : first + size].index_select(0, pages)


def _spread(form: Format, halves: Tensor) -> tuple[Tensor, Tensor]:
    """Scale and minimum of every element, from what its group has: [m, rows, columns,
    halves]."""
    first, decoding = halves[..., 0], form.decoding
    minimum = halves[..., 1] if decoding.has_minimum else first * decoding.lowest
    return first * float(np.float32(decoding.step)), minimum


@dataclass(frozen=True, eq=False, slots=True)
class CodeTables:
    """What a row of codes of one format is read by. ``codes`` int64 [runs, 256, codes of
    a piece]: what each byte of a piece adds to its codes. ``runs``: 0, 1, ...
    ``places`` [pieces, runs]: where the bytes of a piece are. ``worths`` float32 [256].
    ``group_of`` [columns]: the group of each element."""

    codes: Tensor
    runs: Tensor
    places: Tensor
    worths: Tensor
    group_of: Tensor


@cache
def _tables(form: Format, rank: int, tokens: int, device: torch.device) -> CodeTables:
    """Made once: a model has hundreds of lanes that are written alike."""
    groups = form.group_sizes(rank, tokens)
    columns = rank if form.along_rank else tokens
    return CodeTables(
        int64_on(byte_codes(form), device),
        int64_on(np.arange(form.runs), device),
        int64_on(piece_places(form, columns, form.together), device),
        tensor_on(worths(form).astype(np.float32), device),
        int64_on(np.repeat(np.arange(len(groups)), groups), device),
    )
