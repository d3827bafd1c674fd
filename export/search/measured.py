"""Plans chosen by measurement: the model's own sensitivity prices every form, and a
budget of bytes buys the best.

The lossless end and the smallest end of a Variant are what the grid of methods/auto.py
has; search.py bisects between.
"""

from __future__ import annotations

import dataclasses
import hashlib
import itertools
import json
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import numpy as np
import torch

from kvlathe.base.console import human_bytes, log
from kvlathe.base.errors import KvlatheError
from kvlathe.export.calibration.stats import Stats
from kvlathe.export.methods import auto
from kvlathe.export.methods.assignment import Assignment, Priced
from kvlathe.export.methods.composition import CacheSettings, Made
from kvlathe.export.methods.compression import Compression
from kvlathe.export.methods.forms import (
    FORMATS,
    FORMS,
    Array,
    Grid,
    SideFormat,
)
from kvlathe.export.methods.variants import Variant, removed
from kvlathe.export.model import memory
from kvlathe.export.model.checkpoint import Checkpoint
from kvlathe.export.model.layered import LayeredModel
from kvlathe.export.model.spec import DecoderSpec
from kvlathe.export.search.exams import Exam
from kvlathe.export.search.exercises import KINDS, exercises
from kvlathe.export.search.readings import (
    QUESTION_DRAWS,
    Reading,
    of_questions,
    of_text,
)
from kvlathe.export.search.remembered import recall, remember
from kvlathe.export.search.sensitivity import (
    QUERIES,
    Candidate,
    Candidates,
    Distant,
    Losses,
    losses,
)
from kvlathe.plan.formats import Format, Tier
from kvlathe.plan.plan import CompressionPlan

WINDOWS, QUESTIONS = 2, 4
"""Parts of an exam that sensitivity is measured on: gradients of many tokens say more
than scores of many texts."""
EXERCISES = 1
"""Exercises of each kind."""
NEAR_TOKENS = 1024
"""Tokens of an exercise on which forms are priced."""
FAR_TOKENS = 8192
"""Tokens of the longest reading on which windows are priced. Where longer sequences are
served, its positions have gaps."""
FAR_QUESTIONS = 2
FORETOLD = 0.1
"""Nats a token: a search begins where this is foretold. By then answers begin to
fail."""
GUESSED = 0.002
"""Share of the bytes within which that place is found."""


@dataclass(frozen=True)
class Sources:
    """Sources of the readings that sensitivity is measured on: exams' texts and
    questions, and exercises made of the texts' tokens where ``exercised``. Windows are
    priced at positions of up to ``tokens``, the length that is served."""

    exams: Sequence[Exam]
    tokens: int
    exercised: bool = True

    @property
    def digest(self) -> str:
        facts = (
            [exam.digest for exam in self.exams],
            self.tokens,
            self.exercised,
            PRICED,
        )
        return hashlib.sha256(json.dumps(facts).encode()).hexdigest()

    @property
    def far(self) -> int:
        """Tokens of the longest reading."""
        return min(self.tokens, FAR_TOKENS)

    @property
    def text(self) -> list[int]:
        """Every token of the texts."""
        windows = (window for exam in self.exams for window in exam.windows)
        return list(itertools.chain.from_iterable(windows))

    def readings(self, model: LayeredModel, seed: int) -> list[Reading]:
        """The first windows of texts and the shortest questions for forms, the longest
        for windows; and the exercises for both."""
        chosen: list[Reading] = []
        for exam in self.exams:
            by_length = sorted(exam.questions, key=lambda question: question.tokens)
            fitting = [
                question for question in by_length if question.tokens <= self.far
            ]
            chosen += of_text(exam.windows[:WINDOWS])
            chosen += of_questions(by_length[:QUESTIONS])
            chosen += of_questions(fitting[-FAR_QUESTIONS:], far=True)
        text = self.text
        reach = self.tokens if spread_over(model.spec.windows) else self.far
        if text:
            long = text[: self.far]
            chosen += of_text([long], far=True, gaps=reach - len(long))
        if text and self.exercised:
            near = min(NEAR_TOKENS, self.far)
            chosen += exercises(model, text, near, EXERCISES, seed)
            far = self.far, EXERCISES, seed, True, reach - self.far
            chosen += exercises(model, text, *far)
        return chosen


def spread_over(layer_windows: Sequence[int]) -> bool:
    """Whether readings may leave positions out: not where a layer has a window of its
    own, which would see across the gaps what it never sees."""
    return not any(layer_windows)


EXACT = SideFormat(8, "token").stored
"""Codes that err by nothing beside a cut."""
PRICED = 13
"""Version of the way in which losses are measured; remembered ones have it in their
key."""


