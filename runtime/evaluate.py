"""Evaluate: what an engine's compression saves and what it costs, through the engine itself and its paged cache."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Protocol

import numpy as np

from kvlathe import tasks, tokenizer_files
from kvlathe.console import progress
from kvlathe.engines.manifest import Limits, Manifest
from kvlathe.errors import KvlatheError
from kvlathe.export.plan import CompressionPlan
from kvlathe.metrics import Sums
from kvlathe.runtime.tokenizer import Tokenizer

BYTES_OF = "a token of a long sequence; removed: against the uncompressed cache in the same number format"


RANKED_PROMPT = 0.75
"""Of a window, where tokens are ranked by their prompt: the prompt's share; what follows it is scored."""


class Model(tasks.LogitsOracle, Protocol):
    """What is asked of an LLM here: logits of any places of a sequence, its limits, plan and tokenizer.

    Where the plan ranks the tokens of a prompt, the prompt is what comes before the first place asked for.
    """

    limits: Limits
    plan: CompressionPlan
    tokenizer: Tokenizer
    manifest: Manifest | None


def evaluate(
    engine: Model,
    baseline: Model | None = None,
    text: Path | None = None,
    retrieval: Path | None = None,
    windows: int = tasks.WINDOWS,
    window_tokens: int = tasks.WINDOW_TOKENS,
    every: int = tasks.EVERY,
) -> dict[str, Any]:
    """Bytes, and accuracy over the first ``windows`` windows of ``window_tokens`` tokens of ``text`` and over every
    ``every``-th question of ``retrieval``. Keys:

    ``kv_bytes_per_token``, ``kv_bytes_removed`` (fraction, against the uncompressed cache in the same number format),
    ``perplexity``, ``perplexity_ratio``, ``agreement`` (share of equal next tokens), ``kl`` (baseline || engine, nats a
    token), ``retrieval_exact_match``, and ``measured_on``, which says what. A number is None where its file or baseline
    is missing.

    Windows shrink to what both engines take; longer questions are left out. Raises KvlatheError before anything runs if
    the engines have different vocabularies or a file cannot be used.
    """
    longest = longest_input(engine, baseline)
    tokens = min(window_tokens, longest)
    cut = cut_windows(engine, text, windows, tokens) if text else []
    questions = tasks.read_questions(retrieval, engine.tokenizer, every) if retrieval else []
    fitting = [question for question in questions if question.tokens <= longest]
    if questions and not fitting:
        raise KvlatheError(f"no question of {retrieval} fits", f"inputs end at {longest} tokens", "give shorter ones")
    if engine.manifest is None:
        raise KvlatheError("the engine has no manifest", "its bytes are written there", "load it from its folder")
    measured_on: dict[str, Any] = {"kv_bytes": BYTES_OF}
    result: dict[str, Any] = {
        "kv_bytes_per_token": engine.manifest.kv_bytes.per_token,
        "kv_bytes_removed": engine.manifest.kv_bytes.removed,
        **dict.fromkeys(("perplexity", "perplexity_ratio", "retrieval_exact_match", "agreement", "kl")),
        "measured_on": measured_on,
    }
    if text:
        result |= text_scores(engine, baseline, cut)
        measured_on["text"] = {"file": text.name, "windows": len(cut), "window_tokens": tokens}
        if engine.plan.ranked:
            measured_on["text"]["scored_tokens"] = len(scored_rows(engine, tokens))
    if retrieval:
        right = [tasks.answered(engine, question) for question in progress(fitting, "answering questions")]
        result["retrieval_exact_match"] = sum(right) / len(right)
        left_out = len(questions) - len(fitting)
        measured_on["retrieval"] = {
            "file": retrieval.name,
            "questions": len(fitting),
            "every": every,
            "too_long": left_out,
        }
    return result


def longest_input(engine: Model, baseline: Model | None) -> int:
    """Tokens of the longest input that both take. Raises KvlatheError if their vocabularies differ."""
    if baseline is not None:
        _check_comparable(engine, baseline)
    return min(model.limits.max_input_len for model in (engine, baseline) if model is not None)


def _check_comparable(engine: Model, baseline: Model) -> None:
    ours, theirs = (model.tokenizer.backend.get_vocab() for model in (engine, baseline))
    if ours != theirs:
        raise KvlatheError(
            "the engines cannot be compared", "their vocabularies differ", "name a baseline built from the same model"
        )


def cut_windows(engine: Model, text: Path, count: int, tokens: int) -> list[list[int]]:
    """The first ``count`` windows of ``tokens`` tokens of a file of texts."""
    documents = tasks.encode_documents(engine.tokenizer, tasks.read_texts(text))
    return tasks.windows(documents, tokenizer_files.separator(engine.tokenizer.eos_ids), count, tokens)


def scored_rows(model: Model, tokens: int) -> range:
    """The places of a window of ``tokens`` tokens whose next token is predicted: all of them, or, where the plan ranks
    the tokens of a prompt, those from the prompt's last on.
    """
    return range(int(RANKED_PROMPT * tokens) - 1 if model.plan.ranked and tokens > 2 else 0, tokens - 1)


def text_scores(engine: Model, baseline: Model | None, windows: list[list[int]]) -> dict[str, float]:
    """``perplexity`` and, with a baseline, ``perplexity_ratio``, ``agreement`` and ``kl``, over the same places."""
    own, reference = Sums(), Sums()
    for window in progress(windows, "predicting text"):
        rows = scored_rows(engine, len(window))
        targets = np.array(window)[rows.start + 1 :]
        known = None if baseline is None else baseline.logits(window, rows)
        own += Sums.of(engine.logits(window, rows), targets, known)
        reference += Sums() if known is None else Sums.of(known, targets)
    found = {"perplexity": own.perplexity}
    if baseline is None:
        return found
    return found | {
        "perplexity_ratio": own.perplexity / reference.perplexity,
        "agreement": own.agreed / own.tokens,
        "kl": own.kl / own.tokens,
    }
