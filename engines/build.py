"""One engine from one checkpoint: plan, fold, export, build, report, and one rename.

This is the conductor: with planning.py the only module of engines/ that calls export's verbs. The heavy ones are
imported where they are used, so that a refusal needs no torch. Nothing is written before the request is known to be
possible, and nothing remains of a build that did not finish.
"""

from __future__ import annotations

import dataclasses
import json
import math
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import cached_property
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvlathe.console import log, progress
from kvlathe.engines import cache, onnxruntime
from kvlathe.engines import manifest as manifests
from kvlathe.engines.backends import Backend, Built, backend
from kvlathe.engines.folder import appearing, nearest_parent
from kvlathe.engines.manifest import BASIS_FILE, PLAN_FILE, REPORT_FILE, FileRecord, KvBytes, Limits, Manifest
from kvlathe.engines.planning import Planned, bytes_per_token, calibrate_to, open_checkpoint, plan_for, resolved
from kvlathe.engines.request import DTYPE_BYTES, BuildRequest, check
from kvlathe.errors import KvlatheError
from kvlathe.export.layout import CacheLayout
from kvlathe.export.plan import CompressionPlan
from kvlathe.tokenizer_files import FILES, GENERATION, eos_ids, has_backend, read_backend, read_object

if TYPE_CHECKING:
    from kvlathe.export.checkpoint import Checkpoint
    from kvlathe.export.spec import DecoderSpec

__all__ = ["BuildRequest", "build", "calibrate_to", "preview"]

NOT_IN_KEY = ("model", "output_dir", "workers", "overwrite", "use_cache", "command")
"""Fields of a request that do not change the engine (the model enters by its digest)."""


@dataclass(frozen=True)
class Order:
    """A request that no option forbids, its defaults written out, and its backend. Needs no torch."""

    request: BuildRequest
    backend: Backend
    built: Built

    @cached_property
    def key(self) -> str:
        """The cache key: everything that decides the engine's bytes."""
        fields = {f.name: getattr(self.request, f.name) for f in dataclasses.fields(self.request)}
        model = self.request.model
        files = [*sorted(model.glob("*.safetensors")), *(model / name for name in ("config.json", *FILES))]
        return cache.key_of(
            {
                **{name: _content(value) for name, value in fields.items() if name not in NOT_IN_KEY},
                "model": {path.name: manifests.sha256_file(path) for path in files if path.is_file()},
                "versions": self.versions,
                "architectures": self.built.architectures,
            }
        )

    @cached_property
    def versions(self) -> dict[str, str]:
        libraries = {name: _version(name) for name in ("torch", "transformers", "onnx", "onnxscript", "numpy")}
        return {**libraries, **self.built.versions}


@dataclass(frozen=True)
class Job:
    """An order that was found possible, with the checkpoint it is about."""

    order: Order
    checkpoint: Checkpoint
    limits: Limits

    @cached_property
    def eos_ids(self) -> tuple[int, ...]:
        """The ids that end a text. Raises KvlatheError where the tokenizer's files cannot be read."""
        path = self.checkpoint.path
        return eos_ids(path, read_backend(path) if has_backend(path) else None)

    @cached_property
    def weight_bytes(self) -> int:
        """Bytes of the weights as exported, before compression."""
        from kvlathe.export.tensors import stored_shapes

        numbers = sum(math.prod(shape) for shape in stored_shapes(self.checkpoint.spec).values())
        return numbers * DTYPE_BYTES[self.order.request.compute_dtype]


def _version(library: str) -> str:
    try:
        return version(library)
    except PackageNotFoundError:
        return "missing"


def _content(value: object) -> object:
    """Files enter a key by what they hold."""
    if isinstance(value, str | Path) and value and Path(value).is_file():
        return manifests.sha256_file(Path(value))
    return value


# -- promise before ---------------------------------------------------------------------------------------------------
def accept(request: BuildRequest) -> Order:
    """Refuse, with KvlatheError, everything that can be refused without the model."""
    check(request)
    module = backend(request.backend)
    return Order(resolved(request), module, module.identify(request.backend))


