"""The gain of speculation, and its price where nothing repeats.

    python -m benchmarks.speculative ENGINE ... [--speculative ngram|DRAFT_ENGINE] [--rounds 5]
    [--new-tokens 192] [--threads 2]

Each text is continued with speculation and without, in turns; the best of the rounds
counts, because other work on a machine only slows down. Texts that repeat: a file of
code, of which the end shows its beginning again; the same with a document; records. Code
alone is in between. Drawn at temperature 1.2, nothing repeats. A batch has a request of
each. Answers should be the same, to the token: those that are not are counted. They part
where two tokens are as likely but for rounding. One table an engine and one JSON line.
"""

from __future__ import annotations

import json
import statistics
from pathlib import Path
from typing import Any

import click

from benchmarks.support.commands import DATA, ROOT
from kvlathe.base.console import print_table
from kvlathe.runtime.llm import LLM
from kvlathe.runtime.requests.answer import Answer
from kvlathe.runtime.scheduling.parts.speculation import MOST_DRAFTS, Speculation
from kvlathe.runtime.text.sampling_params import SamplingParams

RECORD = '{{"id": {0}, "name": "item {0}", "price": {1}, "stock": true}}'
CODE = ("runtime/cache/pool.py", "runtime/cache/prefix.py")


def texts(llm: LLM) -> dict[str, list[list[int]]]:
    """Prompts by kind."""
    lines = (DATA / "eval_text.jsonl").read_text("utf-8").splitlines()
    documents = [llm.encode(json.loads(line)["text"]) for line in lines]
    documents = [document for document in documents if len(document) > 900][:4]
    code = [llm.encode((ROOT / name).read_text("utf-8")) for name in CODE]
    records = "\n".join(RECORD.format(i, 7 * i) for i in range(20))
    return {
        "code again": [file[:900] + file[:120] for file in code],
        "document again": [one[:700] + one[:120] for one in documents[:2]],
        "records": [llm.encode(records)],
        "code": [file[:900] for file in code],
        "document": [one[:700] for one in documents[2:]],
    }


class Turns:
    """An engine with speculation and without."""

    def __init__(self, llm: LLM, speculative: str, tokens: int) -> None:
        self.llm = llm
        self.off = llm.engine.scheduler.speculation
        llm.speculate(speculative, tokens)
        self.on = llm.engine.scheduler.speculation

    def answer(
        self, made: Speculation, prompts: list[list[int]], params: SamplingParams
    ) -> tuple[float, list[Answer]]:
        """Seconds of decoding, and the answers."""
        self.llm.engine.speculate(made)
        answers = self.llm.generate(prompts, params)
        return max(one.timings.decode_seconds for one in answers), answers

    def compare(
        self, prompts: list[list[int]], params: SamplingParams, rounds: int
    ) -> dict[str, Any]:
        """One kind of text."""
        speeds: tuple[list[float], list[float]] = ([], [])
        answers: list[Answer] = []
        parted = 0
        for _ in range(rounds):
            plain, without = self.answer(self.off, prompts, params)
            fast, answers = self.answer(self.on, prompts, params)
            tokens = sum(len(one.token_ids) - 1 for one in answers)
            speeds[0].append(tokens / plain)
            speeds[1].append(tokens / fast)
            pairs = zip(without, answers, strict=True)
            parted += sum(a.token_ids != b.token_ids for a, b in pairs)
        off, on = (max(found) for found in speeds)
        drafted = sum(one.drafted for one in answers)
        accepted = sum(one.accepted for one in answers)
        return {
            "off": off,
            "on": on,
            "ratio": on / off,
            "drafted": drafted,
            "accepted": accepted,
            "parted": parted,
        }


def measure(
    engine: Path,
    speculative: str,
    tokens: int,
    rounds: int,
    new: int,
    threads: int | None,
) -> dict[str, Any]:
    with LLM.load(engine, threads=threads, cache_bytes=1 << 29) as llm:
        turns, found = Turns(llm, speculative, tokens), texts(llm)
        greedy = SamplingParams(max_new_tokens=new, ignore_eos=True)
        drawn = SamplingParams(new, 1.2, seed=1, ignore_eos=True)
        result: dict[str, Any] = {}
        every = [prompts[0] for prompts in found.values()]
        for kind, prompts in found.items():
            alone = [turns.compare([one], greedy, rounds) for one in prompts]
            result[kind] = _mean(alone)
        prompts = found["document"] + found["code"]
        alone = [turns.compare([one], drawn, rounds) for one in prompts]
        result["drawn, nothing repeats"] = _mean(alone)
        result["a batch of all"] = turns.compare(every, greedy, rounds)
    return result


def _mean(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """One row of several texts: speeds and ratios as their mean, counts as their
    sum."""
    mean = {
        name: statistics.mean(row[name] for row in rows)
        for name in ("off", "on", "ratio")
    }
    counts = ("drafted", "accepted", "parted")
    return mean | {name: sum(row[name] for row in rows) for name in counts}


@click.command(help=__doc__)
@click.argument("engines", nargs=-1, required=True, type=click.Path(path_type=Path))
@click.option("--speculative", default="ngram")
@click.option("--num-speculative-tokens", default=MOST_DRAFTS)
@click.option("--rounds", default=5)
@click.option("--new-tokens", default=192)
@click.option("--threads", type=int)
def main(
    engines: tuple[Path, ...],
    speculative: str,
    num_speculative_tokens: int,
    rounds: int,
    new_tokens: int,
    threads: int | None,
) -> None:
    everything: dict[str, Any] = {}
    for engine in engines:
        given = (num_speculative_tokens, rounds, new_tokens, threads)
        found = measure(engine, speculative, *given)
        everything[str(engine)] = found
        rows = [_row(kind, one) for kind, one in found.items()]
        columns = ["text", "off, tokens/s", "on", "ratio", "guessed", "right", "parted"]
        print_table(str(engine), columns, rows)
    click.echo(json.dumps(everything))


def _row(kind: str, one: dict[str, Any]) -> list[str]:
    right = one["accepted"] / max(1, one["drafted"])
    speeds = [f"{one['off']:.0f}", f"{one['on']:.0f}", f"{one['ratio']:.2f}"]
    return [kind, *speeds, f"{one['drafted']:,}", f"{right:.3f}", str(one["parted"])]


if __name__ == "__main__":
    main()
