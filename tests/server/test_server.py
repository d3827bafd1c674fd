"""The HTTP server as its clients see it: the official OpenAI client, and what a rude
one gets."""

from __future__ import annotations

import json
import re
import socket
import time
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any, cast

import httpx2 as httpx
import numpy as np
import numpy.typing as npt
import openai
import pytest
from fastapi.exceptions import RequestValidationError
from pydantic import BaseModel, ValidationError

from kvlathe.plan.manifest import Manifest
from kvlathe.runtime.async_engine import AsyncEngine
from kvlathe.runtime.sessions.protocols import StepPlan
from kvlathe.runtime.text.sampling_params import SamplingParams
from kvlathe.server.errors import invalid_request
from kvlathe.server.metrics import State
from kvlathe.server.schema import ChatRequest, CompletionRequest
from tests.support.runtime_cases import llm, text
from tests.support.serving_cases import (
    MODEL_NAME,
    Served,
    replaced,
    serving,
    with_template,
)

KEY = "sk-test"
PROMPT = "def main():\n"


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    with serving(
        with_template(llm("torch", "split")), keys=[KEY, "sk-other"], max_body=1 << 16
    ) as found:
        yield found


@pytest.fixture(autouse=True)
def nothing_is_left(served: Served) -> Iterator[None]:
    yield
    assert served.idle()


@pytest.fixture(scope="module")
def client(served: Served) -> openai.OpenAI:
    return openai.OpenAI(
        base_url=f"{served.url}/v1", api_key=KEY, max_retries=0, timeout=60
    )


def alone(prompt: str, **params: Any) -> Any:  # noqa: ANN401
    return llm("torch", "split").generate([prompt], SamplingParams(**params))[0]


def post(
    served: Served,
    path: str = "completions",
    key: str = KEY,
    **body: Any,  # noqa: ANN401
) -> httpx.Response:
    headers = {"Authorization": f"Bearer {key}"}
    return httpx.post(
        f"{served.url}/v1/{path}",
        json={"model": MODEL_NAME, **body},
        headers=headers,
        timeout=60,
    )


# -- answers ---------------------------------------------------------------------------
def test_a_completion_is_the_engines_answer(client: openai.OpenAI) -> None:
    found = client.completions.create(
        model=MODEL_NAME, prompt=PROMPT, max_tokens=24, temperature=0
    )
    expected = alone(PROMPT, max_new_tokens=24)
    assert (
        found.choices[0].text == expected.text
        and found.choices[0].finish_reason == "length"
    )
    assert found.usage and found.usage.prompt_tokens == expected.prompt_tokens
    assert found.usage.completion_tokens == 24 and found.object == "text_completion"


def test_a_stream_is_the_same_in_pieces_with_usage_at_the_end(
    client: openai.OpenAI,
) -> None:
    chunks = list(
        client.completions.create(
            model=MODEL_NAME,
            prompt=PROMPT,
            max_tokens=24,
            temperature=0.8,
            seed=3,
            stream=True,
            stream_options={"include_usage": True},
        )
    )
    expected = alone(PROMPT, max_new_tokens=24, temperature=0.8, seed=3)
    assert (
        "".join(choice.text for chunk in chunks for choice in chunk.choices)
        == expected.text
    )
    assert [
        c.finish_reason for chunk in chunks for c in chunk.choices if c.finish_reason
    ] == ["length"]
    assert (
        not chunks[-1].choices
        and chunks[-1].usage
        and chunks[-1].usage.completion_tokens == 24
    )
    assert len({chunk.id for chunk in chunks}) == 1 and len(chunks) > 5


