"""Prices of forms and of windows, by measuring the model: plans that they open.

With order.py, job.py, planning.py, measuring.py and build.py the only module of engines/
that calls export's verbs.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from kvlathe.engines.backends import BACKENDS
from kvlathe.engines.config import BuildConfig
from kvlathe.engines.order import Order

if TYPE_CHECKING:
    from kvlathe.export.calibration.stats import Stats
    from kvlathe.export.methods.composition import CacheSettings
    from kvlathe.export.methods.variants import Variant
    from kvlathe.export.model.checkpoint import Checkpoint
    from kvlathe.export.model.spec import DecoderSpec
    from kvlathe.export.search.heads import Named
    from kvlathe.export.search.measured import Sources


def cache_settings(config: BuildConfig, spec: DecoderSpec) -> CacheSettings:
    from kvlathe.export.methods.composition import CacheSettings

    return CacheSettings(
        config.hot_bits,
        config.tokens_per_block,
        config.chunk,
        config.seed,
        BACKENDS[config.backend].paired,
        BACKENDS[config.backend].windows,
        spec.windows,
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
