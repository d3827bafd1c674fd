"""An engine as a model of EleutherAI's lm-evaluation-harness (pip install
'.[lm-eval]').

    python -m kvlathe.evaluation.lm_eval_adapter run --model kvlathe --model_args
    engine=out/engine --tasks arc_easy

is the harness's own command line with ``kvlathe`` among its models. ``model_args``:
``engine`` (the folder) and, if wanted, ``threads`` and ``cache_bytes``. The engine's
own limits decide batches and the longest input.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from lm_eval.api.model import TemplateLM  # pyright: ignore[reportMissingImports]
from lm_eval.api.registry import register_model  # pyright: ignore[reportMissingImports]
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window  # pyright: ignore[reportMissingImports]

from kvlathe.base import tokenizer_files
from kvlathe.base.console import fail, log, progress
from kvlathe.base.errors import KvlatheError
from kvlathe.runtime.llm import LLM
from kvlathe.runtime.text.sampling_params import SamplingParams
from kvlathe.tasks import metrics

NEW_TOKENS = 256
"""Most tokens of an answer where a task gives none: the harness's own default."""

HARNESS_NAMES = {"batch_size", "max_batch_size", "device"}
"""Names that the harness adds to ``model_args`` by itself."""

LENGTH_NAMES = ("max_gen_toks", "max_new_tokens", "max_tokens", "max_completion_tokens")
SAMPLING_NAMES = (
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "repetition_penalty",
    "seed",
)


