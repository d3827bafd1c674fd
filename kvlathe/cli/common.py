"""Parts that commands share: options of one meaning, --log-level, --json, and a
standard output that carries results alone."""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import functools
import json
import math
import os
import shlex
import sys
from collections.abc import Callable, Generator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from kvlathe.base import console, devices
from kvlathe.base.errors import KvlatheError
from kvlathe.base.gguf_files import gguf_of
from kvlathe.base.hub import is_name
from kvlathe.plan.manifest import MANIFEST_FILE

PATH = click.Path(path_type=Path)
Result = dict[str, Any]
UNITS = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30, "T": 1 << 40}


if TYPE_CHECKING:
    from kvlathe.runtime.llm import LLM
    from kvlathe.runtime.text.sampling_params import SamplingParams

    # Only newer versions of click have the generic class.
    SizeParam = click.ParamType[int, object]
else:
    SizeParam = click.ParamType


class Finite(click.FloatRange):
    """A number of a range: NaN is in none, and infinity is none to reckon with."""

    def convert(
        self,
        value: float,
        param: click.Parameter | None,
        ctx: click.Context | None,
    ) -> float:
        number = super().convert(value, param, ctx)
        if not math.isfinite(number):
            self.fail(f"{value!r} is no finite number", param, ctx)
        return number


class Size(SizeParam):
    """Bytes: a number, or one with K, M, G or T after it (powers of 1024; iB or B may
    follow)."""

    name = "size"

    def convert(
        self,
        value: object,
        param: click.Parameter | None,
        ctx: click.Context | None,
    ) -> int:
        if isinstance(value, int):
            return value
        number = str(value).strip().upper().removesuffix("B").removesuffix("I")
        last = number[-1:]
        unit = last if last in UNITS and not last.isdigit() else ""
        try:
            size = int(float(number.removesuffix(unit)) * UNITS[unit])
        except (ValueError, OverflowError):
            size = 0
        if size <= 0:
            self.fail(f"{value!r} is not a size such as 512M or 8G", param, ctx)
        return size


ENGINE = click.argument("engine", type=PATH)
ENGINE_OR_MODEL = click.argument("engine", type=PATH, metavar="ENGINE|MODEL")
COMPRESSION_OF_MODEL = click.option(
    "--compression",
    metavar="METHOD[:OPTION=VALUE...]",
    help="Where a model is named in place of an engine (a folder, a GGUF file, org/model "
    "on the Hub): its engine is built with this, once, and kept in the cache. "
    "[default: the most that auto removes at a KL of 0.005]",
)
MODEL_KINDS = (
    "Checkpoint folder in Hugging Face form (config.json, *.safetensors), a GGUF "
    "file, or the name org/model (org/model/FILE.gguf) of one on the Hub."
)
MODEL = click.option("--model", type=PATH, required=True, help=MODEL_KINDS)
REVISION = click.option(
    "--revision", help="Branch, tag or commit of a model on the Hub. [default: main]"
)
LORA = click.option(
    "--lora",
    multiple=True,
    metavar="DIR[=WEIGHT]",
    help="LoRA adapter (a PEFT folder) to merge into the weights, times WEIGHT. May be "
    "given several times: they add up.",
)
ADAPTER = click.option(
    "--lora",
    "adapter",
    metavar="DIR[=WEIGHT]",
    help="LoRA adapter (a PEFT folder) that answers have, times WEIGHT. The engine takes "
    "any if it was built with --enable-lora (docs/adapters.md).",
)
DRAIN_SECONDS = click.option(
    "--drain-seconds",
    type=Finite(0),
    default=30.0,
    show_default=True,
    help="After SIGTERM.",
)
LOG_LEVEL = click.option(
    "--log-level",
    type=click.Choice(console.LEVELS),
    default="info",
    show_default=True,
    help="What stderr says.",
)
THREADS = click.option(
    "--threads",
    type=click.IntRange(1),
    help="Threads of the CPU. [default: one for each core that it may use]",
)
DEVICE = click.option(
    "--device",
    type=click.Choice(devices.DEVICES),
    help="Where an onnxruntime engine runs. [default: KVLATHE_DEVICE, or auto: float16 "
    "engines on a GPU that is ready]",
)
CACHE_SIZE = click.option(
    "--cache-size",
    "cache_bytes",
    type=Size(),
    help="Memory of the KV cache. [default: a full batch, at most half of the machine's "
    "or what a GPU has left]",
)
GPU_MEMORY = click.option(
    "--gpu-memory-utilization",
    type=Finite(0, 1, min_open=True),
    default=devices.GPU_MEMORY_UTILIZATION,
    show_default=True,
    help="Share of a GPU's memory that this may take, an engine with its cache, whatever "
    "others hold.",
)
SERVED_MODEL_NAME = click.option(
    "--served-model-name",
    "model",
    help="What clients call the model. [default: the checkpoint's name]",
)
MAX_BATCH_SIZE = click.option(
    "--max-batch-size",
    "--max-num-seqs",
    "max_batch_size",
    type=click.IntRange(1),
    help="Sequences that run at once. [default: the most that the engine takes]",
)
MAX_WAITING = click.option(
    "--max-waiting",
    type=click.IntRange(0),
    default=256,
    show_default=True,
    help="Longest queue; then requests are refused (HTTP: 429, Retry-After).",
)
TENSOR_PARALLEL = click.option(
    "--tensor-parallel-size",
    type=click.IntRange(1),
    default=1,
    show_default=True,
    help="GPUs to spread the engine over (docs/scale.md).",
)

