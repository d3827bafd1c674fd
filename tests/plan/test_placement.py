"""The law of lives: ``held``, ``moves`` and ``worst`` agree with a simulation
that counts tokens one by one and pages one by one."""

from __future__ import annotations

import dataclasses
import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvlathe.plan import json_fields
from kvlathe.plan.formats import Tier
from kvlathe.plan.groups import Group
from kvlathe.plan.index import Lived, Route
from kvlathe.plan.lives import (
    KEEP,
    LIVES,
    SEAL,
    Age,
    Budget,
    Compact,
    Divide,
    Life,
    Paging,
    SealAfter,
    Window,
)
from kvlathe.plan.sight import NO_END

PAGE = 16


def windows() -> st.SearchStrategy[Window]:
    """To the page and to the token."""
    pages = st.integers(0, 4).map(lambda n: n * PAGE)
    exact = st.integers(1, 4 * PAGE).map(lambda n: Window.of_tokens(n, PAGE))
    return st.builds(Window, pages, pages) | exact


def divisions() -> st.SearchStrategy[Divide]:
    weights = st.lists(st.integers(1, 9), min_size=1, max_size=3)
    return weights.map(lambda ws: Divide(tuple(w / sum(ws) for w in ws)))


@st.composite
def ages(draw: st.DrawFn) -> Age:
    first, sink, young, more = (draw(st.integers(low, 3)) for low in (0, 0, 1, 1))
    recent = draw(st.sampled_from([NO_END, (young + more) * PAGE]))
    return Age(first * PAGE, young * PAGE, sink * PAGE, recent)


EVERY: dict[str, st.SearchStrategy[Life]] = {
    "keep": st.just(KEEP),
    "seal": st.just(SEAL),
    "seal_after": st.builds(SealAfter, st.integers(1, 3).map(lambda n: n * PAGE)),
    "age": ages(),
    "window": windows(),
    "budget": st.builds(Budget, st.integers(1, 4).map(lambda n: n * PAGE)),
    "divide": divisions(),
    "compact": st.builds(Compact, st.sampled_from([0.3, 1.0])),
}
"""Lives of each kind."""


def route_of(lives: list[tuple[Life, int]], step: int) -> Route:
    """The route of groups with so many cold tiers that have one hot bucket. Buckets are
    numbered on."""
    groups: list[Lived] = []
    end = 1
    for life, cold in lives:
        buckets = (0, *range(end, end + cold))
        groups.append(Lived(life, buckets, Paging(PAGE, cold, step)))
        end += cold
    return Route.of(groups)


@st.composite
def placements(draw: st.DrawFn, kinds: tuple[str, ...] = tuple(EVERY)) -> Route:
    """One group of any life, or up to three that are sealed together, whose prompts move
    at their end or on a grid."""
    step = draw(st.sampled_from([0, PAGE, 2 * PAGE, 5 * PAGE]))
    kind = draw(st.sampled_from(kinds))
    life = draw(EVERY[kind])
    cold = draw(st.sampled_from([*life.cold_tiers]))
    lives = [(life, cold)]
    if cold and life.seals:
        sealed = [x for x in EVERY if x not in ("keep", "divide", "seal_after", "age")]
        for other in draw(st.lists(st.sampled_from(sealed), max_size=2)):
            # Those that share a hot page keep as many first tokens there.
            more = (life, cold) if life.stay_hot else (draw(EVERY[other]), 1)
            lives.append(more)
    return route_of(lives, step)


