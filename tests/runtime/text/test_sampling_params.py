"""Parameters that a request may have: the same in Python as over HTTP."""

from __future__ import annotations

import dataclasses
import json
import math
from typing import Any

import numpy as np
import pytest
from pydantic import ValidationError

from kvlathe.base.errors import KvlatheError
from kvlathe.runtime.text.sampling_params import RANGES, SamplingParams
from kvlathe.server.schema import CompletionRequest

WRONG: list[tuple[str, Any]] = [
    ("max_new_tokens", 0),
    ("max_new_tokens", 2.5),
    ("max_new_tokens", 8.0),
    ("max_new_tokens", "8"),
    ("max_new_tokens", True),
    ("max_new_tokens", None),
    ("temperature", -0.1),
    ("temperature", math.nan),
    ("temperature", math.inf),
    ("temperature", "1"),
    ("top_k", -1),
    ("top_k", 1.5),
    ("top_p", 0),
    ("top_p", 1.1),
    ("min_p", -0.1),
    ("repetition_penalty", 0),
    ("presence_penalty", 3),
    ("frequency_penalty", -3),
    ("seed", -1),
    ("seed", 1.5),
    ("seed", 2**64),
    ("seed", "1"),
    ("stop", ""),
    ("stop", ["a", ""]),
    ("stop", [5]),
    ("stop", 5),
    ("stop", b"ab"),
    ("stop", None),
    ("stop_ids", [1.5]),
    ("stop_ids", ["a"]),
    ("stop_ids", b"ab"),
    ("stop_ids", 5),
    ("logit_bias", [(1, 101)]),
    ("logit_bias", [(1.5, 1)]),
    ("logit_bias", [(1, "2")]),
    ("logit_bias", {1: 2}),
    ("logit_bias", [1]),
    ("logprobs", -1),
    ("logprobs", 101),
    ("logprobs", True),
    ("prompt_logprobs", 0.5),
    ("ignore_eos", 1),
]


@pytest.mark.parametrize(("name", "value"), WRONG)
def test_wrong_types_and_ranges_are_refused_by_name(name: str, value: Any) -> None:  # noqa: ANN401  (of any type)
    with pytest.raises(KvlatheError, match=f"{name} is "):
        SamplingParams(**{name: value})


def test_one_stop_string_is_not_its_letters() -> None:
    assert SamplingParams(stop="#zzz").stop_strings == ("#zzz",)
    assert SamplingParams(stop="#zzz") == SamplingParams(stop=["#zzz"])
    assert hash(SamplingParams(stop=["a"], stop_ids=[1], logit_bias=((1, 2),)))


def test_numpys_numbers_become_pythons() -> None:
    given: dict[str, Any] = {"max_new_tokens": np.int64(3), "seed": np.uint8(7)}
    params = SamplingParams(**given)
    assert type(params.max_new_tokens) is int and type(params.seed) is int
    given = {"temperature": np.float32(0.5)}
    assert SamplingParams(**given).temperature == 0.5


def test_zero_new_tokens_are_allowed_only_with_prompt_logprobs() -> None:
    assert SamplingParams(max_new_tokens=0, prompt_logprobs=0).max_new_tokens == 0
    with pytest.raises(KvlatheError, match="max_new_tokens is 0"):
        SamplingParams(max_new_tokens=0)


SHARED = sorted(
    name
    for name in RANGES
    if name in {field.name for field in dataclasses.fields(SamplingParams)}
    and name in CompletionRequest.model_fields
    # The OpenAI API has ranges of its own for these, and has no log-probabilities of prompts.
    and name
    not in ("temperature", "seed", "logprobs", "top_k", "top_p", "prompt_logprobs")
)


@pytest.mark.parametrize("name", SHARED)
def test_http_takes_what_python_takes(name: str) -> None:
    low, high = RANGES[name].low, RANGES[name].high
    for value in (low, high, low - 1e-6, high + 1e-6, (low + high) / 2):
        allowed = RANGES[name].holds(value)
        body = json.dumps({"model": "m", "prompt": "a", name: value})
        try:
            CompletionRequest.model_validate_json(body)
        except ValidationError:
            assert not allowed, (name, value)
        else:
            assert allowed, (name, value)
