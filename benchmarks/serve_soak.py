"""Many streaming clients for minutes against a real server process: no error, no leak,
every output as alone.

python -m benchmarks.serve_soak --engine out/fdc [--clients 200] [--seconds 120]
[--rounds 4] [--prompts 40]

Each client streams one request after another; a few leave in the middle. The load comes
in rounds, after one that warms up and is not counted. After each round the pages are
back; a short run's process has stopped growing once the last one ends; and every answer equals
the same request's answer by itself, or first differs where the two likeliest tokens'
logits, alone, are within 1e-3. Prints one JSON line; fails otherwise, or below 99 %
exact.

From ten minutes on, it also fails where, after the first third of the run, memory grows
by MOST_SLOPE or more, at its median or as a whole, by a step above MOST_STEP, or by a
second step.
"""

from __future__ import annotations

import asyncio
import json
import random
import re
import subprocess
import sys
import threading
import time
from collections import Counter
from pathlib import Path
from typing import Any, NamedTuple

import httpx2 as httpx
import numpy as np
import numpy.typing as npt
import openai

from benchmarks.support.commands import parser_of
from kvlathe.runtime.llm import LLM
from kvlathe.runtime.requests.answer import Answer
from kvlathe.runtime.text.sampling_params import SamplingParams

Float64 = npt.NDArray[np.float64]
CLOSE = 1e-3
"""The distance of two logits between which float rounding may choose."""


def requests_of(engine: Path, count: int) -> list[tuple[list[int], SamplingParams]]:
    """Prompts of real text of many lengths, greedy and sampled. None ends by itself
    before its length or a stop."""
    random_ = np.random.default_rng(1)
    llm = LLM.load(engine, threads=1, cache_bytes=64 << 20)
    text = (Path(__file__).resolve().parents[1] / "data/eval_text.jsonl").read_text(
        "utf-8"
    )
    ids = llm.tokenizer.encode(
        " ".join(json.loads(line)["text"] for line in text.splitlines()[:40])
    )
    found = []
    for i in range(count):
        start, length = (
            int(random_.integers(len(ids) - 600)),
            int(random_.integers(4, 400)),
        )
        sampled: dict[str, Any] = (
            {"temperature": 0.8, "top_p": 0.9, "seed": i} if i % 2 else {}
        )
        new = int(random_.integers(8, 64))
        found.append(
            (
                ids[start : start + length],
                SamplingParams(max_new_tokens=new, logprobs=1, **sampled),
            )
        )
    return found


def resident(process: int) -> int:
    """Bytes of memory of a process."""
    status = Path(f"/proc/{process}/status").read_text("ascii")
    found = re.search(r"VmRSS:\s+(\d+) kB", status)
    return int(found[1]) * 1024 if found else 0


MOST_SLOPE = 0.5
"""MB a minute by which a process may grow. Rounds of a minute say nothing of it: memory
that is free within the process comes and goes by a megabyte."""
LEAST_SECONDS = 600
LEAST_STEP = 4.0
"""MB by which a process grows at once where ONNX Runtime's arena does: it takes 16 MB
more where a step needs more than any before, and touches a part. Such steps come by
chance. It doubles each time, so one after the warm-up is no leak, and two are one."""
MOST_STEP = 18.0
"""MB that such a step may be: 16 MiB, and what comes and goes beside them."""
EVERY_SECONDS = 2.0
ENDS = 10
"""Samples whose median is the memory at an end of a run."""


class Growth(NamedTuple):
    """MB a minute beside the steps; the steps, in MB; and MB by which memory grew from
    the first ENDS samples to the last beside the steps, in so many minutes."""

    slope: float
    steps: list[float]
    rise: float
    minutes: float

    @property
    def leaks(self) -> bool:
        return (
            self.slope >= MOST_SLOPE
            or len(self.steps) > 1
            or max(self.steps, default=0.0) > MOST_STEP
            or self.rise >= max(LEAST_STEP, MOST_SLOPE * self.minutes)
        )


