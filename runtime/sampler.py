"""Sampling: one token from one row of logits, by the request's own parameters and its own random stream.

The processors run in the order of transformers' generate: repetition penalty, temperature, top-k, top-p, min-p; the
logit bias and the presence and frequency penalties of the OpenAI API come before the temperature. A row never sees its
neighbours in the batch, and its random stream is numpy's Philox keyed by the request's seed, so a request's tokens
depend on nothing but its own logits.
"""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from kvlathe.errors import KvlatheError

Logits = npt.NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """What one request asks for. ``temperature`` 0 is greedy; ``top_k`` 0, ``top_p`` 1 and ``min_p`` 0 are off.

    ``stop``: strings that end the text (and are not part of it); ``stop_ids``: tokens that do. ``logprobs``: None, or
    how many of the most likely tokens to report beside each chosen one. ``seed`` None draws a new one.
    ``presence_penalty`` is taken from the logit of every token that the answer has, ``frequency_penalty`` as often as
    it has it; ``repetition_penalty`` counts the prompt too. ``logit_bias``: (token id, what is added to its logit).
    ``prompt_logprobs``: like ``logprobs``, for the prompt's own tokens; then ``max_new_tokens`` may be 0.
    Raises KvlatheError for values out of range.
    """

    max_new_tokens: int = 128
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    seed: int | None = None
    stop: tuple[str, ...] = ()
    stop_ids: tuple[int, ...] = ()
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    ignore_eos: bool = False

    def __post_init__(self) -> None:
        ranges = (
            ("max_new_tokens", self.max_new_tokens >= (self.prompt_logprobs is None), "at least 1"),
            ("temperature", 0 <= self.temperature < float("inf"), "0 or more"),
            ("top_k", self.top_k >= 0, "0 or more"),
            ("top_p", 0 < self.top_p <= 1, "above 0 and at most 1"),
            ("min_p", 0 <= self.min_p <= 1, "between 0 and 1"),
            ("repetition_penalty", 0.01 <= self.repetition_penalty <= 100, "between 0.01 and 100"),
            ("presence_penalty", -2 <= self.presence_penalty <= 2, "between -2 and 2"),
            ("frequency_penalty", -2 <= self.frequency_penalty <= 2, "between -2 and 2"),
            ("logit_bias", all(abs(bias) <= 100 for _, bias in self.logit_bias), "between -100 and 100 for each token"),
            ("seed", self.seed is None or 0 <= self.seed < 2**64, "from 0 to 2^64 - 1"),
            ("stop", all(self.stop), "strings that are not empty"),
            ("logprobs", self.logprobs is None or 0 <= self.logprobs <= 100, "from 0 to 100"),
            ("prompt_logprobs", self.prompt_logprobs is None or 0 <= self.prompt_logprobs <= 100, "from 0 to 100"),
        )
        for name, right, allowed in ranges:
            if not right:
                raise KvlatheError(f"{name} is {getattr(self, name)!r}", f"it must be {allowed}", "change it")


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """Logs of the model's own probabilities, before any processor. ``top``: (token id, logprob), best first."""

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...]


class Sampler:
    """Chooses the tokens of one request."""

    def __init__(self, params: SamplingParams) -> None:
        self.params = params
        seed = secrets.randbits(64) if params.seed is None else params.seed
        self._random = np.random.Generator(np.random.Philox(key=seed))

    def choose(self, logits: Logits, context: Sequence[int], prompt_tokens: int = 0) -> int:
        """A token id from ``logits`` [vocab]; ``context`` is the prompt, of ``prompt_tokens``, and the answer so far.

        Raises KvlatheError where a logit is not a number.
        """
        logits = self._adjusted(logits, context, prompt_tokens)
        if not np.isfinite(logits.max()):
            raise KvlatheError("the model's output is not a number", "a logit is NaN or infinite", "check the engine")
        if self.params.temperature == 0:
            return int(logits.argmax())
        tokens, probabilities = filtered(logits, self.params)
        cumulative = np.cumsum(probabilities)
        drawn = self._random.random() * cumulative[-1]
        return int(tokens[min(np.searchsorted(cumulative, drawn, side="right"), len(tokens) - 1)])

    def _adjusted(self, logits: Logits, context: Sequence[int], prompt_tokens: int) -> Logits:
        params = self.params
        if params.repetition_penalty != 1:
            logits = penalize(logits, context, params.repetition_penalty)
        if params.presence_penalty or params.frequency_penalty:
            answer = np.asarray(context[prompt_tokens:], np.int64)
            logits = discourage(logits, answer, params.presence_penalty, params.frequency_penalty)
        if params.logit_bias:
            logits = logits.copy()
            for token, bias in params.logit_bias:
                logits[token] += bias
        return logits


def discourage(logits: Logits, answer: npt.NDArray[np.int64], presence: float, frequency: float) -> Logits:
    """Take ``presence`` from the logit of every token in ``answer``, and ``frequency`` for each time it is there."""
    tokens, times = np.unique(answer, return_counts=True)
    changed = logits.copy()
    changed[tokens] -= presence + frequency * times
    return changed


def penalize(logits: Logits, context: Sequence[int], penalty: float) -> Logits:
    """Divide the positive and multiply the negative logits of every token in ``context`` (CTRL, Keskar et al. 2019)."""
    seen = np.unique(np.asarray(context, np.int64))
    changed = logits.copy()
    changed[seen] = np.where(logits[seen] > 0, logits[seen] / penalty, logits[seen] * penalty)
    return changed


def filtered(logits: Logits, params: SamplingParams) -> tuple[npt.NDArray[np.intp], npt.NDArray[np.float64]]:
    """The tokens that temperature, top-k, top-p and min-p leave, and their probabilities (sum 1)."""
    with np.errstate(over="ignore"):  # -inf is right: nothing but the maximum is left at temperatures near 0
        scaled = (logits.astype(np.float64) - logits.max()) / params.temperature
    tokens = np.arange(len(scaled))
    if 0 < params.top_k < len(scaled):
        tokens = np.flatnonzero(scaled >= np.partition(scaled, -params.top_k)[-params.top_k])
    probabilities = softmax(scaled[tokens])
    if params.top_p < 1:  # the fewest tokens that reach top_p: one is kept if those before it have less
        likely = np.flatnonzero(probabilities >= (1 - params.top_p) / len(tokens))  # others: below 1 - top_p
        order = likely[np.argsort(-probabilities[likely], kind="stable")]
        tokens, probabilities = tokens[order], probabilities[order]
        keep = np.cumsum(probabilities) - probabilities < params.top_p
        tokens, probabilities = tokens[keep], probabilities[keep]
    if params.min_p > 0:
        keep = probabilities >= params.min_p * probabilities.max()
        tokens, probabilities = tokens[keep], probabilities[keep]
    return tokens, probabilities / probabilities.sum()


def softmax(logits: npt.NDArray[np.floating]) -> npt.NDArray[np.float64]:
    weights = np.exp(logits.astype(np.float64) - logits.max())
    return weights / weights.sum()


def logprob(logits: Logits, token: int, top: int) -> TokenLogprob:
    """Log-probabilities of ``token`` and of the ``top`` most likely tokens in ``logits`` [vocab]."""
    shifted = logits.astype(np.float64) - logits.max()
    scores = shifted - np.log(np.exp(shifted).sum())
    best = np.argpartition(-scores, min(top, len(scores) - 1))[:top]
    best = best[np.argsort(-scores[best], kind="stable")]
    return TokenLogprob(token, float(scores[token]), tuple((int(i), float(scores[i])) for i in best))
