"""A session and its cache from an engine folder, on one device or on several GPUs."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial

from kvlathe.base.errors import KvlatheError
from kvlathe.plan.engine_folder import EngineFolder, open_engine
from kvlathe.plan.layout import CacheLayout
from kvlathe.plan.manifest import Manifest
from kvlathe.plan.memory import states_room
from kvlathe.plan.plan import CompressionPlan
from kvlathe.runtime.sessions import registry
from kvlathe.runtime.sessions.protocols import Session
from kvlathe.runtime.sessions.registry import Runner


@dataclass(frozen=True, slots=True)
class Wanted:
    """Settings of a load; LLM.load has the same fields."""

    device: str | None
    num_shards: int
    memory_share: float
    cache_bytes: int | None
    threads: int | None


@dataclass(frozen=True, slots=True)
class Loaded:
    """``plan``, ``cache_bytes``: of one GPU, where there are several. ``attention``:
    what runs it, in words. ``memory``: bytes of the engine's parts, on one GPU, or on
    the host."""

    session: Session
    plan: CompressionPlan
    cache_bytes: int
    attention: str
    prompt_tokens: int
    memory: Mapping[str, int]


def load_session(engine: EngineFolder, manifest: Manifest, wanted: Wanted) -> Loaded:
    """``manifest``: the engine's, with the limits that are to hold. Raises KvlatheError
    where nothing here runs it."""
    folder, plan = engine.path, engine.plan
    runner = registry.runner(manifest, folder, wanted.device)
    words = runner.attention(manifest)
    if wanted.num_shards > 1:
        runner, plan = _in_parallel(engine, runner, wanted.num_shards)
        words += f", on {wanted.num_shards} GPUs"
    layout = CacheLayout(plan)
    kind = runner.session(manifest)  # says what is missing
    size = registry.cache_bytes(
        manifest, layout, runner, wanted.memory_share, wanted.cache_bytes
    )
    states = states_room(layout, manifest.limits.max_batch_size)
    pages = size - states
    if states and pages < min(layout.page_stride):
        raise KvlatheError(
            f"a cache of {size:,} bytes has no room for pages",
            f"states of {manifest.limits.max_batch_size} sequences take {states:,}",
            "give it more (--cache-size), or run fewer at once (--max-batch-size)",
        )
    work = partial(kind, folder, plan, manifest.limits, pages, wanted.threads)
    session = registry.loaded(work, folder, int(runner.copies * manifest.size), size)
    memory = {"weights": int(runner.copies * manifest.size), "kv_cache": pages}
    memory["states"] = states
    if runner.beside and runner.memory:
        memory["steps"] = runner.beside(plan, manifest.limits, runner.memory()[1])
    return Loaded(session, plan, pages, words, runner.prompt_tokens, memory)


def loaded_again(
    engine: EngineFolder, manifest: Manifest, wanted: Wanted, cache_bytes: int
) -> Session:
    """The session of an engine that was loaded before, with a cache of as many bytes.
    Raises KvlatheError where its folder was changed since."""
    now = open_engine(engine.path, deep=True)
    if now.manifest != engine.manifest:
        raise KvlatheError(
            f"{engine.path} was built again",
            "the process goes on with what it has loaded",
            "start it again",
        )
    same = dataclasses.replace(wanted, cache_bytes=cache_bytes)
    return load_session(now, manifest, same).session


def check_shards(engine: EngineFolder, num_shards: int) -> None:
    """Raises KvlatheError for an engine that runs on one device alone."""
    if num_shards > 1 and engine.manifest.backend != "cuda":
        raise KvlatheError(
            f"{engine.path} cannot run on {num_shards} GPUs",
            f"it was built for {engine.manifest.backend}",
            "build it with --backend cuda",
        )


def _in_parallel(
    engine: EngineFolder, runner: Runner, num_shards: int
) -> tuple[Runner, CompressionPlan]:
    """The runner on ``num_shards`` GPUs, and what one of them keeps of the plan."""
    check_shards(engine, num_shards)
    runner.session(engine.manifest)  # says what is missing
    from kvlathe.runtime.sessions.torch_cuda.shards.parallel import TensorParallel

    together = TensorParallel(engine.path, engine.plan, num_shards)
    several = dataclasses.replace(
        runner,
        session=lambda _: together,
        memory=together.memory,
        copies=together.weight_bytes / engine.manifest.size,
    )
    return several, together.dealt.plans[0]
