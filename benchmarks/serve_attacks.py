"""The longest that a plain request waits while others do their worst to a server.

python -m benchmarks.serve_attacks --engine out/engine [--seconds 10]

A server process of its own, with 256 files, is attacked in one way after the other, by a
process with eight threads and a key. Meanwhile a client with another key asks for four
tokens, again and again, each time on a new connection, for a text and in a chat by
turns. Prints a table, and fails where a request gets 500 or no answer, where the log
has a traceback, or where SIGTERM does not end the server with 0.
"""

from __future__ import annotations

import itertools
import json
import multiprocessing
import random
import re
import resource
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from http.client import HTTPConnection, HTTPException
from pathlib import Path
from typing import Any

from benchmarks.support.commands import parser_of
from benchmarks.support.markdown import print_markdown

MODEL = "lathe-5m"
THREADS = 8
FILES = 256
"""Open files that the server may have."""
PATIENCE = 60.0
"""Seconds for which anybody waits for an answer; one that takes longer is lost."""
TEMPLATE = (
    "{% for m in messages %}{{ m.content }}\n{% endfor %}"
    "{% for i in range(n or 0) %}{% for j in range(n or 0) %}{% endfor %}{% endfor %}"
)
"""A chat template that runs for as long as its client says."""
PLAIN = {"model": MODEL, "prompt": "def main():", "max_tokens": 4, "temperature": 0}
TURNS = [{"role": "user", "content": "x"}]
CHAT = {"model": MODEL, "messages": TURNS, "max_tokens": 4}
ITEMS = {"model": MODEL, "input": TURNS, "max_output_tokens": 4}
BODIES = {"chat/completions": CHAT, "responses": ITEMS, "messages": CHAT}
KEYS = ("sk-plain", "sk-stranger")
HEAD = (
    b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer "
    + KEYS[1].encode()
    + b"\r\n"
)
Ask = Callable[[int, random.Random], int]
"""An attack: the server's port to the status of its answer, 0 for none."""


def post(
    port: int, path: str, body: str, seconds: float = PATIENCE, key: str = KEYS[1]
) -> int:
    """``seconds``: after which the client leaves, if it is less than PATIENCE."""
    headers = {"Content-Type": "application/json", "Authorization": f"Bearer {key}"}
    connection = HTTPConnection("127.0.0.1", port, timeout=seconds)
    try:
        connection.request("POST", path, body, headers)
        answer = connection.getresponse()
        answer.read()
        return answer.status
    except TimeoutError:
        if seconds < PATIENCE:
            return 0
        raise
    finally:
        connection.close()


def raw(port: int, data: bytes, wait: bool = True) -> int:
    """Send bytes that need not be HTTP."""
    with socket.create_connection(("127.0.0.1", port), timeout=5) as connection:
        try:
            connection.sendall(data)
            found = re.match(rb"HTTP/1.1 (\d+)", connection.recv(64) if wait else b"")
        except (ConnectionError, TimeoutError):
            return 0  # it was told to go, or leaves
        return int(found[1]) if found else 0


def slow_structures(port: int, dice: random.Random) -> int:
    parts = [
        {"type": "string", "pattern": f".*{chr(97 + i % 26)}.*{i}{dice.random()}"}
        for i in range(40)
    ]
    form = {"type": "json_schema", "json_schema": {"schema": {"allOf": parts}}}
    body = json.dumps(PLAIN | {"response_format": form})
    return post(port, "/v1/completions", body, 5)


def slow_templates(port: int, _dice: random.Random) -> int:
    values = {"chat_template_kwargs": {"n": 99_999}}
    return post(port, "/v1/chat/completions", json.dumps(CHAT | values), 5)


def deep_bodies(port: int, dice: random.Random) -> int:
    levels = dice.choice([100, 900, 10**5, 10**6])
    begin, end = dice.choice([("[", "]"), ('{"a":', "}")])
    value = begin * levels + "1" + end * levels
    body = json.dumps(CHAT)[:-1] + f', "chat_template_kwargs": {value}}}'
    return post(port, "/v1/chat/completions", body[: 4 << 20])


