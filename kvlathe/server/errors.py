"""Every failure as the OpenAI API says it: {"error": {"message", "type", "param",
"code"}}, and its status."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from fastapi.routing import APIRoute
from pydantic import BaseModel, Field, ValidationError
from pydantic_core import ErrorDetails
from starlette.exceptions import HTTPException

from kvlathe.base.errors import Asleep, Busy, EngineStopped, KvlatheError
from kvlathe.base.memory import OutOfMemory
from kvlathe.runtime.async_engine import RETRY_SECONDS, Closing
from kvlathe.runtime.cache.arena import OutOfPages
from kvlathe.server.connection import is_out_of_files

TYPES = {
    401: "authentication_error",
    404: "not_found_error",
    408: "timeout_error",
    429: "rate_limit_error",
}
TOO_LONG = "context_length_exceeded"
ANTHROPIC_PATH = "/v1/messages"
ANTHROPIC_TYPES = {
    401: "authentication_error",
    404: "not_found_error",
    408: "timeout_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
}
AGAIN = {"Retry-After": str(RETRY_SECONDS)}
"""Headers of an answer to what may succeed later."""

BUSY: Mapping[type[Busy], tuple[int, str]] = {
    Closing: (503, "shutting_down"),
    Asleep: (503, "sleeping"),
}
"""Status and code of those that a fuller queue does not explain."""


class ErrorBody(BaseModel):
    message: str = Field(description="What is wrong, why, and what to do.")
    type: str = Field(
        description="invalid_request_error, authentication_error, rate_limit_error, server_error, ..."
    )
    param: str | None = Field(
        None, description="The field of the request that is at fault."
    )
    code: str | None = Field(
        None, description="A short name of the error for programs."
    )


class ErrorResponse(BaseModel):
    """The form of every error."""

    error: ErrorBody


class ApiError(HTTPException):
    """A failure with its status; ``param`` names the field at fault."""

    def __init__(
        self,
        status: int,
        message: str,
        param: str | None = None,
        code: str | None = None,
        headers: dict[str, str] | None = None,
    ) -> None:
        super().__init__(status, message, headers)
        self.param, self.code = param, code

    @property
    def body(self) -> dict[str, Any]:
        kind = TYPES.get(
            self.status_code,
            "invalid_request_error" if self.status_code < 500 else "server_error",
        )
        said = {
            "message": self.detail,
            "type": kind,
            "param": self.param,
            "code": self.code,
        }
        return {
            "error": {
                key: value and value.encode(errors="replace").decode()
                for key, value in said.items()
            }
        }

    @property
    def anthropic_body(self) -> dict[str, Any]:
        """The same as Anthropic's API says it."""
        kind = ANTHROPIC_TYPES.get(
            self.status_code,
            "invalid_request_error" if self.status_code < 500 else "api_error",
        )
        said = self.body["error"]["message"]
        if self.code == TOO_LONG:  # the words that its clients look for
            said = f"prompt is too long: {said}"
        return {"type": "error", "error": {"type": kind, "message": said}}

    def response(self, path: str) -> JSONResponse:
        """The error in the form of the API that ``path`` belongs to."""
        anthropic = path.startswith(ANTHROPIC_PATH)
        body = self.anthropic_body if anthropic else self.body
        return JSONResponse(body, self.status_code, self.headers)


def refusal(error: KvlatheError, param: str | None) -> ApiError:
    """A refusal of the engine as an HTTP error."""
    if isinstance(error, Busy):
        again = {"Retry-After": str(error.retry_after)}
        status, code = BUSY.get(type(error), (429, "queue_full"))
        return ApiError(status, str(error), code=code, headers=again)
    if isinstance(error, EngineStopped | OutOfPages | OutOfMemory):
        # No fault of the request: it may succeed later, here or elsewhere.
        code = "shutting_down" if isinstance(error, EngineStopped) else "out_of_memory"
        return ApiError(503, str(error), code=code, headers=AGAIN)
    if "is too long" in error.fact or "does not fit" in error.fact:
        return ApiError(400, f"{param}: {error}", param, TOO_LONG)
    return ApiError(
        400, f"{param}: {error}" if param else str(error), param, "invalid_value"
    )


def renamed(error: ApiError, names: Mapping[str, str]) -> ApiError:
    """The error of a chat, with the field's name in another API."""
    first, dot, rest = (error.param or "").partition(".")
    if first not in names:
        return error
    param = f"{names[first]}{dot}{rest}"
    said = error.detail.replace(error.param or "", param, 1)
    return ApiError(
        error.status_code, said, param, error.code, dict(error.headers or {}) or None
    )


