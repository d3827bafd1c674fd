"""The price of compression, through the engine: the papers' rule against its reference
points, and the balanced basis against it.

    python -m benchmarks.accuracy [--model DIR ...] [--text F] [--retrieval F]
    [--calibration F] [--windows 8] [--every 3]

1. FDC on random tokens at the removal rates of REFERENCE (4 x 2048 tokens, float32):
   ``ok`` within p 0.01, perplexity ratio 0.01 and retrieval 0.06 of points that an
   independent implementation measured once.
2. Bases and allocations on the same calibration text at the same bytes: excess
   perplexity (ratio - 1) of each over ``svd``; ``ok`` for ``balanced``: at most 0.75.
   Uniform ranks are the papers' ablation.

Every engine is built, loaded and measured as a user's would be. One table and one JSON
line; 27M parameters take minutes.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from itertools import chain
from pathlib import Path
from typing import Any

import click

from benchmarks.support.commands import DATA
from benchmarks.support.options import several_models, table_and_json
from benchmarks.support.remembering import Remembering
from kvlathe.base.console import cell
from kvlathe.engines.build import build, calibrate_to
from kvlathe.engines.config import BuildConfig
from kvlathe.evaluation.evaluate import evaluate
from kvlathe.runtime.llm import LLM

REFERENCE: dict[str, tuple[tuple[float, float, float, float], ...]] = {
    "lathe-27m": (
        (0.15, 0.211, 1.012, 1.00),
        (0.25, 0.346, 1.051, 0.98),
        (0.35, 0.448, 1.129, 0.84),
    ),
    "lathe-5m": ((0.15, 0.094, 1.019, 0.96), (0.20, 0.234, 1.295, 0.76)),
}
"""Model -> (removal rate, p, perplexity ratio, retrieval)."""

TOLERANCE = (0.01, 0.01, 0.06)
RATIOS = (0.20, 0.35)
WAYS: dict[str, dict[str, Any]] = {
    "svd": {},
    "svd, uniform": {"allocation": "uniform"},
    "svd, V with W_O": {"compression": "zack"},
    "balanced, rate": {"basis": "balanced", "allocation": "rate"},
    "balanced, global": {"basis": "balanced", "allocation": "global"},
    "planes": {"rope_fold": "planes"},
}
COLUMNS = (
    "model",
    "what",
    "asked",
    "p",
    "perplexity ratio",
    "excess over svd",
    "retrieval",
    "agreement",
    "kl",
    "ok",
)


@dataclass(frozen=True)
class Bench:
    model: Path
    text: Path
    retrieval: Path
    calibration: Path
    windows: int
    every: int
    folder: Path

    @cached_property
    def baseline(self) -> Remembering:
        return Remembering(self.built("none"))

    @cached_property
    def random_stats(self) -> Path:
        return self._stats("random")

    @cached_property
    def text_stats(self) -> Path:
        return self._stats(str(self.calibration))

    def _stats(self, source: str) -> Path:
        path = (
            self.folder
            / f"{self.model.name}-{'random' if source == 'random' else 'text'}.npz"
        )
        calibrate_to(self.model, path, source)
        return path

    def built(self, compression: str, **asked: Any) -> LLM:  # noqa: ANN401
        folder = Path(tempfile.mkdtemp(dir=self.folder)) / "engine"
        return LLM.load(
            build(
                BuildConfig(self.model, folder, compression, use_cache=False, **asked)
            )
        )

    def measured(self, llm: LLM, retrieval: bool) -> dict[str, Any]:
        questions = self.retrieval if retrieval else None
        return evaluate(
            llm,
            self.baseline,
            self.text,
            questions,
            windows=self.windows,
            every=self.every,
        )


def row(
    bench: Bench, what: str, asked: str, found: dict[str, Any], **more: object
) -> dict[str, Any]:
    shown = {
        "retrieval": found["retrieval_exact_match"],
        "p": found["kv_bytes_removed"],
    }
    measured = {name: found[name] for name in ("perplexity", "agreement", "kl")}
    return {
        "model": bench.model.name,
        "what": what,
        "asked": asked,
        "perplexity ratio": found["perplexity_ratio"],
        **shown,
        **measured,
        **more,
    }


def reference_points(bench: Bench) -> Iterator[dict[str, Any]]:
    """The uncompressed engine, then every reference point of this model."""
    yield row(bench, "uncompressed", "", bench.measured(bench.built("none"), True))
    for rate, *wanted in REFERENCE.get(bench.model.name, ()):
        found = bench.measured(
            bench.built("fdc", removal_rate=rate, stats=bench.random_stats), True
        )
        keys = ("kv_bytes_removed", "perplexity_ratio", "retrieval_exact_match")
        ok = all(
            abs(found[key] - value) <= far
            for key, value, far in zip(keys, wanted, TOLERANCE, strict=True)
        )
        yield row(
            bench, "fdc, random tokens", f"r = {rate}", found, reference=wanted, ok=ok
        )


def bases(bench: Bench) -> Iterator[dict[str, Any]]:
    """Every way at the same bytes: at most those that svd keeps at each ratio."""
    for ratio in RATIOS:
        svd = None
        for what, way in WAYS.items():
            asked: dict[str, Any] = {
                "compression": "fdc",
                "compression_ratio": ratio,
                "stats": bench.text_stats,
                **way,
            }
            found = bench.measured(bench.built(**asked), False)
            excess = found["perplexity_ratio"] - 1
            svd = excess if svd is None else svd
            judged = (
                {"ok": excess <= 0.75 * svd} if way.get("basis") == "balanced" else {}
            )
            yield row(
                bench,
                what,
                f"{ratio:.0%} removed",
                found,
                **{"excess over svd": excess / svd},
                **judged,
            )


PARTS = {"reference": reference_points, "bases": bases}


@click.command()
@several_models
@click.option(
    "--text", type=click.Path(path_type=Path), default=DATA / "eval_text.jsonl"
)
@click.option(
    "--retrieval",
    type=click.Path(path_type=Path),
    default=DATA / "line_retrieval.jsonl",
)
@click.option(
    "--calibration",
    type=click.Path(path_type=Path),
    default=DATA / "calibration_text.jsonl",
)
@click.option("--windows", default=8)
@click.option("--every", default=3)
@click.option("--part", type=click.Choice((*PARTS, "all")), default="all")
def main(models: tuple[Path, ...], part: str, **settings: Any) -> None:  # noqa: ANN401
    """Measure the cost of compression."""
    rows: list[dict[str, Any]] = []
    for model in models:
        with tempfile.TemporaryDirectory() as folder:
            bench = Bench(model.resolve(), folder=Path(folder), **settings)
            parts = [
                measure for name, measure in PARTS.items() if part in (name, "all")
            ]
            for found in chain.from_iterable(measure(bench) for measure in parts):
                print(
                    " ".join(f"{name}={cell(found.get(name))}" for name in COLUMNS),
                    file=sys.stderr,
                    flush=True,
                )
                rows.append(found)
    table_and_json("accuracy", "Accuracy through the engine", COLUMNS, rows)


if __name__ == "__main__":
    main()
