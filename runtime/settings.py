"""Checks of the numbers that an engine is loaded with."""

from __future__ import annotations

from dataclasses import dataclass

from kvlathe.base.errors import KvlatheError
from kvlathe.plan.engine_folder import EngineFolder
from kvlathe.plan.manifest import Limits
from kvlathe.plan.plan import CompressionPlan, ShardPlan
from kvlathe.runtime.text.sampling_params import is_number


def check_counts(**counts: int | None) -> None:
    """Raises KvlatheError for a number that is not whole, or below 1."""
    for name, value in counts.items():
        if value is not None and (not is_number(value, whole=True) or value < 1):
            raise KvlatheError(
                f"{name} is {value!r:.60}",
                "it must be a whole number, 1 or more",
                "change it",
            )


def memory_share(value: float) -> float:
    if is_number(value) and 0 < value <= 1:
        return float(value)
    raise KvlatheError(
        f"gpu_memory_utilization is {value!r:.60}",
        "it is the share of a GPU's memory that may be used",
        "give a number above 0, 1 at most",
    )


@dataclass(frozen=True, slots=True)
class Lower:
    """Limits below those that an engine was built for; None: the engine's own."""

    max_batch_size: int | None = None
    max_seq_len: int | None = None
    max_num_tokens: int | None = None


def lowered(limits: Limits, chunk: int, wanted: Lower) -> Limits:
    """``limits``, lower where ``wanted`` says so. ``chunk``: tokens of a prompt that
    pass at once. Raises KvlatheError for what is above the engine's limits, and for
    steps too small for a chunk or for a token of every sequence."""
    batch = _at_most(
        limits.max_batch_size,
        wanted.max_batch_size,
        "the engine cannot run {} sequences at once",
    )
    longest = _at_most(
        limits.max_seq_len,
        wanted.max_seq_len,
        "the engine cannot hold sequences of {} tokens",
    )
    tokens = _at_most(
        limits.max_num_tokens,
        wanted.max_num_tokens,
        "the engine cannot take {} tokens in a step",
        least=min(limits.max_num_tokens, max(chunk, batch)),
    )
    return Limits(batch, tokens, min(limits.max_input_len, longest), longest)


def _at_most(most: int, wanted: int | None, fact: str, least: int = 1) -> int:
    """``wanted``, or ``most`` where nothing was asked for."""
    if wanted is None:
        return most
    if is_number(wanted, whole=True) and least <= wanted <= most:
        return int(wanted)
    asked = fact.format(f"{wanted!r:.60}")
    if least == 1:
        reason = f"it was built for 1 to {most}"
        remedy = "give a number in between, or build the engine with a larger one"
    else:
        reason = (
            "a step holds a whole chunk of a prompt and a token of every sequence, and "
            f"what the engine was built for: {least:,} to {most:,}"
        )
        remedy = "give a number in between, or fewer sequences"
    raise KvlatheError(asked, reason, remedy)


def refuse_states(plan: CompressionPlan) -> None:
    """Raises KvlatheError where layers keep states, for what keeps prefixes outside an
    engine."""
    if any(plan.model.states):
        raise KvlatheError(
            "evicted prefixes of this engine cannot be stored",
            "some of its layers keep a state, and a store has pages alone",
            "leave --host-cache-size and --disk-cache out",
        )


def refuse_shards(plan: CompressionPlan) -> None:
    """Raises KvlatheError where ``plan`` is one shard's, for what takes whole pages out
    of an engine."""
    if isinstance(plan, ShardPlan):
        raise KvlatheError(
            f"pages of {plan.num_shards} shards stay in their engine",
            "each shard has its part of every page",
            "run the engine on one GPU",
        )


def refuse_layer(opened: EngineFolder) -> None:
    """Raises KvlatheError for a layer that guesses tokens, where a whole model is
    meant."""
    if opened.manifest.reads_hidden:
        raise KvlatheError(
            f"{opened.path} is no engine of a whole model",
            "it is the layer with which one guesses tokens",
            f"load the model's engine, with --speculative {opened.path}",
        )
