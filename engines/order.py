"""From a build's config to an order: everything is refused here that can be refused without
the model, the compression is parsed, and the cache key says what decides the engine's
bytes.

With job.py, planning.py, pricing.py, measuring.py and build.py the only module of
engines/ that calls export's verbs.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from functools import cached_property, partial
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING

from kvlathe.base import devices
from kvlathe.base.adapters import read_adapter
from kvlathe.base.chat_template import MORE_TEMPLATES
from kvlathe.base.console import log
from kvlathe.base.digests import sha256_file, sha256_files
from kvlathe.base.errors import KvlatheError
from kvlathe.base.flags import flag_of
from kvlathe.base.gguf_files import gguf_of
from kvlathe.base.package import DATA
from kvlathe.base.tokenizer_files import FILES
from kvlathe.engines import cache
from kvlathe.engines.backends import (
    BACKENDS,
    Backend,
    Built,
    backend,
    check_token_ranking,
    check_windows,
)
from kvlathe.engines.config import HOW_MUCH, BuildConfig, check
from kvlathe.engines.rotation import CHECKPOINT

if TYPE_CHECKING:
    from kvlathe.export.methods.compression import Compression
    from kvlathe.export.methods.method import Decision
    from kvlathe.export.methods.options import RankOptions
    from kvlathe.export.search.exams import Metric

DEFAULT_ACCURACY = 0.99
RANDOM = "random"
"""As a calibration's source."""
NOT_IN_KEY = (
    "model",
    "lora",
    "output_dir",
    "workers",
    "gpu_memory_utilization",
    "tensor_parallel_size",
    "overwrite",
    "use_cache",
    "measure",
    "measure_seconds",
    "max_kl",
    "command",
)
"""Fields of a config that do not change what is asked for (the model and
its adapters enter by their digests). The device does: it draws other random numbers, so that measured plans
differ."""
LIBRARIES = ("torch", "transformers", "onnx", "onnxscript", "numpy")
"""That calibrate, fold and export. A backend names its own."""

WHOLE_CHECKPOINTS = (
    CHECKPOINT,
    *(name for name, info in BACKENDS.items() if info.hosted),
)
"""Backends that hand the checkpoint's own files on."""


CALIBRATION_TEXT = DATA / "calibration_text.jsonl"
OF_ACCURACY = ("metric", "text", "retrieval")
"""Options that say how --accuracy is measured."""
OF_BASES = ("basis", "allocation", "rope_fold", "centre")
OF_COMPRESSION = (*OF_BASES, "calibration", "calibration_tokens", "stats")
"""Options that say how a compression removes."""


@dataclass(frozen=True)
class Order:
    """A config that no option forbids, its defaults written out, its compression
    parsed, and its backend. Everything after it takes the parsed value. Needs no torch.

    ``outline``: what the compression decides without statistics. ``searched``: whether
    nobody said how much its ranks remove, so that their own size is searched for,
    whatever stands beside them. ``named``: the model as it was named, where the config
    has the folder that was made of it."""

    config: BuildConfig
    compression: Compression
    outline: Decision
    backend: Backend
    built: Built
    searched: bool = False
    named: Path = Path("MODEL")

    @property
    def options(self) -> RankOptions:
        """The target and the way there, by the flags."""
        return options_of(self.config)

    @cached_property
    def key(self) -> str:
        """The cache key: everything that decides the engine's bytes."""
        facts: dict[str, object] = {}
        for field in dataclasses.fields(self.config):
            if field.name not in NOT_IN_KEY:
                facts[field.name] = _content(getattr(self.config, field.name))
        facts["device"] = devices.requested(self.config.device)
        facts["sizes"] = (self.config.batch, self.config.chunk)
        facts["model"] = _digests(self.config.model)
        facts["searched"] = self.searched
        facts["lora"] = [_adapter_facts(text) for text in self.config.lora]
        facts["versions"] = self.versions
        facts["architectures"] = self.built.architectures
        return cache.key_of(facts)

    @cached_property
    def versions(self) -> dict[str, str]:
        """Versions of the libraries that an engine's bytes depend on."""
        return {name: _version(name) for name in LIBRARIES} | dict(self.built.versions)


def accept(config: BuildConfig) -> Order:
    """Refuse, with KvlatheError, everything that can be refused without the model; write
    out defaults: what to calibrate on, and what accuracy is measured on."""
    from kvlathe.export.methods.composition import verify
    from kvlathe.export.methods.compression import parse

    check(config)
    compression = parse(config.compression)
    _check_given(config, compression)
    outline = verify(compression, options_of(config), config.tokens_per_block)
    _check_tokens(config, compression, outline)
    _warn_unheard(config, compression)
    module = backend(config.backend)
    named = config.model
    config = dataclasses.replace(config, model=folder_of(config.model, config.backend))
    searched = _leaves_size_open(config, compression)
    config = _resolved(config, compression)
    built = module.identify(config.backend)
    return Order(config, compression, outline, module, built, searched, named)


