"""Messages of a conversation, as clients send them and as templates take them."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field

from kvlathe.server.fields import Items, Json
from kvlathe.server.tools import Called


class TextPart(BaseModel):
    model_config = ConfigDict(strict=True)

    type: Literal["text"]
    text: str


class RefusalPart(BaseModel):
    """An earlier answer that said no. Its words are text to the template."""

    model_config = ConfigDict(strict=True)

    type: Literal["refusal"]
    refusal: str

    @property
    def text(self) -> str:
        return self.refusal


class Message(BaseModel):
    """One turn. Fields beside role and content reach the chat template as they are."""

    model_config = ConfigDict(extra="allow", strict=True)

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | Items[TextPart | RefusalPart] | None = Field(
        None, description="A text, or parts of type text or refusal."
    )
    name: str | None = None
    tool_calls: Items[Called] | None = None

    @property
    def spoken(self) -> str:
        """Its text, all parts together."""
        if isinstance(self.content, str):
            return self.content
        return "".join(part.text for part in self.content or [])

    def for_template(self, as_text: bool = False) -> Json:
        """``as_text``: with the arguments of calls as JSON (``CallForm``)."""
        said = {**self.model_dump(exclude_none=True), "content": self.spoken}
        if self.tool_calls:
            said["tool_calls"] = [one.for_template(as_text) for one in self.tool_calls]
        return said
