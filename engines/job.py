"""From an order to a job: the checkpoint is opened, and what is wrong with it is refused
before anything is written.

With order.py, planning.py, pricing.py, measuring.py and build.py the only module of
engines/ that calls export's verbs.
"""

from __future__ import annotations

import dataclasses
import math
import shutil
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

from kvlathe.base.console import log
from kvlathe.base.errors import KvlatheError
from kvlathe.base.extras import require
from kvlathe.base.tokenizer_files import (
    eos_ids,
    has_backend,
    read_backend,
    unknown_tokens,
    unsaid_ends,
)
from kvlathe.engines.backends import BACKENDS, check_windows
from kvlathe.engines.config import DTYPE_BYTES, BuildConfig
from kvlathe.engines.folder import nearest_parent
from kvlathe.engines.order import Order
from kvlathe.engines.planning import open_checkpoint
from kvlathe.plan.kernel_forms import UNLIKE
from kvlathe.plan.manifest import Limits
from kvlathe.plan.weight_formats import WeightFormat, WeightFormats

if TYPE_CHECKING:
    from kvlathe.export.model.checkpoint import Checkpoint
    from kvlathe.export.model.spec import DecoderSpec

GGUF_GROUP = 32
"""Inputs that share a scale in GGUF files whose codes can be kept."""
CUDA_GROUPS = (32, 64, 128, 256)
"""Inputs of a group of 4 bits in engines for the cuda backend, whose kernels take powers of
two from 32 on."""


@dataclass(frozen=True)
class Job:
    """An order that can be carried out, with the checkpoint it is about."""

    order: Order
    checkpoint: Checkpoint
    limits: Limits

    @cached_property
    def eos_ids(self) -> tuple[int, ...]:
        """The ids that end a text. Raises KvlatheError where the tokenizer's files
        cannot be read."""
        path = self.checkpoint.path
        return eos_ids(path, read_backend(path) if has_backend(path) else None)

    @cached_property
    def formats(self) -> WeightFormats:
        """Formats of the weights: in groups as the checkpoint has its codes, if it has any."""
        formats = self.order.config.weight_formats
        packing, maps = self.checkpoint.packing, formats.maps
        if maps is not None and self.kept_codes:
            return dataclasses.replace(
                formats, maps=WeightFormat(maps.name, GGUF_GROUP)
            )
        if packing is None or maps is None or maps.name != f"int{packing.bits}":
            return formats
        own = WeightFormat(
            maps.name, packing.group or maps.group, not packing.symmetric
        )
        return dataclasses.replace(formats, maps=own)

    @cached_property
    def kept_codes(self) -> tuple[str, ...]:
        """The maps whose codes a GGUF file has exactly as the engine's would be: codes
        of no more bits, with the zero in the middle. Empty where they are less than
        half of its maps: then smaller groups gain nothing."""
        maps = self.order.config.weight_formats.maps
        if maps is None or maps.name == "fp8":
            return ()
        from kvlathe.export.gguf.tensors import SYMMETRIC

        kinds = self.checkpoint.kinds()
        kept = [x for x, kind in kinds.items() if SYMMETRIC.get(kind, 99) <= maps.bits]
        return tuple(kept) if 2 * len(kept) >= len(kinds) else ()

    @cached_property
    def weight_bytes(self) -> int:
        """Bytes of the weights as exported, before compression; 0 where they stay in the
        checkpoint."""
        if BACKENDS[self.order.config.backend].hosted:
            return 0
        from kvlathe.export.model.tensors import stored_shapes

        spec, formats = self.checkpoint.spec, self.formats
        number = DTYPE_BYTES[self.order.config.compute_dtype]
        names = spec.family.names
        tables = {f"{names[role]}.weight" for role in ("embed", "head")}
        positions = f"{names.get('positions')}.weight"
        stack = (spec.family.experts.count,) if spec.family.experts else None
        total = 0
        for name, shape in stored_shapes(spec).items():
            form = formats.table if name in tables else formats.maps
            is_map = len(shape) == 2 or shape[:-2] == stack
            if form is None or not is_map or name == positions:
                total += number * math.prod(shape)
                continue
            *many, outputs, inputs = shape
            total += math.prod(many) * form.bytes_of(inputs, outputs, number)
        return total


