"""The whole examination of an engine, beside the uncompressed one: perplexity, line retrieval at every length and
depth, code completion, continuations, and the bytes that were saved.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from kvlathe import tasks
from kvlathe.console import progress
from kvlathe.errors import KvlatheError
from kvlathe.export.layout import CacheLayout
from kvlathe.haystack import Needle, grid
from kvlathe.runtime import continuations
from kvlathe.runtime.evaluate import cut_windows, longest_input, text_scores
from kvlathe.runtime.llm import LLM

LENGTHS = (256, 512, 1024, 2048, 3072, 3584)
DEPTHS = (0.0, 0.25, 0.5, 0.75, 1.0)
CONTEXT = 3000
"""Tokens of the sequence whose bytes are counted, its last and hot pages included."""


@dataclass(frozen=True, slots=True)
class Exam:
    """How much is asked. ``repeats`` questions at each length and depth; ``samples`` lines of code and as many
    continuations of ``new_tokens`` tokens behind ``prompt_tokens``.
    """

    windows: int = tasks.WINDOWS
    window_tokens: int = tasks.WINDOW_TOKENS
    repeats: int = 2
    samples: int = 24
    prompt_tokens: int = 1024
    new_tokens: int = 48
    seed: int = 0


def run_suite(engine: LLM, baseline: LLM | None, text: Path, exam: Exam) -> dict[str, Any]:
    """Keys: ``bytes`` (kv_bytes), ``scores`` (a list of {task, metric, engine, baseline, ratio}), ``heat_map``
    ({lengths, depths, engine, baseline}: exact match by depth, then length) and ``measured_on``.

    ``baseline`` is the uncompressed engine; its numbers and those against it are None without one. Raises KvlatheError
    before anything runs if the engines have different vocabularies or the text cannot be used.
    """
    models = [model for model in (engine, baseline) if model is not None]
    longest = longest_input(engine, baseline)
    windows = cut_windows(engine, text, exam.windows, min(exam.window_tokens, longest))
    needles = _needles(engine, [n for n in LENGTHS if n <= longest], exam)
    rng, room = np.random.default_rng(exam.seed), min(model.limits.max_seq_len for model in models)
    before = min(exam.prompt_tokens, longest, room - exam.new_tokens)
    documents = tasks.read_texts(text)
    lines, passages = (
        continuations.openings(rng, engine.tokenizer, documents, exam.samples, before, code) for code in (True, False)
    )
    maps = [_heat(model, needles) for model in models]
    scores = [
        *_predicting(engine, baseline, windows),
        _score("line retrieval", "exact match", [float(np.mean(list(heat.values()))) for heat in maps]),
        *_writing("code completion", "edit similarity", models, lines, exam.new_tokens),
        *_writing("continuation", "ROUGE-1", models, passages, exam.new_tokens),
    ]
    measured_on = asdict(exam) | {"file": text.name, "window_tokens": len(windows[0]), "windows": len(windows)}
    measured_on |= {"prompt_tokens": before, "questions": len(needles), "code_lines": len(lines)}
    return {
        "engine": described(engine),
        "baseline": None if baseline is None else described(baseline),
        "bytes": kv_bytes(engine.layout),
        "scores": scores,
        "heat_map": _heat_map(needles, maps),
        "measured_on": measured_on | {"passages": len(passages)},
    }


def described(llm: LLM) -> dict[str, str]:
    found = llm.manifest
    return {} if found is None else {"model": found.model, "compression": found.compression, "backend": found.backend}


def kv_bytes(layout: CacheLayout, tokens: int = CONTEXT) -> dict[str, Any]:
    """Bytes of all pages of a sequence of ``tokens`` tokens, hot and partly filled ones included, and what is removed
    of the uncompressed cache: in 16 bit, whatever the engine's own format, and in the engine's hot format.
    """
    plan = layout.plan
    numbers = 2 * plan.model.layers * plan.model.kv_heads * plan.model.head_dim * tokens
    held = layout.bytes_for(tokens)
    hot = next(plan.tiers[bucket.tier].bits_k for bucket in plan.buckets if bucket.source is None)
    found: dict[str, Any] = {"tokens": tokens, "kv_bytes": held, "hot_bits": hot}
    for name, bits in (("16bit", 16), ("hot_format", hot)):
        whole = numbers * bits // 8
        found |= {f"kv_bytes_uncompressed_{name}": whole, f"kv_bytes_removed_{name}": 1 - held / whole}
    return found


def _needles(engine: LLM, lengths: Sequence[int], exam: Exam) -> list[Needle]:
    if not lengths:
        fact, reason = "no line retrieval prompt fits", f"inputs end before {LENGTHS[0]} tokens"
        raise KvlatheError(fact, reason, "build the engine with a larger --max_input_len")
    return grid(engine.tokenizer, lengths, DEPTHS, exam.repeats, exam.seed)


def _score(task: str, metric: str, found: Sequence[float]) -> dict[str, Any]:
    """``found``: of the engine, then of the baseline where there is one."""
    ratio = found[0] / found[1] if len(found) > 1 and found[1] else None
    return {
        "task": task,
        "metric": metric,
        "engine": found[0],
        "baseline": found[1] if len(found) > 1 else None,
        "ratio": ratio,
    }


def _predicting(engine: LLM, baseline: LLM | None, windows: list[list[int]]) -> list[dict[str, Any]]:
    found = text_scores(engine, baseline, windows)
    if baseline is None:
        return [_score("text", "perplexity", [found["perplexity"]])]
    perplexities = [found["perplexity"], found["perplexity"] / found["perplexity_ratio"]]
    return [
        _score("text", "perplexity", perplexities),
        _score("text", "agreement with the baseline", [found["agreement"]]),
        _score("text", "KL from the baseline, nats a token", [found["kl"]]),
    ]


def _heat(model: LLM, needles: Sequence[Needle]) -> dict[tuple[float, int], float]:
    """The share of right answers at each depth and length."""
    right: dict[tuple[float, int], list[bool]] = {}
    for needle in progress(needles, "finding lines"):
        right.setdefault((needle.depth, needle.tokens), []).append(tasks.answered(model, needle.question))
    return {place: float(np.mean(found)) for place, found in right.items()}


def _heat_map(needles: Iterable[Needle], maps: Sequence[dict[tuple[float, int], float]]) -> dict[str, Any]:
    lengths, depths = (sorted({getattr(needle, name) for needle in needles}) for name in ("tokens", "depth"))
    rows = [[[heat[depth, length] for length in lengths] for depth in depths] for heat in maps]
    return {"lengths": lengths, "depths": depths, "engine": rows[0], "baseline": rows[1] if len(rows) > 1 else None}


def _writing(
    task: str, metric: str, models: Sequence[LLM], asked: Sequence[continuations.Opening], new_tokens: int
) -> list[dict[str, Any]]:
    """Against the documents, and of the engine against the baseline's own texts. Nothing where nothing was asked."""
    if not asked:
        return []
    compare = continuations.edit_similarity if task == "code completion" else continuations.rouge_1
    texts = [continuations.written(model, asked, new_tokens, task) for model in models]
    found = [_score(task, metric, [compare(own, [x.text for x in asked]) for own in texts])]
    if len(texts) > 1:
        found.append(_score(task, f"{metric} with the baseline's", [compare(*texts)]))
    return found
