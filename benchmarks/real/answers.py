"""Long answers as samples: where a compressed cache's answer leaves the uncompressed
one, by length."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import cast

from benchmarks.real.samples import Checkpoint, Sample, split

PROMPTS = (
    "Write a long story about a lighthouse keeper who finds a letter in a bottle.",
    "Explain in detail how a steam engine works, from the fire to the wheel.",
    "Write a Python module for a library that lends books, with tests.",
    "Describe the history of bread, from the first ovens to the present.",
    "Plan a journey of two weeks through mountains, day by day.",
    "Explain step by step how to build a wooden boat.",
    "Write a dialogue between a teacher and a pupil about prime numbers.",
    "Compare five sorting algorithms: how they work, their cost, and an example.",
    "Write a report about the water supply of a town of fifty thousand people.",
    "Tell the life of an old tree, from the seed to the saw.",
    "Explain how a bill becomes law, and where it may fail.",
    "Write the rules of a board game that you invent, with an example of play.",
    "Describe how the heart works, and what happens when it does not.",
    "Write a handbook for somebody who keeps bees for the first time.",
    "Solve: a train of 120 m passes a bridge of 480 m in 30 s. Show every step,"
    " then make up ten problems like it and solve them.",
    "Write a parser for arithmetic expressions in Python and explain each part.",
)


def samples(folder: Path, new: int) -> Iterator[Sample]:
    """Every prompt, with an answer of ``new`` tokens."""
    from kvlathe.runtime.text.tokenizer import Tokenizer

    tokenizer = cast(Checkpoint, Tokenizer(folder))
    chat = tokenizer.chat_template is not None
    for number, prompt in enumerate(PROMPTS):
        context = "".join(split(tokenizer, prompt, "", "", chat))
        task = f"answer@{new}"
        yield Sample(task, number, context, "", new, "parting", endless=True)
