"""Chunks for Dynamo's frontend, made of our deltas."""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

from kvlathe.runtime.requests.request import Delta
from kvlathe.runtime.text.sampler import TokenLogprob

Chunk = dict[str, object]
FINISH = {
    "stop": "stop",
    "length": "length",
    "cancelled": "cancelled",
    "timeout": "cancelled",
}
"""Our reasons to end that are no errors."""


class Told:
    """The chunks of one request, of ``prompt`` tokens. ``logprobs``: whether they
    were asked for."""

    def __init__(self, prompt: int, logprobs: bool) -> None:
        self._prompt = prompt
        self._logprobs = logprobs
        self._made = 0

    def chunk(self, delta: Delta) -> Chunk:
        """Raises what ended the sequence early."""
        if delta.error:
            raise delta.error
        self._made += len(delta.token_ids)
        chunk: Chunk = {"token_ids": list(delta.token_ids), "index": delta.index}
        if self._logprobs:
            chunk["log_probs"] = [one.logprob for one in delta.logprobs]
            chunk["top_logprobs"] = [top_of(one) for one in delta.logprobs]
        if delta.prompt_logprobs:
            chunk["engine_data"] = {"prompt_logprobs": prompt_of(delta.prompt_logprobs)}
        if delta.finish_reason:
            chunk["finish_reason"] = FINISH[delta.finish_reason]
            chunk["completion_usage"] = self._usage()
        return chunk

    def _usage(self) -> dict[str, object]:
        made = self._made
        return {
            "prompt_tokens": self._prompt,
            "completion_tokens": made,
            "total_tokens": self._prompt + made,
        }


def top_of(one: TokenLogprob) -> list[dict[str, object]]:
    """The likeliest tokens at one place, and the chosen one."""
    found: list[dict[str, object]] = []
    for rank, (token, logprob) in enumerate(one.top, 1):
        entry: dict[str, object] = {"rank": rank}
        entry["token_id"] = token
        entry["token"] = None  # the frontend has the text
        entry["logprob"] = logprob
        found.append(entry)
    return found


def prompt_of(
    logprobs: Sequence[TokenLogprob],
) -> list[dict[str, dict[str, float]] | None]:
    """Log-probabilities of the prompt's tokens; None for the first one."""
    found: list[dict[str, dict[str, float]] | None] = [None]
    for one in logprobs:
        place = {str(token): {"logprob": value} for token, value in one.top}
        place[str(one.token_id)] = {"logprob": one.logprob}
        found.append(place)
    return found


def cut(chunk: Chunk, most: int) -> Chunk:
    """The first chunk of an answer of at most ``most`` tokens: a prefill worker may
    have gone a few tokens further than it was asked to. It ends where it is full."""
    tokens = cast(list[int], chunk["token_ids"])
    if len(tokens) < most:
        return chunk
    kept = dict(chunk)
    if len(tokens) > most:
        kept.pop("completion_usage", None)  # the frontend counts, too
    for name in ("token_ids", "log_probs", "top_logprobs"):
        if name in chunk:
            kept[name] = cast(list[object], chunk[name])[:most]
    if len(tokens) > most or "finish_reason" not in chunk:
        kept["finish_reason"] = "length"
    return kept
