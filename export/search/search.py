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
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, NoReturn

import numpy as np
import numpy.typing as npt

from kvlathe.base.console import log, progress
from kvlathe.base.errors import KvlatheError
from kvlathe.export.folding.fold import decoder_from
from kvlathe.export.methods.composition import CacheSettings, Made, compose
from kvlathe.export.methods.options import Options
from kvlathe.export.methods.variants import EXACT, Variant, removed
from kvlathe.export.model.checkpoint import Checkpoint
from kvlathe.export.model.decoder import Decoder
from kvlathe.export.search.remembered import Scores
from kvlathe.export.search.sealed import reading
from kvlathe.tasks import tasks

Metric = Literal["retrieval", "perplexity", "agreement"]

WINDOWS = 6
WINDOW_TOKENS = 1024
QUESTIONS = 16
"""A search scores many plans, so it reads less than an evaluation: these many windows,
and questions evenly spaced."""

FEW_TOKENS = 1024
"""Below this a text tells little."""

RESOLUTION = 0.01
"""Bisection stops when the best ratio is known to this fraction of the uncompressed
bytes."""

BESIDE = 0.4
"""Where between its ends a variant is scored that only stands beside others."""

SCHEMA = 2
"""Of the remembered scores."""


@dataclass(frozen=True)
class Exam:
    """What plans are scored on, as token ids: ``questions`` for retrieval, ``windows``
    of text for the other metrics.
    """

    metric: Metric
    questions: tuple[tasks.Question, ...] = ()
    windows: tuple[tuple[int, ...], ...] = ()

    @property
    def digest(self) -> str:
        text = json.dumps(dataclasses.asdict(self))
        return hashlib.sha256(text.encode()).hexdigest()

    @property
    def described(self) -> str:
        """For people and reports."""
        if self.questions:
            return f"exact match of {len(self.questions)} answers"
        longest = max(map(len, self.windows))
        return f"{self.metric} over {len(self.windows)} windows of {longest} tokens"


def read_exam(
    checkpoint: Checkpoint, metric: Metric, text: Path | None, retrieval: Path | None
) -> Exam:
    """The exam of ``metric`` from its file; what is longer than the served length is
    cut or left out.

    Text is read from the file's end (calibration reads from its beginning), and every
    EVERY-th question is left to evaluations. Raises KvlatheError.
    """
    encoder = tasks.FolderEncoder(checkpoint.path)
    longest = checkpoint.spec.max_seq_len
    path = retrieval if metric == "retrieval" else text
    if path is None:
        option = "--retrieval" if metric == "retrieval" else "--text"
        raise KvlatheError(
            f"the metric {metric} has nothing to be measured on",
            "no file was given",
            f"give {option} FILE",
        )
    if metric == "retrieval":
        questions = _held_back(tasks.read_questions(path, encoder, every=1))
        fitting = [question for question in questions if question.tokens <= longest]
        if not fitting:
            raise KvlatheError(
                f"no question of {path} fits",
                f"sequences end at {longest} tokens",
                "give shorter ones",
            )
        count = min(QUESTIONS, len(fitting))
        even = np.linspace(0, len(fitting) - 1, count).round()
        places = np.unique(even.astype(int))
        return Exam(metric, questions=tuple(fitting[place] for place in places))
    documents = tasks.encode_documents(encoder, tasks.read_texts(path)[::-1])
    length = min(WINDOW_TOKENS, longest)
    windows = tasks.windows(documents, encoder.eos_id, WINDOWS, length)
    tokens = sum(map(len, windows))
    if tokens < FEW_TOKENS:
        log.warning(
            "%s gives %d tokens to measure accuracy on: too few to tell plans apart; give more text",
            path,
            tokens,
        )
    return Exam(metric, windows=tuple(map(tuple, windows)))


def _held_back(questions: list[tasks.Question]) -> list[tasks.Question]:
    """All but those that an evaluation asks, unless there are no others."""
    others = [question for i, question in enumerate(questions) if i % tasks.EVERY]
    return others or questions


class TorchOracle:
    """A folded decoder as a LogitsOracle."""

    def __init__(self, decoder: Decoder) -> None:
        self._decoder = decoder

    def logits(
        self, token_ids: Sequence[int], rows: Sequence[int]
    ) -> npt.NDArray[np.float32]:
        return self._decoder.logits(token_ids, rows).cpu().numpy()


# -- scores ----------------------------------------------------------------------------
def score(
    exam: Exam, oracle: tasks.LogitsOracle, said: Sequence[npt.NDArray[np.int64]] = ()
) -> float:
    """Higher is better: share of questions answered, 1 / perplexity, or share of tokens
    equal to ``said``, what the uncompressed model says next in each window.
    """
    if exam.metric == "retrieval":
        questions = progress(exam.questions, "questions")
        answered = [tasks.answered(oracle, question) for question in questions]
        return float(np.mean(answered))
    if exam.metric == "perplexity":
        windows = progress(exam.windows, "windows")
        first, *others = [tasks.text_sums(oracle, window) for window in windows]
        return 1 / sum(others, first).perplexity
    same = []
    for window, expected in zip(exam.windows, said, strict=True):
        same.append(says(oracle, window) == expected)
    return float(np.concatenate(same).mean())


