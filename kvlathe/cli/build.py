"""``kvlathe build`` and ``kvlathe calibrate``: from a checkpoint to an engine folder,
and its reusable first half."""

from __future__ import annotations

import dataclasses
import logging
import re
import shlex
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click
from click.core import ParameterSource

from kvlathe.base import console, devices
from kvlathe.base.flags import flag_of
from kvlathe.base.gguf_files import gguf_of
from kvlathe.base.hub import checkpoint_folder
from kvlathe.cli.common import (
    GPU_MEMORY,
    LORA,
    MODEL,
    MODEL_KINDS,
    PATH,
    REVISION,
    TENSOR_PARALLEL,
    Finite,
    Result,
    command_line,
    reports,
    show_pairs,
)
from kvlathe.cli.methods import MethodsHelp
from kvlathe.cli.show import (
    compaction_words,
    measured_of,
    measured_words,
    memory_of,
    shards_of,
    show_memory,
    show_shards,
    warnings_of,
)
from kvlathe.engines.rotation import CHECKPOINT
from kvlathe.export.methods.options import Number, Option, RankOptions, options_of
from kvlathe.plan import manifest as manifests
from kvlathe.plan.engine_folder import open_engine
from kvlathe.plan.plan import SEARCHED
from kvlathe.plan.weight_formats import BITS, FLOATS

log = logging.getLogger("kvlathe")
Flag = Callable[[Callable[..., Any]], Callable[..., Any]]
"""A decorator that adds a flag to a command."""
CALIBRATION = "'random' tokens, or a .jsonl file with one {\"text\": ...} a line. [default: the method's own]"

DEVICE = click.option(
    "--device",
    type=click.Choice(devices.DEVICES),
    help="Where the model is calibrated, measured and folded. [default: KVLATHE_DEVICE, "
    "or auto: a GPU where torch sees one]",
)


LARGER = 1.5
"""How many times the bytes of a GGUF file its engine's weights take before that is
said."""


def show_build(result: Result) -> None:
    if "checkpoint" in result:
        show_pairs(result)
        return
    if "report" not in result:  # a dry run
        show_pairs(result | {"kv_bytes_removed": f"{result['kv_bytes_removed']:.1%}"})
        return
    rows = [
        ("engine", result["engine"]),
        ("KV bytes a token", result["kv_bytes_per_token"]),
        *uncompressed_rows(result),
        ("KV bytes removed", f"{result['kv_bytes_removed']:.1%}"),
        ("weights", result["weights"]),
        ("bytes of the weights", result["weight_bytes"]),
        ("seconds", result["seconds"]),
        ("report", result["report"]),
        ("measured", measured_words(result["measured"])),
    ]
    if result["compaction"]:
        rows.append(("of a compacted prefix", compaction_words(result["compaction"])))
    if result["searched"]:
        rows.append(("searched", result["searched"]))
    if result["measured"] and result["measured"]["warning"]:
        rows.append(("warning: measured", result["measured"]["warning"]))
    if result["warnings"].get("windows"):
        rows.append(("warning: windows", result["warnings"]["windows"]))
    console.print_pairs(f"{result['model']}, {result['compression']}", rows)
    show_memory(result["memory"])
    show_shards(result["shards"], result["tokens"])
    show_phases(result["phases"])


def uncompressed_rows(result: Result) -> list[tuple[str, object]]:
    """The bytes that others are a share of: a row, where the same number format has 16
    bits."""
    same, half = (
        result[f"kv_bytes_per_token_{name}"] for name in ("baseline", "16bit")
    )
    if same == half:
        return [("uncompressed, 16 bit", half)]
    return [("uncompressed, same number format", same), ("uncompressed, 16 bit", half)]


def show_phases(phases: list[Result]) -> None:
    """On stderr: it is about this run, not about the engine."""
    rows = []
    for phase in phases:
        gpu = phase["gpu_bytes"] or None
        seconds = round(phase["seconds"], 1)
        host = console.human_bytes(phase["host_bytes"])
        rows.append((phase["name"], seconds, host, gpu and console.human_bytes(gpu)))
    columns = ("phase", "seconds", "most memory so far", "of the GPU")
    console.print_table("How long it took", columns, rows, console.err)


