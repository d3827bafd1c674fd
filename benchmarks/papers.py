"""The papers' own measurements in their own shapes, through built engines: ours beside
theirs.

  python3 -m benchmarks.random_checkpoint out/8b
  python3 -m benchmarks.papers --model out/8b --engines out/engines --only zipcache

Engines are built by ``kvlathe build`` where ``--engines`` has no folder of their name, one
at a time, and go when they were measured unless ``--keep``. Every load is answered by
``LLM.generate`` after two smaller ones: ``prompts s`` is the time until the last first
token, ``token ms`` what every further token of an answer takes, ``memory`` the weights and
the most bytes of pages in use, ``rows`` the share of the prompt's hidden states that layers
computed. Ratios are an engine's number over that of the engine it is compared with, in
the same run. What a build or an engine refuses is a row. ``--divide`` makes loads shorter, to
see on a CPU that everything runs. Prints two tables and one JSON line.

What the papers compared with is often slower than what is compared with here: MiKV with
standard attention (ZipCache), a model without grouped heads (UNComp). Palu runs in no engine:
its time is that of ``fdc`` with the attention of benchmarks/decode_baselines.py.
"""

from __future__ import annotations

import gc
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from benchmarks.overhead import MILLI, Spent, generated, prompts_of, warmed
from benchmarks.serve_burst import Shape
from benchmarks.support.commands import meanwhile, parser_of
from kvlathe.base.errors import KvlatheError
from kvlathe.runtime.cache.pool import PagePool
from kvlathe.runtime.llm import LLM
from kvlathe.runtime.text.sampling_params import SamplingParams

BASELINES = "benchmarks.decode_baselines"
LOOK_SECONDS = 0.02
POSITIONS = 8192
"""Positions of the model that UNComp measured: its stages go down from there."""
LONG = 16_896
"""Tokens of the longest sequence of a measurement, in whole chunks."""
GIGA = 1e9
STAGED = "uncomp-stages"
BUILDS = {
    "none": ("none",),
    STAGED: ("uncomp:stages={stages},least=1536",),
    "uncomp": ("uncomp:stages=1",),
    "zipcache": ("zipcache",),
    "all-rows": ("zipcache:probe=all,score=accumulated",),
    "hack": ("hack:bits=2",),
    "kvquant": ("kvquant",),
    "kivi": ("kivi:bits=2",),
    "fdc": ("fdc", "--compression-ratio", "0.5"),
}
"""Options that each engine is built with. ``all-rows`` ranks as MiKV does."""


@dataclass(frozen=True)
class Claim:
    """A paper's ratio of ``number`` (a key of a row), of ``engine`` over ``against``."""

    engine: str
    against: str
    number: str
    theirs: str
    where: str


@dataclass(frozen=True)
class Measurement:
    """``sequences``: where the cache is to hold so many of the first engine's at their
    fullest; the load's count is then what each engine has room for. ``answer``: tokens
    that are counted for there."""

    engines: tuple[str, ...]
    load: Shape
    claims: tuple[Claim, ...]
    sequences: int = 0
    answer: int = 0


UNCOMP = "UNComp, A100, Llama-2-7B: "
MEASUREMENTS = {
    "uncomp-prefill": Measurement(
        ("none", STAGED),
        (1, 8096, 8),
        (Claim(STAGED, "none", "prompts_s", "0.63", UNCOMP + "table 3"),),
    ),
    "uncomp-decode": Measurement(
        ("none", "uncomp", STAGED),
        (8, 3712, 384),
        (
            Claim("uncomp", "none", "token_ms", "0.46", UNCOMP + "table 10"),
            Claim(STAGED, "none", "token_ms", "0.41", UNCOMP + "table 10"),
        ),
    ),
    "uncomp-batch": Measurement(
        ("none", "uncomp"),
        (6, 2048, 256),
        (
            Claim("uncomp", "none", "sequences", "5.33", UNCOMP + "appendix E"),
            Claim("uncomp", "none", "tokens_per_s", "6.4", UNCOMP + "appendix E"),
        ),
        sequences=6,
        answer=8096,
    ),
    "zipcache": Measurement(
        ("none", "zipcache", "all-rows"),
        (8, 4096, 128),
        tuple(
            Claim("zipcache", against, number, theirs, "ZipCache, figure 6, over MiKV")
            for against in ("all-rows", "none")
            for number, theirs in (
                ("prompts_s", "0.63"),
                ("token_ms", "0.43"),
                ("memory_gb", "0.80"),
            )
        ),
    ),
    "hack": Measurement(
        ("none", "hack", "kvquant", "kivi"),
        (8, 16200, 159),
        tuple(
            Claim("hack", against, number, theirs, "HACK, figure 10, Cocktail")
            for against in ("kvquant", "kivi", "none")
            for number, theirs in (
                ("prompts_s", "0.58 to 0.64"),
                ("token_ms", "0.66 to 0.68"),
            )
        ),
    ),
    "fdc": Measurement(
        ("none", "fdc"),
        (8, 16200, 159),
        (
            Claim(
                "fdc", "palu", "token_ms", "0.46 to 0.71", "FDC, figure 10, Cocktail"
            ),
            Claim("fdc", "none", "token_ms", "", "no number: over no compression"),
        ),
    ),
}
Row = dict[str, Any]
COLUMNS = {
    "measurement": 16,
    "engine": 14,
    "load": 14,
    "prompts_s": 11,
    "token_ms": 10,
    "sequences": 11,
    "memory_gb": 11,
    "rows": 7,
}
COMPARED = {"measurement": 16, "what": 36, "ours": 8, "theirs": 14}


