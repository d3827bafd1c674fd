"""Refusals of the server: always in the OpenAI form, named, and before it costs
much."""

from __future__ import annotations

import json
import re
from typing import Any

import httpx2 as httpx
import openai
import pytest
from fastapi.exceptions import RequestValidationError
from pydantic import BaseModel, ValidationError

from kvlathe.server.errors import invalid_request
from kvlathe.server.schema import ChatRequest, CompletionRequest
from tests.support.serving_cases import (
    KEY,
    MODEL_NAME,
    Served,
    alone,
    post,
    replaced,
)

pytestmark = pytest.mark.usefixtures("nothing_is_left")


IMAGE = {"type": "image_url", "image_url": {"url": "file:///etc/passwd"}}


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
        ("completions", {"prompt": "a", "use_beam_search": True}, 400, "use_beam_search"),
        ("completions", {"prompt": "a", "prompt_logprobs": 1}, 400, "prompt_logprobs"),
        ("embeddings", {"input": "a"}, 404, None),
        ("completions", {"prompt": "a", "stream_options": {"foo": 1}}, 400, "stream_options.foo"),
        ("completions", {"prompt": "a", "stream_options": {"include_usage": True}}, 400, "stream_options"),
        ("completions", {"prompt": "a", "logit_bias": {str(i): 1 for i in range(1025)}}, 400, "logit_bias"),
        ("completions", {"prompt": "a", "deadline_seconds": 1e-6}, 408, "deadline_seconds"),
        ("chat/completions", {"messages": []}, 400, "messages"),
        ("chat/completions", {"messages": [{"role": "wizard", "content": "a"}]}, 400, "messages.0.role"),
        ("chat/completions", {"messages": [{"role": "user", "content": "a"}], "tools": [{}]}, 400, "tools.0.type"),
        ("chat/completions", {"messages": [{"role": "user", "content": "a"}], "top_logprobs": 2}, 400, "top_logprobs"),
        ("chat/completions", {"messages": [{"role": "user", "content": [IMAGE]}]}, 400, "messages.0.content.0.type"),
        ("completions", {"model": "gpt-4", "prompt": "a"}, 404, "model"),
    ],
)  # fmt: skip
def test_bad_requests_are_answered_in_the_openai_form(
    served: Served, path: str, body: dict[str, Any], status: int, param: str | None
) -> None:
    content = json.dumps({"model": MODEL_NAME, **body})
    headers = {"Authorization": f"Bearer {KEY}", "Content-Type": "application/json"}
    found = httpx.post(
        f"{served.url}/v1/{path}", content=content, headers=headers, timeout=60
    )
    error = found.json()["error"]
    assert found.status_code == status and error["param"] == param, error
    named = param or f"/v1/{path}"
    assert named.split(".")[-1] in error["message"] and set(error) == {
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


def test_bodies_that_are_no_json_object_are_refused(served: Served) -> None:
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
