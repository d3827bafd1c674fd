"""Whatever a client sends by the OpenAPI schema, or beside it: never a server error,
always the documented form."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import requests
import schemathesis
from hypothesis import HealthCheck, Phase, given, settings
from schemathesis import GenerationMode
from schemathesis.core.result import Ok
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    response_schema_conformance,
)

from tests.support.runtime_cases import llm
from tests.support.serving_cases import MODEL_NAME, Served, serving, with_template

EVERY: list[Any] = list(HealthCheck)


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    with serving(
        with_template(llm("torch", "one")), max_new_tokens=4, max_waiting=8
    ) as found:
        yield found
        assert found.idle()


def served_here(case: schemathesis.Case) -> schemathesis.Case:
    """A request by the schema, within what this server can do: its model, its
    vocabulary, few tokens."""
    if isinstance(body := case.body, dict):
        body["model"] = MODEL_NAME
        for name in (
            "suffix",
            "best_of",
            "logit_bias",
            "deadline_seconds",
            "stream_options",
        ):
            body.pop(name, None)
        for name in ("max_tokens", "max_completion_tokens", "n"):
            if isinstance(number := body.get(name), int):
                body[name] = 1 + number % 3
        if not body.get("prompt", True):
            body["prompt"] = "a"
        for name in ("prompt", "stop_token_ids"):
            if isinstance(tokens := body.get(name), list):
                body[name] = [
                    token % 8192 if isinstance(token, int) else token
                    for token in tokens
                ]
    return case


@pytest.mark.slow
@pytest.mark.parametrize(
    "label",
    ["POST /v1/completions", "POST /v1/chat/completions", "GET /v1/models/{name}"],
)
def test_no_request_gets_a_server_error(served: Served, label: str) -> None:
    schema = schemathesis.openapi.from_url(f"{served.url}/openapi.json")
    operations = (
        found.ok() for found in schema.get_all_operations() if isinstance(found, Ok)
    )
    operation = next(found for found in operations if found.label == label)
    statuses = set()

    @settings(
        max_examples=40,
        derandomize=True,
        phases=[Phase.generate],
        suppress_health_check=EVERY,
    )
    @given(
        case=operation.as_strategy(generation_mode=GenerationMode.POSITIVE).map(
            served_here
        )
        | operation.as_strategy(generation_mode=GenerationMode.NEGATIVE)
    )
    def whatever(case: schemathesis.Case) -> None:
        response = case.call(timeout=60)
        statuses.add(response.status_code)
        assert response.status_code < 500, response.text
        case.validate_response(
            response, checks=[content_type_conformance, response_schema_conformance]
        )

    whatever()
    assert statuses & {400, 404} and (
        200 in statuses or label.startswith("GET")
    )  # the engine was reached


@pytest.mark.parametrize("stream", [False, True])
def test_answers_are_of_the_schema(served: Served, stream: bool) -> None:
    schema = schemathesis.openapi.from_url(f"{served.url}/openapi.json")
    said: tuple[dict[str, Any], ...] = (
        {"prompt": "a", "logprobs": 3, "echo": True},
        {"messages": [{"role": "user", "content": "a"}], "n": 2},
    )
    for path, body in zip(
        ("/v1/completions", "/v1/chat/completions"), said, strict=True
    ):
        case = schema[path]["POST"].Case(
            body={"model": MODEL_NAME, "stream": stream, **body},
            media_type="application/json",
        )
        response = case.call(timeout=60)
        assert (
            response.status_code == 200
            and ("event-stream" in response.headers["content-type"][0]) == stream
        )
        case.validate_response(
            response, checks=[content_type_conformance, response_schema_conformance]
        )


def test_the_server_serves_the_documentation_of_its_api(served: Served) -> None:
    """By the server itself: the page loads nothing."""
    page = requests.get(f"{served.url}/docs", timeout=60).text
    for said in ("POST /v1/chat/completions", "presence_penalty", "list of integer"):
        assert said in page
    assert "http://" not in page and "https://" not in page and "<script" not in page
