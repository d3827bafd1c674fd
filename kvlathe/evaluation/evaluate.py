"""Evaluate: what an engine's compression saves and what it costs, through the engine
itself and its paged cache."""

from __future__ import annotations

import itertools
from collections.abc import Generator, Iterator, Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from kvlathe.base import tokenizer_files
from kvlathe.base.console import log, progress, working
from kvlathe.base.digests import sha256_file
from kvlathe.base.errors import KvlatheError
from kvlathe.plan.manifest import Limits, Manifest
from kvlathe.plan.plan import CompressionPlan
from kvlathe.runtime.text.tokenizer import Tokenizer
from kvlathe.tasks import tasks
from kvlathe.tasks.metrics import Sums

BYTES_OF = (
    "a token of a long sequence; removed: against the uncompressed cache in the same "
    "number format"
)
SCORES = (
    "perplexity",
    "perplexity_ratio",
    "retrieval_exact_match",
    "agreement",
    "kl",
)
LOGITS_AT_ONCE = 1 << 25
"""Logits of an engine in memory at a time, 128 MB. Its session has two copies of
them."""
WINDOWS_AT_ONCE = 8
"""Windows of text that share steps, at most."""
RANKED_PROMPT = 0.75
"""The prompt's share of a window, where tokens are ranked by their prompt. The rest of
the window is scored."""


class Model(tasks.LogitsOracle, Protocol):
    """An LLM as the evaluation uses it: logits of any places of a sequence, its limits,
    plan and tokenizer.

    Where the plan ranks the tokens of a prompt, the prompt is what comes before the
    first place asked for.
    """

    def logits_in_blocks(
        self, texts: Sequence[Sequence[int]], blocks: Sequence[range]
    ) -> Generator[npt.NDArray[np.float32]]: ...

    def texts_at_once(self, tokens: int, most: int) -> int: ...

    @property
    def limits(self) -> Limits: ...

    @property
    def plan(self) -> CompressionPlan: ...
    @property
    def tokenizer(self) -> Tokenizer: ...
    @property
    def manifest(self) -> Manifest | None: ...


def evaluate(
    engine: Model,
    baseline: Model | None = None,
    text: Path | None = None,
    retrieval: Path | None = None,
    windows: int = tasks.WINDOWS,
    window_tokens: int = tasks.WINDOW_TOKENS,
    every: int = tasks.EVERY,
    both: bool = False,
) -> dict[str, Any]:
    """Measure bytes, and accuracy over the first ``windows`` windows of
    ``window_tokens`` tokens of ``text`` and every ``every``-th question of
    ``retrieval``. Keys: ``kv_bytes_per_token``, ``kv_bytes_removed`` (fraction, against
    the uncompressed cache in the same number format), ``perplexity``,
    ``perplexity_ratio``, ``agreement`` (share of equal next tokens), ``kl`` (baseline
    || engine, nats a token), ``retrieval_exact_match``, and ``measured_on``, which says
    what. A score is None where its file or baseline is missing. With ``both`` the
    baseline answers the questions, too: ``retrieval_exact_match_baseline``.

    Windows shrink to what both engines take; longer questions are left out. Raises
    KvlatheError before anything runs if the engines have different vocabularies or a
    file cannot be used.
    """
    longest = longest_input(engine, baseline)
    tokens = min(window_tokens, longest)
    cut = cut_windows(engine, text, windows, tokens) if text else []
    questions: list[tasks.Question] = []
    if retrieval:
        questions = tasks.read_questions(retrieval, engine.tokenizer, every)
    fitting = [question for question in questions if question.tokens <= longest]
    if questions and not fitting:
        raise KvlatheError(
            f"no question of {retrieval} fits",
            f"inputs end at {longest} tokens",
            "shorten them",
        )
    result = _sizes(engine)
    on: dict[str, object] = {"kv_bytes": BYTES_OF}
    if text:
        result |= text_scores(engine, baseline, cut)
        on["text"] = _text_facts(engine, text, cut)
    if retrieval:
        result["retrieval_exact_match"] = _exact_match(engine, fitting)
        if both and baseline is not None:
            result["retrieval_exact_match_baseline"] = _exact_match(baseline, fitting)
        on["retrieval"] = {
            "file": retrieval.name,
            "sha256": sha256_file(retrieval),
            "questions": len(fitting),
            "every": every,
            "too_long": len(questions) - len(fitting),
        }
    return result | {"measured_on": on}


def _sizes(engine: Model) -> dict[str, object]:
    """The bytes of an engine, and no score yet."""
    if engine.manifest is None:
        raise KvlatheError(
            "the engine's bytes are not known",
            "it has no manifest",
            "load it from its folder",
        )
    sizes = engine.manifest.kv_bytes
    return {
        "kv_bytes_per_token": sizes.per_token,
        "kv_bytes_removed": sizes.removed,
        **dict.fromkeys(SCORES),
    }


def _text_facts(
    engine: Model, text: Path, windows: list[list[int]]
) -> dict[str, object]:
    """Facts about the text that the scores were measured on."""
    tokens = len(windows[0])
    facts: dict[str, object] = {
        "file": text.name,
        "sha256": sha256_file(text),
        "windows": len(windows),
        "window_tokens": tokens,
    }
    if engine.plan.index.ranked:
        facts["scored_tokens"] = len(scored_rows(engine, tokens))
    return facts


