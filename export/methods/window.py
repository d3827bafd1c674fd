"""window: a head sees its first tokens and its newest ones (StreamingLLM, arXiv
2309.17453; which heads bear it: DuoAttention, arXiv 2410.10819).

Whole pages, by position alone: nothing is measured, nothing is ranked. The heads that
look far are named; they see everything.
"""

from __future__ import annotations

from kvlathe.base.errors import KvlatheError
from kvlathe.export.methods.options import Decision, known_only
from kvlathe.plan.heads import ModelShape
from kvlathe.plan.lives import NO_END, Window

SUMMARY = "heads see their first and their newest tokens, but for those that are named"
SINK, RECENT = 64, 256
"""Tokens, unless asked otherwise."""
MOST = NO_END // 2
"""Tokens that no window has."""
EXAMPLE = "write for example sink=64,recent=256,whole=4.0/5.3"


def plan(written: dict[str, str], page_tokens: int) -> Decision:
    """Options ``sink`` and ``recent`` (tokens, rounded up to pages) and ``whole``: heads
    as layer.head, divided by "/", that keep all tokens. Raises KvlatheError."""
    known_only(written, ("sink", "recent", "whole"))
    sink = _count(written, "sink", SINK)
    recent = _count(written, "recent", RECENT)
    pages_of_sink = -(-sink // page_tokens)
    pages_of_recent = -(-recent // page_tokens)
    life = Window(pages_of_sink * page_tokens, pages_of_recent * page_tokens)
    whole = written.get("whole", "")
    heads = [_head(text) for text in whole.split("/") if text]
    return Decision(tokens=(life,), whole_heads=tuple(heads))


def check(written: dict[str, str], shape: ModelShape) -> None:
    """Raise KvlatheError for heads that a model of ``shape`` lacks."""
    for layer, head in plan(written, 1).whole_heads:
        if layer >= shape.layers or head >= shape.kv_heads:
            raise KvlatheError(
                f"there is no head {layer}.{head}",
                f"the model has {shape.layers} layers of {shape.kv_heads} KV heads",
                "count layers and heads from 0",
            )


def _count(written: dict[str, str], name: str, default: int) -> int:
    text = written.get(name)
    if text is None:
        return default
    count = int(text) if text.isdecimal() else NO_END
    if count >= MOST:
        fact = f"{name}={text} cannot be used"
        reason = "it is a count of tokens"
        raise KvlatheError(fact, reason, EXAMPLE)
    return count


def _head(text: str) -> tuple[int, int]:
    layer, _, head = text.partition(".")
    is_head = layer.isdecimal() and head.isdecimal()
    if not is_head:
        fact = f"whole={text} cannot be used"
        reason = "a head is layer.head"
        raise KvlatheError(fact, reason, EXAMPLE)
    return int(layer), int(head)
