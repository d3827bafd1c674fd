"""Every method, the comparison plans and compositions in one table, through exported
engines.

    python -m benchmarks.methods [--model DIR ...] [--only REQUEST ...] [--quick]
    [--json-lines FILE]

Bytes are those of all pages of a sequence of 3,072 tokens: scales, sums, scores,
padding and the hot page included (the mean over where in its page the sequence stands),
against the uncompressed cache in 16 bit. Perplexity, agreement and retrieval are those
of ``kvlathe eval``: every token attends what its decode would attend, plans that rank a
prompt get 1,536 tokens of each window as a prompt and are scored on the rest, all
against the uncompressed engine in 32 bit. Methods that need statistics get the kind
that they calibrate on by default. A request that is refused is a row with the reason.
One table and one JSON line a model; rows appear on stderr as they are measured.
"""

from __future__ import annotations

import tempfile
import time
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

import click

from benchmarks.support import options
from benchmarks.support.commands import DATA
from benchmarks.support.options import several_models, table_and_json, tell
from benchmarks.support.palu import low_rank_checkpoint
from benchmarks.support.remembering import Remembering
from kvlathe.base.errors import KvlatheError
from kvlathe.engines.build import build, calibrate_to
from kvlathe.engines.config import BuildConfig
from kvlathe.evaluation.evaluate import evaluate
from kvlathe.export.methods.compression import parse
from kvlathe.plan.memory import bytes_left
from kvlathe.runtime.llm import LLM

REQUESTS = {
    "methods": (
        "none",
        "fdc:removal_rate=0.15",
        "zack:removal_rate=0.15",
        "hack:bits=8",
        "hack:bits=4",
        "hack:bits=4,arithmetic=float",
        "hack:bits=4,sums=stored",
        "hack:bits=2",
        "hack:bits=2,rounding=stochastic",
        "zipcache:high=4,low=2,salient=0.6",
        "zipcache:high=8,low=4,salient=0.6",
        "uncomp:budget=384",
        "duo:share=0.5",
        "duo:share=0.25",
        "auto@0.7",
        "auto@0.8",
    ),
    "comparison": (
        "palu:0.7",
        "palu:0.5",
        "kivi:bits=4",
        "kivi:bits=2",
        "kvquant:bits=4",
        "h2o:budget=384",
        "snapkv:budget=384",
        "keyformer:budget=384",
    ),
    "compositions": (
        "fdc:removal_rate=0.15+hack:bits=8",
        "fdc:removal_rate=0.15+hack:bits=4",
        "fdc:removal_rate=0.15+hack:bits=4,hadamard=none",
        "fdc:basis=balanced,removal_rate=0.15+hack:bits=4",
        "fdc:removal_rate=0.15+kvquant:bits=4",
        "fdc:removal_rate=0.15+kivi:bits=4",
        "fdc:removal_rate=0.15+kivi:bits=2",
        "fdc:removal_rate=0.15+zipcache:high=4,low=2,salient=0.6",
        "fdc:removal_rate=0.15+snapkv:budget=384",
        "uncomp:budget=384+hack:bits=4",
        "duo:share=0.25+hack:bits=4",
        "uncomp:budget=384+fdc:removal_rate=0.15+hack:bits=4",
    ),
}
"""``request@ratio``: with --compression-ratio. ``palu:`` and the share of ranks that it
keeps is no plan of ours: palu.py says how that is measured.
"""

CONTEXT = 3072
QUICK = {"windows": 2, "window_tokens": 1024, "every": 15}
COLUMNS = (
    "method",
    "bytes left",
    "perplexity ratio",
    "retrieval",
    "agreement",
    "kl",
    "seconds",
    "note",
)


KvBits = Literal[16, 32]
HOT_FORMATS: dict[str, KvBits] = {"16": 16, "32": 32}


