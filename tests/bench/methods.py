"""Methods and compositions in one table: bytes left, perplexity ratio, retrieval and agreement, through the engine.

    python tests/bench/methods.py [--model DIR] [--only REQUEST ...] [--windows 8] [--window-tokens 2048] [--every 3]

Every token attends what its decode would attend (one-page grid). Bytes are those of all pages of a sequence of 3,072
tokens, scales and the hot page included (the mean over where in its page a sequence stands), against the uncompressed
cache in 16 bit. Ranks are chosen on statistics of random tokens. One table and one JSON line.
"""

from __future__ import annotations

import json
import tempfile
import time
from pathlib import Path
from typing import Any

import click
import numpy as np
from accuracy import DATA, ROOT, Remembering

from kvlathe.console import print_table
from kvlathe.engines.build import build, calibrate_to
from kvlathe.engines.planning import bytes_per_token
from kvlathe.engines.request import BuildRequest
from kvlathe.export.layout import CacheLayout
from kvlathe.export.methods import calibration
from kvlathe.runtime.evaluate import evaluate
from kvlathe.runtime.llm import LLM

REQUESTS = (
    "fdc",
    "hack:bits=8",
    "hack:bits=4",
    "hack:bits=2",
    "fdc+hack:bits=8",
    "fdc+hack:bits=4",
    "fdc+hack:bits=4,spin=none",
)
CONTEXT = 3072
COLUMNS = ("method", "bytes left", "perplexity ratio", "retrieval", "agreement", "kl", "seconds")


def bytes_left(layout: CacheLayout) -> float:
    """Of the uncompressed 16-bit cache, at CONTEXT tokens: the mean over the last page."""
    plan, page = layout.plan, layout.plan.page_tokens
    whole = bytes_per_token(plan.model, 16)
    held = [layout.bytes_for(tokens) / (whole * tokens) for tokens in range(CONTEXT - page, CONTEXT)]
    return float(np.mean(held))


def measure(llm: LLM, baseline: Any, asked: dict[str, Any]) -> dict[str, Any]:  # noqa: ANN401
    started = time.monotonic()
    found = evaluate(llm, baseline, **asked)
    kept = {"retrieval": found["retrieval_exact_match"], "perplexity ratio": found["perplexity_ratio"]}
    kept |= {name: found[name] for name in ("agreement", "kl")}
    return {**kept, "bytes left": bytes_left(llm.layout), "seconds": time.monotonic() - started}


@click.command()
@click.option("--model", type=click.Path(path_type=Path), default=ROOT / "models" / "lathe-5m")
@click.option("--only", multiple=True, help="Requests to measure instead of the usual ones.")
@click.option("--removal-rate", default=0.15, show_default=True, help="Of the methods that choose ranks.")
@click.option("--kv-bits", type=click.Choice(("16", "32")), default="16", show_default=True, help="The hot format.")
@click.option("--windows", default=8, show_default=True)
@click.option("--window-tokens", default=2048, show_default=True)
@click.option("--every", default=3, show_default=True)
@click.option("--threads", type=int)
def main(
    model: Path, only: tuple[str, ...], removal_rate: float, kv_bits: str, threads: int | None, **asked: int
) -> None:
    """Measure methods and compositions."""
    exam = {"text": DATA / "eval_text.jsonl", "retrieval": DATA / "line_retrieval.jsonl", **asked}
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        calibrate_to(model, folder / "stats.npz", "random")

        def built(request: str, number: int) -> LLM:
            ranked = {"removal_rate": removal_rate, "stats": folder / "stats.npz"} if calibration(request) else {}
            build_request = BuildRequest(
                model, folder / str(number), request, kv_bits=16 if kv_bits == "16" else 32, workers=threads, **ranked
            )
            return LLM.load(build(build_request), threads=threads)

        plain = LLM.load(build(BuildRequest(model, folder / "none", kv_bits=32, workers=threads)), threads=threads)
        baseline = Remembering(plain)
        for number, request in enumerate(("none", *(only or REQUESTS))):
            rows.append({"method": request, **measure(built(request, number), baseline, exam)})
            click.echo(json.dumps(rows[-1]), err=True)
    title = f"{model.name}, r = {removal_rate:g} where ranks are chosen; bytes of {CONTEXT} tokens against 16 bit"
    print_table(title, COLUMNS, [[row[name] for name in COLUMNS] for row in rows])
    print(json.dumps({"benchmark": "methods", "model": model.name, "context": CONTEXT, **asked, "rows": rows}))


if __name__ == "__main__":
    main()
