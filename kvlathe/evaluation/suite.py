"""The whole examination of an engine, beside the uncompressed one: perplexity, line
retrieval at every length and depth, code completion, continuations, and the bytes that
were saved.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from kvlathe.base.console import progress
from kvlathe.base.errors import KvlatheError
from kvlathe.evaluation import continuations
from kvlathe.evaluation.evaluate import cut_windows, longest_input, text_scores
from kvlathe.plan.layout import CacheLayout
from kvlathe.runtime.llm import LLM
from kvlathe.tasks import tasks
from kvlathe.tasks.line_retrieval import Needle, grid

LENGTHS = (256, 512, 1024, 2048, 3072, 3584)
DEPTHS = (0.0, 0.25, 0.5, 0.75, 1.0)
CONTEXT = 3000
"""Tokens of the sequence whose bytes are counted, its last and hot pages included."""


@dataclass(frozen=True, slots=True)
class Exam:
    """Size of the examination. ``repeats`` questions at each length and depth;
    ``samples`` lines of code and as many continuations of ``new_tokens`` tokens behind
    ``prompt_tokens``.
    """

    windows: int = tasks.WINDOWS
    window_tokens: int = tasks.WINDOW_TOKENS
    repeats: int = 2
    samples: int = 24
    prompt_tokens: int = 1024
    new_tokens: int = 48
    seed: int = 0


def run_suite(
    engine: LLM, baseline: LLM | None, text: Path, exam: Exam
) -> dict[str, Any]:
    """Keys: ``bytes`` (kv_bytes), ``scores`` (a list of {task, metric, engine,
    baseline, ratio}), ``heat_map`` ({lengths, depths, engine, baseline}: exact match by
    depth, then length) and ``measured_on``.

    ``baseline`` is the uncompressed engine; its numbers and those against it are None
    without one. Raises KvlatheError before anything runs if the engines have different
    vocabularies or the text cannot be used.
    """
    continuations.require_libraries()
    models = [model for model in (engine, baseline) if model is not None]
    asked = _asked(engine, models, text, exam, longest_input(engine, baseline))
    maps = [_heat(model, asked.needles) for model in models]
    shares = [float(np.mean(list(heat.values()))) for heat in maps]
    new = exam.new_tokens
    scores = [
        *_predicting(engine, baseline, asked.windows),
        _score("line retrieval", "exact match", shares),
        *_writing("code completion", "edit similarity", models, asked.lines, new),
        *_writing("continuation", "ROUGE-1", models, asked.passages, new),
    ]
    measured_on = asdict(exam) | {
        "file": text.name,
        "window_tokens": len(asked.windows[0]),
        "windows": len(asked.windows),
        "prompt_tokens": asked.prompt_tokens,
        "questions": len(asked.needles),
        "code_lines": len(asked.lines),
        "passages": len(asked.passages),
    }
    return {
        "engine": describe(engine),
        "baseline": None if baseline is None else describe(baseline),
        "bytes": kv_bytes(engine.layout),
        "scores": scores,
        "heat_map": _heat_map(asked.needles, maps),
        "measured_on": measured_on,
    }


@dataclass(frozen=True, slots=True)
class Asked:
    """All that an exam asks of an engine. ``lines``, ``passages``: code and text to go
    on with, behind at most ``prompt_tokens``."""

    windows: list[list[int]]
    needles: list[Needle]
    lines: list[continuations.Opening]
    passages: list[continuations.Opening]
    prompt_tokens: int


def _asked(
    engine: LLM, models: Sequence[LLM], text: Path, exam: Exam, longest: int
) -> Asked:
    windows = cut_windows(engine, text, exam.windows, min(exam.window_tokens, longest))
    needles = _needles(engine, [n for n in LENGTHS if n <= longest], exam)
    rng = np.random.default_rng(exam.seed)
    room = min(model.limits.max_seq_len for model in models)
    before = min(exam.prompt_tokens, longest, room - exam.new_tokens)
    documents = tasks.read_texts(text)

    def openings(code: bool) -> list[continuations.Opening]:
        return continuations.openings(
            rng, engine.tokenizer, documents, exam.samples, before, code
        )

    return Asked(windows, needles, openings(True), openings(False), before)


def describe(llm: LLM) -> dict[str, str]:
    manifest = llm.manifest
    if manifest is None:
        return {}
    return {
        "model": manifest.model,
        "compression": manifest.compression,
        "backend": manifest.backend,
    }


def kv_bytes(layout: CacheLayout, tokens: int = CONTEXT) -> dict[str, Any]:
    """Bytes of all pages of a sequence of ``tokens`` tokens, hot and partly filled ones
    included, and what is removed of the uncompressed cache: in 16 bit, whatever the
    engine's own format, and in the engine's hot format.
    """
    plan = layout.plan
    numbers = plan.model.numbers * tokens
    held = layout.bytes_for(tokens)
    hot = plan.index.hot_bits
    sizes: dict[str, Any] = {"tokens": tokens, "kv_bytes": held, "hot_bits": hot}
    for name, bits in (("16bit", 16), ("hot_format", hot)):
        whole = numbers * bits // 8
        sizes[f"kv_bytes_uncompressed_{name}"] = whole
        sizes[f"kv_bytes_removed_{name}"] = 1 - held / whole
    return sizes


def _needles(engine: LLM, lengths: Sequence[int], exam: Exam) -> list[Needle]:
    if not lengths:
        raise KvlatheError(
            "no line retrieval prompt fits",
            f"inputs end before {LENGTHS[0]} tokens",
            "build the engine with a larger --max-input-len",
        )
    return grid(engine.tokenizer, lengths, DEPTHS, exam.repeats, exam.seed)


def _score(task: str, metric: str, values: Sequence[float]) -> dict[str, Any]:
    """``values``: of the engine, then of the baseline where there is one."""
    own = values[0]
    reference = values[1] if len(values) > 1 else None
    return {
        "task": task,
        "metric": metric,
        "engine": own,
        "baseline": reference,
        "ratio": own / reference if reference else None,
    }


def _predicting(
    engine: LLM, baseline: LLM | None, windows: list[list[int]]
) -> list[dict[str, Any]]:
    scores = text_scores(engine, baseline, windows)
    own = scores["perplexity"]
    if baseline is None:
        return [_score("text", "perplexity", [own])]
    return [
        _score("text", "perplexity", [own, own / scores["perplexity_ratio"]]),
        _score("text", "agreement with the baseline", [scores["agreement"]]),
        _score("text", "KL from the baseline, nats a token", [scores["kl"]]),
    ]


def _heat(model: LLM, needles: Sequence[Needle]) -> dict[tuple[float, int], float]:
    """The share of right answers at each depth and length."""
    right: dict[tuple[float, int], list[bool]] = {}
    for needle in progress(needles, "finding lines"):
        answers = right.setdefault((needle.depth, needle.tokens), [])
        answers.append(tasks.answers(model, needle.question))
    return {place: float(np.mean(answers)) for place, answers in right.items()}


def _heat_map(
    needles: Sequence[Needle], maps: Sequence[dict[tuple[float, int], float]]
) -> dict[str, object]:
    lengths = sorted({needle.tokens for needle in needles})
    depths = sorted({needle.depth for needle in needles})

    def rows(heat: dict[tuple[float, int], float]) -> list[list[float]]:
        table = []
        for depth in depths:
            table.append([heat[depth, length] for length in lengths])
        return table

    return {
        "lengths": lengths,
        "depths": depths,
        "engine": rows(maps[0]),
        "baseline": rows(maps[1]) if len(maps) > 1 else None,
    }


def _writing(
    task: str,
    metric: str,
    models: Sequence[LLM],
    asked: Sequence[continuations.Opening],
    new_tokens: int,
) -> list[dict[str, Any]]:
    """Scores of texts against the documents, and of the engine's texts against the
    baseline's. None where nothing was asked."""
    if not asked:
        return []
    compare = continuations.rouge_1
    if task == "code completion":
        compare = continuations.edit_similarity
    texts = [continuations.write(model, asked, new_tokens, task) for model in models]
    references = [opening.text for opening in asked]
    scores = [_score(task, metric, [compare(own, references) for own in texts])]
    if len(texts) > 1:
        scores.append(_score(task, f"{metric} with the baseline's", [compare(*texts)]))
    return scores
