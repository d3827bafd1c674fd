"""Prompts become sequences, or are refused before anything runs."""

from __future__ import annotations

import numbers
from collections.abc import Sequence as Items
from typing import Protocol, cast

import numpy as np

from kvlathe.base.errors import KvlatheError
from kvlathe.plan.plan import CompressionPlan
from kvlathe.runtime.cache.observed_rows import ObservedRows
from kvlathe.runtime.cache.pool import PagePool
from kvlathe.runtime.scheduling.prompt import path_of
from kvlathe.runtime.scheduling.scheduler import Scheduler
from kvlathe.runtime.scheduling.sequence import Sequence
from kvlathe.runtime.sessions.adapters import LoadedAdapter
from kvlathe.runtime.text.guide import Guides
from kvlathe.runtime.text.sampler import Sampler
from kvlathe.runtime.text.sampling_params import SamplingParams, is_number
from kvlathe.runtime.text.tokenizer import TextStream, Tokenizer

Prompt = str | Items[int]
"""A text, or token ids."""


class AdapterNames(Protocol):
    """Adapters by their names."""

    def find(self, name: str) -> LoadedAdapter:
        """Raises KvlatheError for a name that none has."""
        ...


class SequenceFactory:
    """Makes sequences of one engine's plan and cache."""

    def __init__(
        self,
        plan: CompressionPlan,
        pool: PagePool,
        scheduler: Scheduler,
        tokenizer: Tokenizer,
        adapters: AdapterNames | None = None,
    ) -> None:
        self._plan = plan
        self._pool = pool
        self._scheduler = scheduler
        self._tokenizer = tokenizer
        self._adapters = adapters
        self.guides = Guides(tokenizer, plan.model.vocab_size)

    def request(self, tokens: list[int], params: SamplingParams) -> Sequence:
        """A sequence that answers the prompt ``tokens``. Raises KvlatheError for what
        this engine cannot serve."""
        if not isinstance(params, SamplingParams):
            raise KvlatheError(
                f"sampling parameters are {params!r:.60}",
                "they must be SamplingParams",
                "write SamplingParams(max_new_tokens=32)",
            )
        self.check(tokens, params.max_new_tokens)
        if params.prompt_logprobs is not None and self._plan.stages:
            raise KvlatheError(
                "this engine cannot report prompt_logprobs",
                "tokens of the prompt leave it between its layers",
                "ask about the answer only",
            )
        self._check_ids((*params.stop_ids, *(token for token, _ in params.logit_bias)))
        text = TextStream(
            self._tokenizer,
            tokens,
            params.stop_strings,
            params.skip_special_tokens,
            params.min_tokens,
        )
        sequence = self.open(tokens, len(tokens), self._grid(), Sampler(params), text)
        sequence.adapter = self.adapter(params.adapter)
        self._scheduler.check(sequence)
        if params.structure is not None:
            sequence.guide = self.guides.guide(params.structure)
        if params.min_tokens:
            ends = [*params.stop_ids, *self._tokenizer.eos_ids]
            known = [one for one in ends if one < self._plan.model.vocab_size]
            least = min(params.min_tokens, params.max_new_tokens)
            sequence.guide = self.guides.least(least, known, sequence.guide)
        return sequence

    def adapter(self, name: str | None) -> LoadedAdapter | None:
        """The adapter of this name. Raises KvlatheError where there is none."""
        if name is None:
            return None
        if self._adapters is None:
            raise KvlatheError(
                f"there is no adapter {name!r:.80}",
                "this engine takes none",
                "leave it out",
            )
        return self._adapters.find(name)

    def _grid(self) -> int:
        """Prompts are cut at multiples of so many tokens: a chunk or, where it does not
        matter, as many chunks as a step takes, so that one prompt is through before the
        next begins. Prefixes keep the states of layers where prompts are cut."""
        grid = self._plan.prefill_chunk
        keeps = any(self._plan.model.states) and self._scheduler.prefixes is not None
        if keeps or self._plan.index.cuts_prompts:
            return grid
        return max(1, self._scheduler.limits.max_num_tokens // grid) * grid

    def open(
        self,
        tokens: list[int],
        prompt: int,
        grid: int,
        sampler: Sampler,
        text: TextStream | None = None,
    ) -> Sequence:
        """A sequence whose first ``prompt`` tokens are its prompt, computed in chunks
        that end at multiples of ``grid``."""
        observes = self._plan.index.observation is not None
        return Sequence(
            list(tokens),  # it grows, and the caller's list does not
            prompt,
            self._pool.open(),
            path_of(self._plan, prompt, grid),
            sampler,
            text,
            observed_rows=ObservedRows(self._plan, prompt) if observes else None,
        )

    def check(self, tokens: Items[int], new: int) -> None:
        """Raises KvlatheError for a prompt that is empty, of unknown tokens, or, with
        ``new`` more tokens, longer than the limits."""
        if not tokens:
            raise KvlatheError(
                "the prompt is empty",
                "there is no token to continue",
                "give at least one token",
            )
        self._check_ids(tokens)
        limits = self._scheduler.limits
        for count, limit, name, flag in (
            (len(tokens), limits.max_input_len, "input", "max-input-len"),
            (len(tokens) + new, limits.max_seq_len, "context", "max-seq-len"),
        ):
            if count > limit:
                raise KvlatheError(
                    f"a prompt of {len(tokens)} tokens with {new} new ones is too long",
                    # Clients look for these words, as OpenAI and vLLM have them.
                    f"this model's maximum {name} length is {limit} tokens (--{flag})",
                    f"shorten it, or build with a larger --{flag} if the model has more "
                    "positions",
                )

    def _check_ids(self, tokens: Items[int]) -> None:
        vocabulary = self._plan.model.vocab_size
        if len(tokens) and not 0 <= min(tokens) <= max(tokens) < vocabulary:
            raise KvlatheError(
                "a token id is out of range",
                f"the vocabulary has {vocabulary}",
                "check the tokenizer",
            )


def token_ids(prompt: Items[int]) -> list[int]:
    """The ids of a prompt as Python integers. Raises KvlatheError for anything else:
    bytes, floats and truth values would be read as other tokens than were meant."""
    if isinstance(prompt, np.ndarray):
        prompt = prompt.tolist()
    if not isinstance(prompt, Items) or isinstance(prompt, bytes | bytearray):
        raise wrong_prompt(prompt)
    ids = list(prompt)
    for token in ids:
        if type(token) is not int and not is_number(token, whole=True):
            raise wrong_prompt(token)
    return [int(token) for token in ids]


def wrong_prompt(value: object) -> KvlatheError:
    return KvlatheError(
        f"a prompt has {value!r:.60}",
        "it must be a text or a list of token ids",
        "encode it first",
    )


def as_batch(prompts: Prompt | Items[Prompt]) -> list[Prompt]:
    """A text or a list of token ids is a batch of one."""
    if isinstance(prompts, str | bytes):
        return [cast(Prompt, prompts)]
    if not isinstance(prompts, Items | np.ndarray):
        raise wrong_prompt(prompts)
    if len(prompts) and isinstance(prompts[0], numbers.Number):
        return [cast(Prompt, prompts)]
    return list(cast(Items[Prompt], prompts))