def flag(option: Option) -> Flag:
    """An option of methods as a flag of the same name."""
    name, default = flag_of(option.name), option.default
    if isinstance(default, bool):
        off = flag_of(f"no_{option.name}")
        return click.option(f"{name}/{off}", default=default, help=option.about)
    kind: click.Choice[str] | Finite = click.Choice(
        [str(value) for value in option.kind.values]
    )
    metavar = None
    if isinstance(number := option.kind, Number):
        kind = Finite(number.least, number.most, max_open=number.below)
        metavar = "FRACTION"
    return click.option(
        name,
        type=kind,
        metavar=metavar,
        default=default,
        show_default=default is not None,
        help=option.about,
    )


OF_RANKS = {option.name: flag(option) for option in options_of(RankOptions())}
"""The flags of methods that choose ranks."""

HOW_MUCH = (
    OF_RANKS["removal_rate"],
    OF_RANKS["compression_ratio"],
    click.option(
        "--accuracy",
        type=Finite(0, 1, min_open=True),
        metavar="A",
        help="Remove as much as keeps this share of the uncompressed score; searched for.",
    ),
    click.option(
        "--target-len",
        type=click.IntRange(1),
        help="Tokens of the sequence whose bytes auto counts. [default: max_seq_len]",
    ),
    click.option(
        "--protect",
        type=click.Choice(("retrieval", "none")),
        default="retrieval",
        show_default=True,
        help="What auto examines beside text: exercises of looking far back, or nothing.",
    ),
    click.option(
        "--metric",
        type=click.Choice(("retrieval", "perplexity", "agreement", "kl")),
        help="The score that --accuracy speaks of; that of kl is exp(-KL). [default: kl; "
        "retrieval for auto, and where --retrieval is given]",
    ),
    click.option(
        "--text",
        type=PATH,
        help="Documents (.jsonl) on which --accuracy measures perplexity and agreement.",
    ),
    click.option(
        "--retrieval",
        type=PATH,
        help="Prompts with answers (.jsonl) on which --accuracy measures retrieval.",
    ),
    click.option(
        "--measure/--no-measure",
        default=True,
        show_default=True,
        help="Measure what the plan loses, on text that nothing else reads, before "
        "anything is written.",
    ),
    click.option(
        "--measure-seconds",
        type=Finite(0, min_open=True),
        metavar="SECONDS",
        help="Time of that measurement; more of it reads longer texts. [default: a fifth "
        "of the build, or up to 60 s by the model's size]",
    ),
    click.option(
        "--max-kl",
        type=Finite(0),
        metavar="NATS",
        help="Refuse a plan that was measured to lose more than this a token.",
    ),
)
"""Flags of the target (one of three, at most), and of how it is measured."""

LIMITS = (
    click.option(
        "--max-batch-size",
        type=click.IntRange(1),
        help="Sequences in one step. [default: 8; 256 for cuda]",
    ),
    click.option(
        "--max-input-len",
        type=click.IntRange(1),
        help="Tokens of a prompt. [default: those of --max-seq-len]",
    ),
    click.option(
        "--max-seq-len",
        type=click.IntRange(1),
        help="Tokens of prompt and answer. [default: the model's]",
    ),
    click.option(
        "--max-num-tokens",
        type=click.IntRange(1),
        help="Tokens of one packed step. [default: a chunk and a token of every sequence; "
        "8192 for cuda]",
    ),
    click.option(
        "--tokens-per-block",
        type=click.IntRange(16),
        default=64,
        show_default=True,
        help="Tokens in a page of the cache.",
    ),
    click.option(
        "--prefill-chunk",
        type=click.IntRange(16),
        help="Grid on which prompts are cut and pages seal. [default: 512; 2048 for cuda]",
    ),
)
"""Flags of what an engine may be asked."""

HOW = tuple(OF_RANKS[name] for name in ("basis", "allocation", "rope_fold", "centre"))


def size_options(command: Callable[..., Any]) -> Callable[..., Any]:
    for option in reversed((*HOW_MUCH, *LIMITS, *HOW)):
        command = option(command)
    return command