def test_several_prompts_and_choices_are_numbered_prompt_by_prompt(
    client: openai.OpenAI,
) -> None:
    prompts = [PROMPT, "# Install\n"]
    found = client.completions.create(
        model=MODEL_NAME,
        prompt=prompts,
        n=3,
        max_tokens=6,
        temperature=1,
        seed=-1,
        extra_body={"ignore_eos": True},
    )
    assert [choice.index for choice in found.choices] == list(range(6))
    for choice in found.choices:
        seed = (2**64 - 1 + choice.index % 3) % 2**64
        expected = alone(
            prompts[choice.index // 3],
            max_new_tokens=6,
            temperature=1,
            seed=seed,
            ignore_eos=True,
        )
        assert choice.text == expected.text


def test_token_ids_are_a_prompt_too(client: openai.OpenAI, served: Served) -> None:
    ids = served.llm.tokenizer.encode(PROMPT)
    each: Any = (ids, [ids])
    for prompt in each:
        found = client.completions.create(
            model=MODEL_NAME, prompt=prompt, max_tokens=5, temperature=0
        )
        assert found.choices[0].text == alone(PROMPT, max_new_tokens=5).text


def test_stop_strings_and_stop_tokens_end_the_text(client: openai.OpenAI) -> None:
    whole = alone(PROMPT, max_new_tokens=40, ignore_eos=True)
    stop = whole.text[20:23]
    found = client.completions.create(
        model=MODEL_NAME,
        prompt=PROMPT,
        max_tokens=40,
        temperature=0,
        stop=[stop, "zzz"],
    )
    assert (
        found.choices[0].text == whole.text[: whole.text.index(stop)]
        and found.choices[0].finish_reason == "stop"
    )
    body = {"stop_token_ids": [whole.token_ids[3]]}
    found = client.completions.create(
        model=MODEL_NAME, prompt=PROMPT, max_tokens=40, temperature=0, extra_body=body
    )
    assert (
        found.usage
        and found.usage.completion_tokens
        == whole.token_ids.index(whole.token_ids[3]) + 1
    )


def test_logprobs_and_echo(client: openai.OpenAI, served: Served) -> None:
    found = client.completions.create(
        model=MODEL_NAME,
        prompt=PROMPT,
        max_tokens=4,
        temperature=0,
        logprobs=2,
        echo=True,
    )
    choice, expected = found.choices[0], alone(PROMPT, max_new_tokens=4, logprobs=2)
    assert choice.text == PROMPT + expected.text and choice.logprobs
    report = choice.logprobs
    assert (
        report.token_logprobs
        and report.tokens
        and report.text_offset
        and report.top_logprobs
    )
    assert "".join(report.tokens) == choice.text and report.token_logprobs[0] is None
    assert all(
        choice.text[at:].startswith(token)
        for at, token in zip(report.text_offset, report.tokens, strict=True)
    )
    assert report.token_logprobs[-4:] == pytest.approx(
        [entry.logprob for entry in expected.logprobs], abs=1e-3
    )
    assert all(len(top) in (2, 3) for top in report.top_logprobs[1:])
    ids = served.llm.tokenizer.encode(PROMPT)
    logits = llm("torch", "split").logits(ids, range(len(ids) - 1)).astype(np.float64)
    scores = logits - np.log(np.exp(logits).sum(1, keepdims=True))
    assert report.token_logprobs[1 : len(ids)] == pytest.approx(
        scores[range(len(ids) - 1), ids[1:]].tolist(), abs=1e-3
    )
    scored = client.completions.create(
        model=MODEL_NAME, prompt=PROMPT, max_tokens=0, logprobs=1, echo=True
    )
    assert scored.choices[0].text == PROMPT and scored.choices[0].logprobs
    assert scored.choices[0].logprobs.token_logprobs == pytest.approx(
        report.token_logprobs[: len(ids)], abs=1e-3
    )


@pytest.mark.parametrize("as_ids", [False, True])
def test_characters_of_several_tokens_are_reported_whole(
    client: openai.OpenAI, served: Served, as_ids: bool
) -> None:
    """A character may be split over tokens: these are shown as bytes, and offsets count
    characters of the text."""
    text, ids = "日本 naïve 🎉!", served.llm.tokenizer.encode("日本 naïve 🎉!")
    found = client.completions.create(
        model=MODEL_NAME,
        prompt=ids if as_ids else text,
        max_tokens=0,
        logprobs=20,
        echo=True,
    )
    report = found.choices[0].logprobs
    assert (
        found.choices[0].text == text
        and report
        and report.tokens
        and report.text_offset
        and report.top_logprobs
    )
    shown = [
        bytes.fromhex(token[6:].replace("\\x", ""))
        if token.startswith("bytes:")
        else token.encode()
        for token in report.tokens
    ]
    assert b"".join(shown) == text.encode() and any(
        token.startswith("bytes:") for token in report.tokens
    )
    begun = [
        len(b"".join(shown[:i]).decode(errors="ignore")) for i in range(len(shown))
    ]
    assert report.text_offset == begun
    assert all(
        len(top) >= 20 for top in report.top_logprobs[1:]
    )  # none of them hides another


def test_a_prompt_is_echoed_as_it_was_sent(client: openai.OpenAI) -> None:
    text = "a<|endoftext|>b"
    found = client.completions.create(
        model=MODEL_NAME, prompt=text, max_tokens=0, logprobs=0, echo=True
    ).choices[0]
    assert (
        found.text == text
        and found.logprobs
        and found.logprobs.text_offset == [0, 1, 14]
    )


def test_bytes_of_a_chats_tokens_make_up_its_text(
    client: openai.OpenAI, served: Served
) -> None:
    ids = served.llm.tokenizer.encode("日本語é🎉")
    found = client.chat.completions.create(
        model=MODEL_NAME,
        messages=[{"role": "user", "content": "a"}],
        max_tokens=24,
        seed=1,
        logprobs=True,
        logit_bias={str(token): 100 for token in ids},
    ).choices[0]
    assert found.logprobs and found.logprobs.content
    whole = b"".join(bytes(entry.bytes or ()) for entry in found.logprobs.content)
    assert (
        whole.decode(errors="replace") == found.message.content and not whole.isascii()
    )


def test_penalties_and_biases_reach_the_sampler(
    client: openai.OpenAI, served: Served
) -> None:
    plain = alone("def main():", max_new_tokens=20, ignore_eos=True)
    again = client.completions.create(
        model=MODEL_NAME,
        prompt="def main():",
        max_tokens=20,
        temperature=0,
        frequency_penalty=2,
        presence_penalty=2,
        extra_body={"ignore_eos": True},
    )
    assert (
        len(set(plain.token_ids))
        < 10
        < len(set(served.llm.tokenizer.encode(again.choices[0].text)))
    )
    biased = client.completions.create(
        model=MODEL_NAME,
        prompt=PROMPT,
        max_tokens=3,
        temperature=0,
        logit_bias={"17": 100},
    )
    assert (
        served.llm.tokenizer.encode(biased.choices[0].text, add_special_tokens=False)
        == [17] * 3
    )


def test_chats_go_through_the_template(client: openai.OpenAI) -> None:
    messages: Any = [
        {"role": "system", "content": "be brief"},
        {
            "role": "user",
            "content": [
                {"type": "text", "text": "hel"},
                {"type": "text", "text": "lo"},
            ],
        },
    ]
    found = client.chat.completions.create(
        model=MODEL_NAME,
        messages=messages,
        max_completion_tokens=8,
        temperature=0,
        logprobs=True,
        top_logprobs=2,
    )
    expected = alone("<system>be brief\n<user>hello\n<assistant>", max_new_tokens=8)
    choice = found.choices[0]
    assert (
        choice.message.content == expected.text and choice.message.role == "assistant"
    )
    assert choice.logprobs and choice.logprobs.content
    assert "".join(entry.token for entry in choice.logprobs.content) == expected.text
    assert all(
        len(entry.top_logprobs) == 2 and entry.bytes
        for entry in choice.logprobs.content
    )
    chunks = list(
        client.chat.completions.create(
            model=MODEL_NAME,
            messages=messages,
            max_tokens=8,
            temperature=0,
            stream=True,
            n=2,
        )
    )
    deltas = [
        choice for chunk in chunks for choice in chunk.choices if choice.index == 1
    ]
    assert deltas[0].delta.role == "assistant" and deltas[-1].finish_reason == "length"
    assert "".join(choice.delta.content or "" for choice in deltas) == expected.text


def test_models_health_metrics_and_documentation(
    client: openai.OpenAI, served: Served
) -> None:
    assert [model.id for model in client.models.list()] == [MODEL_NAME]
    assert client.models.retrieve(MODEL_NAME).owned_by == "kvlathe"
    assert httpx.get(f"{served.url}/health").json() == {"status": "ok"}
    assert (
        "/v1/chat/completions"
        in httpx.get(f"{served.url}/openapi.json").json()["paths"]
    )
    said = httpx.get(f"{served.url}/metrics").text
    for name in (
        "num_requests_running",
        "num_requests_waiting",
        "kv_cache_usage_perc",
        "prefix_cache_hits_total",
        "prefix_cache_queries_total",
        "num_preemptions_total",
        "prompt_tokens_total",
        "generation_tokens_total",
        "time_to_first_token_seconds_bucket",
        "time_per_output_token_seconds_bucket",
        "e2e_request_latency_seconds_bucket",
        "kv_cache_bytes_saved",
    ):
        assert re.search(
            rf'^kvlathe_{name}{{.*model_name="lathe-5m".*}} [\d.-]', said, re.MULTILINE
        ), name


def test_metrics_count_what_happened(client: openai.OpenAI, served: Served) -> None:
    def counts() -> dict[str, float]:
        said = httpx.get(f"{served.url}/metrics").text
        found = re.findall(r"^kvlathe_(\w+){[^}]*} ([\d.e+-]+)$", said, re.MULTILINE)
        return {name: sum(float(v) for k, v in found if k == name) for name, _ in found}

    before = counts()
    client.completions.create(
        model=MODEL_NAME,
        prompt=[[5] * 10, [6] * 20],
        max_tokens=7,
        extra_body={"ignore_eos": True},
    )
    with pytest.raises(openai.BadRequestError):
        client.completions.create(model=MODEL_NAME, prompt="a", max_tokens=10**6)
    assert served.idle()
    after = counts()
    assert after["http_errors_total"] - before.get("http_errors_total", 0) == 1
    assert after["prompt_tokens_total"] - before["prompt_tokens_total"] == 30
    assert after["generation_tokens_total"] - before["generation_tokens_total"] == 14
    assert (
        after["time_to_first_token_seconds_count"]
        - before["time_to_first_token_seconds_count"]
        == 2
    )
    assert (
        after["time_per_output_token_seconds_count"]
        - before["time_per_output_token_seconds_count"]
        == 12
    )


IMAGE = {"type": "image_url", "image_url": {"url": "file:///etc/passwd"}}


# -- refusals --------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("path", "body", "status", "param"),
    [
        ("completions", {"prompt": "a", "temperature": 3}, 400, "temperature"),
        ("completions", {"prompt": "a", "temperature": "1"}, 400, "temperature"),
        ("completions", {}, 400, "prompt"),
        ("completions", {"prompt": []}, 400, "prompt"),
        ("completions", {"prompt": ""}, 400, "prompt"),
        ("completions", {"prompt": [99999]}, 400, "prompt"),
        ("completions", {"prompt": [-1]}, 400, "prompt.0"),
        ("completions", {"prompt": "\ud800"}, 400, "prompt"),
        ("completions", {"prompt": "a", "max_tokens": 5000}, 400, "max_tokens"),
        ("completions", {"prompt": [5] * 4000, "max_tokens": 200}, 400, "prompt"),
        ("completions", {"prompt": "a", "max_tokens": 0}, 400, "max_tokens"),
        ("completions", {"prompt": "a", "n": 0}, 400, "n"),
        ("completions", {"prompt": "a", "n": 100}, 400, "n"),
        ("completions", {"prompt": [[5]] * 200}, 400, "prompt"),
        ("completions", {"prompt": [[5]] * 8000, "n": 128}, 400, "n"),
        ("completions", {"prompt": "a", "best_of": 3}, 400, "best_of"),
        ("completions", {"prompt": "a", "suffix": "b"}, 400, "suffix"),
        ("completions", {"prompt": "a", "stop": ["a", ""]}, 400, "stop"),
        ("completions", {"prompt": "a", "logit_bias": {"x": 1}}, 400, "logit_bias"),
        ("completions", {"prompt": "a", "logit_bias": {"99999": 1}}, 400, "logit_bias"),
        ("completions", {"prompt": "a", "logit_bias": {"1" * 5000: 1}}, 400, "logit_bias"),
        ("completions", {"prompt": "a", "stop_token_ids": [8192]}, 400, "stop_token_ids"),
        ("completions", {"prompt": "a", "trust_remote_code": True}, 400, "trust_remote_code"),
        ("completions", {"prompt": "a", "stream_options": {"foo": 1}}, 400, "stream_options.foo"),
        ("completions", {"prompt": "a", "stream_options": {"include_usage": True}}, 400, "stream_options"),
        ("completions", {"prompt": "a", "logit_bias": {str(i): 1 for i in range(1025)}}, 400, "logit_bias"),
        ("completions", {"prompt": "a", "deadline_seconds": 1e-6}, 408, "deadline_seconds"),
        ("chat/completions", {"messages": []}, 400, "messages"),
        ("chat/completions", {"messages": [{"role": "wizard", "content": "a"}]}, 400, "messages.0.role"),
        ("chat/completions", {"messages": [{"role": "user", "content": "a"}], "tools": [{}]}, 400, "tools"),
        ("chat/completions", {"messages": [{"role": "user", "content": "a"}], "top_logprobs": 2}, 400, "top_logprobs"),
        ("chat/completions", {"messages": [{"role": "user", "content": [IMAGE]}]}, 400, "messages.0.content.0.type"),
        ("completions", {"model": "gpt-4", "prompt": "a"}, 404, "model"),
    ],
)  # fmt: skip
def test_bad_requests_are_answered_in_the_openai_form(
    served: Served, path: str, body: dict[str, Any], status: int, param: str
) -> None:
    content = json.dumps({"model": MODEL_NAME, **body})
    headers = {"Authorization": f"Bearer {KEY}", "Content-Type": "application/json"}
    found = httpx.post(
        f"{served.url}/v1/{path}", content=content, headers=headers, timeout=60
    )
    error = found.json()["error"]
    assert found.status_code == status and error["param"] == param, error
    assert param.split(".")[-1] in error["message"] and set(error) == {
        "message",
        "type",
        "param",
        "code",
    }


