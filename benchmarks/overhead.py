"""The price of scheduling, sampling and HTTP beside the bare loop of steps.

  python3 -m benchmarks.overhead out/hack4 --loads 64x2000+128 16x7600+256

Each load of an engine's folder is answered three times: over HTTP (``kvlathe serve``,
clients in this process), by ``LLM.generate`` in this process, and bare. The bare loop
makes the session's calls of ``LLM.generate`` again: the same steps and seals in the same
order, one step ahead, tokens sampled greedily where the logits are. Nothing is scheduled
then, no text is made, nobody is told.

``prompts``: seconds until the last first token; ``decode``: from then to the end, and
for each token of an answer. ``graph``: on a GPU, the captured graph of a decode step in
the middle, replayed alone. Prints one table and one JSON line, with each part's ratio to
the bare loop. A load that fails is a row.
"""

from __future__ import annotations

import gc
import json
import random
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.serve_burst import (
    HIGHEST_ID,
    LOWEST_ID,
    Failed,
    Shape,
    burst,
    served,
    shape_of,
)
from benchmarks.support.commands import parser_of, show
from kvlathe.base.errors import KvlatheError
from kvlathe.runtime.llm import LLM
from kvlathe.runtime.sessions.protocols import StepPlan
from kvlathe.runtime.text.sampler import Request, Sampler, SamplingRows, rows_of
from kvlathe.runtime.text.sampling_params import SamplingParams

STEPS = ("start", "run")
CALLS = (*STEPS, "apply", "roll_back", "read_page", "write_page")
REPLAYS = 20
WARM_TOKENS, WARM_ANSWER = 64, 8
MILLI = 1e3
COLUMNS = {
    "load": 14,
    "part": 10,
    "prompts_s": 11,
    "decode_s": 10,
    "token_ms": 10,
    "prompts_ratio": 15,
    "decode_ratio": 14,
    "whole_ratio": 13,
}

Call = tuple[str, tuple[Any, ...]]
"""A method of a session, and what it was given."""


@dataclass(frozen=True)
class Spent:
    """Seconds: ``prompts`` until the last first token, ``decode`` from then on."""

    prompts: float
    decode: float

    @property
    def whole(self) -> float:
        return self.prompts + self.decode

    def row(self, bare: Spent, answer: int) -> dict[str, float]:
        """A row of the table, for answers of ``answer`` tokens."""
        return {
            "prompts_s": self.prompts,
            "decode_s": self.decode,
            "token_ms": MILLI * self.decode / (answer - 1),
            "prompts_ratio": self.prompts / bare.prompts,
            "decode_ratio": self.decode / bare.decode,
            "whole_ratio": self.whole / bare.whole,
        }


# -- the bare loop ---------------------------------------------------------------------
@contextmanager
def recorded(session: object) -> Generator[list[Call]]:
    """Calls that a session gets while the block runs, in order."""
    calls: list[Call] = []
    for name in CALLS:
        setattr(session, name, partial(_noted, calls, name, getattr(session, name)))
    try:
        yield calls
    finally:
        for name in CALLS:
            delattr(session, name)


def _noted(
    calls: list[Call],
    name: str,
    method: Callable[..., Any],
    *args: Any,  # noqa: ANN401
) -> Any:  # noqa: ANN401
    calls.append((name, args))
    return method(*args)


@dataclass(frozen=True)
class Landed:
    """When a step's tokens were known, and which."""

    at: float
    tokens: np.ndarray


def bare(session: Any, calls: list[Call]) -> list[Landed]:  # noqa: ANN401
    """Make the calls again. The tokens of a step are waited for once the next one is
    queued, where the session samples."""
    rows = greedy_of(calls)
    landed: list[Landed] = []
    flight = None
    for name, args in calls:
        if name == "run":
            tokens = session.run(*args).argmax(axis=1)
            landed.append(Landed(time.perf_counter(), tokens))
        elif name == "start":
            sampling = session.start(*args)(rows[len(args[0].logit_rows)])
            landed += _land(flight)
            flight = sampling
        else:
            getattr(session, name)(*args)
    return landed + _land(flight)


def _land(flight: Any) -> list[Landed]:  # noqa: ANN401
    if flight is None:
        return []
    tokens = flight.result().tokens
    return [Landed(time.perf_counter(), tokens)]


def greedy_of(calls: list[Call]) -> dict[int, SamplingRows]:
    """The greedy rows of each number that is among the calls."""
    request = Request(Sampler(SamplingParams()), [], 0)
    counts = {len(step.logit_rows) for step in steps_of(calls)}
    return {count: rows_of([request] * count) for count in counts}


def steps_of(calls: list[Call]) -> list[StepPlan]:
    return [args[0] for name, args in calls if name in STEPS]


def has_prompts(step: StepPlan) -> bool:
    return bool(np.diff(step.cu_seqlens_q).max() > 1)


def spent_bare(session: object, calls: list[Call]) -> Spent:
    """Seconds of the calls until the last step with prompts has ended, and then."""
    gc.collect()
    started = time.perf_counter()
    landed = bare(session, calls)
    prompts = started
    for one, step in zip(landed, steps_of(calls), strict=True):
        if has_prompts(step):
            prompts = one.at
    return Spent(prompts - started, landed[-1].at - prompts)