SPECULATIVE = click.option(
    "--speculative",
    metavar="ngram|DRAFT_ENGINE",
    help="Guess tokens and verify several in a step, where that is faster: as they "
    "followed before, or by a smaller engine or one of `build --mtp`. A token stays if "
    "the model says it.",
)
NUM_SPECULATIVE_TOKENS = click.option(
    "--num-speculative-tokens",
    type=click.IntRange(1),
    default=8,
    show_default=True,
    help="Tokens that are guessed at once, at most.",
)


def adapted(llm: LLM, params: SamplingParams, adapter: str | None) -> SamplingParams:
    """The parameters of answers that have the ``adapter``, which is loaded."""
    if adapter is None:
        return params
    llm.load_adapter(adapter, adapter)
    return dataclasses.replace(params, adapter=adapter)


def engine_to_run(
    named: Path,
    compression: str | None,
    device: str | None,
    gpu_memory_share: float,
    enable_lora: bool = False,
) -> Path:
    """The engine that a command runs: ``named``, or of a model the one that is built
    with ``compression`` for this machine, once, in so much of a GPU's memory.
    ``enable_lora``: that engine takes adapters."""
    if (named / MANIFEST_FILE).is_file():
        if compression is not None:
            raise click.UsageError(
                f"--compression says how a model's engine is built, and {named} is an "
                "engine. Leave it out, or name the model."
            )
        return named
    is_model = (named / "config.json").is_file() or gguf_of(named) is not None
    if not is_model and (named.exists() or not is_name(named)):
        return named  # what opens it says what it lacks
    from kvlathe.engines.on_demand import engine_of
    from kvlathe.runtime.sessions.registry import backend_here

    runs_on = backend_here(device)
    given = named, compression, runs_on, command_line(), gpu_memory_share
    return engine_of(*given, enable_lora)


def command_line() -> str:
    """This process's own command, as one would type it."""
    program = Path(sys.argv[0]).name
    words = ["kvlathe" if program == "__main__.py" else program, *sys.argv[1:]]
    typed = shlex.join(words)
    return typed.encode("utf-8", "backslashreplace").decode()  # file names may be bytes


def check_speculative() -> None:
    """Raises UsageError for a number of guesses where none are asked for."""
    context = click.get_current_context()
    source = context.get_parameter_source("num_speculative_tokens")
    given = source is not click.core.ParameterSource.DEFAULT
    if given and context.params["speculative"] is None:
        raise click.UsageError("--num-speculative-tokens needs --speculative.")


def reports(
    show: Callable[[Result], None],
) -> Callable[[Callable[..., Result]], Callable[..., None]]:
    """Decorate a command that returns its result: with --json it is printed as one
    object, else ``show`` prints it."""

    def decorate(command: Callable[..., Result]) -> Callable[..., None]:
        @click.option(
            "--json",
            "as_json",
            is_flag=True,
            help="Print one JSON object on stdout, all else on stderr.",
        )
        @LOG_LEVEL
        @functools.wraps(command)
        def run(as_json: bool, log_level: str, **options: Any) -> None:  # noqa: ANN401
            console.setup(log_level)
            if not as_json:
                show(command(**options))
                return
            with only_results_on_stdout():
                result = command(**options)
            click.echo(json.dumps(result, default=str))

        return run

    return decorate


@contextlib.contextmanager
def only_results_on_stdout() -> Generator[None]:
    """Inside, whatever is printed goes to stderr, by Python code and by C libraries
    alike."""
    sys.stdout.flush()
    kept = os.dup(1)
    os.dup2(2, 1)
    try:
        with contextlib.redirect_stdout(sys.stderr):
            yield
    finally:
        ctypes.CDLL(None).fflush(None)
        os.dup2(kept, 1)
        os.close(kept)


def show_pairs(result: Result) -> None:
    """A result as a table of names and values; nested ones are flattened, lists of
    records are left to --json."""
    rows: list[tuple[str, object]] = []
    for name, value in result.items():
        label = name.replace("_", " ")
        if isinstance(value, dict):
            rows += [
                (f"{label}: {inner.replace('_', ' ')}", v) for inner, v in value.items()
            ]
        elif isinstance(value, list):
            rows.append((label, ", ".join(str(v) for v in value)))
        else:
            rows.append((label, value))
    console.print_pairs("", rows)


def write(piece: str) -> None:
    """Print a piece of a model's text as it comes. No terminal obeys it."""
    click.echo(console.shown(piece) if sys.stdout.isatty() else piece, nl=False)


def check_text(option: str, text: str) -> None:
    """Raise KvlatheError for an argument that is not UTF-8: Python hands over its bytes
    as lone surrogates, which no tokenizer takes."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise KvlatheError(
            f"{option} cannot be read", "it is not UTF-8 text", "give it in UTF-8"
        ) from error


def read_text(path: Path) -> str:
    """A text file that the user named, its line ends as they are; ``-`` is standard
    input. Raises KvlatheError."""
    try:
        content = sys.stdin.buffer.read() if str(path) == "-" else path.read_bytes()
        return content.decode("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = "it is not UTF-8 text"
        if isinstance(error, OSError):
            reason = str(error.strerror).lower()
        raise KvlatheError(
            f"{path} cannot be read", reason, "name a readable text file"
        ) from error
