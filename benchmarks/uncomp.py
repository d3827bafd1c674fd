"""Token budgets by entropy and hidden states dropped in prefill: time, rows computed,
bytes, retrieval, perplexity.

    python -m benchmarks.uncomp [--model DIR] [--only REQUEST ...] [--no-speed]
    [--json-lines FILE] python -m benchmarks.uncomp --model DIR --only-speed
    [--prompt-tokens 3500] [--rounds 5]

Prefill: seconds from submission to the first token of one prompt, the best of
``rounds``, the uncompressed engine and the other one taking turns, both with the same
kernels; ``--only-speed``: of the requests that drop hidden states, and nothing else (a
minute); ``--no-speed``: all but the time, which a busy machine spoils. Perplexity:
windows of 2,048 tokens, the first 1,536 a prompt, the others teacher-forced through
decode, against the uncompressed engine. Bytes: of all pages after a prompt of that
length, against the uncompressed cache in 16 bit. One table and one JSON line.
"""

from __future__ import annotations

import tempfile
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import click

from benchmarks.support import options
from benchmarks.support.commands import DATA
from benchmarks.support.options import one_model, table_and_json, tell
from benchmarks.support.remembering import Remembering
from kvlathe.base.errors import KvlatheError
from kvlathe.engines.build import build, calibrate_to
from kvlathe.engines.config import BuildConfig
from kvlathe.engines.planning import bytes_per_token
from kvlathe.evaluation.evaluate import evaluate
from kvlathe.runtime.llm import LLM
from kvlathe.runtime.text.sampling_params import SamplingParams
from kvlathe.tasks import tasks

PAPERS_ROWS = "uncomp:stages={layers},least=512"
REQUESTS = (
    PAPERS_ROWS + ",budget=4096,spread=0",  # hidden states alone
    "uncomp:stages=3,budget=4096,spread=0",
    "uncomp",
    "uncomp:stages=1",
    "uncomp:stages=1,budget=256,spread=128",
    "uncomp:stages=1,budget=768",
    "uncomp:stages=1,groups=1",
    "uncomp:stages=1,groups=4",
    "uncomp:stages=1,order=random",
    "uncomp:stages=1,order=reversed",
    "uncomp:stages=1,k=elbow",
    "uncomp:stages=1,k=16",
    "uncomp:stages=1,k=64",
    "uncomp:stages=1,k=all",
    "uncomp:stages=1,recent=0.5",
    "uncomp:stages=1,removed=1",
    "uncomp:stages=1,removed=2",
    "uncomp:stages=3",
    PAPERS_ROWS,
    "uncomp+fdc:removal_rate=0.15",
    "uncomp+hack:bits=4",
    "uncomp+fdc:removal_rate=0.15+hack:bits=4",
)
"""``{layers}``: the model's. The paper's prefill times are taken with 4096 to 512
tokens in five groups of 32 layers,
63.09 % of all rows; a stage a layer down to 512 tokens computes as many of a 3.5 K
prompt's rows in few layers.
"""
DROPPING = tuple(
    request for request in REQUESTS if "stages={" in request or "stages=3" in request
)
COLUMNS = (
    "method",
    "stages",
    "rows",
    "prefill s",
    "faster",
    "bytes left",
    "retrieval",
    "perplexity ratio",
    "agreement",
    "note",
)


def prefill(llm: LLM, prompt: list[int]) -> tuple[float, list[int]]:
    """Seconds to the first token, and the rows that each layer computed."""
    [answer] = llm.generate([prompt], SamplingParams(max_new_tokens=1, ignore_eos=True))
    return answer.timings.prefill_seconds, answer.prompt_rows or [
        len(prompt)
    ] * llm.plan.model.layers


def race(llm: LLM, whole: LLM, prompt: list[int], rounds: int) -> dict[str, Any]:
    """Both engines in turns."""
    ours, theirs, rows = [], [], []
    for _ in range(rounds):
        theirs.append(prefill(whole, prompt)[0])
        seconds, rows = prefill(llm, prompt)
        ours.append(seconds)
    return {
        "prefill s": min(ours),
        "faster": min(theirs) / min(ours),
        **computed(prompt, rows),
    }


def computed(prompt: list[int], rows: list[int]) -> dict[str, Any]:
    """The share of all layers' rows that was computed, and each layer's."""
    return {"rows": sum(rows) / (len(prompt) * len(rows)), "rows by layer": rows}