def prepare(order: Order) -> Job:
    """Refuse the rest: what is wrong with the checkpoint, and a disk too small. Nothing has been written."""
    request = order.request
    checkpoint = open_checkpoint(request.model, request.max_seq_len, request.workers)
    _check_rope_fold(request, checkpoint.spec)
    _check_key_scales(request, checkpoint.spec)
    job = Job(order, checkpoint, request.limits(checkpoint.spec.max_seq_len))
    _check_tokenizer(job)
    _check_disk(job)
    return job


def _check_tokenizer(job: Job) -> None:
    if not has_backend(job.checkpoint.path):
        log.warning(
            "%s has no tokenizer.json: the engine takes token ids only; for text, load the tokenizer with "
            "transformers' AutoTokenizer and save_pretrained it into that folder",
            job.checkpoint.path,
        )
    if not job.eos_ids:
        log.warning("%s names no end-of-text token: only a length ends its answers", job.checkpoint.path)


def _check_rope_fold(request: BuildRequest, spec: DecoderSpec) -> None:
    """Planes are chosen after calibration; whether a model can keep chosen ones is known before."""
    from kvlathe.export.methods.options import parse

    asked = [one.options.get("rope_fold", request.rope_fold) for one in parse(request.compression)]
    if "planes" not in asked:
        return
    fact, remedy = "whole RoPE planes cannot be kept", "leave out --rope-fold planes"
    if spec.rope is None:
        raise KvlatheError(fact, "this model has no RoPE", remedy)
    if "q_norm" in spec.family.names:
        raise KvlatheError(fact, "this model's QK-norm needs all dimensions of a head", remedy)


def _check_key_scales(request: BuildRequest, spec: DecoderSpec) -> None:
    """Factors of K's channels fold into W_K, unless a norm stands behind it."""
    from kvlathe.export.methods import Options, verify

    scales = verify(request.compression, Options(), request.tokens_per_block).scales
    if "k" in scales and spec.rope is not None and "q_norm" in spec.family.names:
        fact, reason = "keys cannot be scaled by channel", "this model's QK-norm stands between its weights and RoPE"
        raise KvlatheError(fact, reason, "choose keys=channel or keys=token")


def _check_disk(job: Job) -> None:
    home = nearest_parent(job.order.request.output_dir)
    free = shutil.disk_usage(home).free
    if free < job.weight_bytes:
        fact = f"the engine needs about {job.weight_bytes:,} bytes and {home} has {free:,} free"
        raise KvlatheError(fact, "the weights are written there", "make room or name another --output_dir")


def preview(request: BuildRequest) -> dict[str, Any]:
    """The dry run: what ``build`` would do, and its bytes. Refuses what ``build`` would refuse, and writes nothing."""
    order = accept(request)
    job = prepare(order)
    spec = job.checkpoint.spec
    return {
        "model": str(job.checkpoint.path),
        "model_type": spec.model_type,
        "output_dir": str(request.output_dir),
        "compression": request.compression,
        "backend": request.backend,
        "architectures": list(order.built.architectures),
        "compute_dtype": request.compute_dtype,
        "cached": request.use_cache and cache.find(order.key) is not None,
        "weight_bytes": job.weight_bytes,
        "kv_bytes_per_token_baseline": bytes_per_token(spec.shape, request.hot_bits),
        "limits": dataclasses.asdict(job.limits),
    }


# -- build ------------------------------------------------------------------------------------------------------------
def build(request: BuildRequest) -> Path:
    """Build the engine folder and return its path. Raises KvlatheError; Ctrl-C and SIGTERM raise KeyboardInterrupt.

    In every case the folder either appears whole or not at all.
    """
    order = accept(request)
    found = cache.find(order.key) if request.use_cache else None
    if found is not None:
        log.info("the same engine was built before: taken from the cache")
        with appearing(request.output_dir, request.overwrite) as folder:
            cache.give(order.key, found, folder)
            _renew(folder, found, request)
        return request.output_dir
    job = prepare(order)
    with appearing(request.output_dir, request.overwrite) as folder:
        _make(job, folder)
    if request.use_cache:
        cache.keep(order.key, request.output_dir)
    return request.output_dir


