"""Servers that may open few files, and addresses."""

from __future__ import annotations

import errno
import resource
from pathlib import Path

import httpx2 as httpx
import pytest

from kvlathe.base.errors import KvlatheError
from kvlathe.server import connection
from kvlathe.server.connection import LEAST_CONNECTIONS, OTHER_FILES, raise_file_limit
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