@register_model("kvlathe")
class EngineLM(TemplateLM):
    """The harness calls it with the ``model_args`` of its command line. What it adds of
    its own (``batch_size``, ``device``) is said to be without effect.
    """

    def __init__(
        self,
        engine: str = "",
        threads: int | None = None,
        cache_bytes: int | None = None,
        **elsewhere: object,
    ) -> None:
        super().__init__()
        if not engine:
            raise KvlatheError(
                "model_args has no engine",
                "it names the folder to measure",
                "write engine=out/engine",
            )
        if unknown := sorted(elsewhere.keys() - HARNESS_NAMES):
            raise KvlatheError(
                f"model_args has {', '.join(unknown)}",
                "an engine takes engine, threads and cache_bytes",
                "leave it out",
            )
        if ignored := sorted(
            name for name, value in elsewhere.items() if value not in (None, 1, "1")
        ):
            log.warning(
                "an engine's own limits decide: %s without effect", ", ".join(ignored)
            )
        self.engine = Path(engine)
        self.llm = LLM.load(self.engine, cache_bytes, threads)

    # -- tokens ------------------------------------------------------------------------
    @property
    def eot_token_id(self) -> int:
        return tokenizer_files.separator(self.llm.tokenizer.eos_ids)

    @property
    def prefix_token_id(self) -> int:
        """The token before a text without context: the model's beginning of a text, or
        else its end."""
        begin = self.llm.tokenizer.special.get("bos_token")
        if begin is None:
            return self.eot_token_id
        first = self.llm.tokenizer.backend.token_to_id(begin)
        return self.eot_token_id if first is None else first

    @property
    def max_length(self) -> int:
        return self.llm.limits.max_input_len

    def tok_encode(
        self, string: str, add_special_tokens: bool | None = None, **_: object
    ) -> list[int]:
        """Encode as the tokenizer frames any text, unless it has its beginning already
        (from a chat template)."""
        begin = self.llm.tokenizer.special.get("bos_token")
        if add_special_tokens is None:
            add_special_tokens = not (begin and string.startswith(begin))
        return self.llm.tokenizer.encode(string, add_special_tokens)

    # -- likelihoods -------------------------------------------------------------------
    def _loglikelihood_tokens(
        self,
        requests: Sequence[tuple[Any, list[int], list[int]]],
        disable_tqdm: bool = False,
        **_: object,
    ) -> list[tuple[float, bool]]:
        asked = requests if disable_tqdm else progress(requests, "scoring")
        scores = []
        for named, context, continuation in asked:
            score = self._score(context, continuation)
            if named is not None:
                self.cache_hook.add_partial("loglikelihood", named, score)
            scores.append(score)
        return scores

    def _score(
        self, context: Sequence[int], continuation: Sequence[int]
    ) -> tuple[float, bool]:
        """The sum of log p of the continuation, and whether greedy decoding says it. A
        context that is too long loses its beginning."""
        if not continuation:
            return 0.0, True
        if len(continuation) > self.max_length:
            raise KvlatheError(
                f"a continuation of {len(continuation)} tokens cannot be scored",
                f"inputs of this engine end at {self.max_length}",
                "build a longer --max-input-len",
            )
        tokens = [*context, *continuation][-(self.max_length + 1) :]
        rows = range(len(tokens) - 1 - len(continuation), len(tokens) - 1)
        logits = self.llm.logits(tokens[:-1], rows)
        targets = np.array(continuation)
        return -float(metrics.nll(logits, targets).sum()), metrics.exact(
            logits, targets
        )

    def loglikelihood_rolling(
        self, requests: Sequence[Any], disable_tqdm: bool = False
    ) -> list[float]:
        """log p of whole texts, in windows of the longest input that follow each
        other."""
        asked = requests if disable_tqdm else progress(requests, "scoring texts")
        scores = []
        for request in asked:
            (text,) = request.args
            windows = get_rolling_token_windows(
                token_list=self.tok_encode(text, add_special_tokens=False),
                prefix_token=self.prefix_token_id,
                max_seq_len=self.max_length,
                context_len=1,
            )
            parts = [self._score(*make_disjoint_window(window)) for window in windows]
            score = sum(logprob for logprob, _ in parts)
            self.cache_hook.add_partial("loglikelihood_rolling", request.args, score)
            scores.append(score)
        return scores

    # -- answers -----------------------------------------------------------------------
    def generate_until(
        self, requests: Sequence[Any], disable_tqdm: bool = False
    ) -> list[str]:
        """Answers, each with the parameters of its request. The harness's cache gets
        them batch by batch, so that an interrupted run keeps what it has."""
        size = self.llm.limits.max_batch_size
        batches = [requests[at : at + size] for at in range(0, len(requests), size)]
        texts: list[str] = []
        for batch in batches if disable_tqdm else progress(batches, "answering"):
            answers = self._answer(batch)
            for request, text in zip(batch, answers, strict=True):
                self.cache_hook.add_partial("generate_until", request.args, text)
            texts += answers
        return texts

    def _answer(self, requests: Sequence[Any]) -> list[str]:
        params = [sampling_params(request.args[1]) for request in requests]
        prompts = []
        for request, own in zip(requests, params, strict=True):
            prompts.append(self._prompt(request.args[0], own))
        return [answer.text for answer in self.llm.generate(prompts, params)]

    def _prompt(self, context: str, params: SamplingParams) -> list[int]:
        """The end of the context, as much as leaves room for the answer."""
        limits = self.llm.limits
        room = min(limits.max_input_len, limits.max_seq_len - params.max_new_tokens)
        if room < 1:
            raise KvlatheError(
                f"{params.max_new_tokens} new tokens are too many",
                f"this engine's max_seq_len is {limits.max_seq_len}",
                "set max_gen_toks in gen_kwargs",
            )
        return (self.tok_encode(context) or [self.prefix_token_id])[-room:]

    # -- chat --------------------------------------------------------------------------
    def apply_chat_template(
        self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True
    ) -> str:
        return self.llm.tokenizer.chat_prompt(chat_history, add_generation_prompt)

    def chat_template(self, chat_template: bool | str = False) -> str | None:
        return self.llm.tokenizer.chat_template or ""

    @property
    def tokenizer_name(self) -> str:
        """The harness keeps encoded requests under this name."""
        return str(self.engine.resolve()).replace("/", "__")


def sampling_params(wanted: dict[str, Any]) -> SamplingParams:
    """The parameters that a task's ``gen_kwargs`` ask for; greedy unless they
    sample."""
    known = {"until", "do_sample", *LENGTH_NAMES, *SAMPLING_NAMES}
    if ignored := sorted(wanted.keys() - known):
        log.warning("generation options without effect here: %s", ", ".join(ignored))
    until = wanted.get("until") or []
    new = next(
        (wanted[name] for name in LENGTH_NAMES if wanted.get(name) is not None),
        NEW_TOKENS,
    )
    chosen = {
        name: wanted[name] for name in SAMPLING_NAMES if wanted.get(name) is not None
    }
    if not wanted.get("do_sample", chosen.get("temperature", 0) > 0):
        chosen["temperature"] = 0.0
    stop = (until,) if isinstance(until, str) else tuple(until)
    return SamplingParams(
        max_new_tokens=int(new), stop=tuple(x for x in stop if x), **chosen
    )


def main() -> None:
    """The harness's command line; a refusal is one line, as kvlathe's own are."""
    from lm_eval.__main__ import cli_evaluate  # pyright: ignore[reportMissingImports]

    try:
        cli_evaluate()
    except KvlatheError as error:
        fail(str(error))
        sys.exit(1)


if __name__ == "__main__":
    main()
