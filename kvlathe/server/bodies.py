"""Bodies of requests as JSON, read before any field is looked at.

Python's reader takes more than JSON has: NaN, Infinity, numbers that become infinite,
half a character. No answer could give them back. It also takes as many levels as its
stack does, and what reads a body later follows those, too: a body that is deep ends here,
and not in the middle of somebody's recursion.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Coroutine, Iterator
from typing import NoReturn

from fastapi import Request
from fastapi.responses import Response
from fastapi.routing import APIRoute

from kvlathe.server.errors import ApiError

MOST_LEVELS = 128
"""Levels of lists and objects in a body. A level of a JSON schema takes two."""
INVALID = "invalid_json"
Path = tuple[str, ...]


class JsonRequest(Request):
    """A request whose body is JSON of at most MOST_LEVELS levels."""

    async def json(self) -> object:
        """The body. Raises ApiError, or JSONDecodeError where it is no JSON."""
        text = await self.body()
        try:
            body = json.loads(text, parse_constant=_no_number, parse_float=_finite)
        except json.JSONDecodeError:
            raise  # FastAPI says where
        except RecursionError as error:
            raise _too_deep() from error
        except ValueError as error:  # bytes that are no UTF-8, an integer without end
            reason = str(error).partition(":")[0]
            said = f"the body cannot be read ({reason})"
            raise ApiError(400, said, None, INVALID) from error
        # Counting brackets is cheap, and few bodies have so many.
        if text.count(b"[") + text.count(b"{") > MOST_LEVELS and is_deep(body):
            raise _too_deep()
        if b"\\u" in text:
            _check_characters(body)
        return body


class JsonRoute(APIRoute):
    """A path whose bodies are read so."""

    def get_route_handler(
        self,
    ) -> Callable[[Request], Coroutine[object, object, Response]]:
        answer = super().get_route_handler()

        async def handler(request: Request) -> Response:
            return await answer(JsonRequest(request.scope, request.receive))

        return handler


def is_deep(body: object) -> bool:
    """Whether ``body``, as JSON is read, has more than MOST_LEVELS levels."""
    level = [body]
    for _ in range(MOST_LEVELS):
        level = [
            part
            for one in level
            if isinstance(one, dict | list)
            for part in (one.values() if isinstance(one, dict) else one)
            if isinstance(part, dict | list)
        ]
    return bool(level)


def _finite(number: str) -> float:
    if math.isinf(found := float(number)):
        raise ValueError(f"{number:.20} is beyond what a number holds")
    return found


def _no_number(name: str) -> NoReturn:
    raise ValueError(f"{name} is no JSON")


def _too_deep() -> ApiError:
    return ApiError(
        400,
        f"the body has more than {MOST_LEVELS} levels of lists and objects",
        None,
        INVALID,
    )


def _check_characters(body: object) -> None:
    """Raises ApiError that names the first text, or key, with half a character (an
    escape such as ``\\ud83d`` alone)."""
    try:
        json.dumps(body, ensure_ascii=False).encode()
    except UnicodeEncodeError as error:
        paths = (path for path, text in _texts(body, ()) if not _is_whole(text))
        param = ".".join(next(paths)) or None
        said = f"{param or 'body'}: a text ends or begins in the middle of a character"
        raise ApiError(400, said, param, "invalid_value") from error


def _texts(value: object, path: Path) -> Iterator[tuple[Path, str]]:
    """Every text in ``value``, keys too, with the path to it."""
    if isinstance(value, str):
        yield path, value
    elif isinstance(value, list):
        for i, each in enumerate(value):
            yield from _texts(each, (*path, str(i)))
    elif isinstance(value, dict):
        for key, each in value.items():
            yield (*path, key), key
            yield from _texts(each, (*path, key))


def _is_whole(text: str) -> bool:
    return text.encode(errors="replace").decode() == text
