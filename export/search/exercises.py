"""Exercises: text in which a model must look far back, made of any tokens.

Text alone prices what a head adds to the next word, and most of that is near. A head
that finds what was said thousands of tokens ago is then cheap to cut, until somebody
asks. So a passage comes, then other text, and then the passage again: models copy it
(induction, Olsson et al. 2022, arXiv 2209.11895). And records of a key and a value
come, and some of their keys again. What is scored are the places that the model gets
right with the first copy in sight and would not get as well without it. No data of the
user are read, and none of a benchmark: the tokens are those of the calibration.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from kvlathe.base.console import log, working
from kvlathe.export.model.layered import Advance, LayeredModel
from kvlathe.export.search.readings import Reading, margin_score, spread

PASSAGE, PASSAGES = 32, 4
"""Tokens that come twice, and how many such pieces, one in each equal part of what comes
before. What is asked of one sequence costs one gradient, however much it is."""
KEY, VALUE, ASKED = 3, 5, 12
"""Tokens of a record's key and value, and records that are asked for."""
NEAR = 128
"""Tokens before the second copy that the model sees where it must do without the
first."""
LEAST = 2 * PASSAGES * PASSAGE + NEAR
"""Tokens of a sequence in which something can be far."""
GAIN = 1.0
"""Nats that the first copy must add to a token's log-probability."""
TRIES = 3
"""Exercises that are made for each one wanted; a model fails some."""
DRAWS = 2
"""Draws of the margins' signs, each a backward pass."""
WEIGHT = 0.1
"""Weight of an exercise's price beside text: margins that move by a third of themselves
(a mean square of 0.1) count as 0.01 nats."""
TOGETHER = 4
"""Windows of many heads move margins together: their mean square is 2 to 4 times the sum
of what each does alone (docs/history/auto.md). It counts where positions have gaps: what
was read is too short there to show how far apart tokens are. Elsewhere it lost more of the
text than it kept of exercises."""
FEW = 4
"""An exercise with fewer places that depend on the first copy is not taken."""


@dataclass(frozen=True)
class Exercise:
    """``ids``, of which those from ``start`` on can be known from what came long
    before; ``answers`` are the places of them that are asked for."""

    ids: tuple[int, ...]
    start: int
    answers: tuple[int, ...]


def copying(text: Sequence[int], length: int, rng: np.random.Generator) -> Exercise:
    """Passages in other text, one at a random depth of each equal part of it, and all
    of them again at the end, in another order."""
    size = PASSAGES * PASSAGE
    passages, rest = _taken_out(text, rng)
    filler = _piece(rest, length - 2 * size, rng)
    ids: list[int] = []
    done = 0
    for depth, passage in zip(
        _depths(len(filler), PASSAGES, rng), passages, strict=True
    ):
        ids += [*filler[done:depth], *passage]
        done = depth
    ids += filler[done:]
    start = len(ids)
    order = rng.permutation(PASSAGES).tolist()
    ids += itertools.chain.from_iterable(passages[place] for place in order)
    return Exercise(tuple(ids), start, tuple(range(start, length)))


