"""SamplingParams: what one request asks for, checked when it is made. RANGES: what each
number may be, for Python and HTTP alike."""

from __future__ import annotations

import difflib
import math
import numbers
from collections.abc import Iterable
from collections.abc import Sequence as Items
from dataclasses import dataclass
from typing import TypedDict, TypeGuard

from kvlathe.base.errors import KvlatheError
from kvlathe.runtime.text.structure import Structure


@dataclass(frozen=True, slots=True)
class Range:
    """Numbers between two bounds. ``open_low``: the lower one itself is not allowed.
    ``whole``: integers only. ``said``: the range in words."""

    low: float
    high: float
    said: str
    whole: bool = False
    open_low: bool = False

    def holds(self, value: object) -> TypeGuard[float]:
        if not is_number(value, self.whole):
            return False
        above = self.low < value if self.open_low else self.low <= value
        return above and value <= self.high


MOST = 2**31 - 1
"""Largest count of tokens: a 32-bit integer holds no more."""

RANGES = {
    "max_new_tokens": Range(1, MOST, "a whole number from 1 to 2^31 - 1", whole=True),
    "min_tokens": Range(0, MOST, "a whole number, 0 or more", whole=True),
    "temperature": Range(0, math.inf, "0 or more"),
    "top_k": Range(0, MOST, "a whole number, 0 or more", whole=True),
    "top_p": Range(0, 1, "above 0 and at most 1", open_low=True),
    "min_p": Range(0, 1, "between 0 and 1"),
    "repetition_penalty": Range(0.01, 100, "between 0.01 and 100"),
    "presence_penalty": Range(-2, 2, "between -2 and 2"),
    "frequency_penalty": Range(-2, 2, "between -2 and 2"),
    "seed": Range(0, 2**64 - 1, "a whole number from 0 to 2^64 - 1", whole=True),
    "logprobs": Range(0, 100, "a whole number from 0 to 100", whole=True),
    "prompt_logprobs": Range(0, 100, "a whole number from 0 to 100", whole=True),
}
"""Field of SamplingParams -> what it may be."""

