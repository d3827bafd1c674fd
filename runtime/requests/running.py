"""A running sequence as data, and back: what of it is not in its pages."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence as Items

from kvlathe.base.errors import KvlatheError
from kvlathe.runtime.cache.parcel import Parcel, Running, damaged
from kvlathe.runtime.requests.sequences import SequenceFactory
from kvlathe.runtime.scheduling.sequence import Sequence
from kvlathe.runtime.text.sampler import TokenLogprob
from kvlathe.runtime.text.sampling_params import RANGES, SamplingParams, is_number
from kvlathe.runtime.text.structure import Structure


def running_of(sequence: Sequence) -> Running:
    """Deadlines stay behind: they are of this machine's clock."""
    params = dataclasses.asdict(sequence.params)
    return Running(
        prompt_tokens=sequence.prompt_tokens,
        params=json.dumps(params),
        seed=sequence.sampler.seed,
        drawn=sequence.sampler.drawn,
        logprobs=_said(sequence.logprobs),
        prompt_logprobs=_said(sequence.prompt_logprobs),
    )


def resumed(factory: SequenceFactory, parcel: Parcel, salt: bytes) -> Sequence:
    """The sequence of a parcel, without its pages: it has said what it had said there,
    and draws the tokens that it would have drawn. Raises KvlatheError for what is none,
    or what this engine cannot serve."""
    running = parcel.running
    if running is None:
        raise KvlatheError(
            "no sequence can go on from this parcel",
            "it holds a prefix",
            "adopt it as one",
        )
    tokens = parcel.tokens
    if running.prompt_tokens > len(tokens) or running.seed > RANGES["seed"].high:
        raise damaged("its prompt is longer than itself, or its seed is none")
    sequence = factory.request(tokens[: running.prompt_tokens], _params(running))
    answer = tokens[running.prompt_tokens :]
    if len(tokens) >= sequence.most_tokens or parcel.cached >= len(tokens):
        raise damaged("no token of its sequence is left to compute")
    factory.check(tokens, 0)
    sequence.tokens = tokens
    sequence.cached = parcel.cached
    sequence.salt = salt
    if parcel.cached >= running.prompt_tokens:
        sequence.path = sequence.path.after
    sequence.sampler.seed = running.seed
    sequence.sampler.drawn = running.drawn
    sequence.logprobs = logprobs_of(running.logprobs)
    sequence.prompt_logprobs = logprobs_of(running.prompt_logprobs)
    _check_logprobs(sequence)
    for token in answer:
        if sequence.text:
            sequence.text.push(token)
        if sequence.guide:
            sequence.guide.accept(token)
    return sequence


def _check_logprobs(sequence: Sequence) -> None:
    """Raises KvlatheError for another number of them than were reported there."""
    params = sequence.params
    answered = sequence.answered if params.logprobs is not None else 0
    if len(sequence.logprobs) != answered:
        raise damaged(f"its answer does not have {answered} log-probabilities")
    most = sequence.prompt_tokens - 1 if params.prompt_logprobs is not None else 0
    if not min(sequence.cached, most) <= len(sequence.prompt_logprobs) <= most:
        raise damaged(f"its prompt does not have {most} log-probabilities")


def _params(running: Running) -> SamplingParams:
    try:
        fields = json.loads(running.params)
        fields["logit_bias"] = tuple(map(tuple, fields["logit_bias"]))
        if structure := fields.get("structure"):
            fields["structure"] = Structure(**structure)
        params = SamplingParams(**fields)
    except (LookupError, TypeError, ValueError, RecursionError) as error:
        raise damaged(f"its sampling parameters are malformed ({error})") from error
    if params.adapter is not None:
        raise damaged("it names an adapter, and sequences with one never leave")
    return params


def _said(logprobs: Items[TokenLogprob]) -> str:
    return json.dumps([(one.token_id, one.logprob, one.top) for one in logprobs])


def logprobs_of(text: str) -> list[TokenLogprob]:
    """The log-probabilities that running_of wrote. Raises KvlatheError."""
    found: list[TokenLogprob] = []
    try:
        for token, logprob, top in json.loads(text):
            best = [_pair(*pair) for pair in top]
            found.append(TokenLogprob(*_pair(token, logprob), tuple(best)))
    except (TypeError, ValueError, RecursionError) as error:
        raise damaged(f"its log-probabilities are malformed ({error})") from error
    return found


def _pair(token: object, logprob: object) -> tuple[int, float]:
    """A token id and its log-probability. Raises TypeError for what is none."""
    if not is_number(token, whole=True) or type(logprob) is not float:
        raise TypeError("no token and logarithm")
    return int(token), logprob
