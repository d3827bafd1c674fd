"""Token budgets by entropy and hidden states dropped in prefill: time, rows computed, bytes, retrieval, perplexity.

    python tests/bench/uncomp.py [--model DIR] [--only REQUEST ...] [--prompt-tokens 3500] [--rounds 3] [--every 3]

Prefill: seconds from submission to the first token of one prompt, the best of ``rounds``, the uncompressed engine and
the other one taking turns, both with the same kernels. Perplexity: windows of 2,048 tokens, the first 1,536 a prompt,
the others teacher-forced through decode, against the uncompressed engine. Bytes: of all pages after a prompt of that
length, against the uncompressed cache in 16 bit. One table and one JSON line.
"""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path
from typing import Any

import click
from accuracy import DATA, ROOT, Remembering

from kvlathe import tasks
from kvlathe.console import print_table
from kvlathe.engines.build import build, calibrate_to
from kvlathe.engines.planning import bytes_per_token
from kvlathe.engines.request import BuildRequest
from kvlathe.runtime.evaluate import evaluate
from kvlathe.runtime.llm import LLM
from kvlathe.runtime.sampler import SamplingParams

REQUESTS = (
    "uncomp:budget=4096,spread=0",  # stages alone
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
    "uncomp+fdc",
    "uncomp+hack:bits=4",
    "uncomp+fdc+hack:bits=4",
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
)


def prefill(llm: LLM, prompt: list[int]) -> tuple[float, list[int]]:
    """Seconds to the first token, and the rows that each layer computed."""
    [answer] = llm.generate([prompt], SamplingParams(max_new_tokens=1, ignore_eos=True))
    return answer.timings.prefill_seconds, answer.prompt_rows or [len(prompt)] * llm.plan.model.layers


def race(llm: LLM, whole: LLM, prompt: list[int], rounds: int) -> dict[str, Any]:
    """Both engines in turns."""
    ours, theirs, rows = [], [], []
    for _ in range(rounds):
        theirs.append(prefill(whole, prompt)[0])
        seconds, rows = prefill(llm, prompt)
        ours.append(seconds)
    share = sum(rows) / (len(prompt) * len(rows))
    return {"prefill s": min(ours), "faster": min(theirs) / min(ours), "rows": share, "rows_by_layer": rows}


def bytes_left(llm: LLM, tokens: int) -> float:
    return llm.layout.bytes_for(tokens) / (tokens * bytes_per_token(llm.plan.model, 16))


@click.command()
@click.option("--model", type=click.Path(exists=True, path_type=Path), default=ROOT / "models" / "lathe-5m")
@click.option("--only", multiple=True, help="Requests in place of the list in this file.")
@click.option("--calibration", type=click.Path(exists=True, path_type=Path), default=DATA / "calibration_text.jsonl")
@click.option("--calibration-tokens", type=int, default=None)
@click.option("--prompt-tokens", default=3500, show_default=True)
@click.option("--rounds", default=3, show_default=True)
@click.option("--windows", default=8, show_default=True, help="Of text; 0: no perplexity.")
@click.option("--every", default=3, show_default=True, help="Every n-th question; 0: no retrieval.")
def main(
    model: Path,
    only: tuple[str, ...],
    calibration: Path,
    calibration_tokens: int | None,
    prompt_tokens: int,
    rounds: int,
    windows: int,
    every: int,
) -> None:
    with tempfile.TemporaryDirectory() as home:
        stats = Path(home) / "stats.npz"
        calibrate_to(model, stats, str(calibration), calibration_tokens)

        def built(request: str, **asked: Any) -> LLM:  # noqa: ANN401
            folder = Path(tempfile.mkdtemp(dir=home)) / "engine"
            return LLM.load(build(BuildRequest(model, folder, request, use_cache=False, **asked)))

        whole = built("none")
        baseline = Remembering(whole)
        documents = tasks.encode_documents(whole.tokenizer, tasks.read_texts(DATA / "eval_text.jsonl"))
        prompt = [token for document in documents for token in document][:prompt_tokens]
        rows = []
        for request in only or REQUESTS:
            llm = built(request, stats=stats)
            if type(llm.session) is not type(whole.session):
                raise click.ClickException(f"{request} and the uncompressed engine run different kernels here")
            stages = "/".join(str(stage.tokens or "all") for stage in llm.plan.stages) or "one"
            row = {"method": request, "stages": stages, **race(llm, whole, prompt, rounds)}
            text = DATA / "eval_text.jsonl" if windows else None
            retrieval = DATA / "line_retrieval.jsonl" if every else None
            found = evaluate(llm, baseline, text, retrieval, windows=windows or 1, every=every or 1)
            row |= {"bytes left": bytes_left(llm, prompt_tokens), "retrieval": found["retrieval_exact_match"]}
            rows.append(row | {name.replace("_", " "): found[name] for name in ("perplexity_ratio", "agreement")})
            print(json.dumps(rows[-1]), file=sys.stderr)
        title = f"{model.name}, prompt of {prompt_tokens} tokens, {type(whole.session).__name__}"
        print_table(title, COLUMNS, [[row.get(column) for column in COLUMNS] for row in rows])
        print(json.dumps({"model": model.name, "prompt_tokens": prompt_tokens, "rows": rows}))


if __name__ == "__main__":
    main()
