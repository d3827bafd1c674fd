"""One engine from one checkpoint: plan, fold, export, build, report, and one rename.

Here the steps are put in order; with order.py, job.py, planning.py, pricing.py and
measuring.py the only module of engines/ that calls export's verbs. The heavy ones are imported where they are used, so
that a refusal needs no torch. Nothing is written before the order is known to be
possible (order.py), and nothing remains of a build that did not finish.
"""

from __future__ import annotations

import dataclasses
import json
import shutil
import time
from collections.abc import Generator, Mapping
from contextlib import AbstractContextManager, contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from kvlathe.base.chat_template import (
    MORE_TEMPLATES,
    SETTINGS_FILE,
    TEMPLATE_FILE,
    chat_templates,
)
from kvlathe.base.console import log
from kvlathe.base.errors import KvlatheError
from kvlathe.base.hub import model_name
from kvlathe.base.json_files import read_object
from kvlathe.base.tokenizer_files import FILES, GENERATION
from kvlathe.engines import cache
from kvlathe.engines.backends import BACKENDS
from kvlathe.engines.config import BuildConfig
from kvlathe.engines.folder import appearing
from kvlathe.engines.job import Job, check_room, prepare
from kvlathe.engines.measuring import check_kl, measured, tell
from kvlathe.engines.order import Order, accept, folder_of
from kvlathe.engines.phases import phase
from kvlathe.engines.planning import (
    Planned,
    bytes_per_token,
    calibrate_to,
    plan_for,
)
from kvlathe.engines.rotation import CHECKPOINT, check_rotation
from kvlathe.engines.targets import cuda, onnxruntime
from kvlathe.engines.targets.room import check_gpu
from kvlathe.plan import manifest as manifests
from kvlathe.plan.adapter_maps import AdapterMap
from kvlathe.plan.deal import deal
from kvlathe.plan.engine_folder import read_plan
from kvlathe.plan.layer_block import held_layout, host_warning
from kvlathe.plan.manifest import (
    BASIS_FILE,
    HEADS_FILE,
    PLAN_FILE,
    REPORT_FILE,
    WEIGHTS_FILE,
    FileRecord,
    KvBytes,
    Limits,
    Manifest,
)
from kvlathe.plan.measurement import Measurement
from kvlathe.plan.memory import memory_table
from kvlathe.plan.plan import CompressionPlan

COPIED = (".json", ".jinja", ".model", ".txt", ".md")
"""Suffixes of what comes along with a checkpoint's weights: config, tokenizer, licence.
Nothing that runs."""

__all__ = ["BuildConfig", "build", "calibrate_to", "preview", "rotate"]


def preview(config: BuildConfig) -> dict[str, Any]:
    """The dry run: what ``build`` would do, and its bytes. It plans as ``build`` does,
    calibration included, so that it refuses what ``build`` refuses; it writes no engine,
    and into the cache only what the build will then find there."""
    order = accept(config)
    job = prepare(order)
    spec = job.checkpoint.spec
    with within(job):
        plan = plan_for(order, job.checkpoint).plan
    order.backend.check_plan(config.backend, plan)
    config = job.order.config
    sizes = kv_bytes(order.config, plan, job.limits)
    return {
        "model": str(job.checkpoint.path),
        "model_type": spec.model_type,
        "output_dir": str(config.output_dir),
        "compression": config.compression,
        "backend": config.backend,
        "architectures": list(order.built.architectures),
        "compute_dtype": config.compute_dtype,
        "weights": config.weights or config.compute_dtype,
        "cached": config.use_cache and cache.find(order.key) is not None,
        "weight_bytes": job.weight_bytes,
        "kv_bytes_per_token": sizes.per_token,
        "kv_bytes_per_token_baseline": sizes.baseline,
        "kv_bytes_per_token_16bit": sizes.baseline_16bit,
        "kv_bytes_removed": sizes.removed,
        "limits": dataclasses.asdict(job.limits),
    }


