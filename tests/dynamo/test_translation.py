"""Requests and answers in Dynamo's terms and ours; needs no Dynamo."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvlathe.base.errors import KvlatheError
from kvlathe.dynamo.asked import Asked
from kvlathe.dynamo.blocks import BlockEvents
from kvlathe.dynamo.told import Told, cut
from kvlathe.runtime.requests.request import Delta
from kvlathe.runtime.text.sampler import TokenLogprob
from kvlathe.runtime.text.sampling_params import SamplingParams

LIMIT = 512


def asked(**groups: Any) -> Asked:  # noqa: ANN401
    return Asked.of({"token_ids": [1, 2, 3], **groups}, LIMIT)


def test_missing_fields_of_a_dynamo_request_are_defaults() -> None:
    nulls = dict.fromkeys(("temperature", "top_p", "top_k", "seed", "n", "min_p"))
    found = asked(sampling_options=nulls, stop_conditions=None)
    expected = SamplingParams(max_new_tokens=LIMIT - 3, temperature=1.0)
    assert found == asked()
    assert found == Asked([1, 2, 3], expected, "")


@given(
    st.fixed_dictionaries(
        {
            "temperature": st.floats(0, 5),
            "top_p": st.floats(0.01, 1),
            "min_p": st.floats(0, 1),
            "repetition_penalty": st.floats(0.01, 100),
            "presence_penalty": st.floats(-2, 2),
            "frequency_penalty": st.floats(-2, 2),
        }
    ),
    st.integers(-1, 50),
    st.integers(-(2**63), 2**63 - 1),
)
def test_every_sampling_field_of_a_dynamo_request_arrives(
    numbers: dict[str, float], top_k: int, seed: int
) -> None:
    options = numbers | {"top_k": top_k, "seed": seed, "logit_bias": {"7": 1.5}}
    stop = {"max_tokens": 9, "stop": ["x"], "stop_token_ids": [4]}
    found = asked(
        sampling_options=options,
        stop_conditions=stop | {"stop_token_ids_hidden": [0]},
        output_options={"logprobs": 2, "prompt_logprobs": 0},
        routing={"cache_salt": "us"},
    )
    fields = dataclasses.asdict(found.params)
    assert {name: fields[name] for name in numbers} == numbers
    assert fields["top_k"] == max(0, top_k)
    assert fields["seed"] == seed % 2**64
    assert fields["logit_bias"] == ((7, 1.5),)
    assert (fields["max_new_tokens"], fields["stop"]) == (9, ("x",))
    assert sorted(fields["stop_ids"]) == [0, 4]
    assert (fields["logprobs"], fields["prompt_logprobs"]) == (2, 0)
    assert found.tenant == "us"


def test_text_that_may_not_end_ignores_hidden_stops() -> None:
    stop = {"ignore_eos": True, "stop_token_ids_hidden": [0], "stop_token_ids": [4]}
    params = asked(stop_conditions=stop).params
    assert params.ignore_eos and params.stop_ids == (4,)


@pytest.mark.parametrize(
    "groups",
    [
        {"stop_conditions": {"min_tokens": 2}},
        {"sampling_options": {"guided_decoding": {"json": {}}}},
        {"sampling_options": {"best_of": 3}},
        {"sampling_options": {"n": 2}},
        {"sampling_options": {"temperature": "hot"}},
        {"sampling_options": {"logit_bias": {"x": 1}}},
        {"token_ids": "text"},
        {"token_ids": [1.5]},
    ],
)
def test_dynamo_requests_that_cannot_be_served_are_refused(
    groups: dict[str, Any],
) -> None:
    with pytest.raises(KvlatheError):
        asked(**groups)


def test_chunks_have_tokens_logprobs_and_counts() -> None:
    told = Told(5, logprobs=True)
    one = TokenLogprob(3, -0.5, ((4, -0.25), (3, -0.5)))
    chunk = told.chunk(Delta(1, "", (3,), (one,), (one,)))
    assert (chunk["token_ids"], chunk["index"]) == ([3], 1)
    assert chunk["log_probs"] == [-0.5]
    tops: Any = chunk["top_logprobs"]
    assert [(t["rank"], t["token_id"], t["logprob"]) for t in tops[0]] == [
        (1, 4, -0.25),
        (2, 3, -0.5),
    ]
    assert chunk["engine_data"] == {
        "prompt_logprobs": [None, {"4": {"logprob": -0.25}, "3": {"logprob": -0.5}}]
    }
    assert "finish_reason" not in chunk
    last = told.chunk(Delta(0, "", (6, 7), (one, one), (), "stop"))
    assert last["finish_reason"] == "stop"
    assert last["completion_usage"] == {
        "prompt_tokens": 5,
        "completion_tokens": 3,
        "total_tokens": 8,
    }


@given(st.lists(st.integers(0, 9), min_size=1, max_size=8), st.integers(1, 9))
def test_a_dynamo_answer_is_cut_at_its_length(tokens: list[int], most: int) -> None:
    chunk: dict[str, object] = {
        "token_ids": tokens,
        "log_probs": list(map(float, tokens)),
    }
    found = cut(chunk, most)
    assert found["token_ids"] == tokens[:most]
    assert found["log_probs"] == tokens[:most]
    assert found.get("finish_reason") == ("length" if len(tokens) >= most else None)
    ended = cut(chunk | {"finish_reason": "stop"}, most)
    assert ended["finish_reason"] == ("length" if len(tokens) > most else "stop")


class Heard:
    """A router that keeps what it is told."""

    def __init__(self) -> None:
        self.held: dict[int, tuple[int | None, list[int], str | None]] = {}

    def publish_stored(
        self,
        token_ids: list[int],
        num_block_tokens: list[int],
        block_hashes: list[int],
        parent_hash: int | None,
        *,
        cache_salt: str | None,
    ) -> None:
        assert num_block_tokens == [len(token_ids)]
        self.held[block_hashes[0]] = (parent_hash, token_ids, cache_salt)

    def publish_removed(self, block_hashes: list[int]) -> None:
        del self.held[block_hashes[0]]


def test_block_names_are_signed_and_chained() -> None:
    heard = Heard()
    events = BlockEvents(heard)
    events.stored(b"\xff" * 32, None, [1, 2], b"")
    events.stored(b"\x01" + b"\0" * 31, b"\xff" * 32, [3, 4], b"us")
    assert heard.held == {-1: (None, [1, 2], None), 1: (-1, [3, 4], "us")}
    events.removed(b"\xff" * 32)
    assert list(heard.held) == [1]
