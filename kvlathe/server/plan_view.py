"""The plan as a page shows it: what it removes at which length, what a full cache
holds, and what the build measured."""

from __future__ import annotations

from pydantic import BaseModel, Field

from kvlathe.plan.manifest import Manifest
from kvlathe.plan.memory import bytes_left, lengths_up_to, uncompressed_pages
from kvlathe.runtime.llm import LLM

POINTS = 48
"""Points of the curve of bytes over tokens, its start aside."""


class LengthBytes(BaseModel):
    """The cache at one length of a sequence."""

    tokens: int
    bytes_per_token: float = Field(
        description="All pages counted, the mean over where in its last page it stands."
    )
    removed: float = Field(description="Share of the uncompressed bytes.")
    sequences: int = Field(description="As many of this length a full cache holds.")
    sequences_uncompressed: int = Field(description="As many it would hold of these.")


class CurvePoint(BaseModel):
    """Bytes of one sequence of so many tokens, the mean over where in its last page it
    stands."""

    tokens: int
    bytes: int
    uncompressed: int


class Lost(BaseModel):
    """What the build measured beside the uncompressed model."""

    kl: float = Field(description="Nats a token.")
    same_token: float
    perplexity_ratio: float
    where: str
    warning: str = Field(description="Empty for a plan that does not break the model.")


class PlanView(BaseModel):
    """The plan, and what follows for this server. Uncompressed is in the same number
    format."""

    model: str
    compression: str
    context: int = Field(description="Tokens of the longest sequence.")
    most_running: int = Field(description="Sequences that run at once.")
    bits: int = Field(description="Of a number of the uncompressed cache.")
    uncompressed_per_token: float
    cache_bytes: int
    chats: bool = Field(description="Whether the model has a chat template.")
    lengths: list[LengthBytes]
    curve: list[CurvePoint]
    lost: Lost | None


def plan_view(llm: LLM, model: str) -> PlanView:
    """Nothing of it changes while the engine runs."""
    shape, bits = llm.plan.model, llm.plan.index.hot_bits
    plain = shape.numbers * bits / 8
    tokenizer = llm.tokenizer
    return PlanView(
        model=model,
        compression=llm.plan.compression,
        context=llm.most_tokens,
        most_running=llm.limits.max_batch_size,
        bits=bits,
        uncompressed_per_token=plain,
        cache_bytes=llm.pool.arena_bytes,
        chats=tokenizer is not None and tokenizer.chat_template is not None,
        lengths=[_at(llm, n, plain) for n in lengths_up_to(llm.most_tokens)],
        curve=_curve(llm, plain),
        lost=_lost(llm.manifest),
    )


def _at(llm: LLM, tokens: int, plain: float) -> LengthBytes:
    left = bytes_left(llm.layout, tokens) * 16 / llm.plan.index.hot_bits
    arena = llm.pool.arena_bytes
    whole = uncompressed_pages(tokens, llm.plan.page_tokens, plain)
    return LengthBytes(
        tokens=tokens,
        bytes_per_token=left * plain,
        removed=1 - left,
        sequences=arena // llm.layout.bytes_for(tokens),
        sequences_uncompressed=int(arena // whole),
    )


def _curve(llm: LLM, plain: float) -> list[CurvePoint]:
    most, start = llm.most_tokens, CurvePoint(tokens=0, bytes=0, uncompressed=0)
    found = [start]
    for tokens in sorted({max(1, most * i // POINTS) for i in range(1, POINTS + 1)}):
        left = bytes_left(llm.layout, tokens) * 16 / llm.plan.index.hot_bits
        whole = round(tokens * plain)
        held = round(left * tokens * plain)
        found.append(CurvePoint(tokens=tokens, bytes=held, uncompressed=whole))
    return found


def _lost(manifest: Manifest | None) -> Lost | None:
    found = manifest and manifest.measured
    if not found:
        return None
    whole = found.whole
    return Lost(
        kl=whole.kl,
        same_token=whole.same_token,
        perplexity_ratio=whole.perplexity_ratio,
        where=found.where,
        warning=found.warning,
    )