def prepare(order: Order) -> Job:
    """Refuse the rest: what is wrong with the checkpoint, and a disk too small. Nothing
    has been written."""
    config = order.config
    drawn = ("matplotlib",)
    exported = ("onnx", "onnxscript") if BACKENDS[config.backend].graph else ()
    require("engines cannot be built here", "export", *drawn, *exported)
    checkpoint = open_checkpoint(
        config.model,
        config.max_seq_len,
        config.workers,
        config.device,
        config.lora,
        config.mtp,
    )
    _check_rope_fold(order, checkpoint.spec)
    _check_key_scales(order, checkpoint.spec)
    _check_layer_windows(order, checkpoint.spec)
    _check_latent(order, checkpoint.spec)
    _check_unlike(order, checkpoint.spec)
    _check_query_heads(order, checkpoint.spec)
    config = _with_weights(config, checkpoint)
    order = dataclasses.replace(order, config=config)
    _check_weights(config, checkpoint)
    job = Job(order, checkpoint, config.limits(checkpoint.spec.max_seq_len))
    _say_codes(job)
    _check_tokenizer(job)
    _check_disk(job)
    return job


def _say_codes(job: Job) -> None:
    """Say which codes of a GGUF file the engine's weights keep."""
    kinds, maps = job.checkpoint.kinds(), job.order.config.weight_formats.maps
    if maps is None or not kinds:
        return
    kept = set(job.kept_codes)
    others = sorted({kind for name, kind in kinds.items() if name not in kept})
    form = job.formats.maps
    assert form is not None
    log.info(
        "--weights %s: %d of %d maps keep the file's codes, unless a basis is folded "
        "in%s",
        maps.name,
        len(kept),
        len(kinds),
        f"; others ({', '.join(others)}) are rounded to groups of {form.group} inputs"
        if others and form.group
        else "",
    )


def _check_tokenizer(job: Job) -> None:
    if not has_backend(job.checkpoint.path):
        log.warning(
            "%s has no tokenizer.json: the engine takes token ids only. For text, load "
            "the tokenizer with transformers' AutoTokenizer and save_pretrained it "
            "into that folder",
            job.checkpoint.path,
        )
    _check_unsaid(job.checkpoint)
    if not job.eos_ids:
        log.warning(
            "%s names no end-of-text token: only a length ends its answers",
            job.checkpoint.path,
        )


def _check_unsaid(checkpoint: Checkpoint) -> None:
    """Tell of tokens that are declared and that the model does not have."""
    path, rows = checkpoint.path, checkpoint.spec.vocab_size
    backend = read_backend(path) if has_backend(path) else None
    if ends := unsaid_ends(path, backend):
        log.warning(
            "%s says that %s ends a text: ignored, as the model has the tokens 0 to %d",
            path,
            ", ".join(map(str, ends)),
            rows - 1,
        )
    if unknown := unknown_tokens(path, rows):
        log.warning(
            "%s declares %s: ignored, as the model has the tokens 0 to %d alone",
            path,
            ", ".join(unknown[:4]) + (", ..." if unknown[4:] else ""),
            rows - 1,
        )


def _check_rope_fold(order: Order, spec: DecoderSpec) -> None:
    """Planes are chosen after calibration; whether a model can keep chosen ones is
    known before."""
    flags = order.options
    ranks = order.compression.choosing_ranks
    folds = [one.overruling(flags).rope_fold for one in ranks] or [flags.rope_fold]
    if "planes" not in folds:
        return
    fact, remedy = "whole RoPE planes cannot be kept", "leave out --rope-fold planes"
    if spec.rope is None:
        raise KvlatheError(fact, "this model has no RoPE", remedy)
    if "q_norm" in spec.family.names:
        raise KvlatheError(
            fact, "this model's QK-norm needs all dimensions of a head", remedy
        )


def _check_key_scales(order: Order, spec: DecoderSpec) -> None:
    """Factors of K's channels fold into W_K, unless a norm follows it."""
    scaled = "k" in order.outline.scales
    if scaled and spec.rope is not None and "q_norm" in spec.family.names:
        raise KvlatheError(
            "keys cannot be scaled by channel",
            "this model's QK-norm stands between its weights and what is cached",
            "choose keys=channel or keys=token",
        )