# -- engines ---------------------------------------------------------------------------
@dataclass(frozen=True)
class Builds:
    """The folder that engines come from. ``flags``: for every build."""

    model: Path
    folder: Path
    keep: bool
    flags: tuple[str, ...]

    @contextmanager
    def engine(self, name: str) -> Generator[Path]:
        """The folder of an engine. Raises KvlatheError where a build refuses it."""
        folder = self.folder / name
        built = not folder.exists()
        if built:
            self.build(name, folder)
        try:
            yield folder
        finally:
            if built and not self.keep:
                shutil.rmtree(folder, ignore_errors=True)

    def build(self, name: str, folder: Path) -> None:
        compression, *more = BUILDS[name]
        config = json.loads((self.model / "config.json").read_text("utf-8"))
        longest = min(LONG, config["max_position_embeddings"])
        compression = compression.format(stages=min(5, config["num_hidden_layers"]))
        with tempfile.TemporaryDirectory() as shorter:
            model = self.model.resolve()
            if name == STAGED:
                longest = min(longest, POSITIONS)
                model = shortened(model, config, Path(shorter), longest)
            command = [sys.executable, "-m", "kvlathe", "build", "--no-cache"]
            command += ["--model", str(model), "--output-dir", str(folder)]
            command += ["--compression", compression, *more, *self.flags]
            command += ["--max-seq-len", str(longest)]
            done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            said = done.stderr.strip().splitlines() or ["it said nothing"]
            raise KvlatheError(f"{name} was not built", said[-1], "see kvlathe build")


def shortened(model: Path, config: Row, folder: Path, positions: int) -> Path:
    """``model`` as one of so many positions."""
    for file in model.iterdir():
        (folder / file.name).symlink_to(file)
    (folder / "config.json").unlink()
    own = config | {"max_position_embeddings": positions}
    (folder / "config.json").write_text(json.dumps(own), "utf-8")
    return folder


# -- one load --------------------------------------------------------------------------
@contextmanager
def watched(llm: LLM) -> Generator[dict[str, int]]:
    """The most bytes of pages in use and the most sequences that run while the block
    does."""
    most = {"bytes": 0, "running": 0}

    def look() -> None:
        running = len(llm.engine.scheduler.running)
        most["bytes"] = max(most["bytes"], llm.pool.bytes_in_use)
        most["running"] = max(most["running"], running)

    with meanwhile(look, LOOK_SECONDS):
        yield most


def measured(llm: LLM, folder: Path, shape: Shape) -> Row:
    """Time and memory that a load takes an engine."""
    count, prompt, new = shape
    llm.session.warm_up()
    for before in warmed(shape):
        generated(llm, before)
    with watched(llm) as most:
        spent: Spent = generated(llm, shape)
    weights = sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())
    token_ms = MILLI * spent.decode / (new - 1)
    return {
        "load": f"{count}x{prompt}+{new}",
        "prompts_s": spent.prompts,
        "token_ms": token_ms,
        "tokens_per_s": MILLI * most["running"] / token_ms,
        "sequences": most["running"],
        "memory_gb": (weights + most["bytes"]) / GIGA,
        "rows": rows_computed(llm, prompt),
        "layers": llm.plan.model.layers,
    }


def rows_computed(llm: LLM, prompt: int) -> float:
    """The share of a prompt's hidden states that layers compute."""
    if not llm.plan.stages:
        return 1.0
    params = SamplingParams(max_new_tokens=1)
    (answer,) = llm.generate(prompts_of(1, prompt, 0), params)
    if answer.prompt_rows is None:  # too short for a token to leave
        return 1.0
    return sum(answer.prompt_rows) / (llm.plan.model.layers * prompt)


def room(llm: LLM, size: int, tokens: int, prompt: int) -> int:
    """The number of sequences of ``tokens`` tokens that fit a cache of ``size`` bytes
    at their fullest."""
    pool = PagePool(llm.layout, size)
    pages, count = pool.worst_pages(tokens, prompt), 1
    while pool.fits([pages] * (count + 1)):
        count += 1
    return min(count, llm.limits.max_batch_size)


@dataclass(frozen=True)
class Settings:
    cache_bytes: int
    device: str | None
    threads: int | None


def rows_of(
    name: str, wanted: Measurement, builds: Builds, settings: Settings
) -> list[Row]:
    """A row for each engine of a measurement, printed as it comes."""
    rows: list[Row] = []
    size = 0
    for engine in wanted.engines:
        row: Row = {"measurement": name, "engine": engine}
        try:
            with builds.engine(engine) as folder:
                found, size = answered(folder, wanted, size, settings)
                row |= found
        except KvlatheError as error:
            row["error"] = str(error)
        gc.collect()  # the memory of an engine goes with its LLM
        show(row, COLUMNS)
        rows.append(row)
    return rows


