"""Whatever a stranger sends to any API: an answer, or a refusal in a sentence."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import httpx2 as httpx
import pytest
from hypothesis import HealthCheck, Phase, given, settings

from kvlathe.server.bodies import MOST_LEVELS
from tests.support.forged_bodies import BODIES, forged, nested
from tests.support.runtime_cases import llm
from tests.support.serving_cases import MODEL_NAME, Served, serving, with_template
from tests.support.tool_cases import HERMES

EVERY: list[Any] = list(HealthCheck)
JSON = {"Content-Type": "application/json"}
LONGEST = 2000
"""Most characters of a sentence that says what is wrong."""


@pytest.fixture(scope="module")
def hermes() -> Iterator[Served]:
    with serving(
        with_template(llm("torch", "split"), HERMES), max_new_tokens=4
    ) as found:
        yield found
        assert found.idle()


@pytest.fixture(scope="module")
def client(hermes: Served) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=hermes.url, timeout=60, headers=JSON) as found:
        yield found


def check(answer: httpx.Response) -> None:
    """An answer, or a refusal in the form of its API."""
    if answer.status_code >= 400:
        error = answer.json()["error"]
        assert 400 <= answer.status_code < 500, error
        assert 0 < len(error["message"]) < LONGEST and error["type"]
    elif answer.headers["content-type"].startswith("text/event-stream"):
        assert '"server_error"' not in answer.text and '"api_error"' not in answer.text
    else:
        assert isinstance(answer.json(), dict)


@pytest.mark.parametrize("path", BODIES)
@pytest.mark.parametrize(
    "count", [12, pytest.param(1000, marks=pytest.mark.nightly)], ids=["few", "many"]
)
def test_no_body_gets_a_server_error(
    client: httpx.Client, path: str, count: int
) -> None:
    @settings(
        max_examples=count,
        derandomize=True,
        deadline=None,
        phases=[Phase.generate],
        suppress_health_check=EVERY,
    )
    @given(body=forged(path))
    def whatever(body: str) -> None:
        check(client.post(path, content=body))

    whatever()


def test_bodies_that_use_most_fields_are_answered(client: httpx.Client) -> None:
    """So what is made of them fails by what was changed."""
    for path, bodies in BODIES.items():
        if path == "/v1/prefixes":
            continue  # this engine compacts none
        for body in bodies:
            answer = client.post(path, json=body)
            assert answer.status_code == 200, (path, answer.text)
            check(answer)


@pytest.mark.parametrize(
    ("value", "said", "param"),
    [
        (nested(MOST_LEVELS, "[", "]"), f"more than {MOST_LEVELS} levels", None),
        (nested(10**5, "[", "]"), f"more than {MOST_LEVELS} levels", None),
        ("NaN", "NaN is no JSON", None),
        ("-1e999", "-1e999 is beyond what a number holds", None),
        ("1" * 5000, "Exceeds the limit (4300 digits)", None),
        ('["\\ud83d"]', "middle of a character", "tools.0.parameters.type.0"),
        ('{"\\udd00": 1}', "middle of a character", "tools.0.parameters.type.?"),
    ],
)
def test_values_that_are_no_json_are_refused_wherever_they_stand(
    client: httpx.Client, value: str, said: str, param: str | None
) -> None:
    """Tools are given back with a response: these could not be."""
    tool = f'{{"type": "function", "name": "f", "parameters": {{"type": {value}}}}}'
    body = f'{{"model": "{MODEL_NAME}", "input": "x", "tools": [{tool}]}}'
    answer = client.post("/v1/responses", content=body)
    error = answer.json()["error"]
    assert answer.status_code == 400 and said in error["message"], error
    assert error["param"] == param


def test_deep_bodies_are_answered_up_to_the_limit_and_characters_of_two_escapes_are_whole(
    client: httpx.Client,
) -> None:
    deep = nested(MOST_LEVELS - 4, "[", "]")
    values = f'{{"own": {deep}, "face": "\\ud83d\\ude00"}}'
    turn = json.dumps([{"role": "user", "content": "x"}])
    body = f'{{"model": "{MODEL_NAME}", "messages": {turn}, "chat_template_kwargs": {values}}}'
    answer = client.post("/v1/chat/completions", content=body)
    assert answer.status_code == 200, answer.text
