"""Engines of models that somebody runs by name: each is built once, and stays in the
cache."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path

from kvlathe.base.console import log
from kvlathe.base.devices import GPU_MEMORY_UTILIZATION
from kvlathe.base.errors import KvlatheError
from kvlathe.base.hub import checkpoint_folder, model_name
from kvlathe.engines import cache
from kvlathe.engines.build import build
from kvlathe.engines.config import BuildConfig
from kvlathe.engines.order import accept
from kvlathe.plan.manifest import Manifest

ACCURACY = 0.995
"""Of a model for which nobody named a plan, as much is removed as keeps exp(-KL) to the
uncompressed model here: KL below 0.005 nats a token."""


def engine_of(
    named: Path,
    compression: str | None,
    backend: str,
    command: str,
    gpu_memory_share: float = GPU_MEMORY_UTILIZATION,
    enable_lora: bool = False,
) -> Path:
    """The engine of a model (a folder, a GGUF file, a name on the Hub): the one in the
    cache, or one that is built there now. ``compression``: what it is built with, by
    default the most that keeps ACCURACY. ``gpu_memory_share``: that a build may take.
    ``enable_lora``: whether the engine takes adapters at run time.

    Raises KvlatheError where there is no such model, or it cannot be built.
    """
    place = cache.engine_path("asked")
    config = BuildConfig(
        checkpoint_folder(named),
        place,
        backend=backend,
        command=command,
        gpu_memory_utilization=gpu_memory_share,
        enable_lora=enable_lora,
    )
    config = dataclasses.replace(config, **asked(compression))
    key = accept(config).key
    name, folder = model_name(config.model), cache.engine_path(key)
    # A process that was ended right after its build has left an engine without a mark.
    kept = cache.adopt(key)
    if kept is None:
        log.info(
            "%s is no engine: building one with %s, once (kvlathe build has every option)",
            named,
            _words(asked(compression)),
        )
        try:
            build(dataclasses.replace(config, output_dir=folder, use_cache=False))
        except KvlatheError:
            if not folder.is_dir():  # else somebody has built the same meanwhile
                raise
        kept = cache.adopt(key)
        assert kept is not None
    log.info("%s: %s", name, _said(kept, folder))
    return folder


def asked(compression: str | None) -> Mapping[str, object]:
    """Fields of the config that say how much to remove."""
    if compression is not None:
        return {"compression": compression}
    return {"compression": "auto", "accuracy": ACCURACY, "metric": "kl"}


def _words(fields: Mapping[str, object]) -> str:
    """``--compression auto --accuracy 0.995 --metric kl``"""
    return " ".join(f"--{name} {value}" for name, value in fields.items())


def _said(kept: Manifest, folder: Path) -> str:
    """An engine of the cache, in a line."""
    removed = f"{kept.compression} removes {kept.kv_bytes.removed:.1%} of the cache"
    lost = kept.measured.line if kept.measured else "not measured"
    return f"{removed}; {lost}; kept in {folder}"
