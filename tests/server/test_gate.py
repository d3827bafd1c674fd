"""The gate: by which names a server may be called, which paths need a key, and how often
metrics are written."""

from __future__ import annotations

import dataclasses

import httpx2 as httpx
import pytest

from kvlathe.base.errors import KvlatheError
from kvlathe.cli.serve import KEY_VARIABLE, check_keys
from kvlathe.server.gate import KEYED, OPERATIONS, host_of
from kvlathe.server.metrics import RENDERINGS, Metrics
from kvlathe.server.run import LOCAL, Settings
from tests.support.runtime_cases import llm
from tests.support.serving_cases import KEY, Served, serving

SETTINGS = Settings(
    "127.0.0.1", 8000, None, (), 1, 1, None, None, None, None, None, 1.0
)


@pytest.mark.parametrize(
    ("header", "name"),
    [
        (b"localhost", "localhost"),
        (b"LocalHost:8000", "localhost"),
        (b"localhost.:8000", "localhost"),
        (b"127.0.0.1:80", "127.0.0.1"),
        (b"[::1]:8000", "::1"),
        (b"[::1]", "::1"),
        (b"evil.example:8000", "evil.example"),
        (b"", ""),
    ],
)
def test_a_header_host_names_who_is_asked(header: bytes, name: str) -> None:
    assert host_of(header) == name


def test_a_server_on_localhost_without_keys_knows_its_names() -> None:
    assert set(SETTINGS.hosts) == {"localhost", "127.0.0.1", "::1"}
    more = dataclasses.replace(SETTINGS, allowed_hosts=("box.lan",))
    assert set(more.hosts) == {*LOCAL, "box.lan"}
    assert not dataclasses.replace(more, keys=("k",)).hosts
    everywhere = dataclasses.replace(SETTINGS, host="0.0.0.0")
    assert not everywhere.hosts
    named = dataclasses.replace(everywhere, allowed_hosts=("box.lan",))
    assert "box.lan" in named.hosts


def get(served: Served, path: str, **headers: str) -> httpx.Response:
    return httpx.get(served.url + path, headers=headers, timeout=60)


def test_other_names_get_421_in_a_sentence_and_operations_want_their_key() -> None:
    keyed = (*KEYED, *OPERATIONS)
    names = dataclasses.replace(SETTINGS, allowed_hosts=("box.lan",)).hosts
    with serving(llm("torch", "split"), [KEY], hosts=names, keyed=keyed) as served:
        for host in ("evil.example", "127.0.0.1.evil.example:80", "localhost@evil"):
            for path in ("/health", "/v1/models", "/", "/nothing"):
                reply = get(served, path, Host=host)
                assert reply.status_code == 421, (host, path)
                assert reply.json()["error"]["code"] == "unknown_host"
                assert "--allowed-host" in reply.json()["error"]["message"]
        for host in ("localhost:1", "LOCALHOST", "[::1]:1", "127.0.0.1", "box.lan"):
            assert get(served, "/health", Host=host).status_code == 200
        for path in ("/metrics", "/docs", "/openapi.json"):
            assert get(served, path).status_code == 401
            assert get(served, path, Authorization=f"Bearer {KEY}").status_code == 200


def test_a_flood_gets_metrics_that_were_written_a_moment_ago(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    moment = 100.0
    monkeypatch.setattr("kvlathe.server.metrics.time.monotonic", lambda: moment)
    metrics, texts = Metrics("m"), list[bytes]()
    for i in range(3 * RENDERINGS):
        metrics.failed(500 + i)
        texts.append(metrics.text())
    assert len(set(texts)) == RENDERINGS and texts[-1] == texts[RENDERINGS - 1]
    moment += 1.1
    assert metrics.text() not in texts


def test_a_key_for_operations_takes_a_key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(KEY_VARIABLE, raising=False)
    check_keys((KEY,), True)
    check_keys((), False)
    with pytest.raises(KvlatheError, match="Give --api-key, too"):
        check_keys((), True)
