"""The texts of vLLM with our pages, over HTTP, beside those of our own engine of the same
plan; and where they part, by how much either prefers its token.

  python3 -m benchmarks.vllm_texts out/ours 'vllm serve MODEL --port {port} ...'

Greedy answers to prompts of unlike lengths, two of which begin alike; all at once, then
again with their prefixes cached. Where two texts part, both have seen the same tokens. So
the gap is what the logarithm of one token's probability is above the other's, in each
engine. Two tokens whose gap is that of rounding are a tie. Prints a table, and a JSON line.
"""

from __future__ import annotations

import json
import urllib.request
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.serve_burst import model_of, served
from benchmarks.support.commands import DATA, LATHE_5M, parser_of
from kvlathe.runtime.llm import LLM
from kvlathe.runtime.text.sampling_params import SamplingParams
from kvlathe.tasks.tasks import FolderEncoder

LENGTHS = (3, 64, 200, 641, 130, 1000)
"""Lengths of prompts: one ends with a page of 64 tokens."""
SHARED, OWN = 256, 90
"""Tokens that the last prompt has in common with the fourth, and others."""
LIKELIEST = 5
"""Tokens whose probability is asked for."""

Ids = list[int]


@dataclass(frozen=True)
class Answer:
    """``likeliest``: of each token's place, tokens and logarithms of probabilities."""

    ids: Ids
    likeliest: list[dict[int, float]]


def prompts(model: Path) -> list[Ids]:
    encoder = FolderEncoder(model)
    lines = (DATA / "eval_text.jsonl").read_text("utf-8").splitlines()
    texts = [json.loads(line)["text"] for line in lines[: len(LENGTHS)]]
    every = [list(encoder.encode(text)) for text in texts]
    cut = [ids[:size] for ids, size in zip(every, LENGTHS, strict=True)]
    return [*cut, every[3][:SHARED] + every[4][:OWN]]


def ours(engine: Path, asked: Sequence[Ids], new: int) -> list[Answer]:
    params = SamplingParams(
        max_new_tokens=new, temperature=0, ignore_eos=True, logprobs=LIKELIEST
    )
    with LLM.load(engine) as llm:
        answers = llm.generate(asked, params)
    found: list[Answer] = []
    for answer in answers:
        places = [dict(one.top) for one in answer.logprobs or ()]
        found.append(Answer(list(answer.token_ids), places))
    return found


def theirs(url: str, asked: Sequence[Ids], new: int) -> list[Answer]:
    wanted = {
        "model": model_of(url),
        "prompt": asked,
        "max_tokens": new,
        "temperature": 0,
        "ignore_eos": True,
        "return_token_ids": True,
        "return_tokens_as_token_ids": True,
        "logprobs": LIKELIEST,
    }
    request = urllib.request.Request(
        f"{url}/v1/completions",
        json.dumps(wanted).encode(),
        {"Content-Type": "application/json"},
    )
    with urllib.request.urlopen(request, timeout=300) as answer:
        choices = json.load(answer)["choices"]
    ordered = sorted(choices, key=lambda choice: choice["index"])
    return [answer_of(choice) for choice in ordered]


def answer_of(choice: dict) -> Answer:
    places = [
        {int(name.removeprefix("token_id:")): value for name, value in place.items()}
        for place in choice["logprobs"]["top_logprobs"]
    ]
    return Answer(choice["token_ids"], places)


def compared(size: int, own: Answer, other: Answer) -> dict:
    """One row: where two texts part, and the gaps there."""
    pairs = list(zip(own.ids, other.ids, strict=True))
    row: dict = {"prompt": size, "equal": sum(a == b for a, b in pairs)}
    parted = [place for place, (a, b) in enumerate(pairs) if a != b]
    if not parted:
        return row
    place = parted[0]
    a, b = pairs[place]
    return row | {
        "parts_at": place,
        "ours_prefers_by": gap(own.likeliest[place], a, b),
        "vllm_prefers_by": gap(other.likeliest[place], b, a),
    }


def gap(likeliest: dict[int, float], token: int, other: int) -> float | None:
    """None where the other is not among the likeliest: no tie."""
    if token not in likeliest or other not in likeliest:
        return None
    return likeliest[token] - likeliest[other]


def furthest(own: Sequence[Answer], other: Sequence[Answer]) -> float:
    """The largest difference of a chosen token's logarithm, up to where texts part."""
    most = 0.0
    for one, two in zip(own, other, strict=True):
        for place, (a, b) in enumerate(zip(one.ids, two.ids, strict=True)):
            if a != b:
                break
            here, there = one.likeliest[place][a], two.likeliest[place][b]
            most = max(most, abs(here - there))
    return most


def show(rows: Sequence[dict], new: int) -> None:
    print(f"{'prompt':>8}{'equal':>10}{'parts at':>10}{'ours by':>10}{'vLLM by':>10}")
    for row in rows:
        gaps = [row.get(key) for key in ("ours_prefers_by", "vllm_prefers_by")]
        told = ["" if value is None else f"{value:.4f}" for value in gaps]
        equal = f"{row['equal']}/{new}"
        cells = [row["prompt"], equal, row.get("parts_at", ""), *told]
        print(f"{cells[0]:>8}" + "".join(f"{cell:>10}" for cell in cells[1:]))


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("engine", type=Path, help="ours")
    parser.add_argument("server", help="vLLM: a command with {port}, or a URL")
    parser.add_argument("--model", type=Path, default=LATHE_5M)
    parser.add_argument("--new", type=int, default=100)
    parser.add_argument("--log", type=Path, help="a file for what vLLM says")
    options = parser.parse_args()
    asked = prompts(options.model)
    own = ours(options.engine, asked, options.new)
    with served(options.server, [], options.log) as url:
        first = theirs(url, asked, options.new)
        again = theirs(url, asked, options.new)
    rows = [
        compared(len(ids), one, two)
        for ids, one, two in zip(asked, own, first, strict=True)
    ]
    same = [one.ids for one in first] == [two.ids for two in again]
    show(rows, options.new)
    most = furthest(own, first)
    print(f"with cached prefixes: {'the same texts' if same else 'OTHER TEXTS'}")
    print(f"largest difference of a logarithm before texts part: {most:.4f}")
    print(json.dumps({"rows": rows, "again": same, "furthest": most}))


if __name__ == "__main__":
    main()