# -- build -----------------------------------------------------------------------------
def build(config: BuildConfig) -> Path:
    """Build the engine folder and return its path; for the backend hf an ordinary
    checkpoint (``rotate``). Raises KvlatheError; Ctrl-C and SIGTERM raise
    KeyboardInterrupt.

    In every case the folder either appears whole or not at all.
    """
    if config.backend == CHECKPOINT:
        rotate(config)
        return config.output_dir
    began = time.monotonic()
    with phase("reading the config and the checkpoint"):
        order = accept(config)
        kept = cache.find(order.key) if config.use_cache else None
    if kept is not None and _is_measured(kept, config):
        log.info("the same engine was built before: taken from the cache")
        check_kl(kept.measured, config.max_kl, config.compression)
        with appearing(config.output_dir, config.overwrite) as folder:
            cache.give(order.key, kept, folder)
            _check_deal(read_plan(folder), config)
            _renew(folder, kept, order)
        if kept.measured and kept.measured.breaks:
            log.warning("%s", kept.measured.warning)
        tell(kept.measured)
        return config.output_dir
    job = prepare(order)
    with (
        appearing(config.output_dir, config.overwrite) as folder,
        within(job),
        _telling_what_stays(config),
    ):
        lost = _make(job, folder, began)
    if config.use_cache:
        if kept is not None:  # it was not measured, or not for so long
            cache.drop(order.key)
        log.info("keeping a copy in the cache")
        with phase("keeping a copy"):
            cache.keep(order.key, config.output_dir)
    tell(lost)
    return config.output_dir


@contextmanager
def _telling_what_stays(config: BuildConfig) -> Generator[None]:
    """Say what an interrupted build leaves for the next one."""
    try:
        yield
    except KeyboardInterrupt:
        if config.use_cache:
            log.info(
                "statistics and prices that were finished are in the cache: the same "
                "build goes on from there"
            )
        raise


def _is_measured(kept: Manifest, config: BuildConfig) -> bool:
    """Whether a cached engine was measured as a config wants it: one that asks for more
    time than that took gets another measurement, where there is more to read."""
    if kept.measured is None:
        return config.mtp or not config.measure
    most = config.measure_seconds or 0.0
    return not kept.measured.left_out or kept.measured.seconds >= most


def within(job: Job) -> AbstractContextManager[None]:
    """The share of a GPU that a build may take, where it computes on one."""
    from kvlathe.export.model.device import within_share

    share = job.order.config.gpu_memory_utilization
    return within_share(job.checkpoint.device, share)


def rotate(config: BuildConfig) -> list[int]:
    """Write the checkpoint with its heads rotated (export/folding/rotated.py). Returns
    the layers whose keys are rotated, too. Raises KvlatheError."""
    check_rotation(config)
    from kvlathe.export.folding.rotated import RotatedCheckpoint
    from kvlathe.export.model.checkpoint import Checkpoint

    with phase("reading the checkpoint"):
        checkpoint = Checkpoint(folder_of(config.model, CHECKPOINT))
        if checkpoint.codes:
            raise KvlatheError(
                f"the heads of {config.model} cannot be rotated",
                "its weights are codes already",
                "give the checkpoint that they were made of",
            )
        if checkpoint.spec.family.latent is not None:
            raise KvlatheError(
                f"the heads of {config.model} cannot be rotated",
                "they share one latent (MLA), which has a norm of its own",
                "build an engine",
            )
        if checkpoint.spec.family.value_norm:
            raise KvlatheError(
                f"the heads of {config.model} cannot be rotated",
                "a norm follows the maps of their values",
                "build an engine",
            )
        if checkpoint.spec.has_out_gates:
            raise KvlatheError(
                f"the heads of {config.model} cannot be rotated",
                "gates multiply what its attention gives, dim by dim",
                "build an engine",
            )
        rotated = RotatedCheckpoint(checkpoint, config.seed)
    check_room(config.output_dir, sum(path.stat().st_size for path in checkpoint.files))
    with appearing(config.output_dir) as folder, phase("rotating and writing"):
        rotated.write(folder)
        for path in sorted(config.model.iterdir()):
            if path.is_file() and path.suffix in COPIED:
                shutil.copyfile(path, folder / path.name)
    return rotated.keys