@click.command("build", cls=MethodsHelp)
@click.argument("word", type=PATH, required=False, metavar="[MODEL]")
@click.option(
    "--model", type=PATH, help=f"{MODEL_KINDS} The first word may be it, too."
)
@REVISION
@LORA
@click.option(
    "--enable-lora",
    is_flag=True,
    help="Take LoRA adapters at run time, too (docs/adapters.md).",
)
@click.option(
    "--mtp",
    is_flag=True,
    help="Build the layer with which the model guesses tokens, for --speculative "
    "(docs/speculative.md).",
)
@click.option(
    "--output-dir",
    type=PATH,
    required=True,
    help="Engine folder to make; it must not exist.",
)
@click.option(
    "--compression",
    default="none",
    show_default=True,
    metavar="METHOD",
    help="METHOD is a name, name:option=value,option=value, or a composition such as "
    "fdc+hack:bits=8. The methods are below.",
)
@size_options
@click.option("--calibration", metavar="random|FILE", help=CALIBRATION)
@click.option(
    "--calibration-tokens",
    type=click.IntRange(1),
    help="Tokens to calibrate on. [default: the method's own]",
)
@click.option(
    "--stats",
    type=PATH,
    help="What 'kvlathe calibrate' wrote; the model is then not run again.",
)
@click.option("--seed", type=click.IntRange(0), default=0, show_default=True)
@click.option(
    "--backend",
    default="onnxruntime",
    show_default=True,
    help="onnxruntime, tensorrt_rtx, tensorrt or cuda; vllm writes what vLLM needs to "
    "cache compressed; hf writes an ordinary checkpoint whose heads are rotated, for any "
    "engine that quantizes its cache.",
)
@click.option(
    "--dtype",
    type=click.Choice(("float32", "float16")),
    help="What the engine computes in. [default: the backend's]",
)
@click.option(
    "--weights",
    type=click.Choice((*FLOATS, *BITS)),
    help="Number format of the weights: int8 or int4 for onnxruntime, fp8 or int4 for "
    "cuda. [default: --dtype, or that of a GPTQ or AWQ checkpoint]",
)
@click.option(
    "--kv-bits",
    type=click.Choice((16, 32)),
    default=16,
    show_default=True,
    help="Number format of cached tokens.",
)
@click.option("--workers", type=click.IntRange(1), help="Threads. [default: all cores]")
@DEVICE
@GPU_MEMORY
@TENSOR_PARALLEL
@click.option(
    "--overwrite", is_flag=True, help="Replace an engine folder of the same name."
)
@click.option(
    "--no-cache", is_flag=True, help="Build even if the same engine was built before."
)
@click.option(
    "--dry-run",
    is_flag=True,
    help="Plan and print what the engine would be; write nothing.",
)
@reports(show_build)
def build_command(
    word: Path | None,
    model: Path | None,
    revision: str | None,
    no_cache: bool,
    dry_run: bool,
    **options: Any,  # noqa: ANN401
) -> Result:
    """Compress a checkpoint's KV cache and write an engine folder.

    Say how much with one of --removal-rate, --compression-ratio and --accuracy.
    """
    from kvlathe.engines import build as builds
    from kvlathe.engines.phases import recorded

    if word is not None and model is not None:
        raise click.UsageError(f"{word} and --model {model} both name a model.")
    if (model := word or model) is None:
        raise click.UsageError("No model is named: --model DIR|FILE.gguf|org/name.")
    folder = checkpoint_folder(model, revision)
    config = builds.BuildConfig(
        folder, **options, use_cache=not no_cache, command=command_line()
    )
    started = time.monotonic()
    if config.backend == CHECKPOINT and dry_run:
        raise click.UsageError(
            "--dry-run says how large an engine's cache will be, and a checkpoint of "
            "--backend hf has none. Leave one of them out."
        )
    if config.backend == CHECKPOINT:
        keys = builds.rotate(config)
        seconds = time.monotonic() - started
        said = {"checkpoint": str(config.output_dir), "layers_of_rotated_keys": keys}
        return {**said, "seconds": seconds}
    if dry_run:
        return builds.preview(config)
    with recorded() as phases:
        engine = builds.build(config)
    name_frontier(model, config.compression, config.output_dir)
    seconds = time.monotonic() - started
    of_phases = [dataclasses.asdict(phase) for phase in phases]
    described = describe(engine, config.tensor_parallel_size)
    name_fewer_bytes(folder, described)
    return {**described, "seconds": seconds, "phases": of_phases}


