"""Samples through an engine: the context is a prompt, cached and compressed as any; the
question comes once that has ended, and the answer behind it is greedy.

So a rule that ranks tokens ranks those of the context alone, and a question attends
what the pages hold. A plan that compacts prefixes compacts each context first.
"""

from __future__ import annotations

import queue
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache

from benchmarks.real.samples import Sample
from kvlathe.plan.memory import bytes_left
from kvlathe.runtime.llm import LLM
from kvlathe.runtime.requests.request import Delta
from kvlathe.runtime.scheduling.sequence import Sequence as Request
from kvlathe.runtime.text.sampling_params import SamplingParams
from kvlathe.runtime.text.tokenizer import TextStream

UNCOMPRESSED_BITS = 16.0


@dataclass(frozen=True, slots=True)
class Answered:
    """An answer's text and tokens, the tokens that were cached at its end, and the bits
    that a number of them takes."""

    text: str
    ids: list[int]
    tokens: int
    bits: float


class Asker:
    """An engine that answers samples."""

    def __init__(self, llm: LLM) -> None:
        self.llm = llm
        self.compacts = llm.plan.index.compaction is not None
        self._left: Callable[[int], float] = lru_cache(self._bytes_left)

    def answers(self, samples: Sequence[Sample]) -> Iterator[tuple[Sample, Answered]]:
        """Answers as they end, many at once. Compacted contexts are asked one at a
        time: later ones may take their pages."""
        size = 1 if self.compacts else max(1, len(samples))
        for at in range(0, len(samples), size):
            yield from self._together(samples[at : at + size])

    def _together(self, samples: Sequence[Sample]) -> Iterator[tuple[Sample, Answered]]:
        saved = [self.compact(self._encode(sample.context)) for sample in samples]
        requests = [self.request(sample) for sample in samples]
        ended: queue.SimpleQueue[Delta] = queue.SimpleQueue()

        def follow(delta: Delta) -> None:
            if delta.finish_reason:
                ended.put(delta)

        submitted = self.llm.thread.submit(requests, follow)
        try:
            for _ in samples:
                delta = ended.get()
                if delta.error:
                    raise delta.error
                place = delta.index
                sample, request = samples[place], requests[place]
                yield sample, self._answered(sample, request, saved[place])
        finally:
            self.llm.thread.end(submitted)

    def request(self, sample: Sample) -> Request:
        """A sequence whose prompt is the context, and whose answer begins with the
        question, as one has that goes on from another engine."""
        context = self._encode(sample.context)
        question = self._encode(sample.question)
        most = len(question) + sample.new
        params = SamplingParams(max_new_tokens=most, ignore_eos=sample.endless)
        request = self.llm.sequence(context, params)
        request.tokens = [*context, *question]
        request.text = TextStream(self.llm.tokenizer, request.tokens, sample.stop)
        return request

    def _encode(self, text: str) -> list[int]:
        return self.llm.tokenizer.encode(text, add_special_tokens=False)

    def compact(self, context: list[int]) -> float:
        """Compact a context, where the plan has a rule for it; the bytes saved."""
        if not self.compacts:
            return 0.0
        made = self.llm.compact(context)
        return made.whole_bytes - made.bytes

    def _answered(self, sample: Sample, request: Request, saved: float) -> Answered:
        asked = request.prompt_tokens + len(self._encode(sample.question))
        tokens = len(request.tokens)
        text = request.text.text if request.text else ""
        return Answered(text, request.tokens[asked:], tokens, self.bits(tokens, saved))

    def bits(self, tokens: int, saved: float = 0.0) -> float:
        """The bits that a number of ``tokens`` cached tokens takes: scales, padding and
        the hot page counted; ``saved`` bytes less."""
        model = self.llm.plan.model
        numbers = 2 * model.layers * model.kv_heads * model.head_dim * tokens
        return UNCOMPRESSED_BITS * self._left(tokens) - 8 * saved / numbers

    def _bytes_left(self, tokens: int) -> float:
        return bytes_left(self.llm.layout, tokens)
