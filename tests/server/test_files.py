"""Servers that may open few files, and addresses."""

from __future__ import annotations

import asyncio
import errno
import logging
import resource
from collections.abc import AsyncGenerator
from pathlib import Path

import httpx2 as httpx
import pytest
from fastapi import FastAPI
from fastapi.responses import StreamingResponse

from kvlathe.base.errors import KvlatheError
from kvlathe.base.limited import MOST_CHILDREN
from kvlathe.server import connection
from kvlathe.server.connection import LEAST_CONNECTIONS, OTHER_FILES, raise_file_limit
from kvlathe.server.errors import handle
from kvlathe.server.run import url_of
from kvlathe.server.turns import Turns
from tests.support.serving_cases import KEY, MODEL_NAME, Served

MANY = 4096


@pytest.mark.parametrize("limit", [16, 32, 64, 128, 1024, MANY])
def test_connections_leave_files_for_all_else_or_the_server_says_so(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, limit: int
) -> None:
    """Ten are open: 64 leave room for 22 connections, where a quarter of them would not
    be enough for the rest."""
    monkeypatch.setattr(resource, "getrlimit", lambda _: (limit, limit))
    monkeypatch.setattr(connection, "OPEN_FILES", tmp_path)
    for i in range(10):
        (tmp_path / str(i)).touch()
    if limit < 64:
        with pytest.raises(KvlatheError, match=f"may open {limit} files: a server"):
            raise_file_limit()
        return
    most = raise_file_limit()
    assert most >= LEAST_CONNECTIONS and limit - most >= 10 + OTHER_FILES
    assert limit < MANY or most == MANY * 3 // 4


def test_files_are_left_for_pipes_to_all_children_of_templates() -> None:
    """Two for each, two more for each of three other programs, and for one that is being
    started."""
    assert OTHER_FILES >= 2 * MOST_CHILDREN + 2 * 3 + 6


def test_a_connection_that_is_reset_in_an_answer_is_no_other_error() -> None:
    """Starlette makes one of every error that an application handles."""
    app = FastAPI()
    handle(app)

    async def pieces() -> AsyncGenerator[str, None]:
        yield "a"
        raise ConnectionResetError("the other end has gone")

    @app.get("/")
    async def begun() -> StreamingResponse:
        return StreamingResponse(pieces())

    async def ask() -> None:
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app)) as client:
            await client.get("http://localhost/")

    with pytest.raises(ConnectionResetError):
        asyncio.run(ask())


def test_requests_that_are_no_http_are_said_once_a_minute_with_their_count() -> None:
    """Other lines of uvicorn's are left as they are."""
    seldom = connection.Seldom()

    def said(text: str, seconds: float) -> str | None:
        record = logging.LogRecord("u", logging.WARNING, "", 0, text, None, None)
        record.created = seconds
        return record.getMessage() if seldom.filter(record) else None

    bad = "Invalid HTTP request received."
    found = [said(bad, seconds) for seconds in (1e9, 1e9 + 1, 1e9 + 59, 1e9 + 61)]
    assert found[0] and found[0].endswith(": 1") and found[1:3] == [None, None]
    assert found[3] and found[3].endswith(": 3")
    assert said("Started server", 1e9 + 62) == "Started server"


@pytest.mark.parametrize("code", [errno.EMFILE, errno.ENFILE])
def test_a_request_that_finds_no_file_is_told_to_come_back(
    served: Served, monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    async def full(*_: object) -> None:
        raise OSError(code, "Too many open files")

    monkeypatch.setattr(Turns, "run", full)
    body = {"model": MODEL_NAME, "prompt": "x", "max_tokens": 1}
    headers = {"Authorization": f"Bearer {KEY}"}
    url = f"{served.url}/v1/completions"
    answer = httpx.post(url, json=body, headers=headers, timeout=60)
    assert answer.status_code == 503 and int(answer.headers["retry-after"]) > 0
    assert answer.json()["error"]["code"] == "out_of_files"


def test_addresses_of_both_kinds_can_be_opened() -> None:
    for host in ("::1", "2001:db8::7", "127.0.0.1", "localhost"):
        url = httpx.URL(url_of(host, 8000))
        assert (url.host, url.port) == (host, 8000)