def says(oracle: tasks.LogitsOracle, window: Sequence[int]) -> npt.NDArray[np.int64]:
    """The next token after every place of the window but its last."""
    rows = range(len(window) - 1)
    return oracle.logits(window, rows).argmax(-1)


# -- the search ------------------------------------------------------------------------
@dataclass
class Searcher:
    """Scores the plans of ``variants``. ``scores`` outlive it."""

    checkpoint: Checkpoint
    variants: Sequence[Variant]
    exam: Exam
    scores: Scores
    said: list[npt.NDArray[np.int64]] = field(default_factory=list)

    def oracle(self, made: Made) -> TorchOracle:
        return TorchOracle(reading(decoder_from(self.checkpoint, *made)))

    def baseline(self) -> float:
        return self.scores.get(
            "uncompressed", lambda: self._measure(self._uncompressed(), "uncompressed")
        )

    def _uncompressed(self) -> Made:
        spec = self.checkpoint.spec
        has_rope = spec.rope is not None
        settings = CacheSettings(32, layer_windows=spec.windows)
        return compose("none", spec.shape, has_rope, None, Options(), settings)

    def score(self, variant: Variant, ratio: float) -> float:
        name = f"{variant.name} {float(ratio)!r}"
        described = f"{variant.name}, {ratio:.1%} removed"
        return self.scores.get(
            name, lambda: self._measure(variant.plan(ratio), described)
        )

    def _measure(self, made: Made, what: str) -> float:
        if self.exam.metric == "agreement" and not self.said:
            whole = self.oracle(self._uncompressed())
            self.said = [says(whole, window) for window in self.exam.windows]
        value = score(self.exam, self.oracle(made), self.said)
        log.info("%s: %s %.4g", what, self.exam.metric, value)
        return value

    def points(self) -> Iterator[tuple[Variant, float, float]]:
        """(variant, ratio, score) of all that was measured."""
        by_name = {variant.name: variant for variant in self.variants}
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
) -> Made:
    """The plan of ``variants`` that removes most while its score is at least
    ``accuracy`` times the uncompressed score.

    Perplexity scores by its inverse: accuracy 0.99 allows a ratio of 1 / 0.99.
    ``remembered``: a folder for scores. ``known_by``: what they depend on beside the
    exam. ``beside``: scored at one size of each request for comparison. The measured points are the
    plan's notes["curve"]. Raises KvlatheError, naming the best there is, if
    nothing can be removed.
    """
    text = json.dumps((SCHEMA, repr(known_by), exam.digest))
    key = hashlib.sha256(text.encode()).hexdigest()[:32]
    scores = Scores.open(remembered, key)
    searcher = Searcher(checkpoint, [*variants, *beside], exam, scores)
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
            if least > variant.most or searcher.score(variant, least) < needed:
                continue
        ratio = largest(
            lambda ratio, of=variant: searcher.score(of, ratio),
            needed,
            least,
            variant.most,
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
    """Where to score what stands beside others: of each request one size, the middle
    one.

    What has one size is left out if it is larger than all of theirs: it loses next to
    nothing, and scoring it takes as long as any.
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
        middle = (len(by_ratio) - 1) // 2
        shown.append(by_ratio[middle])
    return shown


def largest(
    score_at: Callable[[float], float],
    needed: float,
    least: float,
    most: float,
    resolution: float = RESOLUTION,
) -> float | None:
    """The largest ratio in [least, most], to ``resolution``, found to score at least
    ``needed``, by bisection; None if ``least`` does not. A ratio of 0 always does.

    The ends are scored last, and only where nothing between them has decided.
    """
    if least > most:
        return None
    low, high = least, most
    while high - low > resolution:
        middle = (low + high) / 2
        if score_at(middle) >= needed:
            low = middle
        else:
            high = middle
    if low == least and least > EXACT and score_at(least) < needed:
        return None
    reaches_end = high == most > least and score_at(most) >= needed
    return most if reaches_end else low


def _refuse(searcher: Searcher, accuracy: float, baseline: float) -> NoReturn:
    points = list(searcher.points())
    if not points:
        what = " and ".join(variant.name for variant in searcher.variants)
        raise KvlatheError(
            f"{what} removes nothing here",
            "the heads are too small to cut",
            "choose another method",
        )
    variant, ratio, best = max(points, key=lambda point: (point[2], -point[1]))
    reached = best / baseline
    raise KvlatheError(
        f"{variant.name} cannot keep {accuracy:.4g} of the uncompressed {searcher.exam.metric}",
        f"removing {ratio:.1%} of the bytes already leaves {reached:.4g}",
        f"ask for --accuracy {np.floor(1000 * reached) / 1000:.4g} or less",
    )


def _curve(searcher: Searcher, accuracy: float, baseline: float) -> dict[str, Any]:
    """What report.html draws: each point's bytes are its plan's own, all padding
    counted; ``of`` names its line."""
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
    metric = searcher.exam.metric
    return {
        "metric": "1 / perplexity" if metric == "perplexity" else metric,
        "measured_on": searcher.exam.described,
        "baseline": baseline,
        "target": accuracy * baseline,
        "accuracy": accuracy,
        "points": sorted(points, key=lambda point: (point["of"], point["removed"])),
    }