def wrong_bodies(port: int, dice: random.Random) -> int:
    text = dice.choice(["1e999", "NaN", '"\\ud800"', "[[]]", "{}", '"x"', "1" * 9999])
    name = dice.choice(["tools", "messages", "n", "seed", "stop", "logit_bias", "x"])
    path, body = dice.choice([*BODIES.items()])
    return post(port, f"/v1/{path}", json.dumps(body)[:-1] + f', "{name}": {text}}}')


def large_bodies(port: int, dice: random.Random) -> int:
    size = (4 << 20) - 200
    prompt: Any = dice.choice(["a b " * (size // 4), "€" * (size // 6), [5] * 10**6])
    return post(port, "/v1/completions", json.dumps(PLAIN | {"prompt": prompt}))


def half_requests(port: int, dice: random.Random) -> int:
    length = b"Content-Type: application/json\r\nContent-Length: 500\r\n\r\n{"
    data = dice.choice([b"", HEAD[:20], HEAD, HEAD + length])
    return raw(port, data, wait=False)


def bad_http(port: int, dice: random.Random) -> int:
    chunked = HEAD + b"Transfer-Encoding: chunked\r\n\r\n"
    return raw(
        port,
        dice.choice(
            [
                *(chunked + b"zz\r\n{}\r\n", chunked + b"-1\r\n", b"\x16\x03\x01" * 9),
                *(chunked + b"ffffffffffffffff\r\n{}", HEAD + b"x: " + b"a" * 2**20),
                HEAD + b"".join(b"h%d: 1\r\n" % i for i in range(10**4)) + b"\r\n",
                HEAD + b"Content-Length: 5\r\nContent-Length: 6\r\n\r\n{}",
                *(b"GET " + b"a" * 2**17, b"\x00" * 2**16, dice.randbytes(2**12)),
            ]
        ),
    )


def pages(port: int, dice: random.Random) -> int:
    path = dice.choice([b"/metrics", b"/docs", b"/openapi.json", b"/v1/cache"])
    return raw(port, b"GET %b HTTP/1.1\r\nHost: localhost\r\n\r\n" % path)


def clients_that_leave(port: int, _dice: random.Random) -> int:
    body = json.dumps(PLAIN | {"max_tokens": 500, "ignore_eos": True, "stream": True})
    return post(port, "/v1/completions", body, 0.01)


def long_conversations(port: int, _dice: random.Random) -> int:
    return post(port, "/v1/responses", json.dumps(ITEMS | {"input": TURNS * 5000}))


def idle(port: int, _dice: random.Random) -> int:
    """More connections than the server has files, kept for the whole attack."""
    HELD.append(socket.create_connection(("127.0.0.1", port), timeout=PATIENCE))
    time.sleep(0.005)
    return 0


HELD: list[socket.socket] = []
ATTACKS: dict[str, Ask | None] = {
    "nobody": None,
    "structures that compile for seconds": slow_structures,
    "chats whose template does not end": slow_templates,
    "bodies of up to a million levels": deep_bodies,
    "values of wrong types, and no JSON": wrong_bodies,
    "bodies of 4 MB": large_bodies,
    "conversations of 5,000 items": long_conversations,
    "requests that stop in their middle": half_requests,
    "bad chunks, headers without end, noise": bad_http,
    "idle connections, more than files": idle,
    "`/metrics`, `/docs`, `/v1/cache`": pages,
    "streams whose clients leave at once": clients_that_leave,
}


def attack(name: str, port: int, until: float, counts: Any) -> None:  # noqa: ANN401
    """Attack from THREADS threads; what became of it goes into the queue ``counts``."""
    ask = ATTACKS[name]
    assert ask
    resource.setrlimit(resource.RLIMIT_NOFILE, (4096, 4096))

    def again(seed: int, found: Counter[int | str]) -> None:
        dice = random.Random(seed)
        while time.monotonic() < until:
            try:
                found[ask(port, dice)] += 1
            except TimeoutError:
                found["lost"] += 1
            except (OSError, HTTPException):
                found[0] += 1  # the server closed the connection

    own = [Counter[int | str]() for _ in range(THREADS)]
    threads = [
        threading.Thread(target=again, args=(i, found), daemon=True)
        for i, found in enumerate(own)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE + 30)
    found = sum(own, Counter[int | str]())
    found["lost"] += sum(thread.is_alive() for thread in threads)
    counts.put(found)


def plain_requests(port: int, until: float) -> Iterator[float]:
    """Seconds that each took; infinite for one that got no answer."""
    bodies = itertools.cycle([("completions", PLAIN), ("chat/completions", CHAT)])
    while time.monotonic() < until:
        began = time.monotonic()
        path, body = next(bodies)
        try:
            ok = post(port, f"/v1/{path}", json.dumps(body), key=KEYS[0]) == 200
        except OSError:
            ok = False
        yield time.monotonic() - began if ok else float("inf")
        time.sleep(0.02)


def measured(name: str, port: int, seconds: float) -> tuple[list[str], bool]:
    """A row of the table, and whether nothing went wrong."""
    context = multiprocessing.get_context("spawn")
    until = time.monotonic() + seconds
    counts, process = context.Queue(), None
    found = Counter[int | str]()
    if ATTACKS[name] is not None:
        until += 2  # the process begins
        process = context.Process(target=attack, args=(name, port, until, counts))
        process.start()
        time.sleep(1)
    waits = list(plain_requests(port, until))
    if process is not None:
        found = counts.get(timeout=2 * PATIENCE)
        process.join()
    kinds = Counter[str]()
    for status, count in found.items():
        kind = f"{status // 100}xx" if isinstance(status, int) and status else "none"
        kinds[
            "lost" if status == "lost" else "told to wait" if status == 503 else kind
        ] += count
    names = ("2xx", "4xx", "5xx", "lost")
    longest, middle = max(waits), statistics.median(waits)
    cells = [name, f"{found.total():,}", *(f"{kinds[one]:,}" for one in names)]
    cells += [f"{1e3 * middle:.0f}", f"{1e3 * longest:,.0f}"]
    return cells, not (kinds["5xx"] or kinds["lost"]) and longest < PATIENCE


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--engine", type=Path, required=True)
    parser.add_argument("--seconds", type=float, default=10, help="of each attack")
    parser.add_argument("--only", default="", help="attacks whose name has this")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        log, template = Path(folder) / "log", Path(folder) / "template.jinja"
        template.write_text(TEMPLATE)
        serve = [sys.executable, "-m", "kvlathe", "serve", str(args.engine)]
        keys = [word for key in KEYS for word in ("--api-key", key)]
        options = [
            "--port",
            "0",
            "--served-model-name",
            MODEL,
            *keys,
            "--chat-template",
        ]
        limits = (FILES, FILES)
        with log.open("wb") as file:
            server = subprocess.Popen(
                [*serve, *options, str(template)],
                stderr=file,
                preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_NOFILE, limits),
            )
        rows: list[list[str]] = []
        good = True
        try:
            port = port_of(log, server)
            for name in [name for name in ATTACKS if args.only in name]:
                row, fine = measured(name, port, args.seconds)
                print(" | ".join(row), "" if fine else "WRONG", file=sys.stderr)
                rows.append(row)
                good &= fine
        finally:
            server.terminate()
            code = server.wait(2 * PATIENCE)
        said = log.read_text("utf-8", "replace")
    columns = (
        "beside",
        "requests",
        "2xx",
        "4xx",
        "5xx",
        "no answer",
        "median, ms",
        "longest, ms",
    )
    print_markdown("attacks", columns, rows)
    tracebacks = said.count("Traceback")
    print(
        said[(first := said.find("Traceback")) : first + 4000] * (first >= 0),
        file=sys.stderr,
    )
    print(
        json.dumps(
            {"exit_code": code, "tracebacks": tracebacks, "log_bytes": len(said)}
        )
    )
    sys.exit(bool(code or tracebacks or not good))


def port_of(log: Path, server: subprocess.Popen[bytes]) -> int:
    """The port of a server, once it serves."""
    for _ in itertools.count():
        if found := re.search(r"http://[\d.]+:(\d+)", log.read_text("utf-8")):
            return int(found[1])
        assert server.poll() is None, log.read_text("utf-8")
        time.sleep(0.2)
    raise AssertionError


if __name__ == "__main__":
    main()
