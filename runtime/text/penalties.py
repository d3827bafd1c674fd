"""Penalties and biases: changes that a request's own tokens make to its logits.

The host turns them into changes of single logits. Where tokens are counted beside the
logits (runtime/sessions/torch_cuda/sampling/counts.py), only the penalties themselves
go there.
"""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from kvlathe.runtime.text.masks import Guide
from kvlathe.runtime.text.sampling_params import SamplingParams

Float32 = npt.NDArray[np.float32]
Float64 = npt.NDArray[np.float64]
Int64 = npt.NDArray[np.int64]


class Sampler:
    """State of one request's sampling: its parameters, its seed (a new one where it has
    none), and how many tokens it has drawn."""

    def __init__(self, params: SamplingParams) -> None:
        self.params = params
        self.seed = secrets.randbits(64) if params.seed is None else params.seed
        self.drawn = 0


@dataclass(eq=False, slots=True)
class Request:
    """One row's request. ``context``: the prompt, of ``prompt_tokens`` tokens, and the
    answer so far. ``guide``: of an answer that has a structure. ``ahead``: tokens
    before it that are only guessed; its random number is that of the token it would be.
    ``pending``: tokens after the context that were chosen and that the host does not
    know."""

    sampler: Sampler
    context: Sequence[int]
    prompt_tokens: int
    guide: Guide | None = None
    ahead: int = 0
    pending: int = 0


@dataclass(frozen=True, slots=True)
class Changes:
    """Logits that a request's penalties and biases change: entry i is of token
    ``tokens[i]`` in row ``rows[i]``; no place is there twice.

    A positive logit is divided by ``penalty`` and a negative one multiplied by it
    (CTRL, Keskar et al. 2019); then ``added`` is added.
    """

    rows: Int64
    tokens: Int64
    penalty: Float32
    added: Float32


@dataclass(frozen=True, slots=True)
class Penalties:
    """Penalties of rows whose tokens are counted beside the logits: P of the R
    ``rows``, their ``requests``, and the penalties of each [P]."""

    rows: Int64
    requests: tuple[Request, ...]
    repetition: Float32
    presence: Float64
    frequency: Float64


def penalties_of(requests: Sequence[Request]) -> Penalties | None:
    """Collect the rows that are counted; None where no row is."""
    asked: list[Request] = []
    rows: list[int] = []
    for row, request in enumerate(requests):
        if request.sampler.params.is_counted:
            rows.append(row)
            asked.append(request)
    if not rows:
        return None
    params = [request.sampler.params for request in asked]
    repetition = [one.repetition_penalty for one in params]
    presence = [one.presence_penalty for one in params]
    frequency = [one.frequency_penalty for one in params]
    return Penalties(
        rows=np.array(rows, np.int64),
        requests=tuple(asked),
        repetition=np.array(repetition, np.float32),
        presence=np.array(presence, np.float64),
        frequency=np.array(frequency, np.float64),
    )


def changes_of(requests: Sequence[Request], counted: bool = False) -> Changes | None:
    """Penalties and biases of all rows; None where no row has any. ``counted``: without
    the rows that counts say all of."""
    parts: list[tuple[int, Int64, Float32, Float32]] = []
    for row, request in enumerate(requests):
        params = request.sampler.params
        if counted and params.is_counted:
            continue
        if has_changes(params):
            parts.append((row, *_changed(request)))
    if not parts:
        return None
    sizes = [len(tokens) for _, tokens, _, _ in parts]
    return Changes(
        np.repeat([row for row, _, _, _ in parts], sizes).astype(np.int64),
        np.concatenate([tokens for _, tokens, _, _ in parts]),
        np.concatenate([penalty for _, _, penalty, _ in parts]),
        np.concatenate([added for _, _, _, added in parts]),
    )


def has_changes(params: SamplingParams) -> bool:
    return params.has_penalties or bool(params.logit_bias)


def _changed(request: Request) -> tuple[Int64, Float32, Float32]:
    """The tokens whose logits change, their penalties, and what is added to each."""
    params = request.sampler.params
    context = np.asarray(request.context, np.int64)
    answer = context[request.prompt_tokens :]
    bias = np.array([token for token, _ in params.logit_bias], np.int64)
    amounts = np.array([amount for _, amount in params.logit_bias], np.float64)
    repeated = context if params.repetition_penalty != 1 else answer
    tokens = np.unique(np.concatenate([bias, repeated]))
    penalty = np.ones(len(tokens), np.float32)
    if params.repetition_penalty != 1:
        penalty[np.isin(tokens, context)] = params.repetition_penalty
    added = np.zeros(len(tokens), np.float64)
    used, times = np.unique(answer, return_counts=True)
    taken = params.presence_penalty + params.frequency_penalty * times
    added[np.searchsorted(tokens, used)] -= taken
    np.add.at(added, np.searchsorted(tokens, bias), amounts)
    return tokens, penalty, added.astype(np.float32)
