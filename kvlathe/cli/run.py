"""``kvlathe generate``, ``compact`` and ``compare``: what an engine says, what it says
after a compacted prefix, and whether two say the same."""

from __future__ import annotations

import dataclasses
from collections.abc import Generator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from kvlathe.base import console
from kvlathe.cli.common import (
    ADAPTER,
    COMPRESSION_OF_MODEL,
    DEVICE,
    ENGINE,
    ENGINE_OR_MODEL,
    GPU_MEMORY,
    NUM_SPECULATIVE_TOKENS,
    PATH,
    SPECULATIVE,
    TENSOR_PARALLEL,
    THREADS,
    Finite,
    Result,
    adapted,
    check_speculative,
    check_text,
    engine_to_run,
    read_text,
    reports,
    show_pairs,
    write,
)

if TYPE_CHECKING:
    from kvlathe.runtime.requests.answer import Answer


def show_answer(result: Result) -> None:
    """The text was streamed while it came; what is left to say goes to stderr."""
    timings = result["timings"]
    console.log.info(
        "%d prompt tokens in %.2f s; %d new tokens, %.1f a second; ended by %s",
        result["prompt_tokens"],
        timings["prefill_seconds"],
        len(result["token_ids"]),
        timings["decode_tokens_per_second"],
        result["finish_reason"],
    )
    if result["drafted"]:
        console.log.info(
            "%d tokens guessed, %d of them right", result["drafted"], result["accepted"]
        )


@click.command("generate")
@ENGINE_OR_MODEL
@COMPRESSION_OF_MODEL
@click.option("--prompt", help="Text to continue.")
@click.option(
    "--prompt-file",
    type=PATH,
    help="File that holds the text to continue; - is standard input.",
)
@click.option(
    "--chat",
    is_flag=True,
    help="Put the prompt through the checkpoint's chat template, as the user's message.",
)
@click.option(
    "--max-new-tokens", type=click.IntRange(1), default=128, show_default=True
)
@click.option(
    "--temperature",
    type=Finite(0),
    default=0.0,
    show_default=True,
    help="0 always takes the likeliest.",
)
@click.option(
    "--top-k",
    type=click.IntRange(0),
    default=0,
    help="Draw from the k likeliest only; 0 is off.",
)
@click.option(
    "--top-p",
    type=Finite(0, 1, min_open=True),
    default=1.0,
    help="Draw from the likeliest of joint mass p.",
)
@click.option(
    "--min-p",
    type=Finite(0, 1),
    default=0.0,
    help="Drop what is less likely than this share of the best.",
)
@click.option("--repetition-penalty", type=Finite(0.01, 100), default=1.0)
@click.option("--seed", type=click.IntRange(0), help="Same seed, same text.")
@click.option("--stop", multiple=True, help="End before this text; may be given again.")
@click.option("--ignore-eos", is_flag=True, help="Go on past the end-of-text token.")
@ADAPTER
@THREADS
@DEVICE
@GPU_MEMORY
@TENSOR_PARALLEL
@SPECULATIVE
@NUM_SPECULATIVE_TOKENS
@reports(show_answer)
def generate_command(
    engine: Path,
    compression: str | None,
    prompt: str | None,
    prompt_file: Path | None,
    chat: bool,
    adapter: str | None,
    threads: int | None,
    device: str | None,
    gpu_memory_utilization: float,
    tensor_parallel_size: int,
    speculative: str | None,
    num_speculative_tokens: int,
    **sampling: Any,  # noqa: ANN401
) -> Result:
    """Continue a prompt. The text goes to stdout as it comes."""
    if (prompt is None) == (prompt_file is None):
        raise click.UsageError("Give one of --prompt and --prompt-file.")
    check_speculative()
    text = prompt if prompt is not None else read_text(prompt_file or Path("-"))
    check_text("--prompt", text)
    for end in sampling["stop"]:
        check_text("--stop", end)
    from kvlathe.runtime.llm import LLM
    from kvlathe.runtime.text.sampling_params import SamplingParams

    share = gpu_memory_utilization
    llm = LLM.load(
        engine_to_run(engine, compression, device, share, adapter is not None),
        threads=threads,
        device=device,
        gpu_memory_utilization=share,
        tensor_parallel_size=tensor_parallel_size,
    )
    if speculative is not None:
        llm.speculate(speculative, num_speculative_tokens)
    tokens = llm.tokenizer.encode(text)
    if chat:
        framed = llm.tokenizer.chat_prompt([{"role": "user", "content": text}])
        tokens = llm.tokenizer.encode(framed, add_special_tokens=False)
    params = adapted(llm, SamplingParams(**sampling), adapter)
    silent = click.get_current_context().params["as_json"]
    answer = say(llm.stream(tokens, params), silent)
    speed = {"decode_tokens_per_second": answer.timings.decode_tokens_per_second}
    return dataclasses.asdict(answer) | {
        "timings": dataclasses.asdict(answer.timings) | speed
    }


