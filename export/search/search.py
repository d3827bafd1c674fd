"""Search: the largest compression whose score stays at or above a fraction of the
uncompressed model's.

Bisection over the fraction of bytes removed, scored by the folded torch decoder with
every token attending what its decode would attend (sealed.py). Every score is kept on
disk under a digest of all that it depends on, so the papers' F_p (accuracy -> ranks)
fills up as it is asked, and asking again is a look-up.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
import numpy.typing as npt

from kvlathe.base.console import log
from kvlathe.base.errors import KvlatheError
from kvlathe.export.folding.fold import decoder_from
from kvlathe.export.methods.composition import CacheSettings, Made, compose
from kvlathe.export.methods.compression import UNCOMPRESSED
from kvlathe.export.methods.options import RankOptions
from kvlathe.export.methods.remedy import GENTLE
from kvlathe.export.methods.variants import EXACT, Variant, removed
from kvlathe.export.model.checkpoint import Checkpoint
from kvlathe.export.search.exams import SCORES, Exam, TorchOracle, ask, says, score
from kvlathe.export.search.remembered import Scores
from kvlathe.export.search.sealed import reading
from kvlathe.plan.plan import CompressionPlan

RESOLUTION = 0.01
"""Bisection stops when the best ratio is known to this fraction of the uncompressed
bytes, and to FINE of those that are left."""
FINE = 0.15

FINER = 0.005
"""The same where the score is a KL: what it allows may be little."""
FIRST = 0.1
"""Place between its ends at which a search by KL begins."""
POWER = 2.0
"""Losses grow as this power of what is removed, as far as nobody measured."""
LEAST_POWER, MOST_GROWTH = 0.5, 4.0
"""Guesses trust no smaller power, and go no further from what was measured than to so
many times as much."""
MOST_KL = 100.0
"""Nats a token that stand for all above: a score is never 0."""
TINY = 1e-9
"""Nats a token that stand for none."""

BESIDE = 0.4
"""Place between its ends at which a variant is scored that only stands beside
others."""

SCHEMA = 3
"""Version of the remembered scores."""

AT_MOST = "at most"
"""Prefix of the name of a score that a plan cannot exceed."""


class RemovesNothing(KvlatheError):
    """No plan keeps the accuracy."""


# -- the search ------------------------------------------------------------------------
@dataclass
class Searcher:
    """Scores the plans of ``variants``, and for comparison of those ``beside`` them.
    ``scores`` outlive it. ``kl``: what a plan loses in nats a token, for the metric of
    that name."""

    checkpoint: Checkpoint
    variants: Sequence[Variant]
    exam: Exam
    scores: Scores
    beside: Sequence[Variant] = ()
    kl: Callable[[Made], float] | None = None
    said: list[npt.NDArray[np.int64]] = field(default_factory=list)
    failed: list[int] = field(default_factory=list)  # questions, the newest first
    lost: dict[str, float] = field(default_factory=dict)  # KL by the plan's digest

    def oracle(self, made: Made) -> TorchOracle:
        return TorchOracle(reading(decoder_from(self.checkpoint, *made)))

    def baseline(self) -> float:
        if self.exam.metric == "kl":
            return 1.0
        return self.scores.get(
            "uncompressed",
            lambda: self._measure(self._uncompressed(), "uncompressed", self.exam),
        )

    def _uncompressed(self) -> Made:
        spec = self.checkpoint.spec
        settings = CacheSettings(32, layer_windows=spec.windows)
        return compose(
            UNCOMPRESSED,
            spec.shape,
            spec.rope is not None,
            None,
            RankOptions(),
            settings,
        )

    def score(self, variant: Variant, ratio: float) -> float:
        name = f"{variant.name} {float(ratio)!r}"
        described = f"{variant.name}, {ratio:.1%} removed"
        exam = self.exam.fewer if variant in self.beside else self.exam
        return self.scores.get(
            name, lambda: self._measure(variant.plan(ratio), described, exam)
        )

    def reaches(self, variant: Variant, ratio: float, needed: float) -> bool:
        """Whether a plan scores at least ``needed``. One that does not may be left
        before it is through; what it scores at most is then remembered."""
        name = f"{variant.name} {float(ratio)!r}"
        bound = f"{AT_MOST} {name}"
        known = self.scores.known
        if self.exam.metric != "retrieval" or name in known:
            return self.score(variant, ratio) >= needed
        if known.get(bound, 1.0) < needed:
            return False
        found = ask(self.exam, self.oracle(variant.plan(ratio)), needed, self.failed)
        at_most = "" if found.whole else "at most "
        log.info(
            "%s, %.1f%% removed: retrieval %s%.4g",
            variant.name,
            100 * ratio,
            at_most,
            found.most,
        )
        if found.whole:
            self.scores.forget(bound)
            self.scores.put(name, found.most)
        else:
            self.scores.put(bound, min(found.most, known.get(bound, 1.0)))
        return found.most >= needed

    def _measure(self, made: Made, what: str, exam: Exam) -> float:
        if exam.metric == "kl":
            assert self.kl is not None
            plan = made[0].digest
            if plan not in self.lost:  # neighbouring sizes often have the same ranks
                self.lost[plan] = self.kl(made)
            lost = self.lost[plan]
            log.info("%s: KL %.4g", what, lost)
            return math.exp(-min(lost, MOST_KL))
        if exam.metric == "agreement" and not self.said:
            whole = self.oracle(self._uncompressed())
            self.said = [says(whole, window) for window in exam.windows]
        value = score(exam, self.oracle(made), self.said)
        log.info("%s: %s %.4g", what, exam.metric, value)
        return value

    def left(self) -> list[str]:
        """The plans of these variants that were left, and never scored whole."""
        known = self.scores.known
        every = {variant.name for variant in (*self.variants, *self.beside)}
        names = [
            x.removeprefix(AT_MOST).strip() for x in known if x.startswith(AT_MOST)
        ]
        return [x for x in names if x not in known and x.rpartition(" ")[0] in every]

    def points(self) -> Iterator[tuple[Variant, float, float]]:
        """(variant, ratio, score) of all that was measured."""
        by_name = {variant.name: variant for variant in (*self.variants, *self.beside)}
        for point, value in self.scores.known.items():
            name, _, ratio = point.rpartition(" ")
            if name in by_name:
                yield by_name[name], float(ratio), value


def search(
    checkpoint: Checkpoint,
    variants: Sequence[Variant],
    accuracy: float,
    exam: Exam,
    known_by: object,
    remembered: Path | None = None,
    beside: Sequence[Variant] = (),
    kl: Callable[[Made], float] | None = None,
) -> Made:
    """The plan of ``variants`` that removes most while its score is at least
    ``accuracy`` times the uncompressed score.

    Perplexity scores by its inverse: accuracy 0.99 allows a ratio of 1 / 0.99.
    ``remembered``: a folder for scores. ``known_by``: what they depend on beside the
    exam. ``beside``: scored at one size of each request for comparison. ``kl``: as in
    Searcher. The measured points are the plan's notes["curve"]. Raises KvlatheError, naming the best there is,
    if nothing can be removed.
    """
    text = json.dumps((SCHEMA, repr(known_by), exam.digest))
    scores = Scores.open(remembered, hashlib.sha256(text.encode()).hexdigest()[:32])
    searcher = Searcher(checkpoint, variants, exam, scores, beside, kl)
    baseline = searcher.baseline()
    _require_score(baseline, exam)
    best = _best(searcher, variants, accuracy * baseline)
    if best is None:
        _refuse(searcher, accuracy, baseline)
    ratio, chosen = best
    gentlest = min(variant.least for variant in variants)
    for variant, beside_ratio in _shown(beside, gentlest):
        searcher.score(variant, beside_ratio)
    plan, basis = chosen.plan(ratio)
    curve = _curve(searcher, accuracy, baseline) | {"of": chosen.of}
    return dataclasses.replace(plan, notes=plan.notes | {"curve": curve}), basis


def _best(
    searcher: Searcher, variants: Sequence[Variant], needed: float
) -> tuple[float, Variant] | None:
    """The largest ratio of any variant that scores at least ``needed``. None where no
    byte can go. A variant must beat the ones before it by RESOLUTION."""
    best: tuple[float, Variant] | None = None
    for variant in sorted(variants, key=lambda variant: -variant.least):
        least = variant.least
        if best is not None:
            least = max(least, best[0] + RESOLUTION)
            if least > variant.most or not searcher.reaches(variant, least, needed):
                continue
        if searcher.exam.metric == "kl":
            ratio = largest_within(
                lambda ratio, of=variant: -math.log(searcher.score(of, ratio)),
                -math.log(needed),
                least,
                variant.most,
            )
        else:
            ratio = largest_ratio(
                lambda ratio, of=variant: searcher.reaches(of, ratio, needed),
                least,
                variant.most,
                guess=variant.guess and variant.guess(),
            )
        if ratio is not None and ratio > max(EXACT, best[0] if best else 0.0):
            best = ratio, variant
    return best


def _require_score(baseline: float, exam: Exam) -> None:
    if baseline <= 0:
        raise KvlatheError(
            f"the uncompressed model scores 0 on {exam.metric}",
            "there is nothing to keep",
            "choose another metric",
        )


def _shown(variants: Sequence[Variant], gentlest: float) -> list[tuple[Variant, float]]:
    """Points at which to score variants that stand beside others: one size of each
    request, the middle one.

    A variant of one size is left out if it is larger than all of theirs: it loses next
    to nothing, and scoring it takes as long as any.
    """
    sizes: dict[str, list[tuple[Variant, float]]] = {}
    for variant in variants:
        width = variant.most - variant.least
        ratio = variant.least + BESIDE * width
        if width > 0 or ratio > gentlest + EXACT:
            sizes.setdefault(variant.of, []).append((variant, ratio))
    shown = []
    for of_request in sizes.values():
        by_ratio = sorted(of_request, key=lambda size: size[1])
        shown.append(by_ratio[(len(by_ratio) - 1) // 2])
    return shown


def largest_ratio(
    reaches: Callable[[float], bool],
    least: float,
    most: float,
    resolution: float = RESOLUTION,
    guess: float | None = None,
) -> float | None:
    """The largest ratio in [least, most], to ``resolution`` and FINE, found to reach
    the score that is needed, by bisection; None if ``least`` does not. A ratio of 0
    always does.

    From a ``guess`` it steps up, or down, each step twice as long as the one before,
    until it has one ratio that reaches and one that does not. The ends are scored last,
    and only where nothing between them has decided.
    """
    if least > most:
        return None
    low, high = least, most
    step = resolution
    middle = (low + high) / 2 if guess is None else guess
    while high - low > min(resolution, FINE * (1 - low)) + EXACT:
        if guess is None or not low < middle < high:
            middle = (low + high) / 2
        if reaches(middle):
            low = middle
            middle += step
        else:
            high = middle
            middle -= step
        step *= 2
    if low == least and least > EXACT and not reaches(least):
        return None
    return most if high == most > least and reaches(most) else low


def largest_within(
    loss: Callable[[float], float], allowed: float, least: float, most: float
) -> float | None:
    """The largest ratio in [least, most], to FINER, found to lose at most ``allowed``;
    None if ``least`` does not. A ratio of 0 loses nothing.

    Losses grow about as a power of the ratio: each guess is what the nearest two losses
    foretell, on both sides of it where there are such.
    """
    if least > most:
        return None
    low, high = least, most
    known: dict[float, float] = {}
    middle = low + FIRST * (high - low)
    while high - low > FINER + EXACT:
        known[middle] = max(loss(middle), TINY)
        if known[middle] <= allowed:
            low = middle
        else:
            high = middle
        near = min(FINER, (high - low) / 2)
        guess = _foretold(known, low, high, allowed)
        middle = min(max(guess, low + near), high - near)
    if low == least and least > EXACT and loss(least) > allowed:
        return None
    return most if high == most > least and loss(most) <= allowed else low


def _foretold(
    known: Mapping[float, float], low: float, high: float, allowed: float
) -> float:
    """The ratio that loses ``allowed``, by a power law through two ``known`` losses:
    those of ``low`` and ``high``, or the two nearest to the one that is known."""
    near = low if low in known else high
    power = POWER
    pair = sorted(known, key=lambda ratio: abs(ratio - near))[:2]
    if low in known and high in known:
        pair = [low, high]
    if len(pair) == 2 and min(pair) > 0:
        one, other = pair
        slope = math.log(known[other] / known[one]) / math.log(other / one)
        power = max(slope, LEAST_POWER)
    return near * min((allowed / known[near]) ** (1 / power), MOST_GROWTH)


def _refuse(searcher: Searcher, accuracy: float, baseline: float) -> NoReturn:
    smaller = [own for own in searcher.variants if own.least <= own.most]
    if smaller:
        gentlest = min(smaller, key=lambda variant: variant.least)
        searcher.score(gentlest, gentlest.least)
    points = list(searcher.points())
    if not points:
        what = " and ".join(variant.name for variant in searcher.variants)
        raise RemovesNothing(
            f"{what} removes nothing here",
            "the heads are too small to cut",
            f"choose another method, such as {GENTLE} or auto",
        )
    points = [point for point in points if point[1] > EXACT] or points
    variant, ratio, best = max(points, key=lambda point: (point[2], -point[1]))
    reached = best / baseline
    if searcher.exam.metric == "kl":
        raise RemovesNothing(
            f"{variant.name} removes nothing within KL {abs(math.log(accuracy)):.2g}",
            f"removing {ratio:.1%} of the bytes already loses {-math.log(best):.2g} nats "
            "a token",
            f"use {GENTLE} or auto, or ask for --accuracy "
            f"{np.floor(1000 * reached) / 1000:.4g} or less",
        )
    raise RemovesNothing(
        f"{variant.name} cannot keep {accuracy:.4g} of the uncompressed {searcher.exam.metric}",
        f"removing {ratio:.1%} of the bytes already leaves {reached:.4g}",
        f"ask for --accuracy {np.floor(1000 * reached) / 1000:.4g} or less",
    )


def in_words(plan: CompressionPlan) -> str:
    """The question and the answer of the search that found ``plan``."""
    curve = plan.notes["curve"]
    points = [point for point in curve["points"] if point["score"] >= curve["target"]]
    best = max(points, key=lambda point: point["removed"])
    allowed, got = "", f"{curve['metric']} {best['score']:.4g}"
    if curve["metric"] == SCORES["kl"]:
        allowed = f" (KL {-math.log(curve['accuracy']):.2g})"
        got = f"KL {-math.log(best['score']):.2g}"
    return (
        f"the most that keeps {curve['accuracy']:g} of {curve['metric']}{allowed} over "
        f"{curve['measured_on'].partition(' over ')[2]}: removal rate "
        f"{plan.notes['removal_rate']:.4f} takes {best['removed']:.1%} of the bytes at "
        f"{got}, the best of {len(curve['points'])} sizes"
    )


def _curve(searcher: Searcher, accuracy: float, baseline: float) -> dict[str, Any]:
    """The curves that report.html draws: each point's bytes are its plan's own, all
    padding counted; ``of`` names its line."""
    points = []
    for variant, ratio, value in searcher.points():
        plan, _ = variant.plan(ratio)
        points.append(
            {
                "of": variant.of,
                "plan": variant.name,
                "asked": ratio,
                "score": value,
                "removed": removed(plan, variant.bits),
            }
        )
    exam = searcher.exam
    metric = exam.metric
    return {
        "metric": "1 / perplexity" if metric == "perplexity" else SCORES[metric],
        "measured_on": exam.described,
        "others_on": exam.fewer.described,
        "cut_short": len(searcher.left()),
        "baseline": baseline,
        "target": accuracy * baseline,
        "accuracy": accuracy,
        "points": sorted(points, key=lambda point: (point["of"], point["removed"])),
    }
