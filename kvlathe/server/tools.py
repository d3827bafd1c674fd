"""Tools, as clients say them: ``tools``, ``tool_choice``, ``parallel_tool_calls``."""

from __future__ import annotations

import json
import uuid
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, field_validator
from pydantic_core import PydanticCustomError

from kvlathe.server.fields import Items, Json, Strict

MAX_TOOLS = 128
NAME = r"^[a-zA-Z0-9_.-]{1,64}$"
OBJECT = "object"
Name = Annotated[str, Field(pattern=NAME)]


class Function(Strict):
    name: Name
    description: str | None = None
    parameters: Json | None = Field(None, description="A JSON schema.")
    strict: bool | None = Field(
        None,
        description="Ignored: arguments are held to the schema where a call must be.",
    )

    @field_validator("parameters")
    @classmethod
    def _of_an_object(cls, parameters: Json | None) -> Json | None:
        kind = (parameters or {}).get("type", OBJECT)
        kinds = kind if isinstance(kind, list) else [kind]
        if OBJECT not in kinds:
            raise PydanticCustomError("parameters", "the schema's type must be object")
        return parameters

    @property
    def schema_(self) -> Json:
        """JSON schema of the arguments, which are an object. A tool that names no
        parameters takes none."""
        if self.parameters:
            return {**self.parameters, "type": OBJECT}
        return {"type": OBJECT, "properties": {}, "additionalProperties": False}


class Tool(Strict):
    type: Literal["function"]
    function: Function


class Named(Strict):
    name: Name


class NamedChoice(Strict):
    """This function is to be called."""

    type: Literal["function"]
    function: Named


class AllowedTools(Strict):
    mode: Literal["auto", "required"]
    tools: Items[NamedChoice] = Field(min_length=1, max_length=MAX_TOOLS)


class AllowedChoice(Strict):
    """The only tools, of all, that may be called."""

    type: Literal["allowed_tools"]
    allowed_tools: AllowedTools


ToolChoice = Literal["none", "auto", "required"] | NamedChoice | AllowedChoice


def names_of(choice: ToolChoice | None) -> set[str] | None:
    """The tools that a choice leaves; None for all."""
    if isinstance(choice, NamedChoice):
        return {choice.function.name}
    if isinstance(choice, AllowedChoice):
        return {one.function.name for one in choice.allowed_tools.tools}
    return None


def must_call(choice: ToolChoice | None) -> bool:
    """Whether the answer must be a call."""
    if isinstance(choice, AllowedChoice):
        return choice.allowed_tools.mode == "required"
    return choice not in (None, "none", "auto")


class CalledFunction(BaseModel):
    model_config = ConfigDict(extra="allow", strict=True)

    name: str
    arguments: str | Json


class Called(BaseModel):
    """A call that an earlier answer made."""

    model_config = ConfigDict(extra="allow", strict=True)

    id: str | None = None
    type: Literal["function"] = "function"
    function: CalledFunction

    def for_template(self, as_text: bool) -> Json:
        """``as_text``: with arguments as JSON. Most templates write that themselves."""
        said = self.model_dump(exclude_none=True)
        arguments = self.function.arguments
        if isinstance(arguments, str) and not as_text:
            said["function"]["arguments"] = parse_arguments(arguments)
        if isinstance(arguments, dict) and as_text:
            said["function"]["arguments"] = json.dumps(arguments, ensure_ascii=False)
        return said


def new_call_id() -> str:
    return f"call_{uuid.uuid4().hex[:24]}"


def parse_arguments(arguments: str) -> object:
    """The arguments of a call; the text itself where it is no JSON."""
    try:
        return json.loads(arguments)
    except (ValueError, RecursionError):
        return arguments
