"""BuildConfig: everything a build may be told, and every refusal that needs neither
the model nor a library."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, get_args, get_origin, get_type_hints

from kvlathe.base.adapters import read_adapter
from kvlathe.base.devices import GPU_MEMORY_UTILIZATION
from kvlathe.base.errors import KvlatheError
from kvlathe.base.flags import flag_of
from kvlathe.engines.backends import BACKENDS, backend
from kvlathe.engines.folder import check_target
from kvlathe.plan.heads import RANK_MULTIPLE
from kvlathe.plan.manifest import Limits
from kvlathe.plan.weight_formats import BITS, FLOATS, PLAIN, WeightFormats

MOST = 1 << 31
"""Counts are below it: kernels take them as 32-bit integers."""
DTYPE_BYTES = {"float32": 4, "float16": 2}
HOW_MUCH = ("removal_rate", "compression_ratio", "accuracy")
"""Fields that say how much to remove: one at most."""
PATHS = ("model", "output_dir", "text", "retrieval", "stats")
COUNTS = (
    "max_batch_size",
    "max_input_len",
    "max_seq_len",
    "max_num_tokens",
    "tokens_per_block",
    "prefill_chunk",
    "workers",
    "tensor_parallel_size",
    "calibration_tokens",
    "target_len",
)
TYPES: dict[str, tuple[tuple[type, ...], str]] = {
    **dict.fromkeys(PATHS, ((Path,), "path")),
    **dict.fromkeys((*COUNTS, "seed", "kv_bits"), ((int,), "whole number")),
    **dict.fromkeys(
        (*HOW_MUCH, "max_kl", "measure_seconds", "gpu_memory_utilization"),
        ((int, float), "number"),
    ),
    "lora": ((tuple,), "tuple of texts"),
    **dict.fromkeys(
        ("centre", "overwrite", "use_cache", "measure", "enable_lora", "mtp"),
        ((bool,), "truth value"),
    ),
    **dict.fromkeys(
        (
            "compression",
            "metric",
            "protect",
            "basis",
            "allocation",
            "rope_fold",
            "calibration",
            "backend",
            "dtype",
            "weights",
            "device",
            "command",
        ),
        ((str,), "text"),
    ),
}
"""Types that Python may hand over for each field, and how a refusal calls them."""


@dataclass(frozen=True)
class BuildConfig:
    """Everything that ``kvlathe build`` takes. None means the default, which depends on
    the model or the backend. Paths may be given as text.

    At most one of ``removal_rate`` (the papers' r), ``compression_ratio`` (fraction of
    KV bytes removed) and ``accuracy`` (the largest ratio whose score on ``metric``,
    over the file ``text`` or ``retrieval``, stays at or above this fraction of the
    uncompressed score; that of "kl" is exp(-KL)) says how much to compress. Without
    any, methods that choose ranks search for what keeps 0.99. ``calibration``: "random" or a .jsonl
    file of texts; ``stats``: a file that ``kvlathe calibrate`` wrote, used instead.
    What is measured counts bytes at ``target_len`` tokens (the longest sequence) and is
    priced on long-range exercises too, unless ``protect`` is "none".
    The plan is measured against the uncompressed model before it is written, unless
    ``measure`` is False, in about ``measure_seconds`` (None: by its size and the build's
    time); ``max_kl``: the build is refused where it then loses more, in
    nats a token at any length.
    Limits are in tokens, except the batch (sequences). ``kv_bits``: number format of
    fresh tokens. ``weights``: number format of the weights (None: ``dtype``,
    or that of a GPTQ or AWQ checkpoint).
    ``lora``: adapters that are merged in, each ``DIR`` or ``DIR=WEIGHT``.
    ``enable_lora``: whether the engine takes more of them while it runs.
    ``mtp``: the engine is the checkpoint's layer that guesses tokens, and no whole model.
    ``workers``: threads. ``tensor_parallel_size``: GPUs that the plan must be dealt to;
    an engine is the same for any. ``device``: where the model is calibrated, measured
    and folded (None: KVLATHE_DEVICE, or auto: a GPU where torch sees one), in at most
    ``gpu_memory_utilization`` of a GPU's memory.
    """

    model: Path
    output_dir: Path
    compression: str = "none"
    removal_rate: float | None = None
    compression_ratio: float | None = None
    accuracy: float | None = None
    target_len: int | None = None
    protect: Literal["retrieval", "none"] = "retrieval"
    metric: Literal["retrieval", "perplexity", "agreement", "kl"] | None = None
    text: Path | None = None
    retrieval: Path | None = None
    measure: bool = True
    measure_seconds: float | None = None
    max_kl: float | None = None
    basis: Literal["svd", "balanced"] | None = None
    allocation: Literal["rate", "uniform", "global"] | None = None
    rope_fold: Literal["none", "planes"] = "none"
    centre: bool = False
    calibration: str | None = None
    calibration_tokens: int | None = None
    stats: Path | None = None
    seed: int = 0
    backend: str = "onnxruntime"
    dtype: str | None = None
    weights: str | None = None
    kv_bits: Literal[16, 32] | None = None
    max_batch_size: int | None = None
    max_input_len: int | None = None
    max_seq_len: int | None = None
    max_num_tokens: int | None = None
    tokens_per_block: int = 64
    prefill_chunk: int | None = None
    workers: int | None = None
    tensor_parallel_size: int = 1
    device: Literal["auto", "cpu", "cuda"] | None = None
    gpu_memory_utilization: float = GPU_MEMORY_UTILIZATION
    overwrite: bool = False
    use_cache: bool = True
    lora: tuple[str, ...] = ()
    enable_lora: bool = False
    mtp: bool = False
    command: str = ""

    def __post_init__(self) -> None:
        for name in PATHS:
            if isinstance(value := getattr(self, name), str):
                object.__setattr__(self, name, Path(value))

    @property
    def compute_dtype(self) -> str:
        return self.dtype or BACKENDS[self.backend].dtypes[0]

    @property
    def weight_formats(self) -> WeightFormats:
        """Formats of weights that are codes, where any are."""
        return BACKENDS[self.backend].weights.get(
            self.weights or self.compute_dtype, PLAIN
        )

    @property
    def hot_bits(self) -> Literal[16, 32]:
        """Fresh tokens are cached in 16 bit, as everybody does, whatever the engine
        computes in: docs/methods.md has what that costs."""
        return self.kv_bits or 16

    @property
    def batch(self) -> int:
        """Sequences in one step."""
        if self.max_batch_size is not None:
            return self.max_batch_size
        return self._within_a_step(BACKENDS[self.backend].sizes.batch)

    @property
    def chunk(self) -> int:
        """Tokens of a prompt that pass at once: whole pages."""
        if self.prefill_chunk is not None:
            return self.prefill_chunk
        most = self._within_a_step(BACKENDS[self.backend].sizes.chunk)
        page = self.tokens_per_block
        return max(page, most // page * page)

    def _within_a_step(self, size: int) -> int:
        return min(size, self.max_num_tokens or size)

    def limits(self, max_seq_len: int) -> Limits:
        """The profile up to ``max_seq_len``."""
        least = self.chunk + self.batch
        by_default = BACKENDS[self.backend].sizes.tokens or least
        limits = Limits(
            max_batch_size=self.batch,
            max_num_tokens=self.max_num_tokens or max(by_default, least),
            max_input_len=self.max_input_len or max_seq_len,
            max_seq_len=max_seq_len,
        )
        if limits.max_input_len > max_seq_len:
            raise _refused(
                f"{flag_of('max_input_len')} {limits.max_input_len}",
                f"sequences end at {max_seq_len} tokens",
                "lower it",
            )
        return limits


def check(config: BuildConfig) -> None:
    """Raise KvlatheError for the first thing that cannot be: options that exclude each
    other, numbers out of range, a backend that cannot be used, an output folder that
    exists.
    """
    check_types(config)
    _check_choices(config)
    _check_target(config)
    for adapter in config.lora:
        read_adapter(adapter)
    backend(config.backend)
    _check_sizes(config)
    check_share(config.gpu_memory_utilization)
    dtypes = BACKENDS[config.backend].dtypes
    if config.compute_dtype not in dtypes:
        raise _refused(
            f"--dtype {config.dtype}",
            f"{config.backend} computes in {', '.join(dtypes)}",
            "choose another",
        )
    _check_weights(config)
    if config.lora and BACKENDS[config.backend].hosted:
        raise _refused(
            "--lora",
            f"{config.backend} runs the checkpoint as it is",
            "give a checkpoint that the adapter was merged into",
        )
    _check_adapters(config)
    _check_mtp(config)
    if config.tensor_parallel_size > 1 and config.backend != "cuda":
        raise _refused(
            f"--tensor-parallel-size {config.tensor_parallel_size}",
            f"{config.backend} runs on one device",
            "build with --backend cuda",
        )
    check_target(config.output_dir, config.overwrite)


def _check_adapters(config: BuildConfig) -> None:
    """Only some backends have products beside their maps."""
    if not config.enable_lora:
        return
    able = [name for name, info in BACKENDS.items() if info.adapters]
    if config.backend not in able:
        raise _refused(
            "--enable-lora",
            f"{config.backend} has no products of adapters beside its maps",
            f"build for {' or '.join(able)}, or merge the adapter (--lora)",
        )
    if config.tensor_parallel_size > 1:
        raise _refused(
            "--enable-lora",
            "adapters are not cut for several GPUs",
            "use one GPU, or merge the adapter (--lora)",
        )


def _check_mtp(config: BuildConfig) -> None:
    """A layer that guesses is no model of texts: nothing can be measured on it."""
    if not config.mtp:
        return
    able = [name for name, info in BACKENDS.items() if info.hidden_states]
    if config.backend not in able:
        raise _refused(
            "--mtp",
            f"{config.backend} has no rows that read hidden states",
            f"build for {' or '.join(able)}",
        )
    for name in ("lora", "enable_lora", "max_kl"):
        if getattr(config, name) not in ((), False, None):
            raise _refused(
                f"{flag_of(name)} with --mtp",
                "a layer that guesses is no whole model",
                "leave it out",
            )


def _check_weights(config: BuildConfig) -> None:
    """Weights are what the engine computes in, or codes that its backend multiplies."""
    asked = config.weights
    coded = BACKENDS[config.backend].weights
    if asked is None or asked == config.compute_dtype or asked in coded:
        return
    if asked in FLOATS:
        raise _refused(
            f"--weights {asked}",
            f"the engine computes in {config.compute_dtype}, and so do its weights",
            f"give --dtype {asked}",
        )
    able = [name for name, info in BACKENDS.items() if asked in info.weights]
    if not able:
        known = ", ".join((*FLOATS, *BITS))
        raise _refused(f"--weights {asked}", "it is unknown", f"choose one of {known}")
    raise _refused(
        f"--weights {asked}",
        f"{config.backend} has no product of such weights",
        f"build for {' or '.join(able)}",
    )


def check_types(config: BuildConfig) -> None:
    """Python takes anything for a field; what follows compares numbers and opens
    files."""
    for field in dataclasses.fields(config):
        value = getattr(config, field.name)
        kinds, said = TYPES[field.name]
        if value is None and field.default is None:
            continue
        wrong = isinstance(value, bool) and bool not in kinds
        if wrong or not isinstance(value, kinds):
            given = f"{type(value).__name__} {value!r:.60}"
            raise _refused(
                f"{field.name}={given}", f"it is no {said}", f"give a {said}"
            )


def _check_choices(config: BuildConfig) -> None:
    """A field of few values has one of them. click checks those of a command line."""
    for name, kind in get_type_hints(BuildConfig).items():
        for one in (kind, *get_args(kind)):
            allowed = get_args(one) if get_origin(one) is Literal else ()
            value = getattr(config, name)
            if allowed and value is not None and value not in allowed:
                said = ", ".join(map(str, allowed))
                raise _refused(
                    f"{flag_of(name)} {value}", "it is unknown", f"choose one of {said}"
                )


def _check_target(config: BuildConfig) -> None:
    given = [name for name in HOW_MUCH if getattr(config, name) is not None]
    if len(given) > 1:
        raise _refused(
            " and ".join(map(flag_of, given)),
            "each of them says how much to compress",
            "give one",
        )
    for name in given:
        value = getattr(config, name)
        is_whole = name == "accuracy" and value == 1
        if not (0 <= value < 1 or is_whole):
            raise _refused(
                f"{flag_of(name)} {value}",
                "it is a fraction",
                "give a number from 0 to 1",
            )
    _check_measuring(config)
    if config.stats and (config.calibration or config.calibration_tokens):
        raise _refused(
            "--stats with --calibration",
            "a Stats file is a finished calibration",
            "give one of them",
        )
    for path in (config.text, config.retrieval, config.stats):
        if path is not None and not path.is_file():
            raise _refused(f"{path}", "there is no such file", "name one that exists")


def check_share(share: float) -> None:
    """Raise KvlatheError for a share of a GPU's memory that is none."""
    if not 0 < share <= 1:
        raise _refused(
            f"{flag_of('gpu_memory_utilization')} {share}",
            "it is the share of a GPU's memory that may be used",
            "give a number above 0, 1 at most",
        )


