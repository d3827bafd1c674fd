"""Structures of answers as clients ask for them: ``response_format`` of the OpenAI API,
``structured_outputs`` of vLLM."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, model_validator
from pydantic_core import PydanticCustomError

from kvlathe.runtime.text.structure import ANY_OBJECT, Structure
from kvlathe.server.fields import Items, Json, Refused, Strict


class JsonSchema(Strict):
    """A schema with a name, which says nothing here."""

    name: str | None = None
    description: str | None = None
    schema_: Json | bool | None = Field(None, alias="schema")
    strict: bool | None = Field(None, description="Ignored: it always is.")


class ResponseFormat(Strict):
    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None

    @model_validator(mode="after")
    def _has_a_schema(self) -> ResponseFormat:
        named = self.json_schema
        missing = named is None or named.schema_ is None
        if (self.type == "json_schema") == missing:
            raise PydanticCustomError(
                "json_schema", "json_schema.schema belongs to the type json_schema"
            )
        return self

    def structure(self) -> Structure | None:
        if self.type == "text":
            return None
        named = self.json_schema
        return Structure.json(ANY_OBJECT if named is None else named.schema_)


class StructuredOutputs(Strict):
    """The one structure that is given; as in vLLM, exactly one must be."""

    json_: Json | bool | str | None = Field(
        None, alias="json", description="A JSON schema."
    )
    regex: str | None = None
    choice: Items[str] | None = None
    grammar: str | None = Field(None, description="In Lark's syntax.")
    json_object: bool | None = None
    structural_tag: Refused = None
    disable_any_whitespace: Literal[False] | None = None
    disable_additional_properties: Literal[False] | None = None
    whitespace_pattern: Refused = None

    @model_validator(mode="after")
    def _one(self) -> StructuredOutputs:
        named = (self.json_, self.regex, self.choice, self.grammar, self.json_object)
        if sum(value is not None for value in named) != 1 or self.json_object is False:
            raise PydanticCustomError(
                "one", "give one of json, regex, choice, grammar and json_object"
            )
        return self

    def structure(self) -> Structure:
        if self.regex is not None:
            return Structure.regex(self.regex)
        if self.choice is not None:
            return Structure.choice(self.choice)
        if self.grammar is not None:
            return Structure.grammar(self.grammar)
        return Structure.json(ANY_OBJECT if self.json_object else self.json_)
