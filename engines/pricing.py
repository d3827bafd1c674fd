"""What a request asks of the methods, and what measuring the model opens: prices of forms
and of windows.

With order.py, planning.py and build.py the only module of engines/ that calls export's
verbs.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from kvlathe.engines.backends import BACKENDS
from kvlathe.engines.request import BuildRequest

if TYPE_CHECKING:
    from kvlathe.export.calibration.stats import Stats
    from kvlathe.export.methods.composition import CacheSettings
    from kvlathe.export.methods.options import Options
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


def options_of(request: BuildRequest) -> Options:
    from kvlathe.export.methods.options import Options

    return Options(
        removal_rate=request.removal_rate,
        compression_ratio=request.compression_ratio,
        basis=request.basis,
        allocation=request.allocation,
        rope_fold=request.rope_fold,
        centre=request.centre,
    )


def named_heads(
    request: BuildRequest,
    checkpoint: Checkpoint,
    settings: CacheSettings,
    remembered: Path | None,
) -> Named:
    """The request with the heads named that see everything."""
    from kvlathe.export.methods.composition import verify
    from kvlathe.export.search.heads import named

    asked = request.compression
    known = verify(asked, options_of(request), settings.page_tokens)
    (window,) = known.tokens
    sources = sources_of(request, checkpoint)
    return named(asked, checkpoint, window, settings, sources, remembered)


def variant_of(
    request: BuildRequest,
    checkpoint: Checkpoint,
    stats: Stats | None,
    form: CacheSettings,
    remembered: Path | None,
) -> Variant:
    """The plans that measuring the model's sensitivity opens."""
    from kvlathe.export.search.measured import price, variant

    assert stats is not None
    sources = sources_of(request, checkpoint)
    prices = price(checkpoint, stats, form, sources, remembered)
    return variant(request.compression, prices, form)


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
