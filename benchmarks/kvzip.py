"""Compacted prefixes beside budgets of tokens: several questions about one context, and
the text that goes on.

    python -m benchmarks.kvzip [--model DIR ...] [--only REQUEST ...] [--tokens N] [--json-lines FILE]

A context is lines of a line retrieval prompt of N tokens, without its question; then come
questions about lines at several depths. A compacted prefix is made once, and every
question is asked behind it. Plans with a budget of tokens have no reusable prefix that
knows no question: their ``reused`` row ranks the context alone (it is the prompt), and
the question is an answer behind it. Their ``again`` row ranks context and question
together, once for each question. Perplexity is of the last quarter of windows of
``eval_text.jsonl``, behind their first three quarters; the ratio is to the same quarter
behind the whole prefix. "KV left" is the share of the bytes of the prefix's pages in the
uncompressed 16-bit cache. Seconds of a compaction are over those of its prefill.
"""

from __future__ import annotations

import json
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click
import numpy as np
import numpy.typing as npt

from benchmarks.support.commands import DATA
from benchmarks.support.options import several_models
from kvlathe.base.console import print_table
from kvlathe.engines.build import build
from kvlathe.engines.config import BuildConfig
from kvlathe.export.methods.compression import parse
from kvlathe.plan.layout import CacheLayout
from kvlathe.runtime.llm import LLM
from kvlathe.tasks import tasks
from kvlathe.tasks.line_retrieval import ADJECTIVES, NOUNS
from kvlathe.tasks.tasks import Question

KEEPS = (1.0, 0.7, 0.5, 0.4, 0.3, 0.2, 0.1)
REQUESTS = (
    "kvzip",
    "kvzip:heads=same",
    "kvzip+hack:bits=4",
    "snapkv",
    "h2o",
)
BUDGETED = ("snapkv", "h2o")
Logits = npt.NDArray[np.float32]


@dataclass(frozen=True)
class Context:
    """A prefix, and questions whose prompts begin with it."""

    prefix: list[int]
    questions: list[Question]


def contexts(llm: LLM, count: int, tokens: int, questions: int) -> list[Context]:
    """A context of ``tokens`` tokens or a few more, in lines whose names do not repeat;
    the same for every engine of a model."""
    made: list[Context] = []
    for seed in range(count):
        rng = np.random.default_rng(seed)
        pairs = rng.permutation(len(ADJECTIVES) * len(NOUNS)).tolist()
        lines: list[str] = []
        facts: list[tuple[str, str]] = []
        size = 0
        for pair in pairs:
            noun, adjective = divmod(pair, len(ADJECTIVES))
            name = f"{ADJECTIVES[adjective]}-{NOUNS[noun]}"
            value = f"{int(rng.integers(0, 100_000)):05d}"
            line = f"line {name}: REGISTER_CONTENT is <{value}>\n"
            lines.append(line)
            facts.append((name, value))
            size += len(llm.encode(line))
            if size >= tokens:
                break
        text = "".join(lines)
        asked: list[Question] = []
        for place in np.linspace(0, len(facts) - 1, questions).round().astype(int):
            name, value = facts[place]
            prompt = f"{text}What is the REGISTER_CONTENT in line {name}? It is <"
            asked.append(tasks.question(llm.tokenizer, prompt, f"{value}>"))
        made.append(Context(llm.encode(text), asked))
    return made


def losses(logits: Logits, targets: list[int]) -> float:
    """The mean negative log-likelihood of ``targets``."""
    top = logits.max(-1, keepdims=True)
    norm = np.log(np.exp(logits - top).sum(-1)) + top[:, 0]
    rows = np.arange(len(targets))
    return float((norm - logits[rows, targets]).mean())


def retrieval(llm: LLM, all_of: list[Context], reused: bool) -> float:
    """Exact matches. ``reused``: where tokens are ranked, only the context is a
    prompt."""
    right: list[bool] = []
    for context in all_of:
        for asked in context.questions:
            ids = [*asked.prompt, *asked.answer]
            rows = range(len(asked.prompt) - 1, len(ids) - 1)
            prompt = len(context.prefix) if reused else None
            logits = llm.logits(ids, rows, prompt if llm.plan.index.ranked else None)
            right.append(bool((logits.argmax(-1) == asked.answer).all()))
    return float(np.mean(right))


def loss_behind(llm: LLM, windows: list[list[int]], first: int) -> float:
    """The mean loss of the tokens from ``first`` + 1 on."""
    each: list[float] = []
    for window in windows:
        rows = range(first, len(window) - 1)
        logits = llm.logits(window, rows, first if llm.plan.index.ranked else None)
        each.append(losses(logits, window[first + 1 :]))
    return float(np.mean(each))