def _renew(folder: Path, found: Manifest, request: BuildRequest) -> None:
    """Make the report and the manifest of a cached engine speak of this build. The cache's own files stay as they are:
    the report, a link to one of them, is replaced.
    """
    from kvlathe.export.report_heading import heading, renewed

    described = dataclasses.replace(found, model=request.model.resolve().name, command=request.command, created=_now())
    page = folder / REPORT_FILE
    html = page.read_text("utf-8")
    page.unlink()
    fields = heading(described.model, described.compression, described.command, described.created)
    page.write_text(renewed(html, fields), "utf-8")
    record = FileRecord(page.stat().st_size, manifests.sha256_file(page))
    manifests.write(folder, dataclasses.replace(described, files={**found.files, REPORT_FILE: record}))


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")


def _make(job: Job, folder: Path) -> None:
    """Fill ``folder``: plan, basis, graph and weights, what the backend makes of them, tokenizer, report, manifest."""
    from kvlathe.export.fold import fold
    from kvlathe.export.to_onnx import export_onnx

    request, checkpoint = job.order.request, job.checkpoint
    planned = plan_for(request, checkpoint)
    plan = planned.plan
    job.order.backend.check_plan(request.backend, plan)
    (folder / PLAN_FILE).write_text(plan.to_json(), "utf-8")
    planned.basis.save(folder / BASIS_FILE)
    log.info("exporting the graph")
    weights = progress(fold(checkpoint, plan, planned.basis), "folding and writing weights")
    export_onnx(checkpoint.spec, plan, weights, folder, request.compute_dtype)
    made_from = manifests.describe_files(folder)
    log.info("building for %s", request.backend)
    job.order.backend.build(request.backend, folder, plan, job.limits)
    _copy_tokenizer(checkpoint.path, folder, job.eos_ids)
    described = _describe(job, planned, made_from)
    _report(folder, described, planned)
    manifests.write(folder, described)


def _copy_tokenizer(source: Path, folder: Path, ends: tuple[int, ...]) -> None:
    """The tokenizer's files, and in generation_config.json the ids that end a text, wherever the checkpoint has them:
    its config.json does not come along.
    """
    for name in FILES:
        if (source / name).is_file():
            shutil.copyfile(source / name, folder / name)
    if ends:
        settings = read_object(source / GENERATION) | {"eos_token_id": list(ends)}
        (folder / GENERATION).write_text(json.dumps(settings, indent=1), "utf-8")


def _describe(job: Job, planned: Planned, made_from: Mapping[str, FileRecord]) -> Manifest:
    request, plan = job.order.request, planned.plan
    return Manifest(
        model=job.checkpoint.path.resolve().name,
        compression=request.compression,
        backend=request.backend,
        versions=job.order.versions,
        architectures=(*job.order.built.architectures, *_gpus(request, plan)),
        compute_dtype=request.compute_dtype,
        limits=job.limits,
        page_tokens=plan.page_tokens,
        prefill_chunk=plan.prefill_chunk,
        kv_bytes=KvBytes(
            per_token=CacheLayout(plan).bytes_per_token(),
            baseline=bytes_per_token(plan.model, request.hot_bits),
            baseline_16bit=bytes_per_token(plan.model, 16),
        ),
        plan_digest=plan.digest,
        model_digest=job.checkpoint.digest,
        command=request.command,
        created=_now(),
        made_from=made_from,
    )


def _gpus(request: BuildRequest, plan: CompressionPlan) -> tuple[str, ...]:
    """Where an engine that was built for the CPU also runs."""
    return onnxruntime.gpus(plan, request.compute_dtype) if request.backend == "onnxruntime" else ()


def _report(folder: Path, described: Manifest, planned: Planned) -> None:
    from kvlathe.export.methods import evidence
    from kvlathe.export.report import ReportData, write_report

    stats = planned.stats
    data = ReportData(
        model=described.model,
        command=described.command,
        created=described.created,
        plan=planned.plan,
        bytes_per_token=described.kv_bytes.per_token,
        bytes_baseline=described.kv_bytes.baseline,
        bytes_16bit=described.kv_bytes.baseline_16bit,
        evidence=stats and evidence(described.compression, stats, planned.options, planned.plan),
        facts={f"calibration {name}": value for name, value in stats.source.items()} if stats else {},
        limits=dataclasses.asdict(described.limits),
        versions=described.versions,
    )
    write_report(folder / REPORT_FILE, data)
