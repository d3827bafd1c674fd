"""Random plans that rank tokens, and which tokens they hold: simulated token by token
in plain Python."""

from __future__ import annotations

import dataclasses
from collections import defaultdict
from collections.abc import Sequence as Items

import numpy as np
import numpy.typing as npt
from hypothesis import strategies as st

from kvlathe.plan.formats import Tier
from kvlathe.plan.groups import Group
from kvlathe.plan.heads import ModelShape
from kvlathe.plan.lives import Budget, Divide, split_tokens
from kvlathe.plan.noise import noise, noise_key
from kvlathe.plan.plan import CompressionPlan
from kvlathe.plan.token_score import ObservationWindow
from kvlathe.runtime.cache.observed_rows import ObservedRows
from kvlathe.runtime.llm import LLM
from kvlathe.runtime.scheduling.prompt import path_of
from kvlathe.runtime.scheduling.sequence import Sequence
from kvlathe.runtime.sessions.host.pages import HostPages
from kvlathe.runtime.sessions.host.saliency import saliency
from kvlathe.runtime.sessions.protocols import Scores, Session, StepPlan
from kvlathe.runtime.text.sampler import Sampler
from kvlathe.runtime.text.sampling_params import SamplingParams
from kvlathe.runtime.text.tokenizer import Tokenizer
from tests.support.runtime_cases import (
    HEAVY,
    LIMITS,
    MODEL,
    NORMALIZED,
    plan_for,
)
from tests.support.tiers import with_tiers

PAGE = 16
SHAPE = ModelShape(2, 4, 2, 16, 32, 97, 4096)
TIERS = (
    Tier(32, 32),
    Tier(8, 8, "rank", "rank"),
    Tier(16, 16),
    Tier(4, 8, "token", "rank", 16, 16),
)
EVERY = (0, 1, 2, 3)


@st.composite
def plans(draw: st.DrawFn) -> CompressionPlan:
    """One group or two, each divided, or with budgets, hot or sealed; observations of
    every kind."""
    hot, *cold = TIERS
    groups: list[Group] = []
    for lanes in draw(st.sampled_from([[EVERY], [(0, 3), (1, 2)]])):
        kind = draw(st.sampled_from(["divided", "hot", "sealed"]))
        if kind == "hot":
            groups.append(Group(lanes, hot, life=draw(budgets())))
        elif kind == "divided":
            weights = draw(st.lists(st.integers(1, 9), min_size=1, max_size=3))
            shares = tuple(w / sum(weights) for w in weights)
            groups.append(Group(lanes, hot, tuple(cold[: len(shares)]), Divide(shares)))
        else:
            parts = draw(st.sampled_from([[lanes], [lanes[:1], lanes[1:]]]))
            groups += [
                Group(part, hot, (cold[i],), draw(budgets()))
                for i, part in enumerate(parts)
            ]
    shape = dataclasses.replace(
        SHAPE, head_dim=draw(st.sampled_from([16, 48]))
    )  # scores then break the cells of rows
    lanes = plan_for(shape, (Group(EVERY, hot),)).lanes
    return CompressionPlan(
        shape, lanes, tuple(groups), PAGE, 2 * PAGE, 7, draw(observed_rows())
    )


def budgets() -> st.SearchStrategy[Budget]:
    return st.builds(
        lambda pages, recent: Budget(pages * PAGE, recent=recent),
        st.integers(1, 4),
        st.integers(0, 9),
    )


def observed_rows() -> st.SearchStrategy[ObservationWindow]:
    return st.sampled_from(
        [
            NORMALIZED,
            HEAVY,
            ObservationWindow(last=8, accumulated=False),
            ObservationWindow(random=0.1),
            ObservationWindow(last=4, pooling=3),
            dataclasses.replace(NORMALIZED, slice_tokens=2 * PAGE),
            ObservationWindow(last=8, accumulated=False, slice_tokens=4 * PAGE),
            ObservationWindow(special=(3, 5), recent=0.1, normalized=True),
        ]
    )