def bytes_left(llm: LLM, tokens: int) -> float:
    return llm.layout.bytes_for(tokens) / (tokens * bytes_per_token(llm.plan.model, 16))


@dataclass(frozen=True)
class Bench:
    """One model, its statistics, and the uncompressed engine that others are held
    against."""

    model: Path
    home: Path
    stats: Path
    threads: int | None

    def engine(self, request: str, **asked: Any) -> LLM:  # noqa: ANN401
        folder = Path(tempfile.mkdtemp(dir=self.home)) / "engine"
        made = BuildConfig(
            self.model,
            folder,
            request,
            kv_bits=16,
            workers=self.threads,
            use_cache=False,
            **asked,
        )
        return LLM.load(build(made), threads=self.threads)

    @cached_property
    def whole(self) -> LLM:
        return self.engine("none")

    @cached_property
    def baseline(self) -> Remembering:
        return Remembering(self.whole)

    def prompt(self, tokens: int) -> list[int]:
        documents = tasks.encode_documents(
            self.whole.tokenizer, tasks.read_texts(DATA / "eval_text.jsonl")
        )
        return [token for document in documents for token in document][:tokens]

    def row(
        self, request: str, prompt: list[int], rounds: int, exam: dict[str, Any] | None
    ) -> dict[str, Any]:
        """``rounds`` 0: no times; ``exam`` None: no accuracy. A request that this model
        refuses is its reason."""
        request = request.format(layers=self.whole.plan.model.layers)
        try:
            llm = self.engine(request, stats=self.stats)
        except KvlatheError as error:
            return {"method": request, "note": str(error)}
        if rounds and type(llm.session) is not type(self.whole.session):
            raise click.ClickException(
                f"{request} and the uncompressed engine run different kernels here"
            )
        stages = (
            "/".join(str(stage.tokens or "all") for stage in llm.plan.stages) or "one"
        )
        row: dict[str, Any] = {
            "method": request,
            "stages": stages,
            "bytes left": bytes_left(llm, len(prompt)),
        }
        row |= (
            race(llm, self.whole, prompt, rounds)
            if rounds
            else computed(prompt, prefill(llm, prompt)[1])
        )
        if exam is not None:
            found = evaluate(
                llm,
                self.baseline,
                DATA / "eval_text.jsonl",
                DATA / "line_retrieval.jsonl",
                **exam,
            )
            row |= {
                name.replace("_", " "): found[name]
                for name in ("perplexity_ratio", "agreement")
            }
            row["retrieval"] = found["retrieval_exact_match"]
        return row


@click.command()
@one_model
@click.option(
    "--only", multiple=True, help="Requests in place of the list in this file."
)
@click.option("--speed/--no-speed", default=True, help="Prefill times.")
@click.option(
    "--only-speed",
    is_flag=True,
    help="Prefill times of what drops hidden states, no accuracy.",
)
@click.option("--calibration-tokens", type=int, default=None)
@click.option("--prompt-tokens", default=3500, show_default=True)
@click.option("--rounds", default=5, show_default=True)
@click.option("--windows", default=8, show_default=True, help="Of text.")
@click.option("--every", default=3, show_default=True, help="Every n-th question.")
@click.option("--threads", type=int)
@options.json_lines
def main(
    model: Path,
    only: tuple[str, ...],
    speed: bool,
    only_speed: bool,
    calibration_tokens: int | None,
    prompt_tokens: int,
    rounds: int,
    windows: int,
    every: int,
    threads: int | None,
    json_lines: Path | None,
) -> None:
    """Measure budgets and stages."""
    with tempfile.TemporaryDirectory() as home:
        stats = Path(home) / "stats.npz"
        calibrate_to(
            model, stats, str(DATA / "calibration_text.jsonl"), calibration_tokens
        )
        bench = Bench(model, Path(home), stats, threads)
        prompt = bench.prompt(prompt_tokens)
        exam = None if only_speed else {"windows": windows, "every": every}
        rows = []
        for request in only or (DROPPING if only_speed else REQUESTS):
            rows.append(
                bench.row(request, prompt, rounds if speed or only_speed else 0, exam)
            )
            tell({"model": model.name, **rows[-1]}, json_lines)
        columns = [column for column in COLUMNS if any(column in row for row in rows)]
        title = f"{model.name}, prompt of {prompt_tokens} tokens, {type(bench.whole.session).__name__}"
        about = {"model": model.name, "prompt_tokens": prompt_tokens}
        table_and_json("uncomp", title, columns, rows, **about)


if __name__ == "__main__":
    main()
