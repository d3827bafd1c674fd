"""Prices of forms and of windows, by measuring the model: plans that they open.

With order.py, job.py, planning.py, measuring.py and build.py the only module of engines/
that calls export's verbs.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from kvlathe.base.tokenizer_files import has_backend
from kvlathe.engines.backends import BACKENDS
from kvlathe.engines.config import BuildConfig
from kvlathe.engines.order import RANDOM, Order
from kvlathe.tasks.held_out import HeldOut
from kvlathe.tasks.tasks import FolderEncoder

if TYPE_CHECKING:
    from kvlathe.export.calibration.stats import Stats
    from kvlathe.export.methods.composition import CacheSettings
    from kvlathe.export.methods.variants import Variant
    from kvlathe.export.model.checkpoint import Checkpoint
    from kvlathe.export.model.spec import DecoderSpec
    from kvlathe.export.search.exams import Exam
    from kvlathe.export.search.heads import Named
    from kvlathe.export.search.measured import Sources

KL_WINDOWS, KL_TOKENS = 2, 1024
"""Text on which a search by KL scores its plans: at the first positions and at the last
ones that are served."""


def cache_settings(config: BuildConfig, spec: DecoderSpec) -> CacheSettings:
    from kvlathe.export.methods.composition import CacheSettings

    info = BACKENDS[config.backend]
    return CacheSettings(
        config.hot_bits,
        config.tokens_per_block,
        config.chunk,
        config.seed,
        info.paired,
        info.windows and not info.hosted,
        # Engines in float16 may run on a GPU, whose sessions refuse ages.
        info.ages and config.compute_dtype != "float16",
        spec.windows,
        spec.max_seq_len,
    )


def named_heads(
    order: Order,
    checkpoint: Checkpoint,
    settings: CacheSettings,
    remembered: Path | None,
) -> Named:
    """The compression with the heads named that see everything."""
    from kvlathe.export.search.heads import named

    (window,) = order.outline.tokens
    sources = sources_of(order.config, checkpoint)
    return named(order.compression, checkpoint, window, settings, sources, remembered)


def check_memory(order: Order, checkpoint: Checkpoint) -> None:
    """Raise KvlatheError where prices take more memory than is free. Nothing has been
    computed."""
    from kvlathe.export.search.measured import pricing_need

    if not order.compression.measured and not order.compression.measures_heads:
        return
    longest = checkpoint.spec.max_seq_len
    need = pricing_need(
        checkpoint.spec, min(order.config.target_len or longest, longest)
    )
    shorter = "end other programs, raise the container's limit, or give a smaller "
    need.require(checkpoint.device, f"{shorter}--target-len or --max-seq-len")


def variant_of(
    order: Order,
    checkpoint: Checkpoint,
    stats: Stats | None,
    form: CacheSettings,
    remembered: Path | None,
) -> Variant:
    """The plans that measuring the model's sensitivity opens."""
    from kvlathe.export.search.measured import price, variant

    assert stats is not None
    prices = price(
        checkpoint, stats, form, sources_of(order.config, checkpoint), remembered
    )
    return variant(order.compression, prices, form)


def exam_of(order: Order, checkpoint: Checkpoint) -> Exam:
    """The exam of an order's accuracy."""
    from kvlathe.export.search.exams import Exam, read_exam

    config = order.config
    assert config.metric is not None
    if config.metric != "kl":
        return read_exam(checkpoint, config.metric, config.text, config.retrieval)
    text = unread(order, checkpoint, [config.text] if config.text else [])
    length = min(KL_TOKENS, checkpoint.spec.max_seq_len)
    windows = [tuple(text.window(length)) for _ in range(KL_WINDOWS)]
    return Exam("kl", windows=tuple(windows))


def unread(order: Order, checkpoint: Checkpoint, files: Sequence[Path]) -> HeldOut:
    """Text of ``files`` that no statistic has read, then made-up sentences: other ones
    than a measurement makes up."""
    return HeldOut(
        files,
        FolderEncoder(checkpoint.path) if has_backend(checkpoint.path) else None,
        checkpoint.spec.vocab_size,
        calibrated_on(order, checkpoint),
        order.config.seed + 1,
    )


def calibrated_on(order: Order, checkpoint: Checkpoint) -> list[Sequence[int]]:
    """The text that an order's statistics are taken on, as token ids."""
    from kvlathe.export.calibration.calibrate import TOKENS, text_sequences

    config, source = order.config, order.config.calibration
    if not order.compression.calibration or config.stats is not None:
        return []
    if source in (None, RANDOM):
        return []
    tokens = config.calibration_tokens or TOKENS["text"]
    pieces = text_sequences(checkpoint, Path(str(source)), tokens)
    return [piece.tolist() for piece in pieces]


def sources_of(config: BuildConfig, checkpoint: Checkpoint) -> Sources:
    """Texts and questions that prices are taken on."""
    from kvlathe.export.calibration.calibrate import random_sequences
    from kvlathe.export.search.exams import WINDOW_TOKENS, Exam, read_exam
    from kvlathe.export.search.measured import WINDOWS, Sources

    if config.text is not None:
        exams = [read_exam(checkpoint, "perplexity", config.text, None)]
    else:
        length = min(WINDOW_TOKENS, checkpoint.spec.max_seq_len)
        drawn = random_sequences(
            checkpoint.spec.vocab_size, WINDOWS * length, config.seed, length
        )
        exams = [
            Exam("perplexity", windows=tuple(tuple(ids.tolist()) for ids in drawn))
        ]
    if config.metric == "retrieval" and config.retrieval is not None:
        exams.append(read_exam(checkpoint, "retrieval", None, config.retrieval))
    longest = checkpoint.spec.max_seq_len
    tokens = min(config.target_len or longest, longest)
    return Sources(exams, tokens, config.protect == "retrieval")
