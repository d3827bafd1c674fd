"""What an order asks of the methods, and what measuring the model opens: prices of forms
and of windows.

With order.py, job.py, planning.py and build.py the only module of engines/ that calls export's
verbs.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from kvlathe.engines.backends import BACKENDS
from kvlathe.engines.order import Order
from kvlathe.engines.request import BuildRequest

if TYPE_CHECKING:
    from kvlathe.export.calibration.stats import Stats
    from kvlathe.export.methods.composition import CacheSettings
    from kvlathe.export.methods.variants import Variant
    from kvlathe.export.model.checkpoint import Checkpoint
    from kvlathe.export.model.spec import DecoderSpec
    from kvlathe.export.search.heads import Named
    from kvlathe.export.search.measured import Sources


def cache_settings(request: BuildRequest, spec: DecoderSpec) -> CacheSettings:
    from kvlathe.export.methods.composition import CacheSettings

    return CacheSettings(
        request.hot_bits,
        request.tokens_per_block,
        request.chunk,
        request.seed,
        BACKENDS[request.backend].paired,
        BACKENDS[request.backend].windows,
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
    sources = sources_of(order.request, checkpoint)
    return named(order.compression, checkpoint, window, settings, sources, remembered)


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
    sources = sources_of(order.request, checkpoint)
    prices = price(checkpoint, stats, form, sources, remembered)
    return variant(order.compression, prices, form)


def sources_of(request: BuildRequest, checkpoint: Checkpoint) -> Sources:
    """What prices are taken on."""
    from kvlathe.export.calibration.calibrate import random_sequences
    from kvlathe.export.search.exams import WINDOW_TOKENS, Exam, read_exam
    from kvlathe.export.search.measured import WINDOWS, Sources

    if request.text is not None:
        exams = [read_exam(checkpoint, "perplexity", request.text, None)]
    else:
        length = min(WINDOW_TOKENS, checkpoint.spec.max_seq_len)
        drawn = random_sequences(
            checkpoint.spec.vocab_size, WINDOWS * length, request.seed, length
        )
        exams = [
            Exam("perplexity", windows=tuple(tuple(ids.tolist()) for ids in drawn))
        ]
    if request.metric == "retrieval" and request.retrieval is not None:
        exams.append(read_exam(checkpoint, "retrieval", None, request.retrieval))
    longest = checkpoint.spec.max_seq_len
    tokens = min(request.target_len or longest, longest)
    return Sources(exams, tokens, request.protect == "retrieval")