def test_the_client_raises_its_own_errors(
    client: openai.OpenAI, served: Served
) -> None:
    with pytest.raises(openai.NotFoundError, match="does not exist"):
        client.completions.create(model="gpt-4", prompt="a")
    with pytest.raises(openai.BadRequestError, match="temperature"):
        client.completions.create(model=MODEL_NAME, prompt="a", temperature=9)
    stranger = openai.OpenAI(
        base_url=f"{served.url}/v1", api_key="sk-wrong", max_retries=0
    )
    with pytest.raises(openai.AuthenticationError, match="Incorrect API key"):
        stranger.models.list()


def test_a_passed_deadline_is_not_tried_again_by_the_client(served: Served) -> None:
    patient = openai.OpenAI(base_url=f"{served.url}/v1", api_key=KEY, max_retries=2)
    seen, submit = [], served.engine.submit
    served.engine.submit = lambda *a, **k: seen.append(a) or submit(*a, **k)
    try:
        with pytest.raises(openai.APIStatusError, match="deadline_seconds"):
            patient.completions.create(
                model=MODEL_NAME, prompt="a", extra_body={"deadline_seconds": 1e-6}
            )
    finally:
        served.engine.submit = submit
    assert len(seen) == 1


@pytest.mark.parametrize(
    ("kind", "body"),
    [
        (CompletionRequest, {"prompt": [-1] * 50_000}),
        (CompletionRequest, {"prompt": [5] * 50_000 + [-1]}),
        (CompletionRequest, {"prompt": [[-1]] * 50_000}),
        (CompletionRequest, {"prompt": [""] * 50_000}),
        (CompletionRequest, {"prompt": "a", "stop": [1] * 50_000}),
        (CompletionRequest, {"prompt": "a", "stop_token_ids": [-1] * 50_000}),
        (
            CompletionRequest,
            {"prompt": "a", "logit_bias": {str(i): "x" for i in range(50_000)}},
        ),
        (CompletionRequest, {"prompt": "a", **{f"k{i}": 1 for i in range(50_000)}}),
        (
            CompletionRequest,
            {"prompt": "a", "stream_options": {f"k{i}": 1 for i in range(50_000)}},
        ),
        (ChatRequest, {"messages": [{}] * 50_000}),
        (ChatRequest, {"messages": [{"role": "user", "content": [{}] * 50_000}]}),
    ],
)
def test_of_a_million_faults_few_are_looked_at(
    kind: type[BaseModel], body: dict[str, Any]
) -> None:
    """Each would cost kilobytes and time in which the server answers nobody."""
    with pytest.raises(ValidationError) as refused:
        kind.model_validate({"model": MODEL_NAME, **body})
    assert refused.value.error_count() < 8


