"""One point of a frontier: build the engine, load it, examine it. What was measured is
kept in a file of its own, so that a run that was stopped goes on where it was."""

from __future__ import annotations

import dataclasses
import json
import shlex
import tempfile
from dataclasses import dataclass
from pathlib import Path

from kvlathe.base.console import log
from kvlathe.base.devices import GPU_MEMORY_UTILIZATION
from kvlathe.base.digests import sha256_file
from kvlathe.base.errors import KvlatheError
from kvlathe.engines import cache
from kvlathe.engines.build import build
from kvlathe.engines.config import BuildConfig
from kvlathe.engines.order import accept
from kvlathe.engines.planning import bytes_per_token
from kvlathe.evaluation.evaluate import evaluate
from kvlathe.frontier.points import Candidate, Point
from kvlathe.plan.memory import bytes_left
from kvlathe.runtime.llm import LLM

UNCOMPRESSED = Candidate("none")
NO_ENGINE = "engine"
"""Folder of a config that is only asked for its key; and of the one to build."""


@dataclass(frozen=True, slots=True)
class Exam:
    """Texts and questions that every engine is measured on. ``tokens``: the length of
    the sequence whose bytes count; None: the longest that the engine takes."""

    text: Path
    retrieval: Path
    windows: int
    window_tokens: int
    every: int
    tokens: int | None

    @property
    def facts(self) -> dict[str, object]:
        """All that decides a score, beside the engine."""
        files = {"text": self.text, "retrieval": self.retrieval}
        digests = {name: sha256_file(path) for name, path in files.items()}
        return {**dataclasses.asdict(self), **digests}


@dataclass(frozen=True, slots=True)
class Options:
    """Options as on the command line (``kvlathe frontier --help``), for every build
    alike."""

    model: Path
    output: Path
    backend: str = "onnxruntime"
    calibration: str | None = None
    target_len: int | None = None
    max_seq_len: int | None = None
    threads: int | None = None

    def config(self, candidate: Candidate, folder: Path) -> BuildConfig:
        """The build of a candidate into ``folder``."""
        is_plain = candidate == UNCOMPRESSED
        return BuildConfig(
            self.model,
            folder,
            candidate.compression,
            compression_ratio=candidate.ratio,
            target_len=self.target_len,
            calibration=None if is_plain else self.calibration,
            kv_bits=16,
            measure=False,  # the frontier measures the engine itself
            max_seq_len=self.max_seq_len,
            backend=self.backend,
            workers=self.threads,
        )

    def command(self, candidate: Candidate) -> str:
        """``kvlathe build`` for this candidate, as one would type it."""
        config = self.config(candidate, self.output / NO_ENGINE)
        named = {
            "--model": config.model,
            "--output-dir": config.output_dir,
            "--compression": config.compression,
            "--compression-ratio": config.compression_ratio,
            "--target-len": config.target_len,
            "--calibration": config.calibration,
            "--max-seq-len": config.max_seq_len,
        }
        if config.backend != "onnxruntime":
            named["--backend"] = config.backend
        words = ["kvlathe", "build"]
        for flag, value in named.items():
            if value is not None:
                words += [flag, str(value)]
        return shlex.join(words)


def key_of(candidate: Candidate, options: Options, exam: Exam) -> str:
    """The key of a point in the cache: a digest of all that decides its numbers. Raises
    KvlatheError for a config that cannot be built."""
    order = accept(options.config(candidate, options.output / "engines" / NO_ENGINE))
    return cache.key_of({"engine": order.key, "exam": exam.facts})


@dataclass(frozen=True, slots=True)
class Measuring:
    """Measures candidates beside the uncompressed engine in the folder ``baseline``."""

    options: Options
    exam: Exam
    baseline: Path

    def point(self, candidate: Candidate, kept: Path) -> Point:
        """Measure, and keep what was found in the file ``kept``. A candidate that is
        refused gives a point that says why."""
        try:
            found = self._measured(candidate)
        except KvlatheError as error:
            if candidate == UNCOMPRESSED:
                raise
            log.warning("%s is left out: %s", candidate.name, error)
            return Point.refused(candidate, error)
        keep(found, kept)
        return found

    def _measured(self, candidate: Candidate) -> Point:
        if candidate == UNCOMPRESSED:
            return self._examined(candidate, self.baseline)
        with tempfile.TemporaryDirectory(dir=self.baseline.parent) as scratch:
            engine = build(self.options.config(candidate, Path(scratch) / NO_ENGINE))
            return self._examined(candidate, engine)

    def _examined(self, candidate: Candidate, engine: Path) -> Point:
        exam, threads = self.exam, self.options.threads
        files = (exam.text, exam.retrieval)
        sizes = (exam.windows, exam.window_tokens, exam.every)
        with (
            LLM.load(
                self.baseline,
                threads=threads,
                gpu_memory_utilization=GPU_MEMORY_UTILIZATION / 2,
            ) as plain,  # both are there at once: it leaves half of a GPU
            LLM.load(engine, threads=threads) as llm,
        ):
            scores = evaluate(llm, plain, *files, *sizes)
            tokens = exam.tokens or llm.limits.max_seq_len
            left = bytes_left(llm.layout, tokens)
            a_token = bytes_per_token(llm.plan.model, 16)
        return Point(
            candidate.name,
            candidate.compression,
            candidate.ratio,
            tokens=tokens,
            kv_bytes=left * a_token * tokens,
            left=left,
            perplexity=scores["perplexity"],
            perplexity_ratio=scores["perplexity_ratio"],
            retrieval=scores["retrieval_exact_match"],
            agreement=scores["agreement"],
            kl=scores["kl"],
        )


def keep(point: Point, path: Path) -> None:
    """Write a point as a whole or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    fresh = path.with_suffix(".tmp")
    fresh.write_text(json.dumps(point.to_json(), indent=1), "utf-8")
    fresh.replace(path)


def kept_at(path: Path) -> Point | None:
    """A point that was measured before; None where there is none that can be read."""
    try:
        return Point(**json.loads(path.read_text("utf-8")))
    except FileNotFoundError:
        return None
    except (OSError, ValueError, TypeError):
        log.warning("%s is damaged: the plan is measured again", path)
        return None
