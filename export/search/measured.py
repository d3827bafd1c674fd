"""Plans chosen by measurement: the model's own sensitivity prices every form, and a
budget of bytes buys the best.

The lossless end and the smallest end of a Variant are what the grid of methods/auto.py
has; search.py bisects between.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from functools import cache
from pathlib import Path

import numpy as np
import torch

from kvlathe.base.console import log
from kvlathe.export.calibration.stats import Stats
from kvlathe.export.folding.fold import decoder_from
from kvlathe.export.methods import auto
from kvlathe.export.methods.composition import CacheSettings, Made, compose
from kvlathe.export.methods.options import Options
from kvlathe.export.methods.variants import Variant, removed
from kvlathe.export.model.checkpoint import Checkpoint
from kvlathe.export.search.search import Exam
from kvlathe.export.search.sensitivity import (
    Candidate,
    Candidates,
    Reading,
    losses,
    of_questions,
    of_text,
)
from kvlathe.plan.formats import Tier
from kvlathe.plan.plan import CompressionPlan

WINDOWS, QUESTIONS = 2, 4
"""Of an exam, what sensitivity is measured on: gradients of many tokens say more than
scores of many texts."""


def readings(exams: Sequence[Exam]) -> list[Reading]:
    """What to measure on: the first windows of texts and the shortest questions."""
    chosen = []
    for exam in exams:
        shortest_first = sorted(exam.questions, key=lambda question: question.tokens)
        chosen += of_text(exam.windows[:WINDOWS])
        chosen += of_questions(shortest_first[:QUESTIONS])
    return chosen


def priced(
    checkpoint: Checkpoint,
    stats: Stats,
    form: CacheSettings,
    read: Sequence[Reading],
    remembered: Path | None = None,
) -> auto.Priced:
    """Every form of every lane with its measured loss. ``remembered``: a folder for
    losses."""
    grid = auto.Grid(stats, form.page_tokens, form.seed)
    known_by = (
        checkpoint.digest,
        stats.digest,
        form.page_tokens,
        form.seed,
        [(reading.ids, reading.rows.start) for reading in read],
        [(code.bits, code.axis, code.span) for code in auto.FORMATS],
    )
    text = json.dumps(known_by, default=int)
    key = hashlib.sha256(text.encode()).hexdigest()[:32]
    path = None if remembered is None else remembered / f"{key}.npy"
    if path is not None and path.is_file():
        return auto.Priced(grid, np.load(path), form.paired)
    spec = checkpoint.spec
    whole = compose(
        "none", spec.shape, spec.rope is not None, None, Options(), CacheSettings(32)
    )
    decoder = decoder_from(checkpoint, *whole)
    candidates = _candidates(grid)
    loss = losses(decoder, read, candidates, form.page_tokens, form.seed)
    if path is not None:
        path.parent.mkdir(parents=True, exist_ok=True)
        np.save(path, loss)
    return auto.Priced(grid, loss, form.paired)


def _candidates(grid: auto.Grid) -> Candidates:
    ranks = sorted({rank for rank, _ in grid.options})
    codes = tuple(x.stored for x in auto.FORMATS)

    def tensor(x: auto.Array) -> torch.Tensor:
        return torch.tensor(np.ascontiguousarray(x), dtype=torch.float32)

    @cache
    def candidates(side: str, layer: int, head: int) -> list[Candidate]:
        made = []
        for rank in ranks:
            cut = grid.cut(side, layer, head, rank)
            into = tensor(cut.into)
            back = tensor(cut.back)
            made.append(Candidate(into, back, tensor(cut.centre), codes))
        return made

    return candidates


def variant(request: str, prices: auto.Priced, form: CacheSettings) -> Variant:
    """The best plan at every share of the bytes, from the gentlest of the grid to its
    smallest."""
    shape = prices.grid.stats.shape
    numbers = 2 * shape.layers * shape.kv_heads * shape.head_dim * form.page_tokens
    page = numbers * form.bits // 8  # bytes of an uncompressed one

    def at(ratio: float) -> Made:
        choice = prices.chosen(int((1 - ratio) * page + 1e-6))
        return plan_of(request, prices, choice, form)

    most = 1 - prices.least / page
    largest = int(prices.cost.max(-1).sum())
    plan, _ = plan_of(request, prices, prices.chosen(largest), form)
    gentlest = removed(plan, form.bits)
    log.info(
        "forms of every head are priced: from %.1f %% to %.1f %% removed",
        100 * gentlest,
        100 * most,
    )
    return Variant(request, request, form.bits, gentlest, most, at)


def plan_of(
    request: str, prices: auto.Priced, choice: auto.Choice, form: CacheSettings
) -> Made:
    """One option for every row of ``prices``, as a plan."""
    stats = prices.grid.stats
    chosen = auto.made(prices.grid, choice, Tier(form.bits, form.bits))
    loss = auto.total(prices.loss, choice)
    plan = CompressionPlan(
        stats.shape,
        chosen.lanes,
        chosen.tiers,
        chosen.buckets,
        page_tokens=form.page_tokens,
        prefill_chunk=form.prefill_chunk,
        seed=form.seed,
        compression=request,
        notes={"calibration": stats.source, "expected loss": loss},
    )
    return plan, chosen.basis