def pages(tokens: int) -> int:
    return -(-tokens // PAGE)


class Simulation:
    """Counts of one sequence: tokens that are seen in each bucket (``lengths``), and
    those in its pages (``written``). ``peak``: the most pages of each bucket at one time; what
    moves fill is taken before anything is given back."""

    def __init__(self, placed: Route) -> None:
        self.placed = placed
        self.lengths = [0 for _ in placed.buckets]
        self.written = [0 for _ in placed.buckets]
        self.peak = [0 for _ in placed.buckets]
        self.arrived = 0

    def step(self, count: int, settles: bool) -> bool:
        """``count`` tokens more. Whether any moved."""
        self.arrived += count
        self._add(0, count)
        if not settles:
            self._take([0 for _ in self.lengths])
            return False
        moves = self.placed.moves(self.lengths, self.arrived)
        taken = [moves.seals if i else 0 for i in range(len(self.lengths))]
        for selection in moves.selections:
            for target in selection.targets:
                taken[target.bucket] += target.pages(PAGE)
        self._take(taken)
        self._add(0, -moves.seals * PAGE)
        for i in range(1, len(self.lengths)):
            self._add(i, moves.seals * PAGE)
        for selection in moves.selections:
            ranks = [r for t in selection.targets for s in t.spans for r in range(*s)]
            assert len(set(ranks)) == len(ranks)
            assert set(ranks) <= set(range(selection.length))
            assert selection.length == self.lengths[selection.bucket]
            self._add(selection.bucket, -selection.length)
            for target in selection.targets:
                self._add(target.bucket, target.tokens)
        for drop in moves.drops:
            assert (
                drop.pages > 0
                and drop.first + drop.pages <= self.lengths[drop.bucket] // PAGE
            )
            self._add(drop.bucket, -drop.pages * PAGE)
        for shown in moves.shown:
            assert 0 <= shown.tokens <= self.written[shown.bucket]
            self.lengths[shown.bucket] = shown.tokens
        return bool(moves.seals or moves.selections or moves.drops)

    def _add(self, bucket: int, tokens: int) -> None:
        self.lengths[bucket] += tokens
        self.written[bucket] += tokens

    def _take(self, more: list[int]) -> None:
        for i, tokens in enumerate(self.written):
            self.peak[i] = max(self.peak[i], pages(tokens) + more[i])


@pytest.mark.parametrize("kind", LIVES)
@settings(max_examples=100)
@given(
    data=st.data(),
    prompt=st.integers(1, 200),
    more=st.integers(0, 150),
    chunk=st.sampled_from([PAGE, 2 * PAGE]),
)
def test_tokens_held_moved_and_needed_agree_with_counting(
    data: st.DataObject, kind: str, prompt: int, more: int, chunk: int
) -> None:
    placed = data.draw(placements((kind,)))
    simulation, step = Simulation(placed), placed.prompt_step
    while simulation.arrived < prompt:
        end = min(prompt, (simulation.arrived // chunk + 1) * chunk)
        if step:
            end = min(end, (simulation.arrived // step + 1) * step)
        settles = end == prompt or (step > 0 and end % step == 0)
        simulation.step(end - simulation.arrived, settles)
        if settles:
            assert tuple(simulation.lengths) == placed.held(end)
            assert tuple(simulation.written) == placed.written(end)
    for n in range(prompt + 1, prompt + more + 1):
        moved = simulation.step(1, True)
        assert tuple(simulation.lengths) == placed.held(n)
        assert tuple(simulation.written) == placed.written(n)
        assert not moved or placed.can_move(n)
    worst = placed.worst_pages(prompt + more, prompt)
    assert all(now <= most for now, most in zip(simulation.peak, worst, strict=True))


@settings(max_examples=100)
@given(placed=placements(), tokens=st.integers(1, 300))
def test_worst_pages_are_reached_but_for_a_page_or_two(
    placed: Route, tokens: int
) -> None:
    """Over all prompts up to the length: what is reserved is not idle."""
    reached = [0 for _ in placed.buckets]
    for prompt in {tokens, max(1, tokens - 1), tokens // PAGE * PAGE or 1}:
        simulation = Simulation(placed)
        step = placed.prompt_step or prompt
        while simulation.arrived < prompt:
            count = min(step, prompt - simulation.arrived)
            simulation.step(count, True)
        while simulation.arrived < tokens:
            simulation.step(1, True)
        reached = list(map(max, reached, simulation.peak))
    worst = placed.worst_pages(tokens, tokens)
    slack = 2 + 2 * max(1, len(placed.buckets) - 1)
    assert all(most <= now + slack for now, most in zip(reached, worst, strict=True))


@settings(max_examples=200)
@given(window=windows(), prompt=st.integers(1, 150), more=st.integers(0, 100))
def test_no_page_leaves_that_a_later_query_sees(
    window: Window, prompt: int, more: int
) -> None:
    """Positions one by one: the pages that are there hold what each query sees, and at
    its turn the oldest of them is seen."""
    placed = route_of([(window, 0)], 2 * PAGE)
    held: list[int] = []
    for n in range(prompt + more + 1):
        newest = {
            t for t in range(n + 1) if t // PAGE >= n // PAGE - window.recent // PAGE
        }
        if window.exact:
            newest = set(range(n + 1)[-window.exact :])
        seen = newest | set(range(min(window.sink, n + 1)))
        assert seen <= {*held, n}
        settled = n >= prompt or n % (2 * PAGE) == 0
        if settled and not window.exact:
            assert set(held) <= seen
        if settled and window.exact:
            assert len(set(held) - seen) < 2 * PAGE
        if settled and n % PAGE == 0:
            first, newest = window.shared(n, 0)
            assert held == [*range(first), *range(n - newest, n)]
        # Places tell the same as positions: whole pages are gone.
        first = window.sees.first_seen(len(held), PAGE)
        of_places = {
            t for i, t in enumerate([*held, n]) if i < window.sink or i >= first
        }
        assert of_places == seen
        held.append(n)
        if n + 1 >= prompt or (n + 1) % (2 * PAGE) == 0:
            for drop in placed.moves([len(held)], n + 1).drops:
                del held[drop.first * PAGE : (drop.first + drop.pages) * PAGE]


@settings(max_examples=200)
@given(age=ages(), prompt=st.integers(1, 150), more=st.integers(0, 100))
def test_every_token_is_in_one_tier_and_the_newest_in_the_first(
    age: Age, prompt: int, more: int
) -> None:
    """Positions one by one, of pages that are sealed into both cold tiers at once."""
    placed = route_of([(age, 2)], 2 * PAGE)
    held: list[list[int]] = [[], [], []]  # positions in the pages of each bucket
    lengths = [0, 0, 0]
    for n in range(prompt + more):
        held[0].append(n)
        lengths[0] += 1
        if n + 1 < prompt and (n + 1) % (2 * PAGE):
            continue
        moves = placed.moves(lengths, n + 1)
        at, end = moves.first * PAGE, (moves.first + moves.seals) * PAGE
        for cold in held[1:]:
            cold += held[0][at:end]
        del held[0][at:end]
        for drop in moves.drops:
            del held[drop.bucket][drop.first * PAGE : (drop.first + drop.pages) * PAGE]
        lengths = [len(held[0]), len(held[1]), lengths[2]]
        for shown in moves.shown:
            lengths[shown.bucket] = shown.tokens
        seen = [own[:count] for own, count in zip(held, lengths, strict=True)]
        full = (n + 1) // PAGE * PAGE
        first = min(age.first, full)
        sink = min(age.first + age.sink, full)
        assert seen[0] == [*range(first), *range(full, n + 1)]
        newest = range(max(sink, full - age.young), full)
        assert seen[1] == [*range(first, sink), *newest]
        left = max(sink, full - age.recent)
        assert seen[2] == [*range(left, newest.start)]
        assert held[2] == [*range(left, full)]
        assert age.kept(full) == len(seen[0]) - (n + 1 - full) + len(seen[1] + seen[2])
        assert age.shared(full, 1) == (sink - first, len(newest))
        assert age.shared(full, 2) == (0, full - left)


def group_of(life: object) -> Group:
    """A group whose life JSON describes so."""
    hot = json.loads(json.dumps(dataclasses.asdict(Tier(16, 16))))
    cold = [hot] if life == {"kind": "seal"} else []
    fields = {"lanes": [0], "hot": hot, "cold": cold, "life": life}
    return json_fields.read(Group, fields, "group")


@pytest.mark.parametrize("kind", LIVES)
@given(data=st.data())
def test_a_life_is_what_its_file_form_says(data: st.DataObject, kind: str) -> None:
    life = data.draw(EVERY[kind])
    most = life.cold_tiers[-1]
    made = Group((0,), Tier(16, 16), (Tier(8, 8, "rank", "rank"),) * most, life)
    fields = json.loads(json.dumps(dataclasses.asdict(made)))
    assert json_fields.read(Group, fields, "group") == made
    assert life.problem(PAGE) is None


def test_a_life_with_fields_of_another_is_refused() -> None:
    assert group_of({"kind": "seal"}).life == SEAL
    with pytest.raises(ValueError, match=r"group\.life .*recent"):
        group_of({"kind": "keep", "recent": 1})
    with pytest.raises(ValueError, match=r"group\.life\.kind is not one of keep"):
        group_of({"kind": "nothing"})
