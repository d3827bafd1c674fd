"""LLM: an engine folder in, text out. What the command line, the evaluation and servers use.

llm = LLM.load("engine")
for answer in llm.generate(["def main():", "# How to install"], SamplingParams(max_new_tokens=32)):
    print(answer.text, answer.timings.decode_tokens_per_second)
"""

from __future__ import annotations

import bisect
import itertools
from collections.abc import Generator, Iterator
from collections.abc import Sequence as Items
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import numpy as np
import numpy.typing as npt

from kvlathe.engines import manifest as manifests
from kvlathe.engines.manifest import Limits, Manifest
from kvlathe.errors import KvlatheError
from kvlathe.export.layout import CacheLayout
from kvlathe.export.plan import CompressionPlan
from kvlathe.runtime import sessions
from kvlathe.runtime.engine import Engine
from kvlathe.runtime.pool import PagePool
from kvlathe.runtime.prefix import PrefixCache
from kvlathe.runtime.probes import Probes
from kvlathe.runtime.sampler import Sampler, SamplingParams, TokenLogprob
from kvlathe.runtime.scheduler import Scheduler
from kvlathe.runtime.sequence import Chunk, Sequence
from kvlathe.runtime.session import Session
from kvlathe.runtime.staging import Staging
from kvlathe.runtime.tokenizer import TextStream, Tokenizer

Prompt = str | Items[int]


@dataclass(frozen=True, slots=True)
class Timings:
    """Seconds from submission to the first token, and from the first to the last; waiting for others included."""

    prefill_tokens: int
    prefill_seconds: float
    decode_tokens: int
    decode_seconds: float

    @property
    def prefill_tokens_per_second(self) -> float:
        return self.prefill_tokens / self.prefill_seconds if self.prefill_seconds else 0.0

    @property
    def decode_tokens_per_second(self) -> float:
        return self.decode_tokens / self.decode_seconds if self.decode_seconds else 0.0


@dataclass(frozen=True, slots=True)
class Answer:
    """``token_ids`` includes the token that ended the text; ``text`` excludes stop strings and special tokens.

    ``finish_reason``: ``stop`` (end-of-text token or stop string) or ``length``. ``prompt_rows``: where the plan
    dropped hidden states of the prompt, the rows that each layer computed of it.
    """

    text: str
    token_ids: list[int]
    finish_reason: str
    prompt_tokens: int
    logprobs: list[TokenLogprob] | None
    timings: Timings
    prompt_rows: list[int] | None = None


