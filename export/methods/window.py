"""window: a head sees its first tokens and its newest ones (StreamingLLM, arXiv
2309.17453; which heads bear it: DuoAttention, arXiv 2410.10819).

Whole pages, by position alone: nothing is measured, nothing is ranked. The heads that
look far are named; they see everything.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import cast

from kvlathe.base.errors import KvlatheError
from kvlathe.export.methods.method import Decision, Method
from kvlathe.export.methods.options import (
    Kind,
    MethodOptions,
    count,
    option,
)
from kvlathe.plan.heads import ModelShape
from kvlathe.plan.lives import Window

TOKENS = count("a count of tokens")
SINK = "First tokens that every head sees, rounded up to pages."
RECENT = "Newest tokens that every head sees, rounded up to pages."
Heads = tuple[tuple[int, int], ...]
"""(layer, head) each."""


class HeadNames(Kind):
    """Heads as layer.head, divided by "/"."""

    def read(self, text: str) -> Heads:
        return tuple(self._head(part) for part in text.split("/") if part)

    def _head(self, text: str) -> tuple[int, int]:
        layer, _, head = text.partition(".")
        if not (layer.isdecimal() and head.isdecimal()):
            raise ValueError(text)
        return int(layer), int(head)

    def takes(self, value: object) -> bool:
        return isinstance(value, tuple)

    def write(self, value: object) -> str:
        return "/".join(f"{layer}.{head}" for layer, head in cast(Heads, value))

    def refusal(self, fact: str, text: str, example: str) -> KvlatheError:
        return KvlatheError(
            f"{fact} cannot be used",
            "a head is layer.head",
            "write for example whole=4.0/5.3",
        )


@dataclass(frozen=True)
class WindowOptions(MethodOptions):
    """The window, and the heads that have none."""

    sink: int = option(64, TOKENS, SINK)
    recent: int = option(256, TOKENS, RECENT)
    whole: Heads = option(
        (), HeadNames(), 'Heads that see everything: layer.head, divided by "/".'
    )


def plan(options: WindowOptions, page_tokens: int) -> Decision:
    """One window, and the heads that have none."""
    return Decision(
        tokens=(window(options.sink, options.recent, page_tokens),),
        whole_heads=options.whole,
    )


def window(sink: int, recent: int, page_tokens: int) -> Window:
    """A window of at least so many tokens, in whole pages."""
    pages_of_sink = -(-sink // page_tokens)
    pages_of_recent = -(-recent // page_tokens)
    return Window(pages_of_sink * page_tokens, pages_of_recent * page_tokens)


def check(options: WindowOptions, shape: ModelShape) -> None:
    """Raise KvlatheError for heads that a model of ``shape`` lacks."""
    for layer, head in options.whole:
        if (layer, head) not in shape.places:
            raise KvlatheError(
                f"there is no head {layer}.{head}",
                f"the model has {shape.layers} layers of {shape.kv_heads} KV heads",
                "count layers and heads from 0",
            )


METHOD = Method(
    "heads see their first and their newest tokens, but for those that are named",
    WindowOptions(),
    plan=plan,
    check=check,
)