def growth_of(minutes: Float64, mb: Float64) -> Growth:
    """Growth of memory that was ``mb`` [n] at these times [n]. The slope is the median
    of all pairs' (Theil and Sen) between which there is no step."""
    rises = mb[2:] - np.maximum.accumulate(mb)[:-2]  # one may be seen in its middle
    steps: dict[int, float] = {}
    part = np.zeros(len(mb), int)
    for i in map(int, np.flatnonzero(rises >= LEAST_STEP)):
        if not steps or i > max(steps) + 2:
            steps[i] = float(rises[i])
            part[i + 1 :] += 1
    first, second = np.triu_indices(len(mb), 1)
    same = part[first] == part[second]
    first, second = first[same], second[same]
    slopes = (mb[second] - mb[first]) / (minutes[second] - minutes[first])
    rise = float(np.median(mb[-ENDS:]) - np.median(mb[:ENDS])) - sum(steps.values())
    return Growth(
        float(np.median(slopes)),
        list(steps.values()),
        rise,
        float(minutes[-1] - minutes[0]),
    )


class Watch:
    """Looks at a process's memory every few seconds of the last two thirds of a run:
    what comes before them is warming up."""

    def __init__(self, process: int, seconds: float) -> None:
        self._process, self._first = process, seconds / 3
        self._began = time.monotonic()
        self._ended = threading.Event()
        self._seen: list[tuple[float, float]] = []
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()

    def _watch(self) -> None:
        while not self._ended.wait(EVERY_SECONDS):
            since = time.monotonic() - self._began
            if since > self._first:
                self._seen.append((since / 60, resident(self._process) / 1e6))

    def growth(self) -> Growth:
        """Stop. None where it was too short to say."""
        self._ended.set()
        self._thread.join()
        if len(self._seen) < 3:
            return Growth(0.0, [], 0.0, 0.0)
        minutes, mb = np.array(self._seen).T
        return growth_of(minutes, mb)


def gauge(url: str, name: str) -> float:
    said = httpx.get(f"{url}/metrics", timeout=60).text
    found = re.search(rf"^kvlathe_{name}{{[^}}]*}} ([\d.e+-]+)$", said, re.MULTILINE)
    return float(found[1]) if found else 0.0


async def client(
    api: openai.AsyncOpenAI,
    jobs: list[tuple[list[int], SamplingParams]],
    until: float,
    seed: int,
    seen: list,
) -> Counter[str]:
    """Stream until the time is up; (job, tokens as text) of each whole answer goes to
    ``seen``."""
    dice, counts = random.Random(seed), Counter()
    while time.monotonic() < until:
        number = dice.randrange(len(jobs))
        prompt, params = jobs[number]
        leave = dice.random() < 0.02
        try:
            stream = await api.completions.create(
                model=MODEL, prompt=prompt, max_tokens=params.max_new_tokens, temperature=params.temperature,
                top_p=params.top_p, seed=params.seed, stream=True,
            )  # fmt: skip
            text, reason = "", None
            async for chunk in stream:
                text += chunk.choices[0].text
                reason = chunk.choices[0].finish_reason
                if leave:
                    await stream.close()
                    break
            counts["left" if leave else "whole"] += 1
            if not leave:
                seen.append((number, text))
                counts["cut"] += reason is None
        except openai.RateLimitError as error:
            counts["told to wait"] += 1
            await asyncio.sleep(
                float(error.response.headers["retry-after"]) * dice.random()
            )
        except Exception as error:
            counts[f"error {type(error).__name__}: {error}"[:120]] += 1
    return counts


MODEL = "lathe-5m"


async def crowd(
    url: str, jobs: list, clients: int, seconds: float
) -> tuple[Counter[str], list[tuple[int, str]]]:
    api = openai.AsyncOpenAI(
        base_url=f"{url}/v1",
        api_key="none",
        max_retries=0,
        timeout=600,
        http_client=openai.DefaultAsyncHttpxClient(
            limits=httpx.Limits(max_connections=clients + 8)
        ),
    )
    seen: list[tuple[int, str]] = []
    until = time.monotonic() + seconds
    counts: Counter[str] = Counter()
    for each in await asyncio.gather(
        *(client(api, jobs, until, i, seen) for i in range(clients))
    ):
        counts += each
    return counts, seen


