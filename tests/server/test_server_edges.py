"""The server's edges: methods, browsers, bodies that never end, and flags that would
open it by accident."""

from __future__ import annotations

import contextlib
import socket
import time
from collections.abc import Iterator
from pathlib import Path

import httpx2 as httpx
import pytest
from click.testing import CliRunner

from kvlathe.base.errors import KvlatheError
from kvlathe.cli.serve import serve_command
from kvlathe.server.connection import Connection
from kvlathe.server.run import listen
from tests.support.runtime_cases import llm
from tests.support.serving_cases import MODEL_NAME, Served, serving

KEY = "sk-edge"
PAGE = "https://page.example"


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    made = llm("torch", "one")
    with serving(made, keys=[KEY], origins=[PAGE], body_seconds=0.3) as running:
        yield running


# -- methods ---------------------------------------------------------------------------
@pytest.mark.parametrize("path", ["health", "metrics", "docs", "openapi.json"])
def test_head_is_get_without_a_body(served: Served, path: str) -> None:
    url = f"{served.url}/{path}"
    got, headed = httpx.get(url), httpx.head(url)
    assert headed.status_code == got.status_code == 200 and headed.content == b""
    assert headed.headers["content-type"] == got.headers["content-type"]


def test_options_names_the_methods_of_a_path(served: Served) -> None:
    for path, allowed in (
        ("health", "GET, HEAD, OPTIONS"),
        ("v1/completions", "OPTIONS, POST"),
        ("v1/models/any", "GET, HEAD, OPTIONS"),
    ):
        answer = httpx.options(f"{served.url}/{path}")
        assert (answer.status_code, answer.headers["allow"]) == (204, allowed)
    assert httpx.options(f"{served.url}/nowhere").status_code == 404


def test_web_pages_of_a_named_origin_may_call(served: Served) -> None:
    url = f"{served.url}/v1/completions"
    asked = {
        "Origin": PAGE,
        "Access-Control-Request-Method": "POST",
        "Access-Control-Request-Headers": "authorization",
    }
    preflight = httpx.options(url, headers=asked)
    assert preflight.status_code == 200
    assert preflight.headers["access-control-allow-origin"] == PAGE
    refused = httpx.post(url, headers={"Origin": PAGE}, json={})
    assert refused.status_code == 401  # and the page may read why
    assert refused.headers["access-control-allow-origin"] == PAGE
    other = httpx.options(url, headers={**asked, "Origin": "https://other.example"})
    assert "access-control-allow-origin" not in other.headers


# -- bodies ----------------------------------------------------------------------------
def test_a_body_that_never_ends_is_given_up(served: Served) -> None:
    port = int(served.url.rsplit(":", 1)[1])
    head = (
        f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {KEY}\r\n"
    )
    for length in ("Content-Length: 100", "Transfer-Encoding: chunked"):
        with socket.create_connection(("127.0.0.1", port), timeout=20) as connection:
            connection.sendall(f"{head}{length}\r\n\r\n".encode())
            answer = b""
            while piece := connection.recv(4096):  # until the server closes
                answer += piece
        assert b" 408 " in answer and b"body_timeout" in answer


def test_headers_that_never_end_are_given_up(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However often another byte of them comes, and after an answer too; what is
    answered meanwhile is not cut off."""
    monkeypatch.setattr(Connection, "header_seconds", 0.5)
    port = int(served.url.rsplit(":", 1)[1])
    for before in (b"", b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n"):
        with socket.create_connection(("127.0.0.1", port), timeout=20) as connection:
            connection.sendall(before + b"GET /health HTTP/1.1\r\n")
            started = time.monotonic()
            with contextlib.suppress(ConnectionError):
                while time.monotonic() < started + 10:
                    connection.sendall(b"a")
                    time.sleep(0.05)
            assert time.monotonic() < started + 10
    answer = httpx.get(f"{served.url}/health")
    assert answer.status_code == 200
    test_an_answer_may_take_longer_than_a_body(served)


def test_an_answer_may_take_longer_than_a_body(served: Served) -> None:
    body = {"model": MODEL_NAME, "prompt": "a", "max_tokens": 200, "ignore_eos": True}
    headers = {"Authorization": f"Bearer {KEY}"}
    url = f"{served.url}/v1/completions"
    answer = httpx.post(url, json=body, headers=headers, timeout=120)
    assert answer.json()["usage"]["completion_tokens"] == 200


@pytest.mark.parametrize("field", ["prompt", "metadata", "messages"])
def test_deeply_nested_bodies_are_refused(served: Served, field: str) -> None:
    headers = {"Authorization": f"Bearer {KEY}", "Content-Type": "application/json"}
    for opened, closed in (("[", "]"), ('{"a":', "}")):
        nested = opened * 50_000 + "1" + closed * 50_000
        body = f'{{"model": "{MODEL_NAME}", "{field}": {nested}}}'
        for path in ("completions", "chat/completions"):
            url = f"{served.url}/v1/{path}"
            answer = httpx.post(url, content=body, headers=headers, timeout=60)
            assert answer.status_code == 400, answer.text
            assert answer.json()["error"]["type"] == "invalid_request_error"


def test_the_batch_is_what_the_flag_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From the command line to LLM.load."""
    heard: dict[str, object] = {}

    class Stop(Exception): ...

    def load(folder: Path, *_: object, **options: object) -> None:
        heard.update(options)
        raise Stop

    monkeypatch.setattr("kvlathe.server.run.LLM.load", load)
    arguments = [str(tmp_path), "--port", "0", "--max-batch-size", "3"]
    done = CliRunner().invoke(serve_command, arguments)
    assert isinstance(done.exception, Stop), done.output
    assert heard["max_batch_size"] == 3


# -- flags -----------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("arguments", "variable"),
    [
        (["--api-key", ""], None),
        (["--api-key", "good", "--api-key", " "], None),
        ([], ""),
        ([], "  "),
    ],
)
def test_serve_refuses_blank_api_keys(
    tmp_path: Path, arguments: list[str], variable: str | None
) -> None:
    """One would let everybody in, or open the server without a word."""
    given = {"KVLATHE_API_KEY": variable}
    done = CliRunner(env=given).invoke(serve_command, [str(tmp_path), *arguments])
    assert isinstance(done.exception, KvlatheError)
    assert "is blank" in str(done.exception)


@pytest.mark.parametrize("flag", ["--drain-seconds", "--body-seconds"])
@pytest.mark.parametrize("value", ["nan", "inf", "-1"])
def test_serve_refuses_times_that_are_not_finite(
    tmp_path: Path, flag: str, value: str
) -> None:
    done = CliRunner().invoke(serve_command, [str(tmp_path), flag, value])
    assert done.exit_code == 2 and flag in done.output


@pytest.mark.parametrize("host", ["no.such.host.invalid", "192.0.2.1", "a..b"])
def test_a_host_that_cannot_be_is_not_called_a_port(host: str) -> None:
    with pytest.raises(KvlatheError, match="Choose another --host"):
        listen(host, 0)


def test_a_port_in_use_is_called_one() -> None:
    with listen("127.0.0.1", 0) as bound, pytest.raises(KvlatheError, match="--port"):
        bound.listen()
        listen("127.0.0.1", bound.getsockname()[1])
