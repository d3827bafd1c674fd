"""Answer: what came of one prompt, and how long it took."""

from __future__ import annotations

from dataclasses import dataclass

from kvlathe.runtime.scheduling.sequence import Sequence
from kvlathe.runtime.text.sampler import TokenLogprob


@dataclass(frozen=True, slots=True)
class Timings:
    """Prefill: from submission to the first token, waiting included. Decode: from the
    first token to the last."""

    prefill_tokens: int
    prefill_seconds: float
    decode_tokens: int
    decode_seconds: float

    @property
    def prefill_tokens_per_second(self) -> float:
        return rate(self.prefill_tokens, self.prefill_seconds)

    @property
    def decode_tokens_per_second(self) -> float:
        return rate(self.decode_tokens, self.decode_seconds)


@dataclass(frozen=True, slots=True)
class Answer:
    """``token_ids`` has the token that ended the text; ``text`` has neither stop
    strings nor special tokens.

    ``finish_reason``: stop (an end-of-text token or a stop string) or length.
    ``logprobs``: one for each token, where asked for. ``prompt_rows``: where the plan
    drops hidden states of the prompt, the rows of it that each layer computed.
    ``drafted``: tokens that were guessed and tried; ``accepted``: those that were right.
    """

    text: str
    token_ids: list[int]
    finish_reason: str
    prompt_tokens: int
    logprobs: list[TokenLogprob] | None
    timings: Timings
    prompt_rows: list[int] | None = None
    drafted: int = 0
    accepted: int = 0

    @classmethod
    def of(cls, sequence: Sequence) -> Answer:
        """The answer of a sequence that has ended."""
        token_ids = sequence.answer
        timings = Timings(
            prefill_tokens=sequence.prompt_tokens,
            prefill_seconds=sequence.first_token - sequence.started,
            decode_tokens=len(token_ids) - 1,
            decode_seconds=sequence.last_token - sequence.first_token,
        )
        wants_logprobs = sequence.params.logprobs is not None
        return cls(
            text=sequence.text.text if sequence.text else "",
            token_ids=token_ids,
            finish_reason=sequence.finish_reason or "length",
            prompt_tokens=sequence.prompt_tokens,
            logprobs=sequence.logprobs if wants_logprobs else None,
            timings=timings,
            prompt_rows=sequence.prompt_rows,
            drafted=sequence.drafted,
            accepted=sequence.accepted,
        )


def rate(count: int, seconds: float) -> float:
    return count / seconds if seconds else 0.0