class Bench:
    """One model: its engines, and what the whole prefix gives."""

    def __init__(self, model: Path, tokens: int, count: int) -> None:
        self.model, self.tokens, self.count = model, tokens, count
        self.folder = Path(tempfile.mkdtemp())
        with self.load("none") as llm:
            self.contexts = contexts(llm, count, tokens, 6)
            texts = tasks.read_texts(DATA / "eval_text.jsonl")
            documents = tasks.encode_documents(llm.tokenizer, texts)
            size = tokens * 4 // 3
            self.windows = tasks.windows(documents, 0, count, size)
            self.loss = loss_behind(llm, self.windows, tokens)
            self.retrieval = retrieval(llm, self.contexts, False)
            self.whole = llm.layout.bytes_for(tokens)

    def load(self, request: str) -> LLM:
        """Build and load an engine; kept for the bench's life."""
        folder = self.folder / request.replace(":", "_").replace("=", "_")
        if not folder.exists():
            source = parse(request).calibration
            own = None if source == "random" else source
            build(BuildConfig(self.model, folder, compression=request, calibration=own))
        share = not request.startswith(BUDGETED)
        return LLM.load(folder, share_prefixes=share, verify=False)

    def row(
        self, name: str, left: float, retrieved: float, loss: float
    ) -> dict[str, Any]:
        return {
            "request": name,
            "KV left": round(left, 3),
            "retrieval": round(retrieved, 2),
            "perplexity": round(float(np.exp(loss - self.loss)), 4),
        }

    def compacted(self, request: str, keep: float) -> dict[str, Any]:
        """Every context and window compacted once."""
        with self.load(request) as llm:
            made = [llm.compact(context.prefix, keep) for context in self.contexts]
            retrieved = retrieval(llm, self.contexts, True)
            for window in self.windows:
                llm.compact(window[: self.tokens], keep)
            loss = loss_behind(llm, self.windows, self.tokens)
        whole = self.whole / self.tokens
        left = np.mean([one.bytes / (one.tokens * whole) for one in made])
        slower = np.median([one.seconds / one.prefill_seconds for one in made])
        row = self.row(f"{request}@{keep:g}", float(left), retrieved, loss)
        return row | {"seconds": round(float(slower), 1)}

    def budgeted(self, name: str, keep: float) -> list[dict[str, Any]]:
        """A budget of the same share of the prefix's tokens."""
        budget = round(keep * self.tokens / 64) * 64
        request = f"{name}:budget={budget},slice=0"
        with self.load(request) as llm:
            loss = loss_behind(llm, self.windows, self.tokens)
            reused = retrieval(llm, self.contexts, True)
            again = retrieval(llm, self.contexts, False)
            layout: CacheLayout = llm.layout
        left = layout.bytes_for(self.tokens) / self.whole
        return [
            self.row(f"{name}@{keep:g} reused", left, reused, loss),
            self.row(f"{name}@{keep:g} again", left, again, loss),
        ]


@click.command()
@several_models
@click.option("--only", multiple=True, default=REQUESTS)
@click.option("--keep", "keeps", type=float, multiple=True, default=KEEPS)
@click.option("--tokens", default=1536, show_default=True)
@click.option("--contexts", "count", default=8, show_default=True)
@click.option("--json-lines", type=Path)
def main(
    models: tuple[Path, ...],
    only: tuple[str, ...],
    keeps: tuple[float, ...],
    tokens: int,
    count: int,
    json_lines: Path | None,
) -> None:
    """Print one table a model."""
    for model in models:
        bench = Bench(model, tokens, count)
        rows = [bench.row("none", 1.0, bench.retrieval, bench.loss)]
        for request in only:
            for keep in keeps:
                started = time.perf_counter()
                if request in BUDGETED:
                    rows += bench.budgeted(request, keep) if keep < 1 else []
                else:
                    rows.append(bench.compacted(request, keep))
                seconds = time.perf_counter() - started
                click.echo(f"{rows[-1]} in {seconds:.0f} s", err=True)
        names = ["request", "KV left", "retrieval", "perplexity", "seconds"]
        cells = [[str(row.get(name, "")) for name in names] for row in rows]
        print_table(model.name, names, cells)
        if json_lines:
            with json_lines.open("a") as file:
                file.write(json.dumps({"model": model.name, "rows": rows}) + "\n")


if __name__ == "__main__":
    main()
