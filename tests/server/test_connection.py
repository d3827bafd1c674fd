"""Connections whose clients speak no HTTP, or want another protocol."""

from __future__ import annotations

import json
import logging
import random
import re
import socket
from collections.abc import Generator
from contextlib import contextmanager

import httpx2 as httpx
import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from kvlathe.server.connection import Connection
from tests.support.serving_cases import KEY, MODEL_NAME, Served, until

BODY = json.dumps({"model": MODEL_NAME, "prompt": "x", "max_tokens": 2}).encode()
HEAD = f"Host: localhost\r\nAuthorization: Bearer {KEY}\r\n".encode()
POST = b"POST /v1/completions HTTP/1.1\r\nContent-Type: application/json\r\n" + HEAD
WHOLE = POST + b"Content-Length: %d\r\n\r\n" % len(BODY) + BODY
CHUNK = b"%x\r\n%b\r\n" % (len(BODY), BODY)
CHUNKED = POST + b"Transfer-Encoding: chunked\r\n\r\n" + CHUNK
GET = b"GET /health HTTP/1.1\r\nHost: localhost\r\n"
WHOLES = (WHOLE, CHUNKED + b"0\r\n\r\n", GET + b"\r\n")
BYTES = (
    b"\r\n",
    b"\n",
    b"\r",
    b" ",
    b":",
    b",",
    b"0",
    b"9" * 30,
    b"\x00",
    b"\xff",
    b"{",
)
NOISE = {
    "noise": b"\x16\x03\x01" * 9,
    "noise behind a request": WHOLE + b"\x00\x01\r\n\r\n",
    "noise behind HEAD": b"HEAD" + GET[3:] + b"\r\n\x00\r\n\r\n",
    "a chunk without an end": CHUNKED + b"0\r\n: \r\n\r\n",
    "a chunk without a size": CHUNKED + b"zz\r\n",
    "two lengths": POST + b"Content-Length: 5\r\nContent-Length: 6\r\n\r\n{}",
    "HTTP/1.0 and more": WHOLE.replace(b"HTTP/1.1", b"HTTP/1.0") + WHOLE,
    "a close and more": GET + b"Connection: close\r\n\r\n" + GET + b"\x00",
}


def said(served: Served, data: bytes, sizes: random.Random | None = None) -> bytes:
    """The server's answer to bytes, which come in pieces, until it has no more."""
    url = httpx.URL(served.url)
    assert url.port
    pieces: list[bytes] = []
    with socket.create_connection((url.host, url.port), timeout=30) as connection:
        try:
            while data:
                size = sizes.randrange(1, 40) if sizes else len(data)
                connection.sendall(data[:size])
                data = data[size:]
            connection.shutdown(socket.SHUT_WR)
            while piece := connection.recv(1 << 16):
                pieces.append(piece)
        except TimeoutError:
            raise
        except OSError:
            pass  # the server has closed it
    return b"".join(pieces)


@contextmanager
def logs() -> Generator[list[str]]:
    """The lines that are logged meanwhile, tracebacks included."""
    lines: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(handler.format(record))
    logging.getLogger().addHandler(handler)
    try:
        yield lines
    finally:
        logging.getLogger().removeHandler(handler)


@pytest.mark.parametrize("name", NOISE)
def test_bytes_that_are_no_http_end_their_connection_without_a_traceback(
    served: Served, caplog: pytest.LogCaptureFixture, name: str
) -> None:
    """Wherever it stands, and however it comes. One line a minute at most counts them."""
    caplog.set_level(logging.WARNING)
    for sizes in (None, random.Random(1)):
        answer = said(served, NOISE[name], sizes)
        statuses = [
            line[9:12] for line in answer.split(b"\r\n") if line[:5] == b"HTTP/"
        ]
        assert {*statuses} <= {b"200", b"400"}
    texts = [record.getMessage() for record in caplog.records]
    assert len(texts) <= 1 and all("were no HTTP" in text for text in texts)
    assert httpx.get(f"{served.url}/health").status_code == 200
    until(lambda: not served.engine.open)


@st.composite
def changed(draw: st.DrawFn) -> bytes:
    """A request, or two, with bytes put in, taken out and set anew."""
    data = bytearray(b"".join(draw(st.lists(st.sampled_from(WHOLES), min_size=1))))
    for _ in range(draw(st.integers(1, 4))):
        place = draw(st.integers(0, len(data)))
        gone = draw(st.sampled_from([0, 1, 1, 2, 40]))
        new = st.sampled_from(BYTES) | st.binary(max_size=3)
        data[place : place + gone] = draw(new)
    return bytes(data)


@settings(max_examples=40, phases=[Phase.generate])
@given(data=changed())
def test_changed_requests_are_answered_or_ended_and_leave_nothing(
    served: Served, data: bytes
) -> None:
    """No status is one of a server that failed, and the log has no traceback."""
    with logs() as lines:
        statuses = {*re.findall(rb"^HTTP/1.1 (\d+)", said(served, data), re.MULTILINE)}
    assert all(status < b"500" for status in statuses), data
    assert not any("Traceback" in line for line in lines), lines
    assert httpx.get(f"{served.url}/health").status_code == 200


def test_connections_take_up_no_other_protocol(served: Served) -> None:
    """Their connections are counted and closed as all are."""
    upgrade = b"Connection: Upgrade\r\nUpgrade: websocket\r\n"
    upgrade += b"Sec-WebSocket-Version: 13\r\nSec-WebSocket-Key: eA==\r\n\r\n"
    for _ in range(3):
        assert said(served, GET + upgrade).startswith(b"HTTP/1.1 200")
    until(lambda: not any(one.transport.is_closing() for one in Connection.every))