def _exact_match(engine: Model, questions: list[tasks.Question]) -> float:
    """The share of questions that are answered to the letter."""
    asked = progress(questions, "answering questions")
    right = [tasks.answers(engine, question) for question in asked]
    return sum(right) / len(right)


def longest_input(engine: Model, baseline: Model | None) -> int:
    """Tokens of the longest input that both take. Raises KvlatheError if their
    vocabularies differ."""
    if baseline is not None:
        require_comparable(engine, baseline)
    return min(
        model.limits.max_input_len for model in (engine, baseline) if model is not None
    )


def require_comparable(engine: Model, baseline: Model) -> None:
    """Raise KvlatheError for two engines of different models: numbers of one against
    the other would say nothing about a compression."""
    fact = "the engines cannot be compared"
    remedy = "name two engines that were built from one checkpoint"
    ours, theirs = (model.plan.model.vocab_size for model in (engine, baseline))
    if ours != theirs:
        raise KvlatheError(fact, f"they have {ours} and {theirs} token ids", remedy)
    if vocabulary(engine) != vocabulary(baseline):
        raise KvlatheError(fact, "their vocabularies differ", remedy)
    if engine.manifest is None or baseline.manifest is None:
        return
    if engine.manifest.model_digest != baseline.manifest.model_digest:
        names = f"{engine.manifest.model} and {baseline.manifest.model}"
        raise KvlatheError(
            fact, f"{names} differ in their weights or their config.json", remedy
        )


def vocabulary(model: Model) -> dict[str, int] | None:
    """Token ids by text; None for an engine without tokenizer.json."""
    if not tokenizer_files.has_backend(model.tokenizer.folder):
        return None
    return model.tokenizer.backend.get_vocab()


def cut_windows(engine: Model, text: Path, count: int, tokens: int) -> list[list[int]]:
    """The first ``count`` windows of ``tokens`` tokens of a file of texts."""
    log.info("reading %s", text)
    documents = tasks.encode_documents(engine.tokenizer, tasks.read_texts(text))
    return tasks.windows(
        documents, tokenizer_files.separator(engine.tokenizer.eos_ids), count, tokens
    )


def scored_rows(model: Model, tokens: int) -> range:
    """The places of a window of ``tokens`` tokens whose next token is predicted: all of
    them, or, where the plan ranks the tokens of a prompt, those from the prompt's last
    on.
    """
    first = 0
    if model.plan.index.ranked and tokens > 2:
        first = int(RANKED_PROMPT * tokens) - 1
    return range(first, tokens - 1)


def row_blocks(model: Model, rows: range, texts: int = 1) -> list[range]:
    """``rows`` cut into blocks whose logits, of so many texts, are LOGITS_AT_ONCE at
    most; between pages, where they have as many rows as a page."""
    page = model.plan.page_tokens
    size = max(1, _rows_at_once(model) // texts)
    size = size // page * page or size
    borders = range(rows.start // size * size, rows.stop, size)
    return [
        range(max(border, rows.start), min(border + size, rows.stop))
        for border in borders
    ]


def _rows_at_once(model: Model) -> int:
    return max(1, LOGITS_AT_ONCE // model.plan.model.vocab_size)


def _at_once(
    models: Sequence[Model], windows: Sequence[list[int]]
) -> Iterator[list[list[int]]]:
    """Windows of one length that are computed together: as many as have a page of rows
    each in a block, and as all caches hold."""
    for tokens, grouped in itertools.groupby(windows, len):
        own = list(grouped)
        most = WINDOWS_AT_ONCE
        for model in models:
            pages = max(1, _rows_at_once(model) // model.plan.page_tokens)
            most = model.texts_at_once(tokens, min(most, pages))
        yield from (own[at : at + most] for at in range(0, len(own), most))


def text_scores(
    engine: Model, baseline: Model | None, windows: list[list[int]]
) -> dict[str, float]:
    """``perplexity`` and, with a baseline, ``perplexity_ratio``, ``agreement`` and
    ``kl``, over the same places."""
    own, reference = Sums(), Sums()
    models = [model for model in (engine, baseline) if model is not None]
    total = sum(len(scored_rows(engine, len(window))) for window in windows)
    with working("predicting text", total, "tokens") as advance:
        for some in _at_once(models, windows):
            blocks = row_blocks(engine, scored_rows(engine, len(some[0])), len(some))
            streams = [model.logits_in_blocks(some, blocks) for model in models]
            for block, *found in zip(blocks, *streams, strict=True):
                for i, window in enumerate(some):
                    targets = np.array(window[block.start + 1 : block.stop + 1])
                    logits, *known = (of_model[i] for of_model in found)
                    own += Sums.of(logits, targets, known[0] if known else None)
                    if known:
                        reference += Sums.of(known[0], targets)
                advance(len(some) * len(block))
    scores = {"perplexity": own.perplexity}
    if baseline is None:
        return scores
    return scores | {
        "perplexity_ratio": own.perplexity / reference.perplexity,
        "agreement": own.agreed / own.tokens,
        "kl": own.kl / own.tokens,
    }
