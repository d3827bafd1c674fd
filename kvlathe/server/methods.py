"""Methods: HEAD and OPTIONS for every path that has an answer. Plain ASGI."""

from __future__ import annotations

from collections.abc import Sequence

from starlette.responses import Response
from starlette.routing import BaseRoute, Match, Route
from starlette.types import ASGIApp, Receive, Scope, Send


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