def graph_ms(session: Any, calls: list[Call]) -> float | None:  # noqa: ANN401
    """Milliseconds of the graph of a decode step in the middle; None without graphs."""
    if not hasattr(session, "_graph_of"):
        return None
    from benchmarks.support.gpu import repeated

    decodes = [step for step in steps_of(calls) if not has_prompts(step)]
    most = max(len(step.logit_rows) for step in decodes)
    full = [step for step in decodes if len(step.logit_rows) == most]
    step = replace(full[len(full) // 2], after=None)
    session.start(step)(greedy_of(calls)[most]).result()
    return repeated(session._graph_of(most).replay, REPLAYS)


# -- the whole engine, without and with HTTP -------------------------------------------
def prompts_of(count: int, tokens: int, seed: int) -> list[list[int]]:
    drawn = random.Random(seed)
    draw = partial(drawn.randint, LOWEST_ID, HIGHEST_ID)
    return [[draw() for _ in range(tokens)] for _ in range(count)]


def generated(llm: LLM, shape: Shape, seed: int = 0) -> Spent:
    """Seconds of a load in this process."""
    count, prompt, new = shape
    params = SamplingParams(max_new_tokens=new, temperature=0, ignore_eos=True)
    prompts = prompts_of(count, prompt, seed)
    started = time.perf_counter()
    answers = llm.generate(prompts, params)
    whole = time.perf_counter() - started
    first = max(answer.timings.prefill_seconds for answer in answers)
    return Spent(first, whole - first)


def warmed(shape: Shape) -> list[Shape]:
    """Loads before a load: what is made once is made then."""
    count, prompt, _ = shape
    few = (min(count, 8), WARM_TOKENS, WARM_ANSWER)
    return [few, (min(count, 2), prompt, WARM_ANSWER)]


def over_http(url: str, shape: Shape, seed: int) -> Spent:
    """Seconds of a load by clients of a server. Raises Failed."""
    for before in warmed(shape):
        burst(url, *before, seed=1)
    said = burst(url, *shape, seed)
    prompts = said["last_first_token"]
    return Spent(prompts, said["seconds"] - prompts)


def in_process(llm: LLM, shape: Shape) -> tuple[Spent, Spent, float | None]:
    """A load by LLM.generate and bare; the graph alone."""
    for before in warmed(shape):
        generated(llm, before)
    with recorded(llm.session) as calls:
        offline = generated(llm, shape)
    return offline, spent_bare(llm.session, calls), graph_ms(llm.session, calls)


Answered = dict[str, Spent | str]
"""Seconds of each load, or what failed."""


def all_over_http(
    folder: Path, shapes: dict[str, Shape], extra: list[str], log: Path | None
) -> Answered:
    answered: Answered = {}
    try:
        with served(str(folder), extra, log) as url:
            for seed, (load, shape) in enumerate(shapes.items(), 2):
                answered[load] = tried_http(url, shape, seed)
    except Failed as error:
        answered = dict.fromkeys(shapes, str(error))
    return answered


def tried_http(url: str, shape: Shape, seed: int) -> Spent | str:
    try:
        return over_http(url, shape, seed)
    except (Failed, OSError) as error:
        return str(error)


# -- the table -------------------------------------------------------------------------
def rows_of_load(
    llm: LLM, load: str, shape: Shape, http: Spent | str
) -> list[dict[str, Any]]:
    try:
        offline, loop, graph = in_process(llm, shape)
    except KvlatheError as error:
        return [{"load": load, "error": str(error)}]
    new = shape[2]
    rows: list[dict[str, Any]] = []
    if graph is not None:
        rows.append({"load": load, "part": "graph", "token_ms": graph})
    for part, spent in (("bare", loop), ("offline", offline)):
        rows.append({"load": load, "part": part, **spent.row(loop, new)})
    if isinstance(http, Spent):
        rows.append({"load": load, "part": "http", **http.row(loop, new)})
    else:
        rows.append({"load": load, "part": "http", "error": http})
    return rows


@dataclass(frozen=True)
class Settings:
    cache_bytes: int | None
    threads: int | None
    device: str | None

    @property
    def flags(self) -> list[str]:
        """For ``kvlathe serve``."""
        names = {"--cache-size": self.cache_bytes, "--threads": self.threads}
        flags: list[str] = []
        for name, value in (names | {"--device": self.device}).items():
            if value is not None:
                flags += [name, str(value)]
        return flags


def measure(
    folder: Path, shapes: dict[str, Shape], settings: Settings, log: Path | None
) -> list[dict[str, Any]]:
    """All rows of an engine, printed as they come. The server ends before the engine is
    loaded here: the GPU's memory is theirs in turns."""
    http = all_over_http(folder, shapes, settings.flags, log)
    rows: list[dict[str, Any]] = []
    with LLM.load(folder, **asdict(settings)) as llm:
        llm.session.warm_up()
        for load, shape in shapes.items():
            found = rows_of_load(llm, load, shape, http[load])
            rows += found
            for row in found:
                show(COLUMNS, row, ".3f")
    return rows


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("engine", type=Path)
    parser.add_argument("--loads", nargs="+", default=["64x2000+128"])
    parser.add_argument("--cache-size", type=int, help="bytes, in all three")
    parser.add_argument("--threads", type=int)
    parser.add_argument("--device")
    parser.add_argument("--log", type=Path, help="a file for what the server says")
    options = parser.parse_args()
    shapes = {load: shape_of(load) for load in options.loads}
    settings = Settings(options.cache_size, options.threads, options.device)
    show(COLUMNS, {key: key for key in COLUMNS}, ".3f")
    rows = measure(options.engine, shapes, settings, options.log)
    print(json.dumps({"engine": str(options.engine), "rows": rows}))


if __name__ == "__main__":
    main()
