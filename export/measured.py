"""Plans chosen by measurement: the model's own sensitivity prices every form, and a budget of bytes buys the best.

The lossless end and the smallest end of a Family are what the grid of methods/auto.py has; search.py bisects between.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from functools import cache
from pathlib import Path

import numpy as np
import torch

from kvlathe.console import log
from kvlathe.export.checkpoint import Checkpoint
from kvlathe.export.fold import decoder_from
from kvlathe.export.methods import CacheForm, Family, Made, Options, auto, compose, removed
from kvlathe.export.plan import CompressionPlan, Tier
from kvlathe.export.sealed import Code
from kvlathe.export.search import Exam
from kvlathe.export.sensitivity import Form, Forms, Reading, losses, of_questions, of_text
from kvlathe.export.stats import Stats

WINDOWS, QUESTIONS = 2, 4
"""Of an exam, what sensitivity is measured on: gradients of many tokens say more than scores of many texts."""


def readings(exams: Sequence[Exam]) -> list[Reading]:
    """What to measure on: the first windows of texts and the shortest questions."""
    found = []
    for exam in exams:
        found += of_text(exam.windows[:WINDOWS])
        found += of_questions(sorted(exam.questions, key=lambda question: question.tokens)[:QUESTIONS])
    return found


def priced(
    checkpoint: Checkpoint, stats: Stats, form: CacheForm, read: Sequence[Reading], remembered: Path | None = None
) -> auto.Priced:
    """Every form of every lane with its measured loss. ``remembered``: a folder for losses."""
    grid = auto.Grid(stats, form.page_tokens, form.seed)
    asked = [(r.ids, r.rows.start) for r in read], [(x.bits, x.axis, x.span) for x in auto.FORMATS]
    what = (checkpoint.digest, stats.digest, form.page_tokens, form.seed, *asked)
    key = hashlib.sha256(json.dumps(what, default=int).encode()).hexdigest()[:32]
    path = None if remembered is None else remembered / f"{key}.npy"
    if path is not None and path.is_file():
        return auto.Priced(grid, np.load(path), form.paired)
    spec = checkpoint.spec
    whole = compose("none", spec.shape, spec.rope is not None, None, Options(), CacheForm(32))
    found = losses(decoder_from(checkpoint, *whole), read, _forms(grid), form.page_tokens, form.seed)
    if path is not None:
        path.parent.mkdir(parents=True, exist_ok=True)
        np.save(path, found)
    return auto.Priced(grid, found, form.paired)


def _forms(grid: auto.Grid) -> Forms:
    ranks = sorted({rank for rank, _ in grid.options})
    codes = tuple(Code(x.bits, x.axis, auto.GROUP, x.span) for x in auto.FORMATS)

    def tensor(x: auto.Array) -> torch.Tensor:
        return torch.tensor(np.ascontiguousarray(x), dtype=torch.float32)

    @cache
    def forms(side: str, layer: int, head: int) -> list[Form]:
        cuts = (grid.cut(side, layer, head, rank) for rank in ranks)
        return [Form(tensor(cut.into), tensor(cut.back), tensor(cut.centre), codes) for cut in cuts]

    return forms


def family(request: str, found: auto.Priced, form: CacheForm) -> Family:
    """The best plan at every share of the bytes, from the gentlest of the grid to its smallest."""
    shape = found.grid.stats.shape
    page = 2 * shape.layers * shape.kv_heads * shape.head_dim * form.bits * form.page_tokens // 8

    def at(ratio: float) -> Made:
        choice = found.chosen(int((1 - ratio) * page + 1e-6))
        return plan_of(request, found, choice, form)

    most = 1 - found.least / page
    gentlest = removed(plan_of(request, found, found.chosen(int(found.cost.max(-1).sum())), form)[0], form.bits)
    log.info("forms of every head are priced: from %.1f %% to %.1f %% removed", 100 * gentlest, 100 * most)
    return Family(request, request, form.bits, gentlest, most, at)


def plan_of(request: str, found: auto.Priced, choice: auto.Choice, form: CacheForm) -> Made:
    chosen = auto.made(found.grid, choice, Tier(form.bits, form.bits))
    loss = float(np.take_along_axis(found.loss, choice[:, None], 1).sum())
    plan = CompressionPlan(
        found.grid.stats.shape,
        chosen.lanes,
        chosen.tiers,
        chosen.buckets,
        page_tokens=form.page_tokens,
        prefill_chunk=form.prefill_chunk,
        seed=form.seed,
        compression=request,
        notes={"calibration": found.grid.stats.source, "expected loss": loss},
    )
    return plan, chosen.basis
