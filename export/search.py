"""Search: the largest compression whose score stays at or above a fraction of the uncompressed model's.

Bisection over the fraction of bytes removed, scored by the folded torch decoder with every token attending what its
decode would attend (sealed.py). Every score is kept on disk under a digest of all that it depends on, so the papers'
F_p (accuracy -> ranks) fills up as it is asked, and asking again is a look-up.
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

from kvlathe import tasks
from kvlathe.console import log, progress
from kvlathe.errors import KvlatheError
from kvlathe.export.checkpoint import Checkpoint
from kvlathe.export.decoder import Decoder
from kvlathe.export.fold import decoder_from
from kvlathe.export.methods import EXACT, CacheForm, Family, Made, Options, compose, removed
from kvlathe.export.sealed import reading

Metric = Literal["retrieval", "perplexity", "agreement"]

WINDOWS = 6
WINDOW_TOKENS = 1024
QUESTIONS = 16
"""A search scores many plans, so it reads less than an evaluation: these many windows, and questions evenly spaced."""

FEW_TOKENS = 1024
"""Below this a text tells little."""

RESOLUTION = 0.01
"""Bisection stops when the best ratio is known to this fraction of the uncompressed bytes."""

BESIDE = (0.2, 0.4)
"""Where between their ends families are scored that only stand beside others."""

SCHEMA = 2
"""Of the remembered scores."""


@dataclass(frozen=True)
class Exam:
    """What plans are scored on, as token ids: ``questions`` for retrieval, ``windows`` of text for the other
    metrics.
    """

    metric: Metric
    questions: tuple[tasks.Question, ...] = ()
    windows: tuple[tuple[int, ...], ...] = ()

    @property
    def digest(self) -> str:
        return hashlib.sha256(json.dumps(dataclasses.asdict(self)).encode()).hexdigest()

    @property
    def described(self) -> str:
        """For people and reports."""
        if self.questions:
            return f"exact match of {len(self.questions)} answers"
        return f"{self.metric} over {len(self.windows)} windows of {max(map(len, self.windows))} tokens"


def read_exam(checkpoint: Checkpoint, metric: Metric, text: Path | None, retrieval: Path | None) -> Exam:
    """The exam of ``metric`` from its file; what is longer than the served length is cut or left out.

    Text is read from the file's end (calibration reads from its beginning), and every EVERY-th question is left to
    evaluations. Raises KvlatheError.
    """
    encoder, longest = tasks.FolderEncoder(checkpoint.path), checkpoint.spec.max_seq_len
    path = retrieval if metric == "retrieval" else text
    if path is None:
        option = "--retrieval" if metric == "retrieval" else "--text"
        raise KvlatheError(
            f"the metric {metric} has nothing to be measured on", "no file was given", f"give {option} FILE"
        )
    if metric == "retrieval":
        fitting = [x for x in _held_back(tasks.read_questions(path, encoder, every=1)) if x.tokens <= longest]
        if not fitting:
            raise KvlatheError(f"no question of {path} fits", f"sequences end at {longest} tokens", "give shorter ones")
        spaced = np.unique(np.linspace(0, len(fitting) - 1, min(QUESTIONS, len(fitting))).round().astype(int))
        return Exam(metric, questions=tuple(fitting[i] for i in spaced))
    documents = tasks.encode_documents(encoder, tasks.read_texts(path)[::-1])
    found = tasks.windows(documents, encoder.eos_id, WINDOWS, min(WINDOW_TOKENS, longest))
    if (tokens := sum(map(len, found))) < FEW_TOKENS:
        log.warning(
            "%s gives %d tokens to measure accuracy on: too few to tell plans apart; give more text", path, tokens
        )
    return Exam(metric, windows=tuple(map(tuple, found)))


def _held_back(questions: list[tasks.Question]) -> list[tasks.Question]:
    """All but those that an evaluation asks, unless there are no others."""
    return [x for i, x in enumerate(questions) if i % tasks.EVERY] or questions


class TorchOracle:
    """A folded decoder as a LogitsOracle."""

    def __init__(self, decoder: Decoder) -> None:
        self._decoder = decoder

    def logits(self, token_ids: Sequence[int], rows: Sequence[int]) -> npt.NDArray[np.float32]:
        return self._decoder.logits(token_ids, rows).cpu().numpy()


# -- scores ------------------------------------------------------------------------------------------------------------
def score(exam: Exam, oracle: tasks.LogitsOracle, said: Sequence[npt.NDArray[np.int64]] = ()) -> float:
    """Higher is better: share of questions answered, 1 / perplexity, or share of tokens equal to ``said``, what the
    uncompressed model says next in each window.
    """
    if exam.metric == "retrieval":
        return float(np.mean([tasks.answered(oracle, question) for question in progress(exam.questions, "questions")]))
    if exam.metric == "perplexity":
        sums = [tasks.text_sums(oracle, window) for window in progress(exam.windows, "windows")]
        return 1 / sum(sums[1:], sums[0]).perplexity
    same = [says(oracle, window) == known for window, known in zip(exam.windows, said, strict=True)]
    return float(np.concatenate(same).mean())


def says(oracle: tasks.LogitsOracle, window: Sequence[int]) -> npt.NDArray[np.int64]:
    """The next token after every place of the window but its last."""
    return oracle.logits(window, range(len(window) - 1)).argmax(-1)


@dataclass
class Scores:
    """Scores by the ratio asked for, remembered in ``path`` (None: only here)."""

    path: Path | None
    known: dict[str, float] = field(default_factory=dict)

    @classmethod
    def open(cls, folder: Path | None, key: str) -> Scores:
        path = None if folder is None else folder / f"{key}.json"
        if path is None or not path.is_file():
            return cls(path)
        try:
            return cls(path, {str(k): float(v) for k, v in json.loads(path.read_text("utf-8")).items()})
        except (OSError, ValueError, AttributeError):
            log.warning("the remembered scores %s are damaged and will be measured again", path)
            return cls(path)

    def get(self, name: str, measure: Callable[[], float]) -> float:
        if name not in self.known:
            self.known[name] = measure()
            self._write()
        return self.known[name]

    def _write(self) -> None:
        if self.path is None:
            return
        self.path.parent.mkdir(parents=True, exist_ok=True)
        fresh = self.path.with_suffix(".tmp")
        fresh.write_text(json.dumps(self.known, indent=1), "utf-8")
        fresh.replace(self.path)


# -- the search --------------------------------------------------------------------------------------------------------
@dataclass
class Searcher:
    """Scores the plans of ``families``. ``scores`` outlive it."""

    checkpoint: Checkpoint
    families: Sequence[Family]
    exam: Exam
    scores: Scores
    said: list[npt.NDArray[np.int64]] = field(default_factory=list)

    def oracle(self, made: Made) -> TorchOracle:
        return TorchOracle(reading(decoder_from(self.checkpoint, *made)))

    def baseline(self) -> float:
        return self.scores.get("uncompressed", lambda: self._measure(self._uncompressed(), "uncompressed"))

    def _uncompressed(self) -> Made:
        spec = self.checkpoint.spec
        return compose("none", spec.shape, spec.rope is not None, None, Options(), CacheForm(32))

    def score(self, family: Family, ratio: float) -> float:
        name = f"{family.name} {float(ratio)!r}"
        return self.scores.get(name, lambda: self._measure(family.plan(ratio), f"{family.name}, {ratio:.1%} removed"))

    def _measure(self, made: Made, what: str) -> float:
        if self.exam.metric == "agreement" and not self.said:
            whole = self.oracle(self._uncompressed())
            self.said = [says(whole, window) for window in self.exam.windows]
        found = score(self.exam, self.oracle(made), self.said)
        log.info("%s: %s %.4g", what, self.exam.metric, found)
        return found

    def points(self) -> Iterator[tuple[Family, float, float]]:
        """(family, ratio, score) of all that was measured."""
        by_name = {family.name: family for family in self.families}
        for point, value in self.scores.known.items():
            name, _, ratio = point.rpartition(" ")
            if name in by_name:
                yield by_name[name], float(ratio), value


def search(
    checkpoint: Checkpoint,
    families: Sequence[Family],
    accuracy: float,
    exam: Exam,
    known_by: object,
    remembered: Path | None = None,
    beside: Sequence[Family] = (),
) -> Made:
    """The plan of ``families`` that removes most while its score is at least ``accuracy`` times the uncompressed score.

    Perplexity scores by its inverse: accuracy 0.99 allows a ratio of 1 / 0.99. ``remembered``: a folder for scores;
    ``known_by``: what they depend on beside the exam; ``beside``: scored at BESIDE for comparison. The measured points
    are the plan's notes["curve"]. Raises KvlatheError, naming the best there is, if nothing can be removed.
    """
    key = hashlib.sha256(json.dumps((SCHEMA, repr(known_by), exam.digest)).encode()).hexdigest()[:32]
    searcher = Searcher(checkpoint, [*families, *beside], exam, Scores.open(remembered, key))
    baseline = searcher.baseline()
    if baseline <= 0:
        raise KvlatheError(
            f"the uncompressed model scores 0 on {exam.metric}", "there is nothing to keep", "choose another metric"
        )
    best: tuple[float, Family] | None = None
    for family in sorted(families, key=lambda x: -x.least):
        least = max(family.least, best[0] + RESOLUTION if best else 0.0)
        found = largest(lambda ratio, of=family: searcher.score(of, ratio), accuracy * baseline, least, family.most)
        if found is not None and found > max(EXACT, best[0] if best else 0.0):
            best = found, family
    if best is None:
        _refuse(searcher, accuracy, baseline)
    gentlest = min(family.least for family in families)
    for family in beside:
        for ratio in _shown(family, gentlest):
            searcher.score(family, ratio)
    plan, basis = best[1].plan(best[0])
    curve = _curve(searcher, accuracy, baseline) | {"of": best[1].of}
    return dataclasses.replace(plan, notes=plan.notes | {"curve": curve}), basis


def _shown(family: Family, gentlest: float) -> list[float]:
    """Where to score a family that stands beside others. What has one size is left out if it is larger than all of
    theirs: it loses next to nothing, and scoring it takes as long as any.
    """
    if family.least == family.most:
        return [family.least] if family.least > gentlest + EXACT else []
    return [family.least + share * (family.most - family.least) for share in BESIDE]


def largest(
    score_at: Callable[[float], float], needed: float, least: float, most: float, resolution: float = RESOLUTION
) -> float | None:
    """The largest ratio in [least, most], to ``resolution``, found to score at least ``needed``, by bisection; None if
    ``least`` does not. A ratio of 0 always does.
    """
    if least > most or (least > EXACT and score_at(least) < needed):
        return None
    if most > least and score_at(most) >= needed:
        return most
    low, high = least, most
    while high - low > resolution:
        middle = (low + high) / 2
        low, high = (middle, high) if score_at(middle) >= needed else (low, middle)
    return low


def _refuse(searcher: Searcher, accuracy: float, baseline: float) -> NoReturn:
    points = list(searcher.points())
    if not points:
        what = " and ".join(family.name for family in searcher.families)
        raise KvlatheError(f"{what} removes nothing here", "the heads are too small to cut", "choose another method")
    family, ratio, best = max(points, key=lambda point: (point[2], -point[1]))
    reached = best / baseline
    raise KvlatheError(
        f"{family.name} cannot keep {accuracy:.4g} of the uncompressed {searcher.exam.metric}",
        f"removing {ratio:.1%} of the bytes already leaves {reached:.4g}",
        f"ask for --accuracy {np.floor(1000 * reached) / 1000:.4g} or less",
    )


def _curve(searcher: Searcher, accuracy: float, baseline: float) -> dict[str, Any]:
    """What report.html draws: each point's bytes are its plan's own, all padding counted; ``of`` names its line."""
    points = [
        {"of": family.of, "plan": family.name, "asked": ratio, "score": value}
        | {"removed": removed(family.plan(ratio)[0], family.bits)}
        for family, ratio, value in searcher.points()
    ]
    return {
        "metric": searcher.exam.metric if searcher.exam.metric != "perplexity" else "1 / perplexity",
        "measured_on": searcher.exam.described,
        "baseline": baseline,
        "target": accuracy * baseline,
        "accuracy": accuracy,
        "points": sorted(points, key=lambda point: (point["of"], point["removed"])),
    }
