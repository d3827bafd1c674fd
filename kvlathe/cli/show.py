"""``kvlathe inspect`` and ``kvlathe engines``: what an engine is, and which finished
builds are kept."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import click

from kvlathe.base import console
from kvlathe.cli.common import ENGINE, TENSOR_PARALLEL, Finite, Result, reports
from kvlathe.plan.engine_folder import open_engine
from kvlathe.plan.manifest import Manifest
from kvlathe.plan.measurement import UNMEASURED
from kvlathe.plan.plan import SEARCHED, WARNINGS, CompressionPlan

GIB = 1 << 30


FACTS = (
    "model",
    "compression",
    "backend",
    "attention",
    "compute_dtype",
    "weights",
    "weight_bytes",
    "architectures",
    "created",
    "command",
    "kv_bytes_per_token",
    "kv_bytes_per_token_baseline",
    "kv_bytes_per_token_16bit",
)
"""Facts that ``kvlathe inspect`` shows first."""
BUILT = ("model", "compression", "backend", "compute_dtype", "weights", "weight_bytes")
"""Those that the manifest has under the same name."""


def facts(result: Result) -> list[tuple[str, object]]:
    """Names and values of an engine, its limits and warnings included."""
    removed = f"{result['kv_bytes_removed']:.1%} of the same number format"
    rows: list[tuple[str, object]] = []
    for name in FACTS:
        rows.append((name.replace("_", " "), result[name]))
    rows.append(("kv bytes removed", removed))
    for name, score in result["evaluation"].items():
        rows.append((f"measured {name.replace('_', ' ')}", score))
    if result["evaluation"]:
        rows.append(("measured on", result["evaluated_on"]))
    if result["compaction"]:
        rows.append(("of a compacted prefix", compaction_words(result["compaction"])))
    if result["searched"]:
        rows.append(("searched", result["searched"]))
    rows.append(("measured at build", measured_words(result["measured"])))
    rows.append(("bytes on disk", console.human_bytes(result["bytes_on_disk"])))
    rows += result["limits"].items()
    for name, text in result["warnings"].items():
        rows.append((f"warning: {name}", text))
    return rows


def warnings_of(plan: CompressionPlan, manifest: Manifest) -> dict[str, str]:
    """Everything that a build warned of, by name."""
    from kvlathe.engines.backends import BACKENDS
    from kvlathe.plan.layer_block import host_warning

    said = {name: str(plan.notes[name]) for name in WARNINGS if name in plan.notes}
    if manifest.measured and manifest.measured.breaks:
        said["measured"] = manifest.measured.warning
    if warning := host_warning(plan, BACKENDS[manifest.backend].hosted):
        said["windows"] = warning
    return said


def measured_of(manifest: Manifest) -> Result | None:
    """The losses that a build measured, with what they say in words."""
    found = manifest.measured
    if found is None:
        return None
    said = {"line": found.line, "warning": found.warning, "breaks": found.breaks}
    whole = dataclasses.asdict(found.whole)
    return {**dataclasses.asdict(found), "whole": whole, **said}


def compaction_words(share: float) -> str:
    """What the plan saves where a prefix is compacted: nothing of it is in the bytes a
    token."""
    return f"{share:.0%} of the KV pairs stay, once kvlathe compact or the server compacts it"


def measured_words(measured: Result | None) -> str:
    """The same in one line."""
    if measured is None:
        return UNMEASURED
    return str(measured["line"]).removeprefix("measured: ")


def show_engine(result: Result) -> None:
    console.print_pairs(result["engine"], facts(result))
    show_ranks(result["lanes"], result["head_dim"])
    columns = ("bucket", "format", "layers", "heads", "bytes a page", "tokens")
    console.print_table(
        "what is kept of the tokens",
        columns,
        [tuple(bucket.values()) for bucket in result["buckets"]],
    )
    show_memory(result["memory"])
    show_shards(result["shards"], result["limits"]["max_seq_len"])
    for stage in result["stages"][1:]:
        name = f"tokens of a prompt from layer {stage['first_layer']} on"
        console.print_pairs("", [(name, stage["tokens"])])


def show_memory(rows: list[dict[str, int]]) -> None:
    """Print the memory that a server needs (plan/memory.py), for one sequence and for a
    full batch."""
    names = ("steady", "peak", "uncompressed", "batch_steady", "batch_peak", "together")
    lines = []
    for row in rows:
        sizes = [console.human_bytes(row[name]) for name in names]
        lines.append((f"{row['tokens']:,}", *sizes))
    columns = ("tokens", "one holds", "one at its peak", "16 bit, uncompressed")
    batch = rows[0]["batch"]
    both = (*columns, f"{batch} hold", f"{batch} at their peak", "with the weights")
    console.print_table("memory of the cache", both, lines)
    if state := rows[0]["state"]:
        size = console.human_bytes(state)
        console.print_pairs("", [("state of a sequence, 32 bit", f"{size} of those")])


def memory_of(plan: CompressionPlan, manifest: Manifest) -> list[dict[str, int]]:
    """The rows of an engine's memory table."""
    from kvlathe.engines.backends import BACKENDS
    from kvlathe.plan.layer_block import held_layout
    from kvlathe.plan.memory import memory_table

    limits = manifest.limits
    sizes = (limits.max_seq_len, limits.max_batch_size, manifest.weight_bytes)
    return memory_table(held_layout(plan, BACKENDS[manifest.backend].hosted), *sizes)