class Numbers(HostPages, Session):
    """A session whose token at position i has K and V i / 8 everywhere, and whose rows
    attend at random: the same for a (lane, row, token), whatever the step."""

    def run(self, step: StepPlan) -> npt.NDArray[np.float32]:
        rows = np.repeat(step.positions[:, None] / 8, self.row_width, 1).astype(
            self.hot
        )
        self.append(step, rows)
        widths = [table.shape[1] * PAGE for table in step.page_tables]
        mass = np.zeros(
            (len(step.lengths), len(EVERY), sum(widths) + len(step.query_offsets)),
            np.float32,
        )
        for b, (start, stop) in enumerate(
            zip(step.cu_seqlens_q, step.cu_seqlens_q[1:], strict=False)
        ):
            for lane in EVERY:
                for row in range(start, stop):
                    if (
                        step.observation_weights is not None
                        and step.observation_weights[row]
                    ):
                        self.attend(step, b, lane, row, start, mass[b, lane], widths)
        self.page_scores.observe([(step, mass, 0)])
        return np.zeros((len(step.logit_rows), 97), np.float32)

    def attend(
        self,
        step: StepPlan,
        b: int,
        lane: int,
        row: int,
        start: int,
        mass: npt.NDArray,
        widths: list[int],
    ) -> None:
        at = 0
        for bucket, width in enumerate(widths):
            if lane in self.plan.index.buckets[bucket].lanes:
                held = self.positions(
                    bucket,
                    lane,
                    step.page_tables[bucket][b],
                    int(step.lengths[b, bucket]),
                )
                mass[at : at + len(held)] += attention(
                    lane, int(step.positions[row]), held
                )
            at += width
        mass[at : at + row - start + 1] += attention(
            lane, int(step.positions[row]), step.positions[start : row + 1]
        )

    def positions(
        self, bucket: int, lane: int, pages: Items[int], length: int
    ) -> npt.NDArray[np.int64]:
        """Positions of the tokens that a lane holds, read from its keys."""
        part = self.matrices[bucket][lane][0]
        found = [
            part.read(self.rows[bucket][page])[:, 0]
            for page in pages[: -(-length // PAGE)]
        ]
        return np.rint(np.concatenate([*found, np.zeros(0)])[:length] * 8).astype(
            np.int64
        )


def attention(lane: int, row: int, tokens: npt.NDArray) -> npt.NDArray[np.float32]:
    drawn = noise(noise_key(lane, row), np.asarray(tokens), len(tokens), 1)
    return drawn[:, 0].astype(np.float32)


def exact(plan: CompressionPlan) -> CompressionPlan:
    """In formats that hold multiples of 1/8 exactly, so that tokens can be told apart
    in every bucket."""
    return with_tiers(plan, (Tier(32, 32), Tier(32, 16), Tier(16, 32), Tier(16, 16)))


def expected(
    plan: CompressionPlan, prompt: int, total: int, seed: int
) -> list[dict[int, list[int]]]:
    """The positions that each lane of each bucket holds, simulated token by token in
    plain Python."""
    page = plan.page_tokens
    assert plan.index.observation
    flags = ObservedRows(plan, prompt).weights(tokens_of(seed), 0, total)
    held: list[dict[int, list[int]]] = [
        {lane: [] for lane in bucket.lanes} for bucket in plan.index.buckets
    ]
    mass: defaultdict[tuple[int, int], float] = defaultdict(float)
    for n in range(1, total + 1):
        for b, bucket in enumerate(plan.index.buckets):
            for lane in bucket.lanes if bucket.is_hot else ():
                held[b][lane].append(n - 1)
        for lane in EVERY if flags[n - 1] else ():
            known = sorted(i for places in held for i in places.get(lane, []))
            for i, value in zip(
                known, attention(lane, n - 1, np.array(known)), strict=True
            ):
                mass[lane, i] += float(value)
        if n < prompt and not slice_ends(plan, n):
            continue
        for fresh in plan.index.buckets:
            if not fresh.is_hot:
                continue
            for lane in fresh.lanes:
                _settled(plan, held, mass, flags, fresh.number, lane, n)
            if not plan.index.observation.accumulated and (
                n == prompt or n % page == 0
            ):
                mass = defaultdict(
                    float,
                    {
                        key: value
                        for key, value in mass.items()
                        if key[0] not in fresh.lanes
                    },
                )
    return held


def slice_ends(plan: CompressionPlan, tokens: int) -> bool:
    """Whether a slice of a prompt ends there."""
    return plan.index.prompt_step > 0 and tokens % plan.index.prompt_step == 0


def _settled(
    plan: CompressionPlan,
    held: list[dict[int, list[int]]],
    mass: dict[tuple[int, int], float],
    flags: npt.NDArray,
    f: int,
    lane: int,
    n: int,
) -> None:
    observation, cold = (
        plan.index.observation,
        [c for c in plan.index.buckets[f].cold if lane in plan.index.buckets[c].lanes],
    )
    assert observation

    def order(tokens: list[int], newest: int) -> list[int]:
        scores = Scores(
            np.array([[mass[lane, i] for i in tokens]], np.float32),
            np.array([tokens], np.int32),
        )
        seen = flags[:n][::-1].cumsum()[::-1].astype(np.int64)
        key = noise_key(plan.seed, plan.lanes[lane].layer, plan.lanes[lane].head, 2)
        found = dict(
            zip(
                tokens,
                saliency(observation, scores, seen, [key])[0].tolist(),
                strict=True,
            )
        )
        forced = set(tokens[len(tokens) - newest :])
        return sorted(
            tokens, key=lambda i: (i not in forced, 0 if i in forced else -found[i], i)
        )

    life = plan.index.groups[lane].life
    if isinstance(life, Divide):
        _divide(life, held, f, cold, lane, n, order(held[f][lane], 0))
        return
    assert isinstance(life, Budget)
    for c in cold:
        full = len(held[f][lane]) // plan.page_tokens * plan.page_tokens
        held[c][lane] += held[f][lane][:full]
        del held[f][lane][:full]
    for b in cold or [f]:
        tail = 0 if cold else n % plan.page_tokens
        if len(held[b][lane]) > (most := life.budget + tail):
            held[b][lane] = sorted(order(held[b][lane], life.recent + tail)[:most])


def _divide(
    life: Divide,
    held: list[dict[int, list[int]]],
    f: int,
    cold: list[int],
    lane: int,
    n: int,
    order: list[int],
) -> None:
    shares = split_tokens(life.shares, n)
    left: list[int] = []
    for c, count in zip(cold, shares, strict=True):
        own = order[: count - len(held[c][lane])]
        del order[: len(own)]
        full = count // PAGE * PAGE - len(held[c][lane])
        chosen = own[:full] if c != cold[-1] else own[len(own) - full :]
        left += [i for i in own if i not in chosen]
        held[c][lane] = held[c][lane] + sorted(chosen)
    held[f][lane] = sorted(left)


def tokens_of(seed: int) -> list[int]:
    return np.random.default_rng(seed).integers(0, 97, 4096).tolist()


def sequence_of(engine: LLM, tokens: list[int], prompt: int) -> Sequence:
    observed_rows = ObservedRows(engine.plan, prompt)
    return Sequence(
        tokens,
        prompt,
        engine.pool.open(),
        path_of(engine.plan, prompt, engine.plan.prefill_chunk),
        Sampler(SamplingParams()),
        observed_rows=observed_rows,
    )


def engine_of(plan: CompressionPlan, session: Session, size: int) -> LLM:
    return LLM(session, plan, LIMITS, Tokenizer(MODEL), size)