def _renew(folder: Path, kept: Manifest, order: Order) -> None:
    """Make the report and the manifest of a cached engine, copied to ``folder``, speak
    of this build."""
    config = order.config
    from kvlathe.export.report.heading import Heading, heading, renew

    described = dataclasses.replace(
        kept,
        model=model_name(config.model),
        command=config.command,
        created=_now(),
    )
    page = folder / REPORT_FILE
    fields = heading(
        Heading(
            described.model,
            described.compression,
            described.command,
            described.created,
            config.output_dir,
            order.named,
        )
    )
    page.write_text(renew(page.read_text("utf-8"), fields), "utf-8")
    files = {**kept.files, REPORT_FILE: manifests.record_of(page)}
    manifests.write(folder, dataclasses.replace(described, files=files))


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")


def _check_deal(plan: CompressionPlan, config: BuildConfig) -> None:
    """Raise KvlatheError for a plan that cannot be dealt to as many GPUs as were asked
    for."""
    if config.tensor_parallel_size > 1:
        deal(plan, config.tensor_parallel_size)


def _make(job: Job, folder: Path, began: float) -> Measurement | None:
    """Fill ``folder``: plan, basis, graph and weights, what the backend makes of them,
    tokenizer, report, manifest. Returns what the plan loses. ``began``: by the monotonic
    clock, when the build did."""
    config, checkpoint = job.order.config, job.checkpoint
    log.info("planning %s", config.compression)
    planned = plan_for(job.order, checkpoint)
    plan = planned.plan
    job.order.backend.check_plan(config.backend, plan)
    _check_deal(plan, config)
    lost = measured(job.order, checkpoint, planned, time.monotonic() - began)
    (folder / PLAN_FILE).write_text(plan.to_json(), "utf-8")
    check_gpu(folder / PLAN_FILE, job.order.built, config.device)
    if not BACKENDS[config.backend].hosted:
        planned.basis.save(folder / BASIS_FILE)
    with phase("folding and writing"):
        _export(job, planned, folder)
    with phase("hashing what was written"):
        made_from = manifests.describe_files(folder)
    log.info("building for %s", config.backend)
    with phase(f"building for {config.backend}"):
        job.order.backend.build(config.backend, folder, plan, job.limits)
        if not BACKENDS[config.backend].hosted:
            _copy_tokenizer(checkpoint.path, folder, job.eos_ids)
    described = _describe(job, planned, made_from, lost)
    log.info("writing the report")
    with phase("writing the report"):
        _report(folder, job.order, described, planned)
    log.info("signing the files")
    with phase("signing the files"):
        manifests.write(folder, described, _unchanged(made_from, folder))
    return lost


def _unchanged(
    made_from: Mapping[str, FileRecord], folder: Path
) -> dict[str, FileRecord]:
    """Records of large files that a backend left as they were exported: they are not
    read again."""
    weights = made_from.get(WEIGHTS_FILE)
    path = folder / WEIGHTS_FILE
    if weights is None or not path.is_file() or path.stat().st_size != weights.size:
        return {}
    return {WEIGHTS_FILE: weights}


def _export(job: Job, planned: Planned, folder: Path) -> None:
    """The folded weights, and what says how they are used: a graph where the backend is
    built from one. Where a host has the weights, what it multiplies its heads with."""
    from kvlathe.export.folding.fold import fold
    from kvlathe.export.model.coded_weights import CodedWeights
    from kvlathe.export.model.weights_file import DTYPES, write_decoder

    config, checkpoint, plan = job.order.config, job.checkpoint, planned.plan
    if BACKENDS[config.backend].hosted:
        from kvlathe.export.folding.host_heads import write_heads

        write_heads(checkpoint.spec, plan, planned.basis, folder / HEADS_FILE)
        return
    weights = fold(checkpoint, plan, planned.basis)
    spec, device, dtype = checkpoint.spec, checkpoint.device, config.compute_dtype
    formats = job.formats
    if formats.maps is not None:
        weights = CodedWeights(weights, formats, DTYPES[dtype], checkpoint.grid)
    taken: tuple[AdapterMap, ...] = ()
    if config.enable_lora:
        from kvlathe.export.folding.adapter_maps import adapter_maps

        maps = adapter_maps(checkpoint, plan, planned.basis)
        maps.write(folder)
        taken = maps.maps
    if BACKENDS[config.backend].graph:
        from kvlathe.export.onnx.model import export_onnx

        given = spec, plan, weights, folder, dtype
        export_onnx(*given, device=device, formats=formats, adapters=taken)
        return
    write_decoder(spec, plan, weights, folder, dtype, device, formats)


