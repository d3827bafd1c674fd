"""Requests of Dynamo's frontend to a worker, preprocessed there, in our terms.

The frontend has rendered the chat template and tokenized. It detokenizes, too, and cuts
stop strings off. What this engine cannot do is refused in a sentence.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import cast

from kvlathe.base.errors import KvlatheError
from kvlathe.runtime.requests.sequences import token_ids
from kvlathe.runtime.text.sampling_params import SamplingParams

Fields = Mapping[str, object]
NUMBERS = (
    "temperature",
    "top_p",
    "min_p",
    "repetition_penalty",
    "presence_penalty",
    "frequency_penalty",
)
"""Its sampling options that have the same names here."""
DEFAULTS = {"temperature": 1.0}
"""Defaults of the API that differ from those of SamplingParams."""
REFUSED = {
    "sampling_options": ("guided_decoding", "use_beam_search"),
    "stop_conditions": ("min_tokens", "max_thinking_tokens"),
}
"""Fields that must be absent, off or 0."""


@dataclass(frozen=True, slots=True)
class Asked:
    """One answer of the prompt ``tokens``: Dynamo ends a stream where the first of
    several answers ends, so n is refused. ``tenant``: with whom it shares prefixes,
    Dynamo's cache salt."""

    tokens: list[int]
    params: SamplingParams
    tenant: str

    @classmethod
    def of(cls, request: Fields, max_seq_len: int) -> Asked:
        """A request of Dynamo. Without max_tokens, an answer may be as long as
        ``max_seq_len`` leaves. Raises KvlatheError for what cannot be served."""
        for group, names in REFUSED.items():
            for name in names:
                _refuse(group, name, part_of(request, group).get(name))
        sampling = part_of(request, "sampling_options")
        tokens = token_ids(cast(list[int], request.get("token_ids")))
        params = _params(request, max_seq_len - len(tokens))
        for name in ("n", "best_of"):
            if sampling.get(name) not in (None, 1):
                _refuse("sampling_options", name, sampling[name])
        salt = part_of(request, "routing").get("cache_salt")
        return cls(tokens, params, str(salt or ""))


def part_of(request: Fields, name: str) -> Fields:
    """A group of fields, which may be missing or null."""
    found = request.get(name)
    return cast(Fields, found) if isinstance(found, Mapping) else {}


def _params(request: Fields, room: int) -> SamplingParams:
    sampling = part_of(request, "sampling_options")
    stop = part_of(request, "stop_conditions")
    output = part_of(request, "output_options")
    given: dict[str, object] = dict(DEFAULTS)
    for name in NUMBERS:
        if sampling.get(name) is not None:
            given[name] = sampling[name]
    top_k = sampling.get("top_k") or 0  # -1 is off, too
    given["top_k"] = max(0, top_k) if isinstance(top_k, int) else top_k
    seed = sampling.get("seed")
    given["seed"] = seed % 2**64 if isinstance(seed, int) else seed
    given["logit_bias"] = _bias(sampling.get("logit_bias"))
    asked = stop.get("max_tokens")
    given["max_new_tokens"] = max(1, room) if asked is None else asked
    given["stop"] = stop.get("stop") or ()
    given["stop_ids"] = _stop_ids(stop)
    given["ignore_eos"] = bool(stop.get("ignore_eos"))
    given["logprobs"] = output.get("logprobs")
    given["prompt_logprobs"] = output.get("prompt_logprobs")
    # SamplingParams looks at every value, whatever its type is.
    return cast(type, SamplingParams)(**given)


def _stop_ids(stop: Fields) -> list[int]:
    """Tokens that end an answer. The hidden ones are the end-of-text tokens that the
    frontend knows of: where those are to be ignored, they end nothing."""
    found: list[int] = []
    names = ["stop_token_ids"]
    if not stop.get("ignore_eos"):
        names.append("stop_token_ids_hidden")
    for name in names:
        found += cast(list[int], stop.get(name) or [])
    return found


def _bias(bias: object) -> tuple[tuple[int, object], ...]:
    if not isinstance(bias, Mapping):
        return ()
    entries = cast(Mapping[str, object], bias).items()
    try:
        return tuple((int(token), value) for token, value in entries)
    except ValueError as error:
        raise KvlatheError(
            "logit_bias has a key that is no token id", str(error), "send numbers"
        ) from error


def _refuse(group: str, name: str, value: object) -> None:
    if value:
        raise KvlatheError(
            f"{name} is {value!r:.80}",
            f"this engine has no such option ({group})",
            "leave it out",
        )
