"""From a request to a plan and its basis: statistics (calibrated, loaded or cached), then the methods.

With build.py the only module of engines/ that calls export's verbs.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from kvlathe.engines import cache
from kvlathe.engines.folder import whole_file
from kvlathe.engines.manifest import sha256_file
from kvlathe.engines.request import BuildRequest, shipped
from kvlathe.errors import KvlatheError
from kvlathe.export.layout import CacheLayout
from kvlathe.export.plan import CompressionPlan, ModelShape

if TYPE_CHECKING:
    from kvlathe.export.basis import Basis
    from kvlathe.export.checkpoint import Checkpoint
    from kvlathe.export.methods import CacheForm, Options
    from kvlathe.export.stats import Stats

log = logging.getLogger("kvlathe")

CALIBRATION_TEXT, TEXT, RETRIEVAL = "calibration_text.jsonl", "eval_text.jsonl", "line_retrieval.jsonl"


@dataclass(frozen=True)
class Planned:
    """A plan, the matrices that fold it in, and what they were made from (no statistics where none were needed)."""

    plan: CompressionPlan
    basis: Basis
    stats: Stats | None
    options: Options


def open_checkpoint(model: Path, max_seq_len: int | None = None, workers: int | None = None) -> Checkpoint:
    """Raises KvlatheError for everything that makes it unusable, and where the libraries for it are missing."""
    try:
        import torch

        from kvlathe.export.checkpoint import Checkpoint
    except ImportError as error:
        missing = f"{error.name} is not installed"
        raise KvlatheError("checkpoints cannot be read here", missing, "pip install 'kvlathe[export]'") from error
    if workers:
        torch.set_num_threads(workers)
    return Checkpoint(model, max_seq_len)


def plan_for(request: BuildRequest, checkpoint: Checkpoint) -> Planned:
    """Calibrate where the methods need it, and plan; search for the size where an accuracy was asked for."""
    from kvlathe.export.methods import CacheForm, Options, compose

    options = Options(
        removal_rate=request.removal_rate,
        compression_ratio=request.compression_ratio,
        basis=request.basis,
        allocation=request.allocation,
        rope_fold=request.rope_fold,
        centre=request.centre,
    )
    form = CacheForm(request.hot_bits, request.tokens_per_block, request.prefill_chunk, request.seed)
    spec, stats = checkpoint.spec, statistics(request, checkpoint)
    if request.accuracy is not None and stats is not None:
        plan, basis = _searched(request, checkpoint, stats, options, form)
    else:
        plan, basis = compose(request.compression, spec.shape, spec.rope is not None, stats, options, form)
    return Planned(plan, basis, stats, options)


def _searched(
    request: BuildRequest, checkpoint: Checkpoint, stats: Stats, options: Options, form: CacheForm
) -> tuple[CompressionPlan, Basis]:
    from kvlathe.export.search import read_exam, search

    text = retrieval = None
    if request.metric == "retrieval":
        retrieval = request.retrieval or shipped(RETRIEVAL, "--retrieval")
    else:
        text = request.text or shipped(TEXT, "--text")
    exam = read_exam(checkpoint, request.metric, text, retrieval)
    curves = cache.curves_folder() if request.use_cache else None
    assert request.accuracy is not None
    return search(checkpoint, stats, request.compression, options, form, request.accuracy, exam, curves)


def statistics(request: BuildRequest, checkpoint: Checkpoint) -> Stats | None:
    """The Stats file named in the request, or a calibration; None where the methods need neither."""
    from kvlathe.export.methods import calibration
    from kvlathe.export.stats import Stats

    kind = calibration(request.compression)
    if kind is None:
        return None
    if request.stats is not None:
        stats = Stats.load(request.stats)
        stats.require_model(checkpoint.spec.shape, checkpoint.digest)
        return stats
    source = request.calibration or (kind if kind == "random" else str(shipped(CALIBRATION_TEXT, "--calibration")))
    return calibrated(checkpoint, source, request.calibration_tokens, request.seed, request.use_cache)


def calibrated(
    checkpoint: Checkpoint, source: str, tokens: int | None = None, seed: int = 0, use_cache: bool = True
) -> Stats:
    """Statistics on ``source`` ("random" or a .jsonl file), from the cache where they were taken before."""
    from kvlathe.export.calibrate import calibrate
    from kvlathe.export.stats import Stats

    content = sha256_file(Path(source)) if Path(source).is_file() else source
    facts = {"source": content, "tokens": tokens, "seed": seed, "max_seq_len": checkpoint.spec.max_seq_len}
    kept = cache.stats_path(cache.key_of({**facts, "model": checkpoint.digest}))
    if use_cache and kept.is_file():
        log.info("calibration found in the cache")
        return Stats.load(kept)
    stats = calibrate(checkpoint, source, tokens, seed)
    if use_cache:
        cache.keep_file(kept, stats.save)
    return stats


def calibrate_to(model: Path, output: Path, source: str, tokens: int | None = None, seed: int = 0) -> Stats:
    """``kvlathe calibrate``: write the Stats file that ``BuildRequest.stats`` takes. Raises KvlatheError."""
    if output.exists():
        raise KvlatheError(f"{output} exists", "calibration replaces no file", "name another one")
    stats = calibrated(open_checkpoint(model), source, tokens, seed)
    with whole_file(output) as part:
        stats.save(part)
    return stats


def bytes_per_token(shape: ModelShape, bits: int, page_tokens: int) -> float:
    """KV bytes of one token of the uncompressed model in 16 or 32 ``bits``: what ratios are taken against."""
    from kvlathe.export.methods import CacheForm, Options, compose

    form = CacheForm(bits, page_tokens, page_tokens)  # type: ignore[arg-type]
    return CacheLayout(compose("none", shape, True, None, Options(), form)[0]).bytes_per_token()
