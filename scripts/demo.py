"""The main job on the shipped model: build engines, let them write, measure them, print
one table.

Every step is a ``kvlathe`` command that is printed before it runs, so that each number
can be had again by hand.
"""

from __future__ import annotations

import argparse
import json
import shlex
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

from kvlathe.base import console

ROOT = Path(__file__).resolve().parents[1]
BUILDS = {
    "none": "--compression none",
    "fdc": "--compression fdc --removal-rate 0.15",
    "fdc-8bit": "--compression fdc+hack:bits=8 --removal-rate 0.15",
    "auto": "--compression auto --compression-ratio 0.9 --calibration data/calibration_text.jsonl",
}
"""Engine name -> what to build."""

PROMPT = "# How to install\n\nFirst"
NEW_TOKENS = 64
ROUNDS = 3
COLUMNS = {
    "kv_bytes_per_token": "KV bytes/token",
    "kv_bytes_removed": "bytes removed",
    "perplexity": "perplexity",
    "perplexity_ratio": "ratio",
    "retrieval_exact_match": "retrieval",
    "agreement": "agreement",
    "tokens_per_second": "decode tokens/s",
}


def kvlathe(*arguments: str | Path) -> dict[str, Any]:
    """Print and run one command; its JSON result. Its log stays visible; a failure ends
    the demo with its exit code."""
    line = [str(argument) for argument in arguments]
    console.err.print(
        f"$ kvlathe {shlex.join(line)}", style="bold", markup=False, soft_wrap=True
    )
    done = subprocess.run(
        [sys.executable, "-m", "kvlathe", *line, "--json"],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        text=True,
    )
    if done.returncode:
        sys.exit(done.returncode)
    return json.loads(done.stdout)


def build(name: str, model: Path, out: Path) -> Path:
    engine = out / name
    kvlathe(
        "build",
        "--model",
        model,
        "--output-dir",
        engine,
        *shlex.split(BUILDS[name]),
        "--overwrite",
    )
    return engine


def write(engine: Path) -> None:
    """Print what the engine writes after PROMPT."""
    answer = kvlathe(
        "generate", engine, "--prompt", PROMPT, "--max-new-tokens", str(NEW_TOKENS)
    )
    console.out.print(PROMPT + answer["text"], markup=False, soft_wrap=True)


def score(engine: Path, baseline: Path) -> dict[str, Any]:
    """Bytes, and accuracy on the shipped tasks."""
    tasks = [
        "--text",
        "data/eval_text.jsonl",
        "--retrieval",
        "data/line_retrieval.jsonl",
    ]
    against = [] if engine == baseline else ["--baseline", str(baseline)]
    return kvlathe("eval", engine, *against, *tasks)


def speeds(engines: list[Path], prompt_file: Path) -> list[float]:
    """Decode tokens/s of each engine after a long prompt: the median of rounds in which
    they take turns."""
    asked = (
        "--prompt-file",
        prompt_file,
        "--max-new-tokens",
        str(NEW_TOKENS),
        "--ignore-eos",
    )
    rounds = [
        [kvlathe("generate", engine, *asked)["timings"] for engine in engines]
        for _ in range(ROUNDS)
    ]
    return [
        statistics.median(timings["decode_tokens_per_second"] for timings in own)
        for own in zip(*rounds, strict=True)
    ]


def long_prompt(out: Path) -> Path:
    """The longest shipped prompt of at most 8,000 characters (about 2,000 tokens), in a
    file."""
    rows = (
        json.loads(line)
        for line in (ROOT / "data/line_retrieval.jsonl").read_text("utf-8").splitlines()
    )
    path = out / "prompt.txt"
    path.write_text(
        max((row["prompt"] for row in rows if len(row["prompt"]) <= 8000), key=len),
        "utf-8",
    )
    return path


def arguments() -> argparse.Namespace:
    """Paths are absolute afterwards: every command runs in the checkout, wherever the
    demo was started."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", type=Path, default=ROOT / "models/lathe-5m")
    parser.add_argument("--out", type=Path, default=ROOT / "out/demo")
    options = parser.parse_args()
    options.model = options.model.resolve()
    options.out = options.out.resolve()
    if not (options.model / "config.json").is_file():
        console.fail(f"{options.model} is no checkpoint: it has no config.json.")
        sys.exit(1)
    return options


def show(title: str, results: dict[str, dict[str, Any]], out: Path) -> None:
    """One table; where its numbers and the engines' own pages are."""
    rows = []
    for name, result in results.items():
        removed = f"{result['kv_bytes_removed']:.1%}"
        shown = result | {"kv_bytes_removed": removed}
        rows.append((name, *(shown[key] for key in COLUMNS)))
    console.print_table(title, ("engine", *COLUMNS.values()), rows)
    numbers = out / "results.json"
    numbers.write_text(json.dumps(results, indent=1) + "\n", "utf-8")
    pages = [out / name / "report.html" for name in list(results)[1:]]
    for path in (*pages, numbers):
        console.out.print(f"open {path}", markup=False, soft_wrap=True)


def main() -> None:
    options = arguments()
    options.out.mkdir(parents=True, exist_ok=True)
    engines = [build(name, options.model, options.out) for name in BUILDS]
    write(engines[-1])
    prompt = long_prompt(options.out)
    scores = [score(engine, engines[0]) for engine in engines]
    results = {}
    for engine, result, speed in zip(
        engines, scores, speeds(engines, prompt), strict=True
    ):
        results[engine.name] = result | {"tokens_per_second": speed}
    title = f"{options.model.name}, computed in float32 on this CPU, cached in 16 bit"
    show(title, results, options.out)


if __name__ == "__main__":
    main()
