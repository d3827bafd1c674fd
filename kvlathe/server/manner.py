"""Manner: how a model writes its answers to one conversation, by its chat template and
its vocabulary: with thoughts, with calls of tools, or in Harmony's form."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from kvlathe.runtime.text.structure import Structure, ThoughtForm
from kvlathe.runtime.text.tokenizer import Tokenizer
from kvlathe.server import harmony
from kvlathe.server.conventions import (
    Calling,
    Convention,
    NamedConvention,
    convention_of,
)
from kvlathe.server.errors import ApiError
from kvlathe.server.fields import Json
from kvlathe.server.harmony import HarmonyCalls
from kvlathe.server.named_parser import NamedParser
from kvlathe.server.read_answers import Reading, TextReader
from kvlathe.server.reasoning import Thinking, Thoughts, thinking_of
from kvlathe.server.schema import ChatRequest
from kvlathe.server.tagged import TAGGED, TaggedConvention
from kvlathe.server.tagged_parser import TaggedParser
from kvlathe.server.tool_parser import ToolParser

BUDGETS = {"minimal": 512, "low": 2048, "medium": 8192}
"""Effort -> tokens of thoughts, where a template takes no effort. Others have none."""
SWITCHES = ("enable_thinking", "thinking")
"""Values of templates that say whether the model thinks."""


@dataclass(frozen=True, slots=True)
class Manner:
    """``thinking``: the form of thoughts, if any; ``inside``: whether the prompt ends
    in the middle of them (``ThoughtForm.inside``). ``budget``: tokens that they may
    have."""

    tokenizer: Tokenizer
    calling: Calling | None
    thinking: Thinking | None
    harmony: bool
    tools: Mapping[str, Json | bool] = field(default_factory=dict)
    inside: bool | None = None
    budget: int | None = None

    @property
    def plain(self) -> bool:
        """Whether an answer is nothing but its text."""
        return not (self.harmony or self.calling or self.thinks)

    @property
    def thinks(self) -> bool:
        """Whether the answer may have thoughts."""
        return self.harmony or (self.thinking is not None and self.inside is not False)

    @property
    def may_think(self) -> bool:
        """Whether the model thinks at all."""
        return self.harmony or self.thinking is not None

    @property
    def names_tokens(self) -> bool:
        """Whether marks are special tokens, which the text must have."""
        marks = self.thinking.marks if self.thinking and self.thinks else ()
        names = self.tokenizer.special_names.values()
        return self.harmony or self.calling is not None or bool({*marks} & {*names})

    @property
    def reading(self) -> Reading:
        if self.harmony:
            return Reading(harmony.HarmonyReader, HarmonyCalls().new_id, True)

        def reader() -> TextReader:
            thoughts = None
            if self.thinking and self.thinks:
                thoughts = Thoughts(self.thinking, self.inside)
            return TextReader(thoughts, parser_of(self.calling, self.tools))

        new_id = self.calling.new_id if self.calling else HarmonyCalls().new_id
        return Reading(reader, new_id, self.thinks)

    def structure(self, then: Structure | None, calls: bool) -> Structure | None:
        """The structure of an answer that is to have the structure ``then``, behind its
        thoughts; ``calls``: that it is one of calls."""
        if then is None and self.budget is None:
            return None
        if self.harmony:
            after = "" if then is None else harmony.CALL if calls else harmony.FINAL
            form = harmony.form_before(after, self.budget)
            return Structure.after_thoughts(form, then)
        if self.thinking is None or not self.thinks:
            return then
        own = self.thinking
        form = ThoughtForm(
            own.begin, own.end, own.follows, "", self.inside, self.budget
        )
        return Structure.after_thoughts(form, then)


def template_values(
    request: ChatRequest, known: frozenset[str], thinks: bool
) -> dict[str, object]:
    """The values that a request gives its template, which knows the names ``known``: its
    own, and those that its effort means. Raises ApiError for an effort that would change
    nothing."""
    own = dict(request.chat_template_kwargs or {})
    effort = request.reasoning_effort
    if effort is None:
        return own
    said: dict[str, object] = {}
    for name in SWITCHES:
        if name in known:
            said[name] = effort != "none"
    if "reasoning_effort" in known and effort != "none":
        said["reasoning_effort"] = {
            "minimal": "low",
            "xhigh": "high",
            "max": "high",
        }.get(effort, effort)
    if not said and (effort == "none") == thinks and request.insists:
        reason = (
            "this model always thinks"
            if thinks
            else "this model does not think, or in a way that is not known"
        )
        raise ApiError(
            400, f"reasoning_effort: {reason}", "reasoning_effort", "unsupported"
        )
    return {**said, **own}


def budget_of(request: ChatRequest, values: Mapping[str, object]) -> int | None:
    """Most tokens of thoughts that a request asks for."""
    if request.thinking_token_budget is not None:
        return request.thinking_token_budget
    if "reasoning_effort" in values or request.reasoning_effort is None:
        return None
    return BUDGETS.get(request.reasoning_effort)


def calling_of(template: str) -> Calling | None:
    """The way in which a template's model writes calls; None where it takes no tools,
    or writes calls in a way that is not known."""
    if "tools" in template and harmony.shown_by(template):
        return HarmonyCalls()
    for one in TAGGED if "tools" in template else ():
        if all(mark in template for mark in one.shows):
            return one
    return convention_of(template)


def parser_of(
    calling: Calling | None, tools: Mapping[str, Json | bool]
) -> ToolParser | NamedParser | TaggedParser | None:
    """A parser of one answer's calls of ``tools``; None where it makes none."""
    if isinstance(calling, TaggedConvention):
        return TaggedParser(calling, tools)
    if isinstance(calling, NamedConvention):
        return NamedParser(calling)
    return ToolParser(calling) if isinstance(calling, Convention) else None


def manner_of(
    template: str,
    tokenizer: Tokenizer,
    calling: Calling | None,
    tools: Mapping[str, Json | bool],
) -> Manner:
    """The manner of a template's model, before a prompt is known."""
    if harmony.shown_by(template):
        return Manner(tokenizer, calling, None, True, tools)
    thinking = thinking_of(template, tokenizer)
    return Manner(tokenizer, calling, thinking, False, tools)
