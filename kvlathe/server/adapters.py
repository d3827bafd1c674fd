"""Paths that load and unload LoRA adapters, as vLLM has them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from functools import partial

from fastapi import FastAPI
from fastapi.responses import PlainTextResponse
from pydantic import Field

from kvlathe.base.errors import KvlatheError
from kvlathe.server.errors import ApiError, refusal
from kvlathe.server.fields import Strict
from kvlathe.server.service import ERRORS, Service


class LoadRequest(Strict):
    """POST /v1/load_lora_adapter."""

    lora_name: str = Field(description="The `model` of requests that are to have it.")
    lora_path: str = Field(description="A folder of the server, as PEFT writes it.")


class UnloadRequest(Strict):
    """POST /v1/unload_lora_adapter."""

    lora_name: str


def add_adapters(app: FastAPI, service: Service) -> None:
    """The paths by which clients change which adapters there are."""
    llm = service.engine.llm

    async def done(work: Callable[[], None], param: str) -> None:
        try:
            await asyncio.to_thread(work)
        except KvlatheError as error:
            raise refusal(error, param) from error

    @app.post(
        "/v1/load_lora_adapter",
        response_class=PlainTextResponse,
        responses=ERRORS,
        tags=["vLLM"],
    )
    async def load(body: LoadRequest) -> str:
        """Let requests name an adapter."""
        if body.lora_name == service.answerer.model:
            raise ApiError(
                400, "lora_name: the model itself has this name", "lora_name", "taken"
            )
        work = partial(llm.load_adapter, body.lora_name, body.lora_path)
        await done(work, "lora_path")
        return f"Success: LoRA adapter '{body.lora_name}' added successfully."

    @app.post(
        "/v1/unload_lora_adapter",
        response_class=PlainTextResponse,
        responses=ERRORS,
        tags=["vLLM"],
    )
    async def unload(body: UnloadRequest) -> str:
        """Forget an adapter. Answers that have begun end with it."""
        service.check(body.lora_name, "lora_name")
        work = partial(llm.unload_adapter, body.lora_name)
        await done(work, "lora_name")
        return f"Success: LoRA adapter '{body.lora_name}' removed successfully."
