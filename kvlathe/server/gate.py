"""Gate: checks before a request is read (keys and sizes), headers of every response, and
HEAD and OPTIONS for every path that has an answer. Plain ASGI.

Every response says ``x-request-id``: the client's own, where it sent one, or a new one.
At log level debug each has a line in the log with it.
"""

from __future__ import annotations

import asyncio
import hmac
import logging
import re
import time
import uuid
from collections.abc import Callable, Mapping, Sequence

from starlette.responses import Response
from starlette.routing import BaseRoute, Match, Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from kvlathe.server.connection import is_out_of_files
from kvlathe.server.errors import ANTHROPIC_PATH, ApiError, unexpected_error

log = logging.getLogger("kvlathe")
BODY_SECONDS = 60.0
"""Most time that a client may take to send a request's body."""

KEYED = ("/v1/", "/tokenize", "/detokenize", "/sleep", "/wake_up", "/is_sleeping")
"""Beginnings of the paths that need a key, where the server has any."""
OPERATIONS = ("/metrics", "/docs", "/openapi.json")
"""Those that may need one as well: whoever runs the server reads them."""
REQUEST_ID = re.compile(rb"[\w.:-]{1,128}")


class Gate:
    """Lets requests to ``keyed`` paths through that carry one of ``keys`` (none: all),
    and bodies of at most ``max_body`` bytes that come within ``body_seconds``.

    ``hosts``: names by which the server may be asked (none: any). A web page elsewhere
    could have its own name point to this machine, and would then be of one origin with
    the server: the browser tells of it in the header Host.

    The key is the tenant: ``scope["state"]["tenant"]``. Clients share cached prefixes
    only with their own. ``failed`` is told the status of every answer that is an error.
    """

    def __init__(
        self,
        app: ASGIApp,
        keys: Sequence[str],
        max_body: int,
        failed: Callable[[int], None],
        body_seconds: float = BODY_SECONDS,
        hosts: Sequence[str] = (),
        keyed: Sequence[str] = KEYED,
    ) -> None:
        self.app = app
        self.hosts = frozenset(host.lower() for host in hosts)
        self.keyed = tuple(keyed)
        self.keys = [key.encode() for key in keys]
        self.max_body, self.body_seconds = max_body, body_seconds
        self.failed = failed

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        headers, begun = dict(scope["headers"]), list[int]()
        send = self._watched(send, scope, headers.get(b"x-request-id", b""), begun)
        try:
            self._check_host(headers.get(b"host", b""))
            if scope["path"].startswith(self.keyed):
                scope.setdefault("state", {})["tenant"] = self._tenant(key_of(headers))
            self._check(headers.get(b"content-length", b"0"))
        except ApiError as refused:
            await refused.response(scope["path"])(scope, receive, send)
            return
        try:
            await self.app(scope, self._counted(receive), send)
        except Exception as error:
            if not begun:  # Starlette would answer outside of this gate
                failed = unexpected_error(error).response(scope["path"])
                await failed(scope, receive, send)
                if is_out_of_files(error):
                    return  # its reason is no fault
            raise  # into the log

    def _watched(
        self, send: Send, scope: Scope, given: bytes, begun: list[int]
    ) -> Send:
        """The same, naming the request and telling of answers that are errors.
        ``begun`` gets an answer's status."""
        name, started = (
            given if REQUEST_ID.fullmatch(given) else uuid.uuid4().hex.encode(),
            time.perf_counter(),
        )

        async def watched(message: Message) -> None:
            if message["type"] == "http.response.start":
                status, seconds = message["status"], time.perf_counter() - started
                begun.append(status)
                log.debug(
                    "%s %s %r: %d after %.3f s",
                    name.decode(),
                    scope["method"],
                    scope["path"],
                    status,
                    seconds,
                )
                if status >= 400:
                    self.failed(status)
                named = [(b"x-request-id", name)]
                if scope["path"].startswith(ANTHROPIC_PATH):
                    named.append((b"request-id", name))  # as its clients read it
                message = {**message, "headers": [*message["headers"], *named]}
            await send(message)

        return watched

    def _tenant(self, key: bytes) -> str:
        """The key itself, once it is known to be one."""
        if not self.keys:
            return ""
        known = [hmac.compare_digest(key, ours) for ours in self.keys]
        if any(known):
            return key.decode()
        said = (
            "Incorrect API key provided"
            if key
            else "You didn't provide an API key: send Authorization: Bearer KEY"
        )
        raise ApiError(
            401, said, code="invalid_api_key", headers={"WWW-Authenticate": "Bearer"}
        )

    def _check_host(self, header: bytes) -> None:
        host = host_of(header)
        if self.hosts and host and host not in self.hosts:
            raise ApiError(
                421,
                f"this server does not answer as {host:.80}: give --allowed-host to add "
                "that name, or --api-key",
                code="unknown_host",
            )

    def _check(self, length: bytes) -> None:
        if length.isdigit() and int(length) > self.max_body:
            raise self._too_large()

    def _too_large(self) -> ApiError:
        return ApiError(
            413,
            f"the body is larger than {self.max_body:,} bytes",
            code="body_too_large",
        )

    def _counted(self, receive: Receive) -> Receive:
        """The same, refusing bodies that are too large or never end. Once the body is
        here, waiting is for the client to leave and takes as long as it takes."""
        size, whole = 0, False
        until = asyncio.get_running_loop().time() + self.body_seconds

        async def counted() -> Message:
            nonlocal size, whole
            try:
                async with asyncio.timeout_at(None if whole else until):
                    message = await receive()
            except TimeoutError as error:
                raise self._too_slow() from error
            whole = not message.get("more_body", False)
            size += len(message.get("body", b""))
            if size > self.max_body:
                raise self._too_large()
            return message

        return counted

    def _too_slow(self) -> ApiError:
        return ApiError(
            408,
            f"the body has not come within {self.body_seconds:g} seconds",
            code="body_timeout",
            headers={"Connection": "close"},
        )


def key_of(headers: Mapping[bytes, bytes]) -> bytes:
    """The key of a request, as clients of OpenAI or of Anthropic send it; empty for
    none."""
    scheme, _, key = headers.get(b"authorization", b"").partition(b" ")
    return key if scheme.lower() == b"bearer" else headers.get(b"x-api-key", b"")


def host_of(header: bytes) -> str:
    """The name in a header Host, without port and brackets; empty for none."""
    name = header.decode("latin-1").strip().lower()
    if name.startswith("["):
        return name[1:].partition("]")[0]
    return name.partition(":")[0].removesuffix(".")


class Methods:
    """HEAD is answered as GET without a body; OPTIONS names what a path allows, without
    a key."""

    def __init__(self, app: ASGIApp, routes: Sequence[BaseRoute]) -> None:
        self.app, self.routes = app, routes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
        elif scope["method"] == "HEAD":
            # The HTTP server knows the real method and sends no body.
            await self.app({**scope, "method": "GET"}, receive, send)
        elif scope["method"] == "OPTIONS" and (allowed := self._allowed(scope)):
            response = Response(status_code=204, headers={"Allow": allowed})
            await response(scope, receive, send)
        else:
            await self.app(scope, receive, send)

    def _allowed(self, scope: Scope) -> str:
        """Methods of the path's routes; empty if there is no such path."""
        methods: set[str] = set()
        for route in self.routes:
            if isinstance(route, Route) and route.matches(scope)[0] != Match.NONE:
                methods |= route.methods or set()
        if "GET" in methods:
            methods.add("HEAD")
        return ", ".join(sorted({*methods, "OPTIONS"})) if methods else ""
