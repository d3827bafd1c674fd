"""The account of memory: bytes that each part of an engine takes at most. What steps
compute with on a CPU, and the program itself, come to it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from kvlathe.runtime.drafting.draft_model import DraftModel

if TYPE_CHECKING:
    from kvlathe.runtime.llm import LLM

HOST_CACHE = "host_cache"
"""The part that is in the host's memory wherever the engine runs."""


def memory_account(llm: LLM) -> Mapping[str, int]:
    """The parts that take any: ``weights``, ``kv_cache`` (pages), ``states``, ``steps``
    (what a GPU's session keeps beside them), ``host_cache``, ``adapters``, those of a draft
    engine as ``draft_weights`` and so on, and ``draft_hidden_rows`` of a layer that
    guesses."""
    found = dict(llm.engine.memory)
    drafter = llm.engine.scheduler.speculation.drafter
    if isinstance(drafter, DraftModel):
        found |= {f"draft_{name}": own for name, own in drafter.engine.memory.items()}
    prefixes = llm.engine.scheduler.prefixes
    if prefixes and prefixes.stores and prefixes.stores.host:
        found[HOST_CACHE] = prefixes.stores.host.capacity
    if loaded := llm.adapters.loaded:
        found["adapters"] = sum(one.bytes for one in loaded)
        if on_host(llm):  # the graph that takes them has weights of its own
            found["adapters"] += found.get("weights", 0)
    return {name: size for name, size in found.items() if size}


def on_host(llm: LLM) -> bool:
    """Whether the engine is in the host's memory."""
    return "samples" not in llm.session.capabilities


def host_bytes(llm: LLM) -> int:
    """Bytes of the host's memory that all of it takes at most."""
    account = memory_account(llm)
    return sum(account.values()) if on_host(llm) else account.get(HOST_CACHE, 0)