def test_too_many_prompts_are_called_too_many() -> None:
    body = {"model": MODEL_NAME, "prompt": [""] * 50_000}
    with pytest.raises(ValidationError) as refused:
        CompletionRequest.model_validate(body)
    found = invalid_request(
        RequestValidationError(
            [{**e, "loc": ("body", *e["loc"])} for e in refused.value.errors()],
            body=body,
        )
    )
    assert "at most" in found.detail and found.param == "prompt"


def test_a_text_that_cannot_fit_is_not_split_into_tokens(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokenizer, kept = served.llm.tokenizer, served.llm.limits
    replaced(served.llm, max_input_len=16)
    length = 16 * max(len(piece) for piece in tokenizer.backend.get_vocab()) + 1
    monkeypatch.setattr(
        tokenizer, "encode", lambda *_, **__: pytest.fail("it was split")
    )
    found = post(served, prompt=" " * length)
    served.llm.engine.scheduler.limits = kept
    assert (
        found.status_code == 400
        and found.json()["error"]["code"] == "context_length_exceeded"
    )


def test_a_chat_that_names_no_length_gets_what_the_cache_holds(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A cache may hold less than the longest sequence that the engine takes."""
    asked, pool, submit = [], served.llm.pool, served.engine.submit
    monkeypatch.setattr(
        served.engine,
        "submit",
        lambda *a, **k: asked.append(a[1].max_new_tokens) or submit(*a, **k),
    )
    fits = pool.fits
    monkeypatch.setattr(pool, "fits", lambda pages: fits(pages) and pages[0][0] <= 2)
    found = post(
        served,
        "chat/completions",
        messages=[{"role": "user", "content": "a"}],
        logit_bias={"0": 100},
    )
    prompt = found.json()["usage"]["prompt_tokens"]
    assert found.status_code == 200 and asked == [
        2 * served.llm.plan.page_tokens - prompt
    ]


def test_every_response_says_which_request_it_answers(
    served: Served, client: openai.OpenAI
) -> None:
    url, answers = f"{served.url}/v1/models", []
    for given in ("mine-7.a", "no\tname", "x" * 200):
        found = httpx.get(
            url, headers={"X-Request-Id": given}
        )  # refused: it has no key
        assert found.status_code == 401 and (
            found.headers["x-request-id"] == given
        ) == (given == "mine-7.a")
        answers.append(found.headers["x-request-id"])
    answers += [
        client.completions.create(
            model=MODEL_NAME, prompt="a", max_tokens=1
        )._request_id
        for _ in range(2)
    ]
    assert len(set(answers)) == 5 and all(answers)


def test_a_fault_of_the_servers_own_is_named_counted_and_not_told(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    def faulty(*_: object, **__: object) -> None:
        raise RuntimeError("secret detail")

    def counted() -> list[str]:
        return re.findall(
            r'kvlathe_http_errors_total{.*status="500"} (.*)',
            httpx.get(f"{served.url}/metrics").text,
        )

    before = float((counted() or ["0"])[0])
    with monkeypatch.context() as patched:
        patched.setattr(served.engine, "check_count", faulty)
        found = post(served, prompt="a")
    said = found.json()["error"]
    assert (
        found.status_code == 500
        and "RuntimeError" in said["message"]
        and "secret" not in found.text
    )
    assert found.headers["x-request-id"] and float(counted()[0]) == before + 1


def test_what_is_no_request_at_all(served: Served) -> None:
    headers = {"Authorization": f"Bearer {KEY}", "Content-Type": "application/json"}
    for content, status in (
        (b'{"model"', 400),
        (b"[]", 400),
        (b"", 400),
        (b"\xff", 400),
        (b" " * (1 << 17), 413),
    ):
        found = httpx.post(
            f"{served.url}/v1/completions", content=content, headers=headers
        )
        assert found.status_code == status and found.json()["error"]["message"]
    chunked = httpx.post(
        f"{served.url}/v1/completions",
        content=iter([b" " * 40000] * 3),
        headers=headers,
    )
    assert chunked.status_code == 413
    assert httpx.get(f"{served.url}/v1/completions", headers=headers).status_code == 405
    assert (
        httpx.get(f"{served.url}/etc/passwd").json()["error"]["type"]
        == "not_found_error"
    )
    assert httpx.get(f"{served.url}/v1/models").status_code == 401


def test_a_template_that_refuses_is_the_clients_fault(served: Served) -> None:
    kept = served.llm.tokenizer.chat_template
    for template in (
        "{{ raise_exception('roles must alternate') }}",
        "{{ ''.__class__.__mro__ }}",
        None,
    ):
        served.llm.tokenizer.chat_template = template
        found = post(
            served, "chat/completions", messages=[{"role": "user", "content": "a"}]
        )
        assert found.status_code == 422 and found.json()["error"]["param"] == "messages"
    served.llm.tokenizer.chat_template = kept


def test_templates_are_not_read_from_requests(served: Served) -> None:
    content = "{% for x in ().__class__.__base__.__subclasses__() %}{{ x }}{% endfor %}{{ 7 * 7 }}"
    found = post(
        served,
        "chat/completions",
        messages=[{"role": "user", "content": content}],
        max_tokens=4,
        temperature=0,
    )
    expected = alone(f"<user>{content}\n<assistant>", max_new_tokens=4)
    assert found.json()["choices"][0]["message"]["content"] == expected.text


# -- faults ----------------------------------------------------------------------------
def raw_request(served: Served, **body: Any) -> socket.socket:  # noqa: ANN401
    """A connection on which a request was sent and nothing was read."""
    content = json.dumps({"model": MODEL_NAME, "ignore_eos": True, **body}).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {KEY}\r\nContent-Length: {len(content)}"
    port = int(served.url.rsplit(":", 1)[1])
    connection = socket.create_connection(("127.0.0.1", port), timeout=60)
    connection.sendall(
        head.encode() + b"\r\nContent-Type: application/json\r\n\r\n" + content
    )
    return connection


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_leaves_takes_its_pages_with_it(
    served: Served, client: openai.OpenAI, stream: bool
) -> None:
    gone = raw_request(served, prompt=PROMPT, max_tokens=2000, stream=stream, n=2)
    until = time.monotonic() + 30
    while not served.llm.engine.scheduler.running and time.monotonic() < until:
        time.sleep(0.01)
    if stream:
        assert b"200 OK" in gone.recv(100)
    assert served.llm.pool.bytes_in_use
    other = client.completions.create(
        model=MODEL_NAME, prompt=PROMPT, max_tokens=30, temperature=0, stream=True
    )
    gone.close()
    assert (
        "".join(chunk.choices[0].text for chunk in other)
        == alone(PROMPT, max_new_tokens=30).text
    )
    assert served.idle(20)  # 2000 tokens would take longer


def test_a_client_that_leaves_the_queue_is_not_served(served: Served) -> None:
    """A stream has said nothing yet while it waits: its client's leaving must be
    noticed all the same."""
    kept = served.llm.limits
    replaced(served.llm, max_batch_size=1)
    runs = raw_request(served, prompt=PROMPT, max_tokens=1500, stream=True)
    assert b"200 OK" in runs.recv(100)
    waits = [
        raw_request(served, prompt=PROMPT, max_tokens=4, stream=stream)
        for stream in (True, False)
    ]
    until = time.monotonic() + 30
    while served.engine.open < 3 and time.monotonic() < until:
        time.sleep(0.01)
    assert served.engine.open == 3
    for gone in waits:
        gone.close()
    while served.engine.open > 1 and time.monotonic() < until:
        time.sleep(0.01)
    assert served.engine.open == served.engine.running == 1
    runs.close()
    assert served.idle(20)
    served.llm.engine.scheduler.limits = kept


def test_saved_bytes_count_shared_pages_once() -> None:
    engine = llm("torch", "split")
    engine.manifest = cast(
        Manifest,
        SimpleNamespace(
            kv_bytes=SimpleNamespace(baseline=engine.layout.bytes_per_token() * 4)
        ),
    )
    state = State(AsyncEngine(engine), MODEL_NAME)

    def gauges() -> dict[str, float]:
        return {family.name: family.samples[0].value for family in state.collect()}

    first, second = (
        engine.sequence([5] * 100, SamplingParams(max_new_tokens=30)) for _ in range(2)
    )
    engine.engine.scheduler.add(first)
    while not first.answered:
        engine.engine.step()
    alone, used = (
        gauges()["kvlathe_kv_cache_bytes_saved"],
        gauges()["kvlathe_kv_cache_bytes"],
    )
    second.table, second.cached = engine.pool.fork(first.table), first.cached
    engine.engine.scheduler.running.append(second)
    assert alone > used and gauges()["kvlathe_kv_cache_bytes_saved"] == pytest.approx(
        alone, rel=1e-3
    )
    for sequence in (first, second):
        engine.engine.cancel(sequence)
    assert not engine.pool.bytes_in_use


def test_a_step_that_raises_fails_the_guilty_alone(
    served: Served, client: openai.OpenAI, caplog: pytest.LogCaptureFixture
) -> None:
    run = served.llm.session.run

    def breaking(step: StepPlan) -> npt.NDArray[np.float32]:
        if 8191 in step.input_ids:
            raise RuntimeError("secret detail")
        return run(step)

    served.llm.session.run = breaking
    try:
        good = raw_request(
            served, prompt=PROMPT, max_tokens=20, temperature=0, ignore_eos=False
        )
        found = post(served, prompt=[8191, 5])
        assert (
            "secret detail" in caplog.text
        )  # for who runs the server, not for who asks
        assert (
            found.status_code == 500
            and "secret" not in found.text
            and found.json()["error"]["code"] == "engine_error"
        )
        with pytest.raises(openai.APIError, match="engine failed"):
            list(
                client.completions.create(
                    model=MODEL_NAME, prompt=[8191, 5], stream=True
                )
            )
        answer = b""
        while b'"usage"' not in answer:
            answer += good.recv(4096)
        assert (
            json.loads(answer.split(b"\r\n\r\n")[1])["choices"][0]["text"]
            == alone(PROMPT, max_new_tokens=20).text
        )
        good.close()
    finally:
        served.llm.session.run = run


def test_a_full_queue_is_429_with_retry_after(served: Served) -> None:
    kept, served.engine.max_waiting = served.engine.max_waiting, 2
    busy = raw_request(
        served, prompt=[list(text(20, i)) for i in range(10)], max_tokens=700
    )
    until = time.monotonic() + 30
    while served.engine.open < 10 and time.monotonic() < until:
        time.sleep(0.01)
    found = post(served, prompt="a")
    assert found.status_code == 429 and int(found.headers["retry-after"]) >= 1
    assert found.json()["error"]["code"] == "queue_full"
    busy.close()
    served.engine.max_waiting = kept


def test_tenants_keys_are_their_own(served: Served) -> None:
    assert post(served, key="sk-other", prompt="a", max_tokens=1).status_code == 200
    seen = []
    submit = served.engine.submit
    served.engine.submit = lambda *a, **k: seen.append(a[4]) or submit(*a, **k)
    for key in (KEY, "sk-other"):
        post(served, key=key, prompt="a", max_tokens=1)
    served.engine.submit = submit
    assert seen == [KEY, "sk-other"]
