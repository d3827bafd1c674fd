"""The length of an engine's step, from what was measured.

    seconds = step + prompt_token * prompt tokens + decode_token * answers
              + pair * (prompt token, earlier token) pairs + cached * tokens that answers read

Every measured row is one equation. The five times are their non-negative least squares,
each row weighed by its own length. `step_times.json` has rows of one H200, each with
the page that says it.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Sequence
from dataclasses import astuple, dataclass
from pathlib import Path

import numpy as np
from scipy.optimize import nnls

MEASURED = Path(__file__).with_name("step_times.json")


@dataclass(frozen=True)
class StepTimes:
    """Seconds of each part of a step."""

    step: float
    prompt_token: float
    decode_token: float
    pair: float
    cached: float

    def prompt(self, tokens: int, pairs: float) -> float:
        """Seconds that prompt tokens add to a step."""
        return self.prompt_token * tokens + self.pair * pairs

    def decode(self, answers: int, cached: int) -> float:
        """Seconds that answers add to a step. ``cached``: tokens that they read
        together."""
        return self.decode_token * answers + self.cached * cached


@dataclass(frozen=True)
class Row:
    """One timing, as counts of the five parts. ``source``: the page, and the words
    on it."""

    steps: float
    prompt_tokens: float
    answers: float
    pairs: float
    cached: float
    seconds: float
    source: str = ""
    says: str = ""

    @property
    def counts(self) -> tuple[float, ...]:
        return astuple(self)[:5]


@dataclass(frozen=True)
class Build:
    """Timings of one build of a model. ``token_bytes``: of its cache."""

    name: str
    token_bytes: int
    rows: tuple[Row, ...]


def decode_row(answers: int, context: int, seconds: float, *source: str) -> Row:
    """A step of ``answers`` tokens, each after ``context`` others."""
    return Row(1, 0, answers, 0, answers * context, seconds, *source)


def prompt_row(
    prompts: int, tokens: int, chunk: int, seconds: float, *source: str
) -> Row:
    """``prompts`` prompts of ``tokens`` tokens each, in steps of ``chunk`` tokens."""
    whole = prompts * tokens
    pairs = prompts * tokens**2 / 2
    return Row(math.ceil(whole / chunk), whole, 0, pairs, 0, seconds, *source)


def fitted(rows: Sequence[Row]) -> StepTimes:
    """The five times that agree best with ``rows``, by relative error."""
    counts = np.array([row.counts for row in rows])
    seconds = np.array([row.seconds for row in rows])
    equations = counts / seconds[:, None]
    scale = equations.max(axis=0)
    scale[scale == 0] = 1.0
    found, _ = nnls(equations / scale, np.ones(len(rows)))
    return StepTimes(*(found / scale).tolist())


def expected(times: StepTimes, row: Row) -> float:
    """Seconds of a row by the fit."""
    return sum(a * b for a, b in zip(astuple(times), row.counts, strict=True))


def errors(times: StepTimes, rows: Iterable[Row]) -> list[float]:
    """The fit's error at each row, relative."""
    return [expected(times, row) / row.seconds - 1 for row in rows]


def measured(path: Path = MEASURED) -> dict[str, Build]:
    """The builds of a file of rows."""
    builds: dict[str, Build] = {}
    for name, found in json.loads(path.read_text("utf-8")).items():
        rows = [decode_row(*row) for row in found["decodes"]]
        rows += [prompt_row(*row) for row in found["prompts"]]
        builds[name] = Build(name, found["token_bytes"], tuple(rows))
    return builds