def name_fewer_bytes(model: Path, result: Result) -> None:
    """Name the flags that would make the engine smaller, where nobody said that it is to
    be as it is."""
    context = click.get_current_context()

    def is_default(name: str) -> bool:
        return context.get_parameter_source(name) is ParameterSource.DEFAULT

    if is_default("compression"):
        log.info(
            "nothing was compressed: --compression hack:bits=4, or auto with "
            "--compression-ratio 0.9, makes the cache smaller"
        )
    file, weights = gguf_of(model), result["weight_bytes"]
    if file is None or not is_default("weights"):
        return
    if weights > LARGER * (had := file.stat().st_size):
        log.info(
            "the weights take %s in %s, %s was %s: --weights int8 or int4 stores them in "
            "fewer bits",
            console.human_bytes(weights),
            result["weights"],
            file.name,
            console.human_bytes(had),
        )


def name_frontier(model: Path, compression: str, engine: Path) -> None:
    """Name the command that measures other plans of the model, where ``auto`` chose
    this one."""
    if "auto" not in re.split(r"[:+]", compression):
        return
    folder = engine.parent / "frontier"
    words = ["kvlathe", "frontier", "--model", str(model), "--output", str(folder)]
    log.info(
        "other plans of this model, measured and drawn beside it: %s", shlex.join(words)
    )


def describe(engine: Path, num_shards: int = 1) -> Result:
    """The promises of a finished engine folder, on ``num_shards`` GPUs."""
    opened = open_engine(engine, deep=False)
    manifest = opened.manifest
    sizes = manifest.kv_bytes
    return {
        "engine": str(engine),
        "model": manifest.model,
        "compression": manifest.compression,
        "backend": manifest.backend,
        "weights": manifest.weights,
        "weight_bytes": manifest.weight_bytes,
        "kv_bytes_per_token": sizes.per_token,
        "kv_bytes_per_token_baseline": sizes.baseline,
        "kv_bytes_per_token_16bit": sizes.baseline_16bit,
        "kv_bytes_removed": sizes.removed,
        "memory": memory_of(opened.plan, manifest),
        "tokens": manifest.limits.max_seq_len,
        "shards": shards_of(opened.plan, num_shards, manifest.limits.max_seq_len),
        "report": str(engine / manifests.REPORT_FILE),
        "measured": measured_of(manifest),
        "warnings": warnings_of(opened.plan, manifest),
        "compaction": opened.plan.index.compaction,
        "searched": str(opened.plan.notes.get(SEARCHED, "")),
    }


@click.command("calibrate")
@MODEL
@REVISION
@LORA
@click.option(
    "--output", type=PATH, required=True, help="Statistics file to write (.npz)."
)
@click.option(
    "--calibration",
    default="random",
    show_default=True,
    metavar="random|FILE",
    help=CALIBRATION,
)
@click.option(
    "--calibration-tokens", type=click.IntRange(1), help="Tokens to calibrate on."
)
@click.option(
    "--max-seq-len", type=click.IntRange(1), help="As for build. [default: the model's]"
)
@click.option("--seed", type=click.IntRange(0), default=0, show_default=True)
@DEVICE
@GPU_MEMORY
@reports(show_pairs)
def calibrate_command(
    model: Path,
    revision: str | None,
    lora: tuple[str, ...],
    output: Path,
    calibration: str,
    calibration_tokens: int | None,
    max_seq_len: int | None,
    seed: int,
    device: str | None,
    gpu_memory_utilization: float,
) -> Result:
    """Run the model once over calibration tokens and write what planning needs to know
    of it.

    'kvlathe build --stats FILE' then plans without running the model again.
    """
    from kvlathe.engines import build as builds

    started = time.monotonic()
    asked = (calibration, calibration_tokens, seed, max_seq_len)
    stats = builds.calibrate_to(
        checkpoint_folder(model, revision),
        output,
        *asked,
        device,
        lora,
        gpu_memory_utilization,
    )
    return {
        "stats": str(output),
        "tokens": stats.whole.tokens,
        "seconds": time.monotonic() - started,
    }


COMMANDS = (build_command, calibrate_command)
