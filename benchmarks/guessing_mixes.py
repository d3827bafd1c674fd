"""Time that guessing tokens takes, or saves, over about a thousand steps of mixes.

    python -m benchmarks.guessing_mixes ENGINE [--speculative ngram|DRAFT_ENGINE] [--rounds 5]
    [--steps 1000] [--threads 2] [--mixes ...]

Drawn texts never repeat, so nothing is gained there; greedy ones of a small model do.
Each round runs a mix without guesses, with them, and without again. Speculation knows
nothing yet each time. The time is that from the first request to the last token, prompts
included. ``ratio`` is the time with guesses over that without, the median of the rounds
and that of the best ones; ``again`` is the same of the two runs without guesses, and
says how much of a ratio is chance. One line a mix and one JSON line.
"""

from __future__ import annotations

import json
import statistics
import time
from pathlib import Path

import click

from benchmarks.speculative import Turns, texts
from kvlathe.runtime.llm import LLM
from kvlathe.runtime.requests.answer import Answer
from kvlathe.runtime.scheduling.parts.speculation import MOST_DRAFTS, Speculation
from kvlathe.runtime.text.sampling_params import SamplingParams

Mix = tuple[list[list[int]], list[SamplingParams]]
"""Prompts, and what is asked of each."""
SHORT = 40
"""Tokens of an answer where answers are short."""
WAYS = ("off", "on", "again")


def mixes_of(llm: LLM, steps: int) -> dict[str, Mix]:
    """Requests of about so many steps, by what they are."""
    found = texts(llm)
    every = [prompts[0] for prompts in found.values()]
    plain = [prompt[:600] for prompt in found["code"] + found["document"]]
    greedy = SamplingParams(steps, ignore_eos=True)
    most = llm.limits.max_batch_size
    short = steps // SHORT * most

    def drawn(count: int, tokens: int) -> Mix:
        params = [
            SamplingParams(tokens, 1.2, seed=seed, ignore_eos=True)
            for seed in range(count)
        ]
        return (plain * count)[:count], params

    return {
        "one drawn": drawn(1, steps),
        "4 drawn": drawn(4, steps),
        "a full batch, drawn": drawn(most, steps),
        "short ones, drawn": drawn(short, SHORT),
        "one greedy": (every[:1], [greedy]),
        "5 greedy": (every, [greedy] * 5),
        "3 greedy, 3 drawn": (
            every[:3] + drawn(3, steps)[0],
            [greedy] * 3 + drawn(3, steps)[1],
        ),
    }


def measured(turns: Turns, mix: Mix, rounds: int) -> dict[str, float]:
    """Seconds of a mix without guesses, the ratios, and counts of guesses."""
    seconds: dict[str, list[float]] = {way: [] for way in WAYS}
    answers: dict[str, list[Answer]] = {}
    for turn in range(rounds + 1):  # the first one captures graphs and loads
        for way in WAYS:
            made = turns.off
            if way == "on":
                ends = turns.llm.engine.stop_ids
                made = Speculation(turns.on.drafter, turns.on.most, ends)
            turns.llm.engine.speculate(made)
            began = time.perf_counter()
            answers[way] = turns.llm.generate(*mix)
            if turn:
                seconds[way].append(time.perf_counter() - began)
    found = {"seconds": statistics.median(seconds["off"])}
    for way in ("on", "again"):
        pairs = zip(seconds[way], seconds["off"], strict=True)
        found[way] = statistics.median(ours / plain for ours, plain in pairs)
        found[f"{way}, best"] = min(seconds[way]) / min(seconds["off"])
    pairs = zip(answers["on"], answers["off"], strict=True)
    return found | {
        "guessed": sum(one.drafted for one in answers["on"]),
        "right": sum(one.accepted for one in answers["on"]),
        "parted": sum(ours.token_ids != plain.token_ids for ours, plain in pairs),
        "answers": len(answers["on"]),
    }


@click.command(help=__doc__)
@click.argument("engine", type=click.Path(path_type=Path))
@click.option("--speculative", default="ngram")
@click.option("--num-speculative-tokens", default=MOST_DRAFTS)
@click.option("--rounds", default=5)
@click.option("--steps", default=1000)
@click.option("--threads", type=int)
@click.option("--mixes", help="names with ; between them; default: all")
def main(
    engine: Path,
    speculative: str,
    num_speculative_tokens: int,
    rounds: int,
    steps: int,
    threads: int | None,
    mixes: str | None,
) -> None:
    everything: dict[str, dict[str, float]] = {}
    with LLM.load(engine, threads=threads, cache_bytes=1 << 30) as llm:
        turns = Turns(llm, speculative, num_speculative_tokens)
        for name, mix in mixes_of(llm, steps).items():
            if mixes and name not in mixes.split(";"):
                continue
            everything[name] = one = measured(turns, mix, rounds)
            click.echo(
                f"{name:20} {one['seconds']:7.2f} s  ratio {one['on']:.3f}, best "
                f"{one['on, best']:.3f}  again {one['again']:.3f}, best "
                f"{one['again, best']:.3f}  guessed {one['guessed']}, right "
                f"{one['right']}, parted {one['parted']} of {one['answers']}"
            )
    click.echo(json.dumps(everything))


if __name__ == "__main__":
    main()
