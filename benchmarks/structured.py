"""The price of structured answers: a mask by itself, and answers with and without one.

``python -m benchmarks.structured --engine E [--tokenizer tokenizer.json]``
``--tokenizer``: of which vocabulary masks are timed; the engine's by default.
"""

from __future__ import annotations

import json
import shutil
import tempfile
import time
from pathlib import Path

import numpy as np

from benchmarks.support.commands import parser_of
from kvlathe.runtime.llm import LLM
from kvlathe.runtime.text.guide import Guides
from kvlathe.runtime.text.masks import Guide, Masks, apply_masks, no_bits
from kvlathe.runtime.text.sampling_params import SamplingParams
from kvlathe.runtime.text.structure import Structure
from kvlathe.runtime.text.tokenizer import Tokenizer

RECORD = {
    "type": "object",
    "properties": {
        "title": {"type": "string", "maxLength": 60},
        "year": {"type": "integer", "minimum": 1900, "maximum": 2100},
        "tags": {"type": "array", "items": {"type": "string"}, "maxItems": 5},
        "place": {
            "type": "object",
            "properties": {"city": {"type": "string"}, "at": {"type": "number"}},
            "required": ["city", "at"],
        },
    },
    "required": ["title", "year", "tags", "place"],
}
TEXT = json.dumps(
    {
        "title": "A page of the cache, and what it holds",
        "year": 2026,
        "tags": ["kv", "cache", "compression"],
        "place": {"city": "Zurich", "at": 47.37},
    },
    indent=2,
)
STRUCTURES = {
    "JSON schema": (Structure.json(RECORD), TEXT),
    "any object": (Structure.json(), TEXT),
    "regex": (Structure.regex(r"([a-z]+ ){5,40}[0-9]{3}"), "some words and more " * 6),
}


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--engine", type=Path, required=True)
    parser.add_argument("--tokenizer", type=Path)
    parser.add_argument("--repeats", type=int, default=20)
    parser.add_argument("--threads", type=int, default=2)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        folder = options.engine
        if options.tokenizer:
            shutil.copy(options.tokenizer, Path(scratch) / "tokenizer.json")
            folder = Path(scratch)
        masks(Tokenizer(folder), options.repeats)
    answers(options.engine, options.threads)


def masks(tokenizer: Tokenizer, repeats: int) -> None:
    """Compiling a structure, and the mask of each token of a text."""
    vocabulary = tokenizer.backend.get_vocab_size()
    guides = Guides(tokenizer, vocabulary)
    started = time.perf_counter()
    guides.guide(Structure.regex("a"))
    ready = time.perf_counter() - started
    print(f"vocabulary {vocabulary:,}: made ready once in {ready:.2f} s")
    for name, (structure, text) in STRUCTURES.items():
        started = time.perf_counter()
        guides.guide(structure)
        compiled = 1e3 * (time.perf_counter() - started)
        ids = tokenizer.encode(text, add_special_tokens=False)
        times = [walked(guides.guide(structure), ids) for _ in range(repeats)]
        micros = 1e6 * np.concatenate(times)
        said = " ".join(f"{np.percentile(micros, p):.0f}" for p in (50, 95, 100))
        print(f"{name}: compiled in {compiled:.1f} ms; mask, us: p50 p95 most {said}")
    logits = np.zeros((1, vocabulary), np.float32)
    applied = Masks(np.zeros(1, np.int64), no_bits(1, vocabulary))
    started = time.perf_counter()
    for _ in range(100):
        apply_masks(logits, applied)
    seconds = (time.perf_counter() - started) / 100
    print(f"applied on the host: {1e6 * seconds:.0f} us a row")


def walked(guide: Guide, ids: list[int]) -> list[float]:
    """Seconds that each mask took along a text."""
    bits, times = no_bits(1, guide.vocabulary), list[float]()
    for token in ids:
        if not guide.asks:
            break
        started = time.perf_counter()
        guide.fill(bits)
        times.append(time.perf_counter() - started)
        guide.accept(token)
    return times


def answers(folder: Path, threads: int) -> None:
    """Tokens a second of answers of equal length, structured and plain in turn."""
    structure = Structure.regex("[a-z ]{2000}")
    plain = SamplingParams(max_new_tokens=256, ignore_eos=True)
    bound = SamplingParams(max_new_tokens=256, structure=structure)
    with LLM.load(folder, threads=threads) as llm:
        for batch in (1, min(8, llm.limits.max_batch_size)):
            prompts = ["def main():\n    print("] * batch
            speeds: dict[str, list[float]] = {"plain": [], "structured": []}
            for _ in range(5):
                for name, params in (("plain", plain), ("structured", bound)):
                    started = time.perf_counter()
                    found = llm.generate(prompts, params)
                    seconds = time.perf_counter() - started
                    tokens = sum(len(answer.token_ids) for answer in found)
                    speeds[name].append(tokens / seconds)
            said = {name: round(float(np.median(s))) for name, s in speeds.items()}
            print(f"batch {batch}, tokens a second: {said}")


if __name__ == "__main__":
    main()
