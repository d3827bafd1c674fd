"""From an order to a plan and its basis: statistics (calibrated, loaded or cached), then
the methods.

With order.py, job.py, pricing.py, measuring.py and build.py the only module of engines/
that calls export's verbs.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from kvlathe.base.adapters import read_adapter
from kvlathe.base.console import log
from kvlathe.base.devices import GPU_MEMORY_UTILIZATION
from kvlathe.base.digests import sha256_file
from kvlathe.base.errors import KvlatheError
from kvlathe.base.extras import require
from kvlathe.engines import cache
from kvlathe.engines.config import check_share
from kvlathe.engines.folder import check_file_target, whole_file
from kvlathe.engines.order import Order, folder_of
from kvlathe.engines.phases import phase
from kvlathe.engines.pricing import (
    cache_settings,
    check_memory,
    exam_of,
    named_heads,
    variant_of,
)
from kvlathe.plan.heads import ModelShape
from kvlathe.plan.plan import SEARCHED, WARNINGS, CompressionPlan

if TYPE_CHECKING:
    from kvlathe.export.bases.basis import Basis
    from kvlathe.export.calibration.stats import Stats
    from kvlathe.export.methods.composition import CacheSettings, Made
    from kvlathe.export.methods.compression import Compression
    from kvlathe.export.methods.variants import Variant
    from kvlathe.export.model.checkpoint import Checkpoint
    from kvlathe.export.model.spec import DecoderSpec


@dataclass(frozen=True)
class Planned:
    """A plan, the matrices that fold it in, and what they were made from (no statistics
    where none were needed)."""

    plan: CompressionPlan
    basis: Basis
    stats: Stats | None


READERS = ("torch", "transformers", "safetensors", "huggingface_hub")
"""Packages that reading a checkpoint takes."""


def open_checkpoint(
    model: Path,
    max_seq_len: int | None = None,
    workers: int | None = None,
    device: str | None = None,
    lora: Sequence[str] = (),
    mtp: bool = False,
) -> Checkpoint:
    """``device``, ``lora`` and ``mtp`` as in BuildConfig. Raises KvlatheError for everything that makes it
    unusable, and where the libraries for it are missing."""
    require("checkpoints cannot be read here", "export", *READERS)
    import torch

    from kvlathe.export.model.checkpoint import Checkpoint
    from kvlathe.export.model.device import choose_device

    if workers:
        torch.set_num_threads(workers)
    adapters = [read_adapter(text) for text in lora]
    given = max_seq_len, choose_device(device), adapters, mtp
    return Checkpoint(folder_of(model), *given)


def plan_for(order: Order, checkpoint: Checkpoint) -> Planned:
    """Plan an order: calibrate where its methods need it, search where it asks for an
    accuracy."""
    order.compression.check_model(checkpoint.spec.shape)
    check_memory(order, checkpoint)
    with phase("calibrating"):
        stats = statistics(order, checkpoint)
    with phase("planning"):
        return _planned(order, checkpoint, stats)


def _planned(order: Order, checkpoint: Checkpoint, stats: Stats | None) -> Planned:
    """From statistics on."""
    settings = cache_settings(order.config, checkpoint.spec)
    curves = cache.curves_folder() if order.config.use_cache else None
    if not order.compression.measures_heads:
        plan, basis = _made(order, checkpoint, stats, settings, curves)
    else:
        whole = named_heads(order, checkpoint, settings, curves)
        by_name = dataclasses.replace(order, compression=whole.compression)
        plan, basis = _made(by_name, checkpoint, stats, settings, curves)
        plan = dataclasses.replace(
            plan, compression=order.compression.text, notes=plan.notes | whole.notes
        )
    plan = _with_warnings(plan, order.compression, checkpoint.spec)
    return Planned(plan, basis, stats)


def _made(
    order: Order,
    checkpoint: Checkpoint,
    stats: Stats | None,
    settings: CacheSettings,
    curves: Path | None,
) -> Made:
    """The plan of an order that names its heads, if it chooses any."""
    from kvlathe.export.methods.composition import compose

    config, spec = order.config, checkpoint.spec
    by_loss = None
    if order.compression.measured:
        by_loss = variant_of(order, checkpoint, stats, settings, curves)
    if order.searched:
        return _with_found_size(order, checkpoint, stats, curves)
    if config.accuracy is not None:
        return _searched(order, checkpoint, stats, curves, by_loss)
    if by_loss is not None:
        return by_loss.at(config.compression_ratio or 0.0)
    compression, options = order.compression, order.options
    return compose(
        compression, spec.shape, spec.rope is not None, stats, options, settings
    )


def _with_found_size(
    order: Order, checkpoint: Checkpoint, stats: Stats | None, curves: Path | None
) -> Made:
    """The plan whose ranks keep the accuracy, searched without the methods that stand
    beside them. Those do what they were asked for, and are not in the score."""
    from kvlathe.export.methods.composition import compose
    from kvlathe.export.search.search import RemovesNothing, in_words

    compression, spec = order.compression, checkpoint.spec
    settings = cache_settings(order.config, spec)
    alone = dataclasses.replace(order, compression=compression.ranks_alone)
    is_composed = len(compression.methods) > 1
    found: Made | None = None
    rate = 0.0
    said: dict[str, object] = {}
    try:
        found = _searched(alone, checkpoint, stats, curves, None)
        rate = found[0].notes["removal_rate"]
        said = {SEARCHED: in_words(found[0]), "curve": found[0].notes["curve"]}
        log.info("searched: %s", said[SEARCHED])
    except RemovesNothing as refusal:
        if not is_composed:
            raise
        log.warning("the ranks stay whole: %s", refusal)
        said = {SEARCHED: f"the ranks stay whole: {refusal}"}
    if is_composed or found is None:
        options = order.options.asked(removal_rate=rate)
        has_rope = spec.rope is not None
        found = compose(compression, spec.shape, has_rope, stats, options, settings)
    plan, basis = found
    return dataclasses.replace(plan, notes=plan.notes | said), basis


UNCENTRED = (
    "--centre has no effect: where a model has a softcap or sink logits, scores may not "
    "be shifted"
)


def _with_warnings(
    plan: CompressionPlan, compression: Compression, spec: DecoderSpec
) -> CompressionPlan:
    """The plan with a note for each of WARNINGS that is true of it. Each is logged."""
    from kvlathe.export.methods.composition import whole_ranks_note

    uncentred = plan.notes.get("centre") is True and not spec.shape.shifts
    texts = {"rope": spec.rope_note, "reach": str(plan.notes.get("reach", ""))}
    texts["ranks"] = whole_ranks_note(compression, plan)
    texts["uncentred"] = UNCENTRED if uncentred else ""
    said = {name: texts[name] for name in WARNINGS if texts[name]}
    for text in said.values():
        log.warning("%s", text)
    return dataclasses.replace(plan, notes=plan.notes | said)


def _searched(
    order: Order,
    checkpoint: Checkpoint,
    stats: Stats | None,
    curves: Path | None,
    by_loss: Variant | None,
) -> tuple[CompressionPlan, Basis]:
    """The smallest plan that reaches the accuracy that was asked for. ``by_loss``: the
    only kind of plan to search, with others beside it for comparison; without it, all
    kinds that the compression allows."""
    from kvlathe.export.methods.variants import for_comparison, variants
    from kvlathe.export.search.search import search
    from kvlathe.measuring.divergence import Divergence

    config, options = order.config, order.options
    assert config.accuracy is not None
    settings = cache_settings(config, checkpoint.spec)
    shape, has_rope = checkpoint.spec.shape, checkpoint.spec.rope is not None
    exam = exam_of(order, checkpoint)
    kl = Divergence(checkpoint, exam.windows).kl if config.metric == "kl" else None
    if by_loss is not None:
        kinds = [by_loss]
        beside = for_comparison(shape, has_rope, stats, settings)
    else:
        kinds = variants(order.compression, shape, has_rope, stats, options, settings)
        beside = ()
    known_by = (
        checkpoint.digest,
        stats and stats.digest,
        options,
        settings,
        config.text,
        config.retrieval,
    )
    return search(
        checkpoint, kinds, config.accuracy, exam, known_by, curves, beside, kl
    )


def statistics(order: Order, checkpoint: Checkpoint) -> Stats | None:
    """The Stats file that an order names, or a calibration; None where the methods need
    neither."""
    from kvlathe.export.calibration.stats import Stats

    config = order.config
    if order.compression.calibration is None:
        return None
    if config.stats is not None:
        stats = Stats.load(config.stats)
        stats.require_model(checkpoint.spec.shape, checkpoint.digest)
        _require_rope(stats, checkpoint)
        if stats.rope and (
            unread := stats.unread_positions(checkpoint.spec.max_seq_len)
        ):
            log.warning("%s", unread)
        return stats
    assert config.calibration is not None
    return calibrated(
        checkpoint,
        config.calibration,
        config.calibration_tokens,
        config.seed,
        config.use_cache,
        order.compression.reads_entropies,
    )


def _require_rope(stats: Stats, checkpoint: Checkpoint) -> None:
    """Raise KvlatheError where RoPE turns otherwise at the length that was calibrated
    for (LongRoPE's two factors)."""
    from kvlathe.export.model.spec import read_spec

    length, served = stats.source.get("max_seq_len"), checkpoint.spec.max_seq_len
    if length is None:
        return
    if read_spec(checkpoint.path, int(length)).ropes != checkpoint.spec.ropes:
        raise KvlatheError(
            f"the statistics are of sequences of up to {length} tokens",
            f"this model's RoPE differs at {served}",
            f"calibrate with --max-seq-len {served}",
        )


def calibrated(
    checkpoint: Checkpoint,
    source: str,
    tokens: int | None = None,
    seed: int = 0,
    use_cache: bool = True,
    with_entropies: bool = True,
) -> Stats:
    """Statistics on ``source`` ("random" or a .jsonl file), from the cache where they
    were taken before, on a device of this kind. ``with_entropies`` as in calibrate_on."""
    from kvlathe.export.calibration.calibrate import calibrate
    from kvlathe.export.calibration.stats import SCHEMA_VERSION, Stats

    content: str | list[str] = source
    if Path(source).is_file():
        read = (Path(source), checkpoint.path / "tokenizer.json")
        content = [sha256_file(path) for path in read if path.is_file()]
    facts = {
        "source": content,
        "tokens": tokens,
        "seed": seed,
        "max_seq_len": checkpoint.spec.max_seq_len,
        "schema_version": SCHEMA_VERSION,
        "model": checkpoint.digest,
        "device": checkpoint.device.type,
    }
    whole = cache.stats_path(cache.key_of(facts | {"entropies": True}))
    kept = cache.stats_path(cache.key_of(facts | {"entropies": with_entropies}))
    for path in (kept, whole):
        if use_cache and path.is_file():
            log.info("calibrated before: the statistics are taken from the cache")
            return Stats.load(path)
    log.info("calibrating on %s", source)
    stats = calibrate(checkpoint, source, tokens, seed, with_entropies)
    if use_cache:
        cache.keep_file(kept, stats.save)
    return stats


def calibrate_to(
    model: Path,
    output: Path,
    source: str,
    tokens: int | None = None,
    seed: int = 0,
    max_seq_len: int | None = None,
    device: str | None = None,
    lora: Sequence[str] = (),
    gpu_memory_utilization: float = GPU_MEMORY_UTILIZATION,
) -> Stats:
    """``kvlathe calibrate``: write the Stats file that ``BuildConfig.stats`` takes.
    Raises KvlatheError."""
    check_file_target(output)
    check_share(gpu_memory_utilization)
    checkpoint = open_checkpoint(model, max_seq_len, device=device, lora=lora)
    from kvlathe.export.model.device import within_share

    with within_share(checkpoint.device, gpu_memory_utilization):
        stats = calibrated(checkpoint, source, tokens, seed)
    with whole_file(output) as part:
        stats.save(part)
    return stats


def bytes_per_token(shape: ModelShape, bits: int) -> float:
    """KV bytes of one token of the uncompressed model at ``bits`` a number, no padding:
    what ratios are taken against.

    Our own cache pads heads to multiples of 16 dims, an ordinary one does not.
    """
    return shape.numbers * bits / 8