def _copy_tokenizer(source: Path, folder: Path, ends: tuple[int, ...]) -> None:
    """The tokenizer's files, and in generation_config.json the ids that end a text,
    wherever the checkpoint has them: its config.json does not come along.
    """
    for name in FILES:
        if (source / name).is_file():
            shutil.copyfile(source / name, folder / name)
    if (source / MORE_TEMPLATES).is_dir():  # an engine has no inner folders
        named = chat_templates(source)
        entries = [{"name": name, "template": text} for name, text in named.items()]
        settings = read_object(source / SETTINGS_FILE) | {"chat_template": entries}
        (folder / SETTINGS_FILE).write_text(json.dumps(settings, indent=1), "utf-8")
        (folder / TEMPLATE_FILE).unlink(missing_ok=True)
    if ends or (source / GENERATION).is_file():
        settings = read_object(source / GENERATION) | {"eos_token_id": list(ends)}
        (folder / GENERATION).write_text(json.dumps(settings, indent=1), "utf-8")


def _describe(
    job: Job,
    planned: Planned,
    made_from: Mapping[str, FileRecord],
    lost: Measurement | None,
) -> Manifest:
    config, plan = job.order.config, planned.plan
    return Manifest(
        model=model_name(job.checkpoint.path),
        compression=config.compression,
        backend=config.backend,
        versions=job.order.versions,
        architectures=_architectures(job, plan),
        compute_dtype=config.compute_dtype,
        weights=config.weights or config.compute_dtype,
        limits=job.limits,
        page_tokens=plan.page_tokens,
        prefill_chunk=plan.prefill_chunk,
        kv_bytes=kv_bytes(config, plan, job.limits),
        plan_digest=plan.digest,
        model_digest=job.checkpoint.digest,
        command=config.command,
        created=_now(),
        reads_hidden=config.mtp,
        made_from=made_from,
        measured=lost,
    )


def kv_bytes(config: BuildConfig, plan: CompressionPlan, limits: Limits) -> KvBytes:
    layout = held_layout(plan, BACKENDS[config.backend].hosted)
    return KvBytes(
        per_token=layout.bytes_per_token(limits.max_seq_len),
        baseline=bytes_per_token(plan.model, config.hot_bits),
        baseline_16bit=bytes_per_token(plan.model, 16),
    )


def _architectures(job: Job, plan: CompressionPlan) -> tuple[str, ...]:
    """GPUs and CPUs that the engine runs on; one that was built for the CPU also where GPUs take it."""
    config, every = job.order.config, job.order.built.architectures
    if config.backend == "cuda":
        return cuda.able(config.weights)
    if config.backend != "onnxruntime":
        return every
    return (*every, *onnxruntime.gpus(plan, config.compute_dtype))


def _report(folder: Path, order: Order, described: Manifest, planned: Planned) -> None:
    from kvlathe.export.methods.evidence import evidence
    from kvlathe.export.report.report import ReportData, write_report

    stats, seen = planned.stats, None
    facts: dict[str, object] = {}
    if stats is not None:
        seen = evidence(order.compression, stats, order.options, planned.plan)
        facts = {f"calibration {name}": value for name, value in stats.source.items()}
    facts["weights"] = described.weights
    facts["bytes of the weights"] = described.weight_bytes
    if state := planned.plan.model.state_bytes:
        facts["bytes of a sequence's state, 32 bit"] = state
    held = planned.plan, BACKENDS[described.backend].hosted
    if warning := host_warning(*held):
        facts["warning: windows"] = warning
    layout, limits = held_layout(*held), described.limits
    data = ReportData(
        model=described.model,
        command=described.command,
        created=described.created,
        plan=planned.plan,
        bytes_per_token=described.kv_bytes.per_token,
        bytes_baseline=described.kv_bytes.baseline,
        bytes_16bit=described.kv_bytes.baseline_16bit,
        evidence=seen,
        loss=described.measured,
        longest=limits.max_seq_len,
        facts=facts,
        memory=memory_table(
            layout, limits.max_seq_len, limits.max_batch_size, described.weight_bytes
        ),
        limits=dataclasses.asdict(limits),
        versions=described.versions,
        engine=order.config.output_dir,
        checkpoint=order.named,
    )
    write_report(folder / REPORT_FILE, data)