class LLM:
    """An engine with its tokenizer and its cache. Not thread-safe: one call at a time."""

    def __init__(
        self,
        session: Session,
        plan: CompressionPlan,
        limits: Limits,
        tokenizer: Tokenizer,
        cache_bytes: int,
        share_prefixes: bool | None = False,
    ) -> None:
        self.plan, self.limits, self.tokenizer = plan, limits, tokenizer
        self.layout = CacheLayout(plan)
        self.pool = PagePool(self.layout, cache_bytes)
        self.session = session
        share = plan.sharable if share_prefixes is None else share_prefixes
        prefixes = PrefixCache(self.pool) if share else None
        self.engine = Engine(session, self.pool, Scheduler(self.pool, session, limits, prefixes), tokenizer.eos_ids)
        self.manifest: Manifest | None = None
        self.attention = "unknown"

    @classmethod
    def load(
        cls,
        engine_dir: str | Path,
        cache_bytes: int | None = None,
        threads: int | None = None,
        verify: bool = True,
        share_prefixes: bool | None = False,
        device: str | None = None,
    ) -> LLM:
        """Load an engine folder, checking that its files are those that were built (or just their sizes).

        ``cache_bytes`` of KV cache: by default room for max_batch_size sequences of max_seq_len tokens, at most half of
        the machine's memory; memory is only taken as it is used. ``threads``: default one a core (runtime/machine.py).
        ``share_prefixes``: finished requests leave their pages to later ones that begin alike, until room is needed;
        None: where the plan allows it. ``device``: cpu, cuda or auto; None: KVLATHE_DEVICE, or else auto
        (runtime/sessions.py).
        Raises KvlatheError where the folder is incomplete, changed, or of a backend that cannot run here.
        """
        folder = Path(engine_dir)
        manifest = manifests.verify(folder, deep=verify)
        runner = sessions.runner(manifest, folder, device)
        plan = CompressionPlan.from_json((folder / manifests.PLAN_FILE).read_text("utf-8"))
        kind = runner.session(manifest)
        size = cache_bytes or sessions.cache_bytes(manifest, CacheLayout(plan), runner)
        session = kind(folder, plan, manifest.limits, size, threads)
        llm = cls(session, plan, manifest.limits, Tokenizer(folder), size, share_prefixes)
        llm.manifest, llm.attention = manifest, runner.attention(manifest)
        return llm

    # -- text ------------------------------------------------------------------------------------------------------
    def generate(
        self, prompts: Prompt | Items[Prompt], params: SamplingParams | Items[SamplingParams] | None = None
    ) -> list[Answer]:
        """Answers in the order of ``prompts`` (texts or token ids), computed together in packed steps.

        ``params``: one for all, or one each. Raises KvlatheError before anything runs if a prompt is empty or too long
        or there are more prompts than max_batch_size.
        """
        batch = as_batch(prompts)
        if len(batch) > self.limits.max_batch_size:
            raise KvlatheError(
                f"{len(batch)} prompts came at once",
                f"this engine takes {self.limits.max_batch_size}",
                "send fewer at a time or build with a larger --max_batch_size",
            )
        each = list(params) if isinstance(params, Items) else [params or SamplingParams()] * len(batch)
        sequences = [self.sequence(self.encode(prompt), p) for prompt, p in zip(batch, each, strict=True)]
        for _ in self._run(sequences):
            pass
        return [answer(sequence) for sequence in sequences]

    def stream(self, prompt: Prompt, params: SamplingParams | None = None) -> Generator[str, None, Answer]:
        """The answer's text in pieces of whole characters, as they come; the generator returns the whole answer.

        Several streams may be read in turns: each step serves them all.
        """
        sequence, shown = self.sequence(self.encode(prompt), params or SamplingParams()), 0
        for _ in itertools.chain(self._run([sequence]), [None]):  # another stream's step may have been the last
            text = sequence.text.text if sequence.text else ""
            if len(text) > shown:
                yield text[shown:]
                shown = len(text)
        return answer(sequence)

    def chat(self, messages: Items[dict[str, Any]], params: SamplingParams | None = None) -> Answer:
        """The answer to ``messages`` ({"role": ..., "content": ...}) through the checkpoint's chat template."""
        prompt = self.tokenizer.chat_prompt(messages)
        return self.generate([self.tokenizer.encode(prompt, add_special_tokens=False)], params)[0]

    @property
    def sharable(self) -> bool:
        """Whether sequences that begin alike may share what they begin with."""
        return self.plan.sharable

    @property
    def most_tokens(self) -> int:
        """Of a sequence that the limits allow and the cache can hold, whatever its prompt's length."""
        lengths = range(1, self.limits.max_seq_len + 1)
        return bisect.bisect_right(lengths, False, key=lambda n: not self.pool.fits([self.pool.worst_pages(n)]))

    def encode(self, prompt: Prompt) -> list[int]:
        return self.tokenizer.encode(prompt) if isinstance(prompt, str) else [int(token) for token in prompt]

    def sequence(self, tokens: list[int], params: SamplingParams) -> Sequence:
        """A new request for these prompt tokens, checked against the limits. Raises KvlatheError."""
        self._check(tokens, params.max_new_tokens)
        if params.prompt_logprobs is not None and self.plan.stages:
            raise KvlatheError(
                "this engine cannot report prompt_logprobs",
                "tokens of the prompt leave it between its layers",
                "ask about the answer only",
            )
        self._check_ids((*params.stop_ids, *(token for token, _ in params.logit_bias)))
        text = TextStream(self.tokenizer, tokens, params.stop)
        return self._open(tokens, len(tokens), self.plan.prefill_chunk, Sampler(params), text)

    def _open(
        self, tokens: list[int], prompt: int, chunk: int, sampler: Sampler, text: TextStream | None = None
    ) -> Sequence:
        """A sequence whose first ``prompt`` tokens are its prompt."""
        staged = len(self.plan.passes(prompt)) > 1
        staging = Staging(self.plan, prompt, chunk) if staged else None
        probes = Probes(self.plan, prompt)
        return Sequence(tokens, prompt, self.pool.open(), chunk, sampler, text, probes=probes, staging=staging)

    def _check(self, tokens: Items[int], new: int) -> None:
        if not tokens:
            raise KvlatheError("the prompt is empty", "there is no token to continue", "give at least one token")
        self._check_ids(tokens)
        limits = self.limits
        for count, limit, flag in (
            (len(tokens), limits.max_input_len, "max_input_len"),
            (len(tokens) + new, limits.max_seq_len, "max_seq_len"),
        ):
            if count > limit:
                raise KvlatheError(
                    f"a prompt of {len(tokens)} tokens with {new} new ones is too long",
                    f"this engine's {flag} is {limit}",
                    f"shorten it or build with a larger --{flag}",
                )

    def _check_ids(self, tokens: Items[int]) -> None:
        vocabulary = self.plan.model.vocab_size
        if len(tokens) and not 0 <= min(tokens) <= max(tokens) < vocabulary:
            raise KvlatheError("a token id is out of range", f"the vocabulary has {vocabulary}", "check the tokenizer")

    def _run(self, sequences: Items[Sequence]) -> Iterator[None]:
        """Serve the sequences, yielding after each step. Their pages go back however this ends."""
        scheduler = self.engine.scheduler
        try:
            for sequence in sequences:
                scheduler.add(sequence)
            while not all(sequence.finish_reason for sequence in sequences):
                self.engine.step()
                for sequence in sequences:
                    if sequence.error:
                        raise sequence.error
                yield
        finally:
            for sequence in sequences:
                scheduler.remove(sequence)

    # -- evaluation ------------------------------------------------------------------------------------------------
    def logits(self, token_ids: Items[int], rows: Items[int], prompt: int | None = None) -> npt.NDArray[np.float32]:
        """Next-token logits [len(rows), vocab] after the given places of one sequence, through the paged cache.

        Where the plan seals, the grid is one page, so that every token attends what its decode would attend. Where it
        ranks a prompt, the first ``prompt`` tokens are one (default: up to the first of ``rows``), ranked when it ends;
        the others are fed as their decode would see them. Rows inside a prompt attend a cache that is not compressed.
        """
        tokens = [int(token) for token in token_ids]
        self._check(tokens, 0)
        ranked, seals = self.plan.ranked, any(bucket.source is not None for bucket in self.plan.buckets)
        grid = self.plan.page_tokens if seals and not ranked else self.plan.prefill_chunk
        first = (min(rows) + 1 if prompt is None else prompt) if ranked else len(tokens)
        if not 1 <= first <= len(tokens):
            raise KvlatheError(
                f"a prompt of {first} tokens cannot be", f"there are {len(tokens)}", "give a part of them"
            )
        sequence = self._open(tokens, first, grid, Sampler(SamplingParams()))
        wanted, found = set(rows), {}
        try:
            while sequence.cached < len(tokens):
                decodes = ranked and sequence.cached >= first
                most = self.pool.steady(sequence.table) if decodes else self.limits.max_num_tokens
                found |= self._logits(sequence, sequence.next_tokens(min(most, self.limits.max_num_tokens)), wanted)
        finally:
            self.pool.release(sequence.table)
        return np.stack([found[row] for row in rows])

    def _logits(self, sequence: Sequence, count: int, wanted: set[int]) -> dict[int, npt.NDArray[np.float32]]:
        """Compute the next ``count`` rows of a sequence: the logits of those of its places that are ``wanted``."""
        places = sequence.places(count)
        offsets = [i for i, place in enumerate(places) if place in wanted and sequence.sees_logits]
        reservation = self.pool.reserve(sequence.table, sequence.arriving(count), sequence.seals_after(count))
        rows = self.engine.run([Chunk(sequence, count, reservation, offsets)])
        return dict(zip((places[i] for i in offsets), rows, strict=True))


def as_batch(prompts: Prompt | Items[Prompt]) -> list[Prompt]:
    """A text or a list of token ids is a batch of one."""
    if isinstance(prompts, str) or (len(prompts) and isinstance(prompts[0], int | np.integer)):
        return [cast(Prompt, prompts)]
    return list(cast(Items[Prompt], prompts))


def answer(sequence: Sequence) -> Answer:
    new = sequence.answer
    prefill, decode = sequence.first_token - sequence.started, sequence.last_token - sequence.first_token
    return Answer(
        text=sequence.text.text if sequence.text else "",
        token_ids=new,
        finish_reason=sequence.finish_reason or "length",
        prompt_tokens=sequence.prompt_tokens,
        logprobs=sequence.logprobs if sequence.params.logprobs is not None else None,
        timings=Timings(sequence.prompt_tokens, prefill, len(new) - 1, decode),
        prompt_rows=sequence.prompt_rows,
    )
