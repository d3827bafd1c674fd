"""Choices of an answer as each of the two APIs writes them: texts, and reports on
tokens."""

from __future__ import annotations

import codecs
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from kvlathe.runtime.requests.request import Delta
from kvlathe.runtime.text.sampler import TokenLogprob
from kvlathe.runtime.text.tokenizer import Tokenizer

Json = dict[str, Any]


class Kind(ABC):
    """One of the two APIs: how a choice is written."""

    prefix = object = chunk_object = ""
    thinks = False
    """Whether its answers may have thoughts."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.tokenizer = tokenizer

    def opening(self, index: int) -> Json | None:
        """The first piece of a choice's stream, before its text."""
        return None

    @abstractmethod
    def choice(self, delta: Delta) -> Json:
        """A whole answer."""

    def chunks(self, delta: Delta) -> list[Json]:
        """Pieces of one, in the order of what they say; none where there is nothing to
        say yet."""
        return [self.choice(delta)]

    def cut_call(self, index: int) -> str:
        """The text of a call that a choice began and did not end."""
        return ""

    def thought_tokens(self, delta: Delta) -> int:
        """Tokens of a delta that are thoughts."""
        return 0

    def token(self, token: int) -> str:
        """A token as clients see it. One that is part of a character: its bytes, as
        OpenAI does (several that read alike would be one entry of top_logprobs)."""
        piece = self.tokenizer.piece(token)
        try:
            return piece.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in piece)


@dataclass(frozen=True, slots=True)
class Echo:
    """A prompt as it is repeated before its answer. ``starts``: where its tokens begin
    in ``text``, where that is what the client sent; None for token ids."""

    ids: list[int]
    text: str
    starts: list[int] | None


class Spans:
    """Starts of the tokens of a text, in characters. A token that continues a character
    begins where that does."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer, self._at = tokenizer, 0
        self._characters = codecs.getincrementaldecoder("utf-8")("replace")

    def begin(self, echo: Echo) -> list[int]:
        """Starts of the tokens of a prompt that comes first."""
        if echo.starts is None:
            return [self.start(token) for token in echo.ids]
        self._at = len(echo.text)
        return echo.starts

    def start(self, token: int) -> int:
        """Start of the next token."""
        begun = self._at
        if token not in self._tokenizer.special_ids:
            self._at += len(self._characters.decode(self._tokenizer.piece(token)))
        return begun


class Completions(Kind):
    """``echoes``: prompts to begin the texts with, for each of their ``n`` choices."""

    prefix, object, chunk_object = "cmpl", "text_completion", "text_completion"

    def __init__(
        self,
        tokenizer: Tokenizer,
        reports: bool,
        echoes: Sequence[Echo] = (),
        n: int = 1,
    ) -> None:
        super().__init__(tokenizer)
        self.reports, self.echoes, self.n = reports, echoes, n
        self._spans: dict[int, Spans] = {}  # of each choice

    def choice(self, delta: Delta) -> Json:
        text, reports, offsets = delta.text, [*delta.logprobs], list[int]()
        if (spans := self._spans.get(delta.index)) is None:
            spans = self._spans[delta.index] = Spans(self.tokenizer)
            if self.echoes:
                echo = self.echoes[delta.index // self.n]
                text = echo.text + text
                if self.reports:
                    reports = [
                        TokenLogprob(echo.ids[0], float("nan"), ()),
                        *delta.prompt_logprobs,
                        *reports,
                    ]
                    offsets = spans.begin(echo)
        logprobs = None
        if self.reports:
            answered = reports[len(offsets) :]
            logprobs = self._logprobs(
                reports,
                [*offsets, *(spans.start(report.token_id) for report in answered)],
            )
        return {
            "index": delta.index,
            "text": text,
            "logprobs": logprobs,
            **ending(delta),
        }

    def _likeliest(self, report: TokenLogprob) -> dict[str, float]:
        """The chosen token and the likeliest ones, by text."""
        tokens = [(report.token_id, report.logprob), *report.top]
        return {self.token(token): logprob for token, logprob in tokens}

    def _logprobs(self, reports: list[TokenLogprob], offsets: list[int]) -> Json:
        tokens = [self.token(r.token_id) for r in reports]
        known = [
            r.logprob == r.logprob for r in reports
        ]  # the first token of a prompt has no probability
        tops = [self._likeliest(report) for report in reports]
        return {
            "tokens": tokens,
            "token_logprobs": [
                r.logprob if k else None for r, k in zip(reports, known, strict=True)
            ],
            "top_logprobs": [
                top if k else None for top, k in zip(tops, known, strict=True)
            ],
            "text_offset": offsets,
        }


def ending(delta: Delta) -> Json:
    """Why an answer ended; as in vLLM, with the stop string that ended it."""
    said: Json = {"finish_reason": delta.finish_reason}
    return said if delta.stop is None else {**said, "stop_reason": delta.stop}


class Chat(Kind):
    prefix, object, chunk_object = (
        "chatcmpl",
        "chat.completion",
        "chat.completion.chunk",
    )

    def __init__(self, tokenizer: Tokenizer, reports: bool) -> None:
        super().__init__(tokenizer)
        self.reports = reports

    def opening(self, index: int) -> Json:
        delta = {"role": "assistant", "content": ""}
        return {"index": index, "delta": delta, "logprobs": None, "finish_reason": None}

    def choice(self, delta: Delta) -> Json:
        return self._with(
            "message", {"role": "assistant", "content": delta.text}, delta
        )

    def chunks(self, delta: Delta) -> list[Json]:
        said = {"content": delta.text} if delta.text else {}
        return [self._with("delta", said, delta)]

    def _with(self, name: str, value: Json, delta: Delta) -> Json:
        logprobs = (
            {"content": [self._report(r) for r in delta.logprobs]}
            if self.reports
            else None
        )
        return {
            "index": delta.index,
            name: value,
            "logprobs": logprobs,
            **ending(delta),
        }

    def _report(self, report: TokenLogprob) -> Json:
        tops = [self._likely(token, logprob) for token, logprob in report.top]
        return {**self._likely(report.token_id, report.logprob), "top_logprobs": tops}

    def _likely(self, token: int, logprob: float) -> Json:
        return {
            "token": self.token(token),
            "logprob": logprob,
            "bytes": list(self.tokenizer.piece(token)),
        }