def _check_measuring(config: BuildConfig) -> None:
    for name in ("max_kl", "measure_seconds"):
        value = getattr(config, name)
        if value is not None and not config.measure:
            flag = f"{flag_of(name)} {value:g}"
            raise _refused(flag, "nothing is measured", "leave out --no-measure")
    if config.max_kl is not None and not config.max_kl >= 0:
        raise _refused(
            f"{flag_of('max_kl')} {config.max_kl:g}",
            "it is nats a token",
            "give 0 or more, such as 0.05",
        )
    if config.measure_seconds is not None and not config.measure_seconds > 0:
        raise _refused(
            f"{flag_of('measure_seconds')} {config.measure_seconds:g}",
            "it is the time of a measurement",
            "give a number above 0",
        )


def _check_sizes(config: BuildConfig) -> None:
    for name in COUNTS:
        if (value := getattr(config, name)) is not None and not 0 < value < MOST:
            raise _refused(
                f"{flag_of(name)} {value}", "it is a count", "give 1 to 2^31 - 1"
            )
    if not 0 <= config.seed < 1 << 63:
        raise _refused(
            f"--seed {config.seed}", "it is out of range", "give 0 to 2^63 - 1"
        )
    if config.tokens_per_block % RANK_MULTIPLE:
        raise _refused(
            f"{flag_of('tokens_per_block')} {config.tokens_per_block}",
            f"pages are multiples of {RANK_MULTIPLE} tokens",
            "give 64 or 128",
        )
    if config.chunk % config.tokens_per_block:
        page = config.tokens_per_block
        raise _refused(
            f"{flag_of('prefill_chunk')} {config.chunk}",
            f"chunks are whole pages of {page} tokens",
            "give a multiple",
        )
    least = max(config.chunk, config.batch)
    if config.max_num_tokens is not None and config.max_num_tokens < least:
        need = (
            f"a step must hold one chunk ({config.chunk} tokens) and one token of "
            f"every sequence ({config.batch})"
        )
        raise _refused(
            f"{flag_of('max_num_tokens')} {config.max_num_tokens}",
            need,
            "raise it or lower --prefill-chunk",
        )


def _refused(what: str, reason: str, remedy: str) -> KvlatheError:
    return KvlatheError(f"{what} cannot be used", reason, remedy)
