"""Whatever a client sends by the OpenAPI schema, or beside it: never a server error, always the documented form."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import requests
import schemathesis
from hypothesis import HealthCheck, Phase, given, settings
from runtime_cases import llm
from schemathesis import GenerationMode
from schemathesis.specs.openapi.checks import content_type_conformance, response_schema_conformance
from serving_cases import MODEL_NAME, Served, serving, with_template

EVERY = list(HealthCheck)


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    with serving(with_template(llm("torch", "one")), max_new_tokens=4, max_waiting=8) as found:
        yield found
        assert found.idle()


def served_here(case: schemathesis.Case) -> schemathesis.Case:
    """A request by the schema, within what this server can do: its model, its vocabulary, few tokens."""
    if isinstance(body := case.body, dict):
        body["model"] = MODEL_NAME
        for name in ("suffix", "best_of", "logit_bias"):
            body.pop(name, None)
        for name in ("max_tokens", "max_completion_tokens", "n"):
            if body.get(name):
                body[name] = 1 + body[name] % 3
        body["stream"] = len(str(body)) % 2 == 0  # half of them
        if isinstance(prompt := body.get("prompt"), list):
            body["prompt"] = [token % 8192 if isinstance(token, int) else token for token in prompt]
    return case


@pytest.mark.parametrize("label", ["POST /v1/completions", "POST /v1/chat/completions", "GET /v1/models/{name}"])
def test_no_request_gets_a_server_error(served: Served, label: str) -> None:
    schema = schemathesis.openapi.from_url(f"{served.url}/openapi.json")
    operation = next(found.ok() for found in schema.get_all_operations() if found.ok().label == label)
    statuses, kinds = set(), set()

    @settings(max_examples=60, deadline=None, derandomize=True, phases=[Phase.generate], suppress_health_check=EVERY)
    @given(
        case=operation.as_strategy(generation_mode=GenerationMode.POSITIVE).map(served_here)
        | operation.as_strategy(generation_mode=GenerationMode.NEGATIVE)
    )
    def whatever(case: schemathesis.Case) -> None:
        response = case.call(timeout=60)
        statuses.add(response.status_code)
        kinds.add(response.headers["content-type"][0].partition(";")[0])
        assert response.status_code < 500, response.text
        case.validate_response(response, checks=[content_type_conformance, response_schema_conformance])

    whatever()
    assert "text/event-stream" in kinds or label.startswith("GET")
    assert statuses & {400, 404} and (200 in statuses or label.startswith("GET"))  # the engine was reached


def test_the_documentation_is_served(served: Served) -> None:
    assert "swagger" in requests.get(f"{served.url}/docs", timeout=10).text