def say(pieces: Generator[str, None, Answer], silent: bool) -> Answer:
    """Print the pieces as they come and return what the generator returns."""
    while True:
        try:
            piece = next(pieces)
        except StopIteration as end:
            if not silent:
                click.echo()
            return end.value
        if not silent:
            write(piece)


@click.command("compact")
@ENGINE
@click.option(
    "--prefix-file",
    type=PATH,
    required=True,
    help="File that holds the text that all prompts begin with; - is standard input.",
)
@click.option(
    "--keep",
    type=Finite(0, 1, min_open=True),
    help="Share of its KV pairs that stay. [default: what the engine was built with]",
)
@click.option(
    "--prompt",
    "prompts",
    multiple=True,
    help="Text after the prefix, to be continued; may be given again.",
)
@click.option("--max-new-tokens", type=click.IntRange(1), default=64, show_default=True)
@THREADS
@reports(show_pairs)
def compact_command(
    engine: Path,
    prefix_file: Path,
    keep: float | None,
    prompts: tuple[str, ...],
    max_new_tokens: int,
    threads: int | None,
) -> Result:
    """Compact a prefix once, and answer prompts that begin with it."""
    prefix = read_text(prefix_file)
    for prompt in prompts:
        check_text("--prompt", prompt)
    from kvlathe.runtime.llm import LLM
    from kvlathe.runtime.text.sampling_params import SamplingParams

    params = SamplingParams(max_new_tokens=max_new_tokens)
    with LLM.load(engine, threads=threads, share_prefixes=True) as llm:
        made = dataclasses.asdict(llm.compact(prefix, keep))
        answers = llm.generate([prefix + prompt for prompt in prompts], params)
    return made | {"answers": [answer.text for answer in answers]}


@click.command("compare")
@click.argument("engine_a", type=PATH)
@click.argument("engine_b", type=PATH)
@click.option(
    "--prompt",
    help="Text that both read. [default: made-up sentences, as many as reach every "
    "format and leave every window]",
)
@click.option(
    "--raw",
    is_flag=True,
    help="Feed one step's raw tensors to both graphs, each in its own runtime (polygraphy).",
)
@GPU_MEMORY
@reports(show_pairs)
def compare_command(
    engine_a: Path,
    engine_b: Path,
    prompt: str | None,
    raw: bool,
    gpu_memory_utilization: float,
) -> Result:
    """Run two engines of one model on the same text and say how far their logits
    differ."""
    from kvlathe.engines.compare import compare, compare_runtimes, telling_tokens
    from kvlathe.evaluation.evaluate import require_comparable
    from kvlathe.runtime.llm import LLM
    from kvlathe.tasks.held_out import HeldOut

    if raw:
        return compare_runtimes(engine_a, engine_b)
    if prompt is not None:
        check_text("--prompt", prompt)
    # Both are there at once.
    a = LLM.load(engine_a, gpu_memory_utilization=gpu_memory_utilization / 2)
    b = LLM.load(engine_b, gpu_memory_utilization=gpu_memory_utilization / 2)
    require_comparable(a, b)
    wanted = max(telling_tokens(a.plan), telling_tokens(b.plan))
    if prompt is None:
        held_out = HeldOut((), a.tokenizer, a.plan.model.vocab_size)
        ids = held_out.window(min(wanted, a.most_tokens, b.most_tokens))
    else:
        ids = a.tokenizer.encode(prompt)
    if len(ids) < wanted:
        console.log.warning(
            "the text has %d tokens, and the engines have not done all that they do "
            "before %d: what they do to older tokens is not compared",
            len(ids),
            wanted,
        )
    return compare(a, b, ids) | {"reached": len(ids) >= wanted}


COMMANDS = (generate_command, compact_command, compare_command)