def _check_layer_windows(order: Order, spec: DecoderSpec) -> None:
    from kvlathe.export.methods.composition import check_layer_windows

    if not any(spec.windows):
        return
    check_windows(order.config.backend, windowed=True)
    check_layer_windows(order.compression, order.outline)


def _check_latent(order: Order, spec: DecoderSpec) -> None:
    """Heads that share a latent are known to engines on CPUs, and keep all dimensions."""
    from kvlathe.export.methods.composition import check_latent

    if spec.family.latent is None:
        return
    if BACKENDS[order.config.backend].hosted:
        raise KvlatheError(
            f"--backend {order.config.backend} cannot be used with this model",
            "its heads share one latent (MLA), which its host would cache its own way",
            "build with --backend onnxruntime",
        )
    check_latent(order.compression, order.outline)


def _check_unlike(order: Order, spec: DecoderSpec) -> None:
    """Layers that differ in their heads, or share caches, are known to two backends."""
    from kvlathe.export.methods.composition import check_unlike

    if spec.shape.alike:
        return
    if order.config.backend not in ("onnxruntime", "cuda"):
        raise KvlatheError(
            f"--backend {order.config.backend} cannot be used with this model",
            UNLIKE,
            "build with --backend onnxruntime and run it on a CPU, or with --backend cuda",
        )
    check_unlike(order.compression, order.outline, spec.shape)


def _check_query_heads(order: Order, spec: DecoderSpec) -> None:
    """Heads of zeros are engines' own: a host has those of the checkpoint."""
    if spec.family.query_heads and BACKENDS[order.config.backend].hosted:
        raise KvlatheError(
            f"--backend {order.config.backend} cannot be used with this model",
            "its layers have unlike numbers of query heads",
            "build with --backend onnxruntime",
        )


def _with_weights(config: BuildConfig, checkpoint: Checkpoint) -> BuildConfig:
    """A checkpoint of integers gives an engine of them, unless something else was asked
    for, or the model has experts. Raises KvlatheError where the backend cannot."""
    packing, experts = checkpoint.packing, checkpoint.spec.family.experts
    if packing is None or config.weights is not None or experts is not None:
        return config
    own = f"int{packing.bits}"
    if own not in BACKENDS[config.backend].weights:
        raise KvlatheError(
            f"{config.backend} has no product of {own} weights",
            "the checkpoint is quantized so",
            f"give --weights {config.compute_dtype}, or choose another backend",
        )
    return dataclasses.replace(config, weights=own)


def _check_weights(config: BuildConfig, checkpoint: Checkpoint) -> None:
    """Only the cuda backend has products of experts' codes, shards cut weights between
    codes, 4 bits are not rounded to 4 bits again, and the cuda backend has its own groups."""
    spec = checkpoint.spec
    if config.weight_formats.maps is None:
        return
    fact = f"--weights {config.weights} cannot be used"
    if spec.family.experts is not None and config.backend != "cuda":
        reason = "this model has experts, whose codes the cuda backend alone takes"
        raise KvlatheError(fact, reason, "leave out --weights")
    if config.tensor_parallel_size > 1:
        reason = "codes are not cut for several GPUs"
        raise KvlatheError(fact, reason, "leave out --weights, or use one GPU")
    packing = checkpoint.packing
    group = packing.group if packing and config.backend == "cuda" else 0
    if config.weights == "int4" and group and group not in CUDA_GROUPS:
        reason = f"its kernels take no groups of {group}, which the checkpoint has"
        raise KvlatheError(fact, reason, "give --weights fp8 or float16")
    if config.weights == "int4" and checkpoint.disordered:
        reason = f"desc_act has put the groups of {checkpoint.disordered} out of order"
        wider = "int8" if config.backend == "onnxruntime" else "fp8"
        raise KvlatheError(
            fact, reason, f"give --weights {wider} or {config.compute_dtype}"
        )


def _check_disk(job: Job) -> None:
    check_room(job.order.config.output_dir, job.weight_bytes)


def check_room(target: Path, weight_bytes: int) -> None:
    """Raise KvlatheError where a folder of so many bytes finds none."""
    home = nearest_parent(target)
    free = shutil.disk_usage(home).free
    if free < weight_bytes:
        raise KvlatheError(
            f"{home} has no room for {target.name}",
            f"its weights take about {weight_bytes:,} bytes, with {free:,} free",
            "make room or name another --output-dir",
        )