class Bench:
    """One model: its statistics by kind, its uncompressed engine, and the rows."""

    def __init__(
        self,
        model: Path,
        folder: Path,
        threads: int | None,
        kv_bits: KvBits,
        exam: dict[str, Any],
    ) -> None:
        self.model, self.folder, self.threads = model, folder, threads
        self.kv_bits: KvBits = kv_bits
        self.exam = exam
        self.built = 0

    @cached_property
    def baseline(self) -> Any:  # noqa: ANN401
        return Remembering(self.engine(self.model, "none", 32))

    def stats(self, kind: str) -> Path:
        path = self.folder / f"{kind}.npz"
        if not path.exists():
            calibrate_to(
                self.model,
                path,
                kind if kind == "random" else str(DATA / "calibration_text.jsonl"),
            )
        return path

    def engine(self, model: Path, request: str, bits: KvBits | None = None) -> LLM:
        self.built += 1
        request, _, ratio = request.partition("@")
        kind = parse(request).calibration
        request_of = BuildConfig(
            model,
            self.folder / f"engine{self.built}",
            request,
            kv_bits=bits or self.kv_bits,
            workers=self.threads,
            compression_ratio=float(ratio) if ratio else None,
            stats=None if kind is None else self.stats(kind),
        )
        return LLM.load(build(request_of), threads=self.threads)

    def row(self, request: str) -> dict[str, Any]:
        started = time.monotonic()
        try:
            name, _, kept = request.partition(":")
            if name == "palu":
                folder = self.folder / f"low_rank_{kept}"
                text = DATA / "calibration_text.jsonl"
                llm = self.engine(
                    low_rank_checkpoint(self.model, folder, text, float(kept)), "none"
                )
                left, note = float(kept), "accuracy by low-rank weights, bytes computed"
            else:
                llm, note = self.engine(self.model, request), ""
                left = bytes_left(llm.layout, CONTEXT)
            found = evaluate(llm, self.baseline, **self.exam)
        except KvlatheError as error:
            return {"method": request, "note": str(error)}
        kept_scores = {
            "retrieval": found["retrieval_exact_match"],
            "perplexity ratio": found["perplexity_ratio"],
        }
        kept_scores |= {name: found[name] for name in ("agreement", "kl")}
        return {
            "method": request,
            "bytes left": left,
            **kept_scores,
            "seconds": time.monotonic() - started,
            "note": note,
        }


@click.command()
@several_models
@click.option(
    "--only",
    multiple=True,
    help="Requests, or names of groups: methods, comparison, compositions.",
)
@click.option(
    "--quick",
    is_flag=True,
    help="Few windows and questions: what runs, not what it is worth.",
)
@click.option(
    "--kv-bits",
    type=click.Choice(tuple(HOT_FORMATS)),
    default="16",
    show_default=True,
    help="The hot format.",
)
@click.option("--windows", default=8, show_default=True)
@click.option("--window-tokens", default=2048, show_default=True)
@click.option("--every", default=3, show_default=True)
@click.option("--threads", type=int)
@options.json_lines
def main(
    models: tuple[Path, ...],
    only: tuple[str, ...],
    quick: bool,
    kv_bits: str,
    threads: int | None,
    json_lines: Path | None,
    **asked: int,
) -> None:
    """Measure methods, comparison plans and compositions."""
    chosen = [
        request for name in only or REQUESTS for request in REQUESTS.get(name, (name,))
    ]
    asked |= QUICK if quick else {}
    exam = {
        "text": DATA / "eval_text.jsonl",
        "retrieval": DATA / "line_retrieval.jsonl",
        **asked,
    }
    for model in models:
        with tempfile.TemporaryDirectory() as scratch:
            bench = Bench(model, Path(scratch), threads, HOT_FORMATS[kv_bits], exam)
            rows = []
            for request in chosen:
                rows.append(bench.row(request))
                tell({"model": model.name, **rows[-1]}, json_lines)
        title = f"{model.name}; bytes of {CONTEXT} tokens against 16 bit"
        about = {"model": model.name, "context": CONTEXT, **asked}
        table_and_json("methods", title, COLUMNS, rows, **about)


if __name__ == "__main__":
    main()