def folder_of(model: Path, backend: str = "") -> Path:
    """The checkpoint folder that ``model`` means: itself, or one that is made of a GGUF
    file. Raises KvlatheError for a file that cannot be read, and for one that
    ``backend`` cannot take."""
    file = None if cache.is_checkpoint(model) else gguf_of(model)
    found = model
    if file is not None:
        if not file.is_file():
            raise KvlatheError(
                f"there is no file {file}",
                "",
                "give a GGUF file or a checkpoint folder",
            )
        from kvlathe.export.gguf.folder import write_checkpoint

        log.info("reading config and tokenizer of %s", file)
        found = cache.checkpoint_of(file, partial(write_checkpoint, file))
    if cache.is_checkpoint(found) and backend in WHOLE_CHECKPOINTS:
        raise KvlatheError(
            f"--backend {backend} takes no GGUF file",
            "it needs a checkpoint in Hugging Face form",
            "give the checkpoint that the file was made of, or choose another backend",
        )
    return found


def options_of(config: BuildConfig) -> RankOptions:
    """The target and the way there, by the flags."""
    from kvlathe.export.methods.options import RankOptions

    return RankOptions(
        removal_rate=config.removal_rate,
        compression_ratio=config.compression_ratio,
        basis=config.basis,
        allocation=config.allocation,
        rope_fold=config.rope_fold,
        centre=config.centre,
    )


def _check_given(config: BuildConfig, compression: Compression) -> None:
    """Raise KvlatheError for a size that nothing can be asked for."""
    for name in HOW_MUCH:
        if getattr(config, name) is not None and compression.removes_nothing:
            raise KvlatheError(
                f"{flag_of(name)} with --compression {compression} cannot be used",
                "it removes nothing",
                "name a compression",
            )
    reads_texts = _calibrated_on(config, compression) or compression.measured
    if config.mtp and (reads_texts or config.accuracy is not None):
        raise KvlatheError(
            f"--mtp cannot be used with --compression {compression}",
            "it is fitted to texts, which a layer that guesses cannot read alone",
            "leave --compression out, or choose codes that need no statistics",
        )
    chooses_ranks = compression.choosing_ranks or compression.removes_nothing
    if config.centre and not chooses_ranks:
        raise KvlatheError(
            f"--centre cannot be used with {compression}",
            "none of its methods chooses the basis that is centred",
            "leave it out, or add a method that chooses ranks",
        )
    if compression.measured and config.removal_rate is not None:
        raise KvlatheError(
            f"--removal-rate cannot be used with {compression}",
            "it weighs every head's losses itself",
            "give --accuracy or --compression-ratio",
        )


def _check_tokens(
    config: BuildConfig, compression: Compression, outline: Decision
) -> None:
    """Raise KvlatheError where tokens are chosen in a way that the backend, or a search,
    knows nothing of."""
    ranks_tokens = outline.score is not None
    check_token_ranking(config.backend, ranks_tokens or outline.compacts)
    check_windows(config.backend, outline.windowed)
    if config.accuracy is not None:
        _check_searchable(config, compression)


def _check_searchable(config: BuildConfig, compression: Compression) -> None:
    """Raise KvlatheError where the size that keeps an accuracy cannot be searched for."""
    open_size = bool(compression.choosing_ranks) and not compression.has_size
    for one in compression.methods:
        own = one.outline(config.tokens_per_block)
        if own.score is not None:
            reason = (
                f"{one.name} chooses tokens while it runs, which no search foresees"
            )
        elif own.windowed and compression.choosing_ranks:
            reason = f"what {one.name} removes depends on the sequence's length"
        elif own.compacts and len(compression.methods) == 1:
            reason = f"{one.name} removes nothing until a prefix is compacted"
        else:
            continue
        searched = "the ranks are then searched for alone, and " if open_size else ""
        raise KvlatheError(
            f"--accuracy cannot be used with {config.compression}",
            reason,
            f"leave out --accuracy: {searched}the build says what all of it loses",
        )


def _leaves_size_open(config: BuildConfig, compression: Compression) -> bool:
    """Whether ranks are to be chosen and nobody said how much they may remove."""
    if compression.measured or not compression.choosing_ranks:
        return False
    sizes = [getattr(config, name) for name in HOW_MUCH]
    return not compression.has_size and not any(x is not None for x in sizes)


def _warn_unheard(config: BuildConfig, compression: Compression) -> None:
    """Say which options nothing will look at: scripts pass the same flags to every
    build. A default is not given."""
    unheard = OF_COMPRESSION if compression.removes_nothing else ()
    if compression.measured:
        unheard = OF_BASES
    hears_scores = compression.measured or compression.measures_heads
    hears_scores = hears_scores or _leaves_size_open(config, compression)
    given = [
        field.name
        for field in dataclasses.fields(config)
        if getattr(config, field.name) != field.default
    ]
    for name in given:
        if name in unheard:
            log.warning(
                "%s has no effect with --compression %s", flag_of(name), compression
            )
        if name in OF_ACCURACY and config.accuracy is None and not hears_scores:
            if name == "text" and config.measure:
                continue  # the build's measurement reads it first
            log.warning("%s has no effect without --accuracy", flag_of(name))


