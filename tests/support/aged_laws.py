"""Laws of engines whose newest tokens have more bits than older ones, whatever runs them:
a text is the same alone, beside others, guessed at, behind a shared prefix, preempted and
moved, but where the engine itself has a near tie."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Literal

import numpy as np
import pytest

from kvlathe.runtime.llm import LLM
from kvlathe.runtime.text.sampling_params import SamplingParams
from tests.support.drafts import Reader, trying
from tests.support.preemption import preempt_all
from tests.support.runtime_cases import text

ANSWER = 80
PARAMS = SamplingParams(max_new_tokens=ANSWER, ignore_eos=True, temperature=0.0)
MOST_PARTED = 2
"""Texts of eight that may part from those alone, each at a near tie."""
Texts = list[list[int]]
Way = Literal["computed again", "kept on the host"]


def random_steps(seed: int, chunk: int) -> tuple[Texts, list[tuple[int, ...]]]:
    """Three texts of up to 700 tokens, and steps of whole chunks, then of single rows and
    of a few."""
    draw = np.random.default_rng(seed)
    texts, schedules = [], []
    for i in range(3):
        chunks = int(draw.integers(0, 6))
        short = draw.integers(1, 40, int(draw.integers(1, 5))).tolist()
        sizes = [*[chunk] * chunks, *short, *draw.integers(1, 3, 60).tolist()]
        sizes = [0] * int(draw.integers(0, 3)) + sizes
        schedules.append(sizes)
        texts.append(list(text(min(700, sum(sizes)), 100 * i + seed)))
    longest = max(map(len, schedules))
    padded = [sizes + [0] * (longest - len(sizes)) for sizes in schedules]
    return texts, list(zip(*padded, strict=True))


def prompts(count: int = 8) -> Texts:
    """Texts of random lengths; some begin alike, within a block and past two."""
    draw = np.random.default_rng(5)
    lengths = draw.integers(1, 480, count).tolist()
    found = [list(text(length, 50 * i)) for i, length in enumerate(lengths)]
    found[1] = list(text(400))
    found[2] = list(text(300)) + found[2][:60]
    return found


class Engine:
    """``made`` gives an LLM of a plan with a cache of so many bytes, which shares
    prefixes or does not. ``near``: tokens whose logits are this share of the largest
    apart are a tie."""

    def __init__(self, made: Callable[[int, bool], LLM], near: float) -> None:
        self.made, self.near, self.asked = made, near, prompts()
        self.parted = 0
        self.size = 1 << 26
        with made(self.size, False) as llm:
            self.alone = [self.texts(llm, [one])[0] for one in self.asked]
            self.bytes_of = llm.layout.bytes_for(max(map(len, self.asked)) + ANSWER)

    def texts(self, llm: LLM, asked: Texts) -> Texts:
        """Greedy answers; nothing stays behind them but prefixes."""
        return [answer.token_ids for answer in llm.generate(asked, PARAMS)]

    def alike(self, llm: LLM, found: Texts) -> None:
        """Check texts against those of each prompt alone. Two may part at a tie."""
        parted = 0
        for prompt, one, other in zip(self.asked, found, self.alone, strict=True):
            if one == other:
                continue
            parted += 1
            end = next(i for i in range(ANSWER) if one[i] != other[i])
            tokens = [*prompt, *one[:end]]
            logits = llm.logits(tokens, [len(tokens) - 1])[-1]
            apart = logits.max() - min(logits[one[end]], logits[other[end]])
            assert apart <= self.near * np.abs(logits).max()
        self.parted += parted
        assert parted <= MOST_PARTED

    def together_and_guessed(self) -> None:
        with self.made(self.size, False) as llm:
            self.alike(llm, self.texts(llm, self.asked))
            whole = [[*a, *b] for a, b in zip(self.asked, self.alone, strict=True)]
            tried = llm.engine.speculate(trying(Reader(3, 0.2, whole)))
            self.alike(llm, self.texts(llm, self.asked))
            assert tried.drafted > tried.accepted > 100
            assert llm.pool.bytes_in_use == 0

    def behind_prefixes(self) -> None:
        with self.made(self.size, True) as llm:
            prefixes = llm.engine.scheduler.prefixes
            assert prefixes is not None
            self.alike(llm, [self.texts(llm, [one])[0] for one in self.asked])
            self.alike(llm, self.texts(llm, self.asked))
            assert prefixes.hits >= 500

    def preempted(self, way: Way, patch: pytest.MonkeyPatch) -> None:
        with self.made(int(self.bytes_of * 2.2), False) as llm:
            scheduler = llm.engine.scheduler
            preempt_all(scheduler, way == "computed again", patch)
            found = self.texts(llm, self.asked)
            assert scheduler.preemptions > 2
        with self.made(self.size, False) as llm:
            self.alike(llm, found)

    def moved(self) -> None:
        """The longest prompt's sequence goes on elsewhere, packed."""
        longest = max(range(len(self.asked)), key=lambda i: len(self.asked[i]))
        with self.made(self.size, False) as source, self.made(self.size, False) as here:
            ready = threading.Event()
            sequence = source.sequence(list(self.asked[longest]), PARAMS)

            def told(_: object) -> None:
                if sequence.answered >= 9:
                    ready.set()

            source.thread.submit([sequence], told)
            assert ready.wait(60)
            departure = source.exchange.export_sequence(sequence)
            assert departure is not None
            with departure:
                arrival = here.exchange.unpack(departure.packed())
            request = here.exchange.adopt_sequence(arrival)
            here.thread.wait(request)
            found = list(self.alone)
            found[longest] = request.sequences[0].answer
            self.alike(here, found)
            assert source.pool.bytes_in_use == here.pool.bytes_in_use == 0