BIAS = Range(-100, 100, "between -100 and 100 for each token")
OPTIONAL = frozenset({"seed", "logprobs", "prompt_logprobs"})
"""Fields that may be None."""


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """Parameters of one request.

    >>> params = SamplingParams(max_new_tokens=32, temperature=0.8, top_p=0.9, stop="\\n")
    >>> params.stop_strings
    ('\\n',)
    >>> SamplingParams(top_p=1.5)
    Traceback (most recent call last):
        ...
    kvlathe.base.errors.KvlatheError: top_p is 1.5: it must be above 0 and at most 1. Change it.

    ``max_new_tokens``: tokens of the answer at most; may be 0 where
        ``prompt_logprobs`` is given.
    ``temperature``: 0 is greedy. ``top_k`` 0, ``top_p`` 1 and ``min_p`` 0 are off.
    ``presence_penalty``: taken from the logit of every token that the answer has;
        ``frequency_penalty``: as often as the answer has it.
    ``repetition_penalty``: counts the prompt too (CTRL, Keskar et al. 2019).
    ``logit_bias``: (token id, number added to its logit), several times.
    ``seed``: None draws a new one.
    ``stop``: one string or several that end the text and are not part of it;
        ``stop_ids``: tokens that do.
    ``logprobs``: how many of the likeliest tokens to report beside each chosen one,
        None: report nothing; ``prompt_logprobs``: the same for the prompt's tokens.
    ``ignore_eos``: go on after an end-of-text token.
    ``structure``: the form that the answer must have (docs/structured.md).
    ``skip_special_tokens``: False: the text has special tokens too, but for the one
        that ends it.
    ``min_tokens``: tokens that the answer has before a token or a stop string may end
        it; only its structure may end it sooner.
    ``adapter``: the name of the LoRA adapter that answers (LLM.load_adapter); None: the
        model as it is.

    Raises KvlatheError for a value of another type or out of its range.
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
    stop: str | Items[str] = ()
    stop_ids: Items[int] = ()
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    ignore_eos: bool = False
    structure: Structure | None = None
    skip_special_tokens: bool = True
    min_tokens: int = 0
    adapter: str | None = None

    def __post_init__(self) -> None:
        for name in RANGES:
            self._check_number(name)
        self._check_stop()
        self._check_tokens()
        for name in ("ignore_eos", "skip_special_tokens"):
            if not isinstance(getattr(self, name), bool):
                raise self._refusal(name, "True or False")
        if self.structure is not None and not isinstance(self.structure, Structure):
            raise self._refusal("structure", "a Structure, such as Structure.json()")
        if self.adapter is not None and not isinstance(self.adapter, str):
            raise self._refusal("adapter", "the name of an adapter")

    @property
    def stop_strings(self) -> tuple[str, ...]:
        """``stop`` as a tuple, whichever way it was given."""
        if isinstance(self.stop, str):
            return (self.stop,)
        return tuple(self.stop)

    @property
    def has_penalties(self) -> bool:
        """Whether tokens count that the answer has already."""
        repeats = self.repetition_penalty != 1
        return bool(repeats or self.presence_penalty or self.frequency_penalty)

    @property
    def is_counted(self) -> bool:
        """Whether counts of tokens say all that its penalties change."""
        return self.has_penalties and not self.logit_bias

    @property
    def looks_back(self) -> bool:
        """Whether the choice of a token depends on the tokens before it."""
        return self.has_penalties or self.is_guided

    @property
    def is_guided(self) -> bool:
        """Whether a guide says which tokens may follow."""
        return self.structure is not None or self.min_tokens > 0

    def _check_number(self, name: str) -> None:
        value, allowed = getattr(self, name), RANGES[name]
        if value is None and name in OPTIONAL:
            return
        scores_prompt = name == "max_new_tokens" and self.prompt_logprobs is not None
        if scores_prompt and value == 0 and is_number(value, whole=True):
            return
        if not allowed.holds(value):
            raise self._refusal(name, allowed.said)
        if allowed.whole and type(value) is not int:  # numpy's would overflow
            object.__setattr__(self, name, int(value))

    def _check_stop(self) -> None:
        strings = [self.stop] if isinstance(self.stop, str) else self.stop
        if not all(isinstance(text, str) and text for text in elements_of(strings)):
            raise self._refusal("stop", "a string or a list of strings, none empty")
        object.__setattr__(self, "stop", tuple(strings))

    def _check_tokens(self) -> None:
        ids = elements_of(self.stop_ids)
        if not all(is_number(token, whole=True) for token in ids):
            raise self._refusal("stop_ids", "a list of token ids")
        object.__setattr__(self, "stop_ids", tuple(ids))
        for entry in elements_of(self.logit_bias):
            pair = elements_of(entry)
            if len(pair) != 2 or not is_number(pair[0], whole=True):
                raise self._refusal("logit_bias", "pairs of a token id and a number")
            if not BIAS.holds(pair[1]):
                raise self._refusal("logit_bias", BIAS.said)
        object.__setattr__(self, "logit_bias", tuple(self.logit_bias))

    def _refusal(self, name: str, allowed: str) -> KvlatheError:
        return KvlatheError(
            f"{name} is {getattr(self, name)!r:.80}",
            f"it must be {allowed}",
            "change it",
        )


class SamplingFields(TypedDict, total=False):
    """The fields of SamplingParams, for methods that take them as keyword arguments."""

    max_new_tokens: int
    temperature: float
    top_k: int
    top_p: float
    min_p: float
    repetition_penalty: float
    presence_penalty: float
    frequency_penalty: float
    logit_bias: tuple[tuple[int, float], ...]
    seed: int | None
    stop: str | Items[str]
    stop_ids: Items[int]
    logprobs: int | None
    prompt_logprobs: int | None
    ignore_eos: bool
    structure: Structure | None
    skip_special_tokens: bool
    min_tokens: int
    adapter: str | None


OTHER_NAMES = {"max_tokens": "max_new_tokens", "stop_token_ids": "stop_ids"}
"""Fields as other programs call them -> their names here."""


def made_of(fields: SamplingFields) -> SamplingParams:
    """SamplingParams of keyword arguments. Raises KvlatheError for a name that is no
    field, and guesses which was meant."""
    known = SamplingFields.__annotations__
    for name in fields:
        if name not in known:
            near = difflib.get_close_matches(name, known, 1, 0.5)
            meant = OTHER_NAMES.get(name, near[0] if near else None)
            raise KvlatheError(
                f"{name} is no sampling parameter",
                f"SamplingParams has {', '.join(known)}",
                f"say {meant}" if meant else "choose one of them",
            )
    return SamplingParams(**fields)


def is_number(value: object, whole: bool = False) -> TypeGuard[float]:
    """Whether a value is a finite number, numpy's included, and no truth value."""
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        return False
    return isinstance(value, numbers.Integral) if whole else math.isfinite(value)


def elements_of(value: object) -> list[object]:
    """The elements of a list; what is none, text and bytes included, as the one element
    None, which no check takes."""
    if isinstance(value, str | bytes | bytearray) or not isinstance(value, Iterable):
        return [None]
    return list(value)