def compare(llm: LLM, jobs: list, seen: list[tuple[int, str]]) -> Counter[str]:
    """Answers against the same request alone: exact, close (parted at a tie within
    CLOSE) or wrong."""
    verdicts: Counter[str] = Counter()
    alone = {
        n: llm.generate([jobs[n][0]], jobs[n][1])[0]
        for n in sorted({n for n, _ in seen})
    }
    cache: dict[tuple[int, str], str] = {}
    for key in seen:
        if key not in cache:
            cache[key] = (
                "exact"
                if key[1] == alone[key[0]].text
                else parted(llm, jobs[key[0]], alone[key[0]], key[1])
            )
        verdicts[cache[key]] += 1
    return verdicts


def parted(
    llm: LLM, job: tuple[list[int], SamplingParams], answer: Answer, text: str
) -> str:
    """The way in which an answer differs from the one alone: of a greedy request,
    whether the first token that differs was a choice between two that are ``CLOSE``,
    alone; of a sampled one, nothing more is asked (it counts as not exact)."""
    prompt, params = job
    if params.temperature:
        return "sampled"
    before = len(llm.tokenizer.decode(prompt[-4:]))
    texts = [
        llm.tokenizer.decode([*prompt[-4:], *answer.token_ids[:n]])[before:]
        for n in range(len(answer.token_ids))
    ]
    shared = max(n for n, begun in enumerate(texts) if text.startswith(begun))
    row = llm.logits([*prompt, *answer.token_ids[:shared]], [len(prompt) + shared - 1])[
        0
    ]
    top = np.sort(row)[-2:]
    return "close" if top[1] - top[0] < CLOSE else "wrong"


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--engine", type=Path, required=True)
    parser.add_argument("--clients", type=int, default=200)
    parser.add_argument(
        "--seconds", type=float, default=120, help="of all rounds together"
    )
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--prompts", type=int, default=40, help="different requests")
    parser.add_argument("--cache-size", default="32M")
    args = parser.parse_args()
    jobs = requests_of(args.engine, args.prompts)
    command = [
        sys.executable,
        "-m",
        "kvlathe.cli.main",
        "serve",
        str(args.engine),
        "--port",
        "0",
        "--served-model-name",
        MODEL,
    ]
    more = [
        "--cache-size",
        args.cache_size,
        "--max-waiting",
        str(args.clients),
        "--no-share-prefixes",
    ]
    server = subprocess.Popen([*command, *more], stderr=subprocess.PIPE, text=True)
    assert server.stderr
    url = next(
        found[0]
        for found in map(re.compile(r"http://[\d.]+:\d+").search, server.stderr)
        if found
    )
    try:
        counts, seen, rounds = Counter[str](), [], []
        watch = Watch(server.pid, args.seconds)
        for i in range(args.rounds + 1):
            seconds = args.seconds / args.rounds * (1 if i else 0.5)
            found = asyncio.run(crowd(url, jobs, args.clients, seconds))
            counts, seen = (counts + found[0], seen + found[1]) if i else (counts, seen)
            time.sleep(2)
            rounds.append(resident(server.pid))
        growth = watch.growth()
        pages, running = (
            gauge(url, "kv_cache_bytes") + gauge(url, "kv_cache_bytes_kept"),
            gauge(url, "num_requests_running"),
        )
        preemptions = gauge(url, "num_preemptions_total")
    finally:
        server.terminate()
        code = server.wait(60)
    verdicts = compare(
        LLM.load(args.engine, threads=1, cache_bytes=64 << 20), jobs, seen
    )
    exact = verdicts["exact"] / max(1, len(seen))
    result = {
        "clients": args.clients, "seconds": args.seconds, "counts": dict(counts), "verdicts": dict(verdicts),
        "exact": exact,
        "pages_left_bytes": pages, "running_left": running, "rss_after_rounds": rounds,
        "rss_mb_a_minute": round(growth.slope, 3), "rss_mb_steps": growth.steps,
        "rss_mb_beside_steps": round(growth.rise, 3),
        "preemptions": preemptions, "exit_code": code,
    }  # fmt: skip
    print(json.dumps(result))
    errors = [name for name in counts if name.startswith("error")] or counts["cut"]
    long = args.seconds >= LEAST_SECONDS
    grew = growth.leaks if long else rounds[-1] > 1.01 * rounds[-2]
    leaked = pages or running or grew
    sys.exit(
        bool(errors or leaked or verdicts["wrong"] or exact < 0.99 or code or not seen)
    )


if __name__ == "__main__":
    main()
