"""``kvlathe chat``: a conversation with an engine in a terminal."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import TYPE_CHECKING

import click

from kvlathe.base import console
from kvlathe.base.errors import KvlatheError
from kvlathe.cli.common import (
    ADAPTER,
    CACHE_SIZE,
    COMPRESSION_OF_MODEL,
    DEVICE,
    ENGINE_OR_MODEL,
    GPU_MEMORY,
    LOG_LEVEL,
    NUM_SPECULATIVE_TOKENS,
    PATH,
    SPECULATIVE,
    THREADS,
    Finite,
    adapted,
    check_speculative,
    check_text,
    engine_to_run,
    write,
)
from kvlathe.plan.memory import uncompressed_pages

if TYPE_CHECKING:
    from kvlathe.runtime.llm import LLM
    from kvlathe.runtime.requests.answer import Answer
    from kvlathe.runtime.text.sampling_params import SamplingParams

FULL = "the conversation is as long as the engine takes: /reset begins anew"
CONTINUES = "this model has no chat template: it continues your text"
CONTINUED_TOKENS = 256
"""New tokens of such an answer, at most: nothing in it says where it ends."""
HELP = "/reset begins anew, /quit ends; Ctrl-C ends an answer"


class Conversation:
    """The turns so far, and the answers that go on from them."""

    def __init__(self, llm: LLM, params: SamplingParams, system: str | None) -> None:
        self._llm, self._params, self._system = llm, params, system
        self.turns: list[dict[str, str]] = []
        self.reset()

    def reset(self) -> None:
        """Begin anew."""
        self.turns = []
        if self._system is not None:
            self.turns.append({"role": "system", "content": self._system})

    def say(self, text: str) -> str:
        """Print the answer to ``text`` as it comes, and return what is to be said of
        it. Ctrl-C ends it early; what came of it stays. What is refused leaves no
        trace."""
        self.turns.append({"role": "user", "content": text})
        pieces: list[str] = []
        try:
            answer = self._answered(pieces)
        except KeyboardInterrupt:
            answer = None
        except BaseException:
            self.turns.pop()
            raise
        finally:
            click.echo()
        self.turns.append({"role": "assistant", "content": "".join(pieces)})
        if answer is None:
            return "ended by Ctrl-C"
        return self._told(answer)

    @property
    def continues(self) -> bool:
        """Whether there is no chat template: every text is then a beginning of its
        own."""
        return self._llm.tokenizer.chat_template is None

    def _prompt(self) -> list[int]:
        tokenizer = self._llm.tokenizer
        if self.continues:
            return tokenizer.encode(self.turns[-1]["content"])
        chat = tokenizer.chat_prompt(self.turns)
        return tokenizer.encode(chat, add_special_tokens=False)

    def _answered(self, pieces: list[str]) -> Answer:
        llm, prompt = self._llm, self._prompt()
        stream = llm.stream(prompt, self._fitting(len(prompt)))
        try:
            while True:
                piece = next(stream)
                pieces.append(piece)
                write(piece)
        except StopIteration as end:
            return end.value
        finally:
            stream.close()

    def _fitting(self, prompt: int) -> SamplingParams:
        """The parameters, with as many new tokens as have room."""
        asked = self._params.max_new_tokens
        if self.continues:
            asked = min(asked, CONTINUED_TOKENS)
        count = min(asked, max(1, self._llm.most_tokens - prompt))
        return dataclasses.replace(self._params, max_new_tokens=count)

    def _told(self, answer: Answer) -> str:
        """Speed, and the bytes of the cache that the conversation takes."""
        tokens = answer.prompt_tokens + len(answer.token_ids)
        llm = self._llm
        size = console.human_bytes(llm.layout.bytes_for(tokens))
        said = f"{answer.timings.decode_tokens_per_second:.0f} tokens/s; cache {size}"
        if llm.manifest is not None:
            baseline = llm.manifest.kv_bytes.baseline
            plain = uncompressed_pages(tokens, llm.plan.page_tokens, baseline)
            uncompressed = console.human_bytes(round(plain))
            said += f" for {tokens:,} tokens (uncompressed: {uncompressed})"
        if tokens >= llm.most_tokens:
            said += f"; {FULL}"
        return said


@click.command("chat")
@ENGINE_OR_MODEL
@COMPRESSION_OF_MODEL
@click.option("--system", help="What the model is told before everything else.")
@click.option(
    "--chat-template", type=PATH, help="A file with one, in place of the checkpoint's."
)
@click.option(
    "--max-new-tokens",
    type=click.IntRange(1),
    default=1024,
    show_default=True,
    help="Of one answer.",
)
@click.option("--temperature", type=Finite(0), default=0.7, show_default=True)
@click.option(
    "--top-p",
    type=Finite(0, 1, min_open=True),
    default=0.95,
    show_default=True,
    help="Of the probability: the likeliest tokens that have it are drawn from.",
)
@click.option("--seed", type=click.IntRange(0), help="Same seed, same text.")
@ADAPTER
@CACHE_SIZE
@THREADS
@DEVICE
@GPU_MEMORY
@SPECULATIVE
@NUM_SPECULATIVE_TOKENS
@LOG_LEVEL
def chat_command(
    engine: Path,
    compression: str | None,
    system: str | None,
    chat_template: Path | None,
    max_new_tokens: int,
    temperature: float,
    top_p: float,
    seed: int | None,
    adapter: str | None,
    cache_bytes: int | None,
    threads: int | None,
    device: str | None,
    gpu_memory_utilization: float,
    speculative: str | None,
    num_speculative_tokens: int,
    log_level: str,
) -> None:
    """Talk with an engine. Answers come as they are computed; after each, its speed and
    the bytes of the cache.

    /reset begins a new conversation, /quit or Ctrl-D ends. Ctrl-C ends an answer.
    """
    console.setup(log_level)
    check_text("--system", system or "")
    check_speculative()
    from kvlathe.base.chat_template import read_template
    from kvlathe.runtime.llm import LLM
    from kvlathe.runtime.text.sampling_params import SamplingParams

    share = gpu_memory_utilization
    engine = engine_to_run(engine, compression, device, share, adapter is not None)
    params = SamplingParams(max_new_tokens, temperature, top_p=top_p, seed=seed)
    with LLM.load(
        engine,
        cache_bytes,
        threads,
        share_prefixes=None,
        device=device,
        gpu_memory_utilization=share,
    ) as llm:
        if speculative is not None:
            llm.speculate(speculative, num_speculative_tokens)
        if chat_template is not None:
            llm.tokenizer.chat_template = read_template(chat_template)
        conversation = Conversation(llm, adapted(llm, params, adapter), system)
        if conversation.continues:
            unused = "; --system is not used" if system is not None else ""
            click.echo(f"{CONTINUES}{unused}", err=True)
        else:
            llm.tokenizer.chat_prompt([{"role": "user", "content": ""}])  # or refuses
        click.echo(HELP, err=True)
        talk(conversation)


def talk(conversation: Conversation) -> None:
    """Ask and answer until the user ends it."""
    while (text := ask()) is not None:
        if text in ("/quit", "/exit"):
            return
        if text == "/reset":
            conversation.reset()
            click.echo("a new conversation", err=True)
        elif text.startswith("/"):
            click.echo(HELP, err=True)
        elif text:
            try:
                said = conversation.say(text)
            except KvlatheError as error:
                said = f"error: {error}"
                if "is too long" in error.fact or "does not fit" in error.fact:
                    said = FULL
            click.echo(f"[{said}]", err=True)


def ask() -> str | None:
    """The next line, None at the end of the input. Ctrl-C on an empty line is no
    end."""
    while True:
        try:
            text = input("> ")
            text.encode("utf-8")
            return text.strip()
        except EOFError:
            return None
        except KeyboardInterrupt:
            click.echo("", err=True)
        except UnicodeEncodeError:
            click.echo("[that is no UTF-8 text]", err=True)


COMMANDS = (chat_command,)
