"""Keys and values in pages, as numbers, by torch where the pages are: the slow form of
what kernels read. For token scores that look at keys (kvlathe/plan/formula.py)."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from kvlathe.plan.codec import PageMatrix, worths
from kvlathe.plan.packing import byte_codes, piece_places

FLOATS = {16: torch.float16, 32: torch.float32}


def read_matrix(pages: Tensor, matrix: PageMatrix) -> Tensor:
    """K or V of one lane in ``pages`` uint8 [m, page_stride]: float32 [m * P, rank], the
    numbers that PageMatrix.read gives."""
    form = matrix.format
    tokens, rank = matrix.tokens, matrix.rank
    if not form.is_coded:
        size = form.element_bytes(tokens * rank)
        numbers = _bytes(pages, matrix.data, size).view(FLOATS[form.bits])
        return numbers.float().view(-1, rank)
    rows, columns = (tokens, rank) if form.along_rank else (rank, tokens)
    worth = _worth(pages, matrix, rows, columns)  # [m, rows, columns]
    scale, minimum = _metadata(pages, matrix, rows)
    values = worth * scale + minimum
    return (values if form.along_rank else values.mT).reshape(-1, rank)


def _bytes(pages: Tensor, first: int, size: int) -> Tensor:
    """[m, size] contiguous, so that it can be viewed as other numbers."""
    return pages[:, first : first + size].contiguous()


def _worth(pages: Tensor, matrix: PageMatrix, rows: int, columns: int) -> Tensor:
    """What the codes are worth, float32 [m, rows, columns]."""
    form = matrix.format
    stored = _bytes(pages, matrix.data, form.element_bytes(rows * columns))
    by_row = stored.unflatten(1, (rows, -1)).int()
    device = pages.device
    places = torch.from_numpy(piece_places(form, columns, form.together)).to(device)
    shares = torch.from_numpy(byte_codes(form)).to(device)  # [runs, 256, together]
    runs = torch.arange(form.runs, device=device)
    codes = shares[runs, by_row[..., places]].sum(-2).flatten(-2)
    return torch.from_numpy(worths(form)).to(device).float()[codes.int()]


def _metadata(pages: Tensor, matrix: PageMatrix, rows: int) -> tuple[Tensor, Tensor]:
    """Scale and minimum of every element, float32 [m, rows, columns]."""
    form, groups = matrix.format, matrix.groups
    stored = _bytes(pages, matrix.meta, rows * len(groups) * form.group_bytes)
    halves = stored.view(torch.float16).float()
    by_group = halves.unflatten(1, (rows, len(groups), form.halves))
    sizes = torch.tensor(groups, device=pages.device)
    first = by_group[..., 0].repeat_interleave(sizes, -1)
    decoding = form.decoding
    if decoding.has_minimum:
        minimum = by_group[..., 1].repeat_interleave(sizes, -1)
    else:
        minimum = first * decoding.lowest
    return first * float(np.float32(decoding.step)), minimum