def unfit(error: ValidationError, fields: Mapping[str, object]) -> ApiError:
    """400 for a chat with ``fields`` that another API's request cannot become."""
    first = error.errors()[0]
    param = ".".join(field_of(first["loc"], fields)) or blamed(first, fields)
    said = first["msg"] if param is None else f"{param}: {first['msg']}"
    return ApiError(400, said, param, "invalid_value")


def unexpected_error(error: Exception) -> ApiError:
    """The HTTP error for a fault of the server itself, or of a process that may open no
    more files."""
    if is_out_of_files(error):
        said = "the server may open no more files just now (ulimit -n)"
        return ApiError(503, said, code="out_of_files", headers=AGAIN)
    return ApiError(
        500, f"the server failed ({type(error).__name__}); its log says more"
    )


def handle(app: FastAPI) -> None:
    """Answer every exception that a request is to blame for in this form."""

    async def api_error(request: Request, error: Exception) -> JSONResponse:
        assert isinstance(error, HTTPException)
        if not isinstance(
            error, ApiError
        ):  # no such path, method not allowed, a body that breaks off
            said = str(error.detail)
            path, headers = f"{request.url.path:.200}", dict(error.headers or {})
            if error.status_code == 404:
                said = f"there is no {path}: {paths_of(app)}"
            if error.status_code == 405:
                said = f"{path} takes {headers.get('Allow')}, not {request.method}"
            error = ApiError(error.status_code, said, headers=headers)
        return error.response(request.url.path)

    async def invalid(request: Request, error: Exception) -> JSONResponse:
        assert isinstance(error, RequestValidationError)
        return invalid_request(error).response(request.url.path)

    app.add_exception_handler(HTTPException, api_error)
    app.add_exception_handler(RequestValidationError, invalid)


def paths_of(app: FastAPI) -> str:
    """The paths that there are, in words."""
    described = {r.path for r in app.routes if isinstance(r, APIRoute)}
    return f"this server has {', '.join(sorted(described))}"


def invalid_request(error: RequestValidationError) -> ApiError:
    """400 that names the first field at fault; where it may be of several types, that
    it is too long or what is wrong deepest inside it."""
    first = error.errors()[0]
    if first["type"] == "json_invalid":
        reason = first.get("ctx", {}).get("error", "it ends early")
        return ApiError(400, f"the body is not JSON ({reason})", None, "invalid_json")
    in_body = first["loc"][0] == "body"  # else in the query or the path
    same = [
        (field_of(e["loc"][1:], error.body if in_body else {}), e)
        for e in error.errors()
        if e["loc"][:2] == first["loc"][:2]
    ]
    path, worst = max(same, key=lambda entry: (*weight(entry[1]), len(entry[0])))
    if isinstance(error.body, bytes):
        return ApiError(
            400,
            "the body is not JSON by its Content-Type: send application/json",
            None,
            "invalid_json",
        )
    param = ".".join(path) or blamed(worst, error.body)
    if worst["type"] == "extra_forbidden":
        return ApiError(
            400,
            f"Unrecognized request argument supplied: {param}",
            param,
            "unknown_parameter",
        )
    code = {
        "missing": "missing_required_parameter",
        "unsupported": "unsupported_parameter",
    }.get(worst["type"])
    said = worst["msg"]
    if worst["type"] == "literal_error":
        given = json.dumps(worst["input"], ensure_ascii=False)
        said = f"{given:.80} is not taken here. {said}"
    return ApiError(400, f"{param or 'body'}: {said}", param, code or "invalid_value")


def weight(fault: ErrorDetails) -> tuple[bool, bool]:
    """Rank of a fault among several, of which the first is said: one that is too long,
    then a type that is none of ours, since its other fields are then not ours either."""
    of_a_type = fault["type"] == "literal_error" and fault["loc"][-1] == "type"
    return fault["type"] == "too_long", of_a_type


def blamed(fault: ErrorDetails, body: object) -> str | None:
    """The field that is at fault where several together are: such faults have its name
    as their type."""
    kind = fault["type"]
    return kind if isinstance(body, dict) and kind in body else None


def field_of(loc: Sequence[str | int], body: Any) -> list[str]:  # noqa: ANN401
    """The path in ``body`` that a pydantic ``loc`` means: without the names of the
    types that were tried."""
    path = []
    for i, part in enumerate(loc):
        if isinstance(body, dict) and (part in body or i == len(loc) - 1):
            body = body.get(part)
        elif isinstance(body, list) and isinstance(part, int) and part < len(body):
            body = body[part]
        else:
            continue
        path.append(f"{part!s:.80}")
    return path