def price(
    checkpoint: Checkpoint,
    stats: Stats,
    form: CacheSettings,
    sources: Sources,
    remembered: Path | None = None,
) -> Priced:
    """Every form of every lane with its measured loss. ``remembered``: a folder for
    losses."""
    tokens = min(sources.tokens, stats.shape.max_positions)
    # A layer with a window of its own keeps it, so none is chosen.
    windowed = form.windowed and not form.own_windows
    settings = form.page_tokens, form.seed, tokens, form.bits, windowed, form.aged
    grid = Grid(stats, *settings)
    known_by = (
        checkpoint.digest,
        stats.digest,
        form.page_tokens,
        form.seed,
        sources.digest,
        [(code.bits, code.axis, code.span, code.coding) for code in FORMATS],
        [repr(life) for life in grid.lives],
    )
    key = hashlib.sha256(json.dumps(known_by).encode()).hexdigest()[:32]
    path = None if remembered is None else remembered / f"{key}.npz"
    if kept := recall(path, 2):
        forms, windows = kept
        return Priced(grid, forms, windows, form.paired)
    found = _measured(checkpoint, grid, sources)
    windows = grid.by_life(found.windows)
    _refuse_unknown(found.forms, windows)
    remember(path, found.forms, windows)
    return Priced(grid, found.forms, windows, form.paired)


def _refuse_unknown(forms: Array, windows: Array) -> None:
    """Refuses prices that are no numbers: a choice would take them for the least."""
    unknown = sum(int((~np.isfinite(prices)).sum()) for prices in (forms, windows))
    if unknown:
        raise KvlatheError(
            f"{unknown:,} of {forms.size + windows.size:,} prices are no finite numbers",
            "a gradient or the attention of the model overflows on the calibration text",
            "check the checkpoint's weights, or choose another --compression",
        )


def uncompressed(checkpoint: Checkpoint) -> LayeredModel:
    """The model as it is, to take gradients of. Its layers stay in memory where they
    take less than half of what is left."""
    spec = checkpoint.spec
    need = pricing_need(spec, min(spec.max_seq_len, FAR_TOKENS))
    layers = spec.layers * memory.layer_weights(spec)
    kept = layers < (memory.free_bytes(checkpoint.device) - need.bytes) / 2
    where = "stay in memory" if kept else "are read again for each pass"
    log.debug("the layers, %s, %s", human_bytes(layers), where)
    return LayeredModel(checkpoint, kept)


def pricing_need(spec: DecoderSpec, tokens: int) -> memory.Need:
    """Memory that measuring takes where sequences of up to ``tokens`` tokens are
    served."""
    longest = max(min(tokens, FAR_TOKENS), min(NEAR_TOKENS, spec.max_seq_len))
    remembered = EXERCISES * len(KINDS) * (longest + NEAR_TOKENS)
    return memory.of_prices(spec, longest, remembered, QUESTION_DRAWS, 2 * QUERIES)


def _measured(checkpoint: Checkpoint, grid: Grid, sources: Sources) -> Losses:
    """``forms`` has every option of the grid in each of its lives."""
    model = uncompressed(checkpoint)
    readings = sources.readings(model, grid.seed)
    candidates = _candidates(grid, checkpoint.device)
    page, seed = grid.page_tokens, grid.seed
    distant = Distant(grid.distant_parts, _distant_codes(candidates))
    found = losses(
        model, readings, candidates, grid.windows, page, seed, grid.parts, distant
    )
    return dataclasses.replace(found, forms=of_lives(grid, found.forms, found.distant))


FEW_BITS = [place for place, form in enumerate(FORMATS) if form.bits < EXACT.bits]
"""Places of formats that are priced on far readings: 8 bits lose nothing there."""


def _distant_codes(candidates: Candidates) -> Candidates:
    """The whole rank in FEW_BITS."""

    def codes(side: str, layer: int, head: int) -> list[Candidate]:
        whole = candidates(side, layer, head)[-1]
        few = tuple(whole.codes[place] for place in FEW_BITS)
        return [dataclasses.replace(whole, codes=few)]

    return codes