# -- defaults --------------------------------------------------------------------------
def _resolved(config: BuildConfig, compression: Compression) -> BuildConfig:
    """The config with its defaults written out. Raises KvlatheError where a file of
    this project is needed and is not there."""
    searched = _leaves_size_open(config, compression)
    config = dataclasses.replace(
        config,
        metric=_metric(config, compression),
        basis=config.basis or ("balanced" if searched else "svd"),
    )
    if compression.measured or searched:
        config = _with_accuracy(config, compression)
    if compression.measures_heads:
        config = _priced_on(config)
    kind, source = _calibrated_on(config, compression), config.calibration
    if kind is not None and source is None and config.stats is None:
        source = kind
        if kind != RANDOM:
            source = str(CALIBRATION_TEXT)
    config = dataclasses.replace(config, calibration=source)
    return _measured_on(config) if compression.measured else _scored_on(config)


def _calibrated_on(config: BuildConfig, compression: Compression) -> str | None:
    """The kind of tokens that a compression calibrates on, or None. The balanced basis
    takes text where there is any, whatever its method: random tokens say little of what
    attention gives."""
    flags = options_of(config)
    bases = [one.overruling(flags).basis for one in compression.choosing_ranks]
    kind = compression.calibration
    if kind == RANDOM and "balanced" in bases and CALIBRATION_TEXT.is_file():
        return "text"
    return kind


def _metric(config: BuildConfig, compression: Compression) -> Metric:
    """The metric that was named, or the one that the compression is mostly asked for."""
    if config.metric is not None:
        return config.metric
    asks = compression.measured or compression.measures_heads
    return "retrieval" if asks or config.retrieval else "kl"


def _with_accuracy(config: BuildConfig, compression: Compression) -> BuildConfig:
    """The config with DEFAULT_ACCURACY, where no size was asked for."""
    if any(getattr(config, name) is not None for name in HOW_MUCH):
        return config
    metric = "exp(-KL)" if config.metric == "kl" else config.metric
    log.info(
        "no size was asked for: what keeps %s of the uncompressed %s is searched for",
        DEFAULT_ACCURACY,
        metric,
    )
    return dataclasses.replace(config, accuracy=DEFAULT_ACCURACY)


def _scored_on(config: BuildConfig) -> BuildConfig:
    """Fill in the file that an accuracy is taken on."""
    if config.accuracy is None:
        return config
    if config.metric == "kl":
        return _divergence_on(config)
    if config.metric == "retrieval":
        return dataclasses.replace(
            config,
            retrieval=config.retrieval or DATA / "line_retrieval.jsonl",
        )
    return dataclasses.replace(config, text=config.text or CALIBRATION_TEXT)


def _divergence_on(config: BuildConfig) -> BuildConfig:
    """The text that a KL is taken on: that of the calibration, or this project's. Where
    there is none, sentences are made up."""
    if config.text is not None:
        return config
    files = [Path(name) for name in (config.calibration, CALIBRATION_TEXT) if name]
    there = [path for path in files if path.is_file()]
    return dataclasses.replace(config, text=there[0] if there else None)


def _measured_on(config: BuildConfig) -> BuildConfig:
    """Fill in what sensitivity is taken on:
    text in any case (random tokens where that is what was calibrated on), and questions
    where retrieval is what counts.
    """
    if config.accuracy is not None:
        config = _scored_on(config)
    return _priced_on(config)


def _priced_on(config: BuildConfig) -> BuildConfig:
    """The text that prices are taken on: that of the calibration, unless that was said
    to be random tokens."""
    if config.text is not None or config.calibration == RANDOM:
        return config
    own = config.calibration and Path(config.calibration)
    text = own or CALIBRATION_TEXT
    return dataclasses.replace(config, text=text)


# -- the key
def _version(library: str) -> str:
    try:
        return version(library)
    except PackageNotFoundError:
        return "missing"


def _digests(model: Path) -> dict[str, str]:
    """SHA-256 of each file of a checkpoint that a build reads."""
    weights = sorted([*model.glob("*.safetensors"), *model.glob("*.gguf")])
    others = [model / name for name in ("config.json", *FILES)]
    others += sorted((model / MORE_TEMPLATES).glob("*.jinja"))
    there = [path for path in (*weights, *others) if path.is_file()]
    if there:
        log.info("reading %s", model)
    digests = sha256_files(there)
    return {path.name: digest for path, digest in zip(there, digests, strict=True)}


def _adapter_facts(text: str) -> tuple[list[str], float]:
    """Everything that decides what an adapter adds."""
    adapter = read_adapter(text)
    there = [path for path in adapter.files if path.is_file()]
    return sha256_files(there), adapter.weight


def _content(value: object) -> object:
    """Files enter a key by what they hold."""
    if isinstance(value, str | Path) and value and Path(value).is_file():
        return sha256_file(Path(value))
    return value
