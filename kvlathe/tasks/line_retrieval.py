"""Line retrieval made to measure: prompts of any length with the asked line at any
depth, for any tokenizer.

A prompt is lines of ``line <adjective>-<noun>: REGISTER_CONTENT is <ddddd>`` and a
question about one of them: a needle among hay of its own kind. Names do not repeat
within a prompt. The same generator gives the same prompts.
"""

from __future__ import annotations

import bisect
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from kvlathe.base.errors import KvlatheError
from kvlathe.tasks.tasks import Encoder, Question, question


def _words(text: str) -> list[str]:
    return text.split()


ADJECTIVES = _words(
    """
    able acid aged arid bald big blue bold brave brief broad calm cheap clean clear cold
    cool crisp damp dark deep dim dry dull early empty fair fast fat fine firm flat
    fresh full glad grand gray green grim hard harsh heavy high hollow hot huge icy idle
    keen kind large late lazy lean light long loose loud low mean mild narrow near neat
    new noisy old pale plain polite prime proud pure quick quiet rapid rare raw rich
    ripe rough round royal rude sad safe salty shallow sharp short shy silent silver
    simple slim slow small smooth soft solid sour stale steep stiff strong sunny sweet
    swift tall tame tart tasty tense thick thin tidy tight tiny tired tough vast warm
    weak wet white wide wild wise young
    """
)
NOUNS = _words(
    """
    ant ape arm axe bag ball band bank barn base bat bay bead beam bean bear bed bell
    belt bird boat bone book boot bowl box branch bread brick bridge broom brush bulb
    cabin cage cake camp candle card cart cat cave chain chair chalk cheek chest clock
    cloud coat coin cord corn cow crab crown cup deer desk dish dog door drum duck ear
    egg farm fence field fish flag flame floor flower fog fork fox frog gate glass glove
    goat gold grape grass hall hammer hand hat hawk hill hook horn horse house ink iron
    jar jeep key king kite knife lake lamp leaf lemon lion lock map mask milk moon mouse
    nail nest net nose oak ocean oven owl pan path pear pen pipe plate pond pot queen
    rain rat ring river road rock roof rope rose salt sand seed sheep ship shoe snake
    snow soap sock spoon star stone stove sun table tent tower train tree
    """
)
LEAST_LINES, TOKENS_OF_A_LINE = 2, 8
"""Fewer of neither: no tokenizer writes 45 characters of this kind in fewer tokens."""


@dataclass(frozen=True, slots=True)
class Needle:
    """One question of the grid: ``depth`` 0 asks for the first line, 1 for the last."""

    tokens: int
    depth: float
    question: Question


def needle(
    rng: np.random.Generator, encoder: Encoder, tokens: int, depth: float
) -> Needle:
    """A prompt that with its answer has at most ``tokens`` tokens and as many lines as
    that allows.

    Raises KvlatheError where not even two lines fit.
    """
    chosen = rng.permutation(len(ADJECTIVES) * len(NOUNS))
    names = [
        f"{ADJECTIVES[i % len(ADJECTIVES)]}-{NOUNS[i // len(ADJECTIVES)]}"
        for i in chosen.tolist()
    ]
    values = rng.integers(0, 100_000, len(names)).tolist()

    def made(lines: int) -> Question:
        return question(encoder, *prompt(names[:lines], values, depth))

    counts = range(
        LEAST_LINES, min(len(names), max(LEAST_LINES, tokens // TOKENS_OF_A_LINE)) + 1
    )
    lines = (
        LEAST_LINES
        - 1
        + bisect.bisect_right(counts, tokens, key=lambda count: made(count).tokens)
    )
    while lines >= LEAST_LINES:
        candidate = made(lines)
        if candidate.tokens <= tokens:
            return Needle(tokens, depth, candidate)
        lines -= 1  # names differ in length: one line fewer may ask for a longer one
    raise KvlatheError(
        f"a line retrieval prompt of {tokens} tokens cannot be made",
        "two lines and a question are longer with this tokenizer",
        "ask for longer prompts",
    )


def prompt(
    names: Sequence[str], values: Sequence[int], depth: float
) -> tuple[str, str]:
    """The text and its answer. The model has to say the digits and the closing
    bracket."""
    lines = [
        f"line {name}: REGISTER_CONTENT is <{value:05d}>"
        for name, value in zip(names, values, strict=False)
    ]
    asked = round(depth * (len(names) - 1))
    lines.append(f"What is the REGISTER_CONTENT in line {names[asked]}? It is <")
    return "\n".join(lines), f"{values[asked]:05d}>"


def grid(
    encoder: Encoder,
    lengths: Sequence[int],
    depths: Sequence[float],
    repeats: int = 1,
    seed: int = 0,
) -> list[Needle]:
    """``repeats`` needles for every length and depth, each from its own random
    stream."""
    return [
        needle(
            np.random.default_rng((seed, length, round(1000 * depth), i)),
            encoder,
            length,
            depth,
        )
        for length in lengths
        for depth in depths
        for i in range(repeats)
    ]