def of_lives(grid: Grid, forms: Array, distant: Array) -> Array:
    """[lives, 2 lanes, options] of losses by part: every cut, then the codes of the whole
    rank; of ``distant`` parts FEW_BITS. An error of a cut and one of codes are independent, codes err about as much at
    any rank (docs/auto.md), and tokens of different parts err apart."""
    cuts, codes = np.split(forms, [len(grid.ranks) - 1], -1)
    cuts = np.pad(cuts, ((0, 0), (0, 0), (0, 1)))  # the whole rank cuts nothing
    by_part = dict(zip(grid.parts, codes, strict=True))
    for part, lost in zip(grid.distant_parts, distant, strict=True):
        by_part[part] = np.zeros(codes.shape[1:])
        by_part[part][:, FEW_BITS] = lost
    found: list[Array] = []
    for life in grid.lives:
        tiers = grid.parts_of(life)
        of_codes = np.zeros((codes.shape[1], len(FORMS)))
        for parts, own in zip(tiers, zip(*FORMS, strict=True), strict=False):
            for part in parts:
                of_codes += by_part[part][:, own]
        cut = cuts[grid.parts.index(tiers[0][0])]
        both = cut[..., None] + of_codes[:, None]  # [2 lanes, ranks, forms]
        found.append(both.reshape(len(both), -1))
    return np.stack(found)


def _candidates(grid: Grid, device: torch.device) -> Candidates:
    """Every cut, then the codes of the whole rank."""
    *cuts, whole = grid.ranks

    def tensor(x: Array) -> torch.Tensor:
        return torch.tensor(np.ascontiguousarray(x), dtype=torch.float32, device=device)

    def candidate(
        side: str, layer: int, head: int, rank: int, codes: tuple[Format, ...]
    ) -> Candidate:
        cut = grid.cut(side, layer, head, rank)
        return Candidate(tensor(cut.into), tensor(cut.back), tensor(cut.centre), codes)

    @cache
    def candidates(side: str, layer: int, head: int) -> list[Candidate]:
        at = (side, layer, head)
        made = [candidate(*at, rank, (EXACT,)) for rank in cuts]
        codes = tuple(x.stored for x in FORMATS)
        return [*made, candidate(*at, whole, codes)]

    return candidates


def variant(compression: Compression, prices: Priced, form: CacheSettings) -> Variant:
    """The best plan at every share of the bytes, from the gentlest of the grid to its
    smallest. Shares are those of the grid's sequence."""
    grid = prices.grid
    shape = grid.stats.shape
    numbers = shape.numbers * grid.tokens
    whole = numbers * form.bits // 8  # uncompressed bytes

    def at(ratio: float) -> Made:
        choice = prices.chosen(int((1 - ratio) * whole + 1e-6))
        return plan_of(compression, prices, choice, form)

    def guess() -> float:
        """The share removed at which prices foretell a loss of FORETOLD."""
        low, high = gentlest, most
        while high - low > GUESSED:
            middle = (low + high) / 2
            if prices.lost(prices.chosen(int((1 - middle) * whole + 1e-6))) <= FORETOLD:
                low = middle
            else:
                high = middle
        return low

    most = 1 - prices.least / whole
    largest, _ = plan_of(compression, prices, prices.chosen(prices.most), form)
    gentlest = removed(largest, form.bits)
    log.info(
        "forms of every head are priced: from %.1f %% to %.1f %% removed of %d tokens",
        100 * gentlest,
        100 * most,
        grid.tokens,
    )
    text = compression.text
    return Variant(text, text, form.bits, gentlest, most, at, guess)


def plan_of(
    compression: Compression, prices: Priced, choice: Assignment, form: CacheSettings
) -> Made:
    """One form for every lane, as a plan."""
    stats = prices.grid.stats
    chosen = auto.made(
        prices.grid, choice, Tier(form.bits, form.bits), form.layer_windows
    )
    plan = CompressionPlan(
        stats.shape,
        chosen.lanes,
        chosen.groups,
        page_tokens=form.page_tokens,
        prefill_chunk=form.prefill_chunk,
        seed=form.seed,
        compression=compression.text,
        notes={
            "calibration": stats.source,
            "expected loss": prices.lost(choice),
            **exam_note(
                prices.grid.tokens,
                form.max_seq_len or stats.shape.max_positions,
                form.layer_windows,
            ),
        },
    )
    return plan, chosen.basis


def exam_note(tokens: int, served: int, layer_windows: Sequence[int]) -> dict[str, str]:
    """Notes of what was priced at positions of up to ``tokens``, and a warning where
    longer sequences are ``served`` than were read. ``layer_windows``: those of the
    model's layers."""
    read = min(tokens, FAR_TOKENS)
    reach = tokens if spread_over(layer_windows) else read
    at = f" at positions of up to {reach:,}" if reach > read else ""
    priced_on = {"priced on": f"sequences of up to {read:,} tokens{at}"}
    if served <= read:
        return priced_on
    fact = f"this plan was priced on {priced_on['priced on']}, and serves {served:,}"
    unseen = "of more distant" if served > reach else "among so many"
    reason = f"what heads need {unseen} tokens was not examined"
    remedy = "Measure it: kvlathe eval --suite"
    return priced_on | {"reach": f"{fact}: {reason}. {remedy}."}