def recall(text: Sequence[int], length: int, rng: np.random.Generator) -> Exercise:
    """Records of random keys and values, each of random tokens of the text; then some
    of them again, one of each equal part of them, in another order."""
    size = KEY + VALUE
    count = max(1, length // size - ASKED)
    records = rng.choice(np.asarray(text), (count, size))
    asked = records[rng.permutation(_depths(count, min(ASKED, count), rng))]
    ids = np.concatenate([records, asked]).ravel().tolist()
    start = count * size
    values = [place for place in range(start, len(ids)) if place % size >= KEY]
    return Exercise(tuple(ids), start, tuple(values))


Kind = Callable[[Sequence[int], int, np.random.Generator], Exercise]
"""(tokens to take from, length, random numbers) -> an exercise."""
KINDS: tuple[Kind, ...] = (copying, recall)


def _depths(length: int, count: int, rng: np.random.Generator) -> list[int]:
    """A random place of each of ``count`` equal parts of ``length``, in order: windows
    of every size leave out as many as they would of many."""
    return (
        ((np.arange(count) + rng.random(count)) * length / count).astype(int).tolist()
    )


def _taken_out(
    text: Sequence[int], rng: np.random.Generator
) -> tuple[list[list[int]], list[int]]:
    """Passages of the text and the rest of it, in which they do not come again: else a
    nearer place would tell as much. A text shorter than a passage is its own rest."""
    passages: list[list[int]] = []
    rest = list(text)
    for _ in range(PASSAGES):
        start = int(rng.integers(len(rest)))
        turned = rest[start:] + rest[:start]
        rounds = -(-PASSAGE // len(turned))
        passages.append((turned * rounds)[:PASSAGE])
        rest = turned[PASSAGE:] or rest
    return passages, rest


def _piece(
    text: Sequence[int], length: int, rng: np.random.Generator
) -> tuple[int, ...]:
    """``length`` tokens of the text from a random place, read round and round."""
    start = int(rng.integers(len(text)))
    return tuple(text[place % len(text)] for place in range(start, start + length))


def exercises(
    model: LayeredModel,
    text: Sequence[int],
    length: int,
    count: int,
    seed: int,
    far: bool = False,
    gaps: int = 0,
) -> list[Reading]:
    """Up to ``count`` exercises of each kind, of at most ``length`` tokens, scored at
    the places that depend on what is far. ``model`` is the uncompressed one; ``gaps``:
    positions between the tokens that none of them has."""
    taken: list[tuple[Exercise, list[int]]] = []
    if length < LEAST:
        log.debug("%d tokens are too few for exercises", length)
        return []
    most = len(KINDS) * TRIES * count
    with working(f"choosing exercises of {length:,} tokens", most) as advance:
        for kind, make in enumerate(KINDS):
            rng = np.random.default_rng((seed, length, kind))
            found = tried = 0
            while found < count and tried < TRIES * count:
                exercise = make(text, length, rng)
                tried += 1
                positions = spread(len(exercise.ids), gaps)
                places = _dependent(model, exercise, positions, advance)
                if len(places) >= FEW:
                    taken.append((exercise, places))
                    found += 1
                else:
                    model.forget(exercise.ids, positions)
            advance(TRIES * count - tried)
            log.debug("%s: %d of %d exercises taken", make.__name__, found, count)
    total = sum(len(places) for _, places in taken)
    readings = []
    for exercise, places in taken:
        answer = [exercise.ids[place] for place in places]
        rows = [place - 1 for place in places]
        weight = WEIGHT * (TOGETHER if far and gaps else 1) / (total * DRAWS)
        scored = rows, margin_score(answer), DRAWS, weight
        readings.append(Reading(exercise.ids, *scored, far, gaps))
    return readings


@torch.inference_mode()
def _dependent(
    model: LayeredModel,
    exercise: Exercise,
    positions: tuple[int, ...],
    advance: Advance,
) -> list[int]:
    """The places of the answers that the model gets right, and would give GAIN nats
    less where it saw only what is near. ``advance`` comes to 1."""
    whole = _before_answers(model, exercise, positions, 0, advance)
    cut = max(0, exercise.start - NEAR)
    near = _before_answers(model, exercise, positions, cut)
    answers = [exercise.ids[place] for place in exercise.answers]
    labels = torch.tensor(answers, device=whole.device)
    right = whole.argmax(-1) == labels
    kept = right & ((whole - near).gather(-1, labels[:, None])[:, 0] > GAIN)
    judged = zip(exercise.answers, kept.tolist(), strict=True)
    return [place for place, is_kept in judged if is_kept]


def _before_answers(
    model: LayeredModel,
    exercise: Exercise,
    positions: tuple[int, ...],
    cut: int,
    advance: Advance = lambda _: None,
) -> torch.Tensor:
    """Log-probabilities [answers, vocab] before each answer, without the first ``cut``
    tokens."""
    rows = [place - 1 - cut for place in exercise.answers]
    ids = exercise.ids[cut:]
    logits = model.logits(ids, rows, not cut, advance, positions[cut:])
    return logits.log_softmax(-1)