def answered(
    folder: Path, wanted: Measurement, size: int, settings: Settings
) -> tuple[Row, int]:
    """Time and memory that the load takes an engine, and the bytes that sequences are
    counted in: ``size``, or those of the first engine where it is 0."""
    count, prompt, new = wanted.load
    with LLM.load(folder, **asdict(settings)) as llm:
        if wanted.sequences:
            tokens = prompt + wanted.answer
            size = size or bytes_for(llm, wanted.sequences, tokens)
            count = room(llm, size, tokens, prompt)
        return measured(llm, folder, (count, prompt, new)), size


def bytes_for(llm: LLM, sequences: int, tokens: int) -> int:
    """Bytes of whole pages for so many sequences, one page of each bucket more."""
    each = llm.layout.bytes_for(tokens)
    return sequences * (each + sum(llm.layout.page_stride))


# -- what the papers say ---------------------------------------------------------------
def palu_row(fdc: Row, load: Shape) -> Row:
    """``fdc`` with Palu's attention in place of ours: computed from the times of both
    kernels at rank 64."""
    row: Row = {"measurement": "fdc", "engine": "palu", "load": fdc.get("load", "")}
    library = os.environ.get("KVLATHE_LIBRARY", "")
    case = f"{load[0]}x{load[1] + load[2] // 2}"
    command = [sys.executable, "-m", BASELINES, "--library", library, "--what", "palu"]
    command += ["--cases", case, "--ranks", "uniform64"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode or "token_ms" not in fdc:
        said = done.stderr.strip().splitlines() or ["fdc was not measured"]
        return row | {"error": said[-1]}
    found = json.loads(done.stdout.strip().splitlines()[-1])["results"]
    (rebuilt,) = [one for one in found if one["name"] == "rebuilt"]
    slower_ms = (rebuilt["us"] - rebuilt["ours_us"]) / MILLI
    return row | {"token_ms": fdc["token_ms"] + fdc["layers"] * slower_ms}


def compared(name: str, wanted: Measurement, rows: list[Row]) -> list[Row]:
    """Each claim of a paper beside our ratio."""
    by_engine = {row["engine"]: row for row in rows}
    found: list[Row] = []
    for claim in wanted.claims:
        what = f"{claim.number}: {claim.engine} / {claim.against}"
        mine = by_engine[claim.engine].get(claim.number)
        other = by_engine.get(claim.against, {}).get(claim.number)
        ours = mine / other if mine and other else None
        said = {"theirs": claim.theirs, "error": claim.where}
        found.append({"measurement": name, "what": what, "ours": ours, **said})
    return found


def show(row: Row, columns: dict[str, int]) -> None:
    cells: list[str] = []
    for key, width in columns.items():
        value = row.get(key)
        text = f"{value:.3f}" if isinstance(value, float) else str(value or "")
        cells.append(f"{text:>{width}}")
    print("".join(cells).rstrip(), "", row.get("error", ""), flush=True)


def shorter(wanted: Measurement, divisor: int) -> Measurement:
    """The same with loads of fewer tokens."""
    count, prompt, new = wanted.load
    load = (count, max(64, prompt // divisor), max(8, new // divisor))
    return replace(wanted, load=load, answer=wanted.answer // divisor)


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--engines", type=Path, required=True, metavar="FOLDER")
    parser.add_argument("--only", nargs="+", choices=MEASUREMENTS, metavar="NAME")
    parser.add_argument("--keep", action="store_true", help="the engines it builds")
    parser.add_argument("--backend", default="cuda")
    parser.add_argument("--dtype", default="float16")
    parser.add_argument("--device")
    parser.add_argument("--threads", type=int)
    parser.add_argument("--cache-size", type=int, default=24 << 30, help="bytes")
    parser.add_argument("--divide", type=int, default=1)
    options = parser.parse_args()
    flags = ("--backend", options.backend, "--dtype", options.dtype)
    builds = Builds(options.model, options.engines, options.keep, flags)
    options.engines.mkdir(parents=True, exist_ok=True)
    settings = Settings(options.cache_size, options.device, options.threads)
    rows: list[Row] = []
    claims: list[Row] = []
    show({key: key for key in COLUMNS}, COLUMNS)
    for name in options.only or MEASUREMENTS:
        wanted = shorter(MEASUREMENTS[name], options.divide)
        found = rows_of(name, wanted, builds, settings)
        if name == "fdc":
            found.append(palu_row(found[-1], wanted.load))
            show(found[-1], COLUMNS)
        rows += found
        claims += compared(name, wanted, found)
    show({key: key for key in COMPARED}, COMPARED)
    for claim in claims:
        show(claim, COMPARED)
    print(json.dumps({"model": str(options.model), "rows": rows, "claims": claims}))


if __name__ == "__main__":
    main()