def show_ranks(lanes: list[Result], head_dim: int) -> None:
    """Print the ranks of every head; where all are the same, once."""
    title = f"kept ranks, K/V, of {head_dim}"
    columns, rows = rank_table(lanes)
    if len(alike := {cell for row in rows for cell in row[1:]}) > 1:
        console.print_table(title, columns, rows)
    else:
        console.print_pairs("", [(title, f"{alike.pop()} in every head")])


def _ranks_of(lane: Mapping[str, object]) -> str:
    if lane["fill_from"] is not None:
        return f"= {lane['fill_from']}"
    if lane.get("values_in_keys"):
        return f"{lane['rank_k']}, V its first {lane['rank_v']}"
    return f"{lane['rank_k']}/{lane['rank_v']}"


def rank_table(
    lanes: list[dict[str, Any]],
) -> tuple[tuple[str, ...], list[tuple[str, ...]]]:
    """Columns and rows: a row a layer, a column a KV head; a removed head names the
    head that stands in for it."""
    heads = 1 + max(lane["head"] for lane in lanes)
    cells = [_ranks_of(lane) for lane in lanes]
    rows = [
        (str(i // heads), *cells[i : i + heads]) for i in range(0, len(cells), heads)
    ]
    return ("layer", *(f"head {h}" for h in range(heads))), rows


def shards_of(
    plan: CompressionPlan, num_shards: int, tokens: int
) -> list[dict[str, Any]]:
    """Rows with the part of a sequence of ``tokens`` tokens that each GPU holds. Raises
    KvlatheError for a plan that cannot be dealt to so many."""
    from kvlathe.plan.deal import deal

    if num_shards == 1:
        return []
    dealt = deal(plan, num_shards)
    taken = dealt.taken(tokens)
    return [
        {"shard": shard, "heads": len(lane_shards), "filled": filled, "taken": taken}
        for shard, (lane_shards, filled) in enumerate(
            zip(dealt.shards, dealt.filled(tokens), strict=True)
        )
    ]


def show_shards(rows: list[dict[str, Any]], tokens: int) -> None:
    columns = ("GPU", "KV heads", "bytes of them", "bytes of its pages")
    lines = [tuple(row.values()) for row in rows]
    if lines:
        console.print_table(f"a sequence of {tokens:,} tokens", columns, lines)


@click.command("inspect")
@ENGINE
@TENSOR_PARALLEL
@reports(show_engine)
def inspect_command(engine: Path, tensor_parallel_size: int) -> Result:
    """Show an engine: its plan (ranks of every head), bytes for each token, limits, and
    what runs its attention. With --tensor-parallel-size also what each GPU holds."""
    from kvlathe.evaluation import record
    from kvlathe.plan.layout import CacheLayout
    from kvlathe.runtime.loading import check_shards
    from kvlathe.runtime.sessions.registry import attention

    opened = open_engine(engine)
    check_shards(opened, tensor_parallel_size)
    manifest = opened.manifest
    plan = opened.plan
    layout = CacheLayout(plan)
    kept = record.read(engine, manifest)
    fields = ("bucket", "format", "layers", "heads", "page_bytes", "tokens")
    return {
        "engine": str(engine),
        **{name: getattr(manifest, name) for name in BUILT},
        "attention": attention(manifest),
        "architectures": ", ".join(manifest.architectures),
        "created": manifest.created,
        "command": manifest.command,
        "kv_bytes_per_token": manifest.kv_bytes.per_token,
        "kv_bytes_per_token_baseline": manifest.kv_bytes.baseline,
        "kv_bytes_per_token_16bit": manifest.kv_bytes.baseline_16bit,
        "kv_bytes_removed": manifest.kv_bytes.removed,
        "evaluation": kept.scores,
        "evaluated_on": kept.measured_on,
        "measured": measured_of(manifest),
        "compaction": plan.index.compaction,
        "searched": str(plan.notes.get(SEARCHED, "")),
        "memory": memory_of(plan, manifest),
        "shards": shards_of(plan, tensor_parallel_size, manifest.limits.max_seq_len),
        "bytes_on_disk": manifest.size,
        "limits": dataclasses.asdict(manifest.limits),
        "warnings": warnings_of(plan, manifest),
        "page_tokens": manifest.page_tokens,
        "page_bytes": layout.page_stride,
        "head_dim": plan.model.head_dim,
        "lanes": [dataclasses.asdict(lane) for lane in plan.lanes],
        "buckets": [dict(zip(fields, row, strict=True)) for row in layout.described()],
        "stages": [dataclasses.asdict(stage) for stage in plan.stages],
        "tiers": [dataclasses.asdict(tier) for tier in plan.index.tiers],
        "versions": dict(manifest.versions),
        "plan_digest": manifest.plan_digest,
    }


@click.group("engines")
def engines_group() -> None:
    """List or remove the finished builds that are kept, so that the same request again
    takes a moment."""


def show_entries(result: Result) -> None:
    columns = ("key", "model", "compression", "backend", "size", "days unused")
    rows = [
        (
            x["key"][:12],
            x["model"],
            x["compression"],
            x["backend"],
            console.human_bytes(x["bytes"]),
            x["days_unused"],
        )
        for x in result["engines"]
    ]
    size = console.human_bytes(result["bytes"])
    title = f"{result['cache']}: {size}"
    if "left" in result:
        title = f"removed from {result['cache']}: {size}"
    console.print_table(title, columns, rows)


def listing(entries: list[Any]) -> Result:
    """Cache entries (engines.cache.Entry) as a result."""
    from kvlathe.engines import cache

    engines = [
        {
            "key": entry.key,
            "model": entry.manifest.model,
            "compression": entry.manifest.compression,
            "backend": entry.manifest.backend,
            "bytes": entry.size,
            "days_unused": round((time.time() - entry.last_used) / 86400, 2),
        }
        for entry in entries
    ]
    return {
        "cache": str(cache.root()),
        "bytes": sum(entry.size for entry in entries),
        "engines": engines,
    }


@engines_group.command("list")
@reports(show_entries)
def list_command() -> Result:
    """List the finished builds that are kept."""
    from kvlathe.engines import cache

    return listing(cache.entries())


@engines_group.command("prune")
@click.option(
    "--older-than-days",
    type=Finite(0),
    help="Remove builds unused for this long.",
)
@click.option(
    "--max-gib",
    type=Finite(0),
    help="Then remove the least recently used beyond this size.",
)
@click.option(
    "--all",
    "everything",
    is_flag=True,
    help="Remove everything, calibration results and curves too.",
)
@reports(show_entries)
def prune_command(
    older_than_days: float | None, max_gib: float | None, everything: bool
) -> Result:
    """Remove kept builds and list what was removed. Engine folders given out stay as
    they are."""
    if older_than_days is None and max_gib is None and not everything:
        raise click.UsageError(
            "Say what to remove: --older-than-days, --max-gib or --all."
        )
    from kvlathe.engines import cache

    most = None if max_gib is None else int(max_gib * GIB)
    pruned = cache.prune(older_than_days, most, everything)
    for path in pruned.left:
        console.log.warning("left as it is, kvlathe did not write it: %s", path)
    for path in pruned.outdated:
        console.log.warning("removed, an older version built it: %s", path)
    left = [str(path) for path in pruned.left]
    outdated = [str(path) for path in pruned.outdated]
    return listing(pruned.removed) | {"left": left, "outdated": outdated}


COMMANDS = (inspect_command, engines_group)
