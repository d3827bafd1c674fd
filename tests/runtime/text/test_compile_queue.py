"""Turns at compiling: no client waits for all of another's, and nothing is compiled that
nobody waits for any more."""

from __future__ import annotations

import threading
from concurrent.futures import Future, wait

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvlathe.base.errors import Busy, EngineStopped
from kvlathe.runtime.text.compile_queue import WAITING, CompileQueue, Turn, TurnQueue
from kvlathe.runtime.text.structure import Structure

STACK = 1 << 20


def named(name: str) -> Structure:
    return Structure.regex(name)


class Work:
    """Notes the order of its calls. The first one waits for ``begin``."""

    def __init__(self) -> None:
        self.begun, self.begin = threading.Event(), threading.Event()
        self.order: list[str] = []
        self.queue = CompileQueue[str]([self.make], STACK)
        self.held = self.queue.put(named("first"), "first")
        self.begun.wait(10)

    def make(self, structure: Structure, client: str) -> str:
        self.begun.set()
        self.begin.wait(10)
        self.order.append(structure.text)
        return structure.text

    def all(self, futures: list[Future[str]]) -> list[str]:
        """The order in which ``futures`` were done, those that came before left out."""
        self.begin.set()
        wait([self.held, *futures], 30)
        self.queue.close()
        return self.order[1:]


def served(queue: TurnQueue[str], turns: list[tuple[str, float]]) -> list[str]:
    """The clients in the order in which ``queue`` takes their ``turns`` (client,
    seconds), which all wait at once."""
    for number, (client, seconds) in enumerate(turns):
        waits = Turn[str](named(f"{client} {seconds}"), client, number, [Future()])
        queue.put(waits)
    order: list[str] = []
    while queue.lines:
        turn = queue.begin()
        order.append(turn.client)
        queue.end(turn, float(turn.structure.text.split()[1]))
    return order


def nothing(structure: Structure, client: str) -> str | None:
    return None


def test_a_client_waits_for_one_of_anothers_turns_at_most() -> None:
    queue, flood = TurnQueue(nothing), [("a", 2.0)] * 60
    assert served(queue, [*flood, ("b", 2.0)]).index("b") <= 1
    # Whoever comes late is before all but one, and is owed nothing for its idle time.
    for number in range(60):
        queue.put(Turn(named("a 2"), "a", number, [Future()]))
    for _ in range(30):
        queue.end(queue.begin(), 2.0)
    late = served(queue, [("b", 2.0)] * 10)
    assert "b" in late[:2] and late[:10].count("a") >= 4


@settings(max_examples=50, deadline=None)
@given(
    st.lists(st.tuples(st.sampled_from("abc"), st.floats(0.01, 4)), max_size=30),
)
def test_clients_that_wait_get_equal_times(turns: list[tuple[str, float]]) -> None:
    """As long as all of them wait, none has had more than another by more than its
    longest turns."""
    longest = max((seconds for _, seconds in turns), default=0.0)
    left = {name: [s for own, s in turns if own == name] for name in "abc"}
    had = dict.fromkeys((name for name in left if left[name]), 0.0)
    for client in served(TurnQueue(nothing), turns):
        had[client] += left[client].pop(0)
        if not left[client]:
            break
        assert max(had.values()) - min(had.values()) <= 2 * longest + 1e-9


def test_a_client_that_sends_too_many_is_told_when_to_come_back() -> None:
    work = Work()
    futures = [work.queue.put(named(f"a{i}"), "a") for i in range(WAITING)]
    futures.append(work.queue.put(named("a0"), "a"))  # it waits already
    with pytest.raises(Busy, match="Try again") as busy:
        work.queue.put(named("one more"), "a")
    assert busy.value.retry_after > 0
    futures.append(work.queue.put(named("b"), "b"))
    assert len(work.all(futures)) == WAITING + 1


def test_a_turn_that_nobody_waits_for_is_skipped_and_leaves_its_place() -> None:
    work = Work()
    gone = [work.queue.put(named(f"a{i}"), "a") for i in range(WAITING)]
    stays = work.queue.put(named("a1"), "a")
    assert all(future.cancel() for future in gone)
    last = work.queue.put(named("last"), "a")
    assert work.all([stays, last]) == ["a1", "last"]


def test_a_work_that_makes_nothing_passes_its_turn_to_the_next() -> None:
    def quick(structure: Structure, client: str) -> str | None:
        return "quick" if structure.text == "a" else None

    def slow(structure: Structure, client: str) -> str:
        return f"slow for {client}"

    queue = CompileQueue[str]([quick, slow], STACK)
    assert queue.put(named("a"), "x").result(10) == "quick"
    assert queue.put(named("b"), "x").result(10) == "slow for x"
    queue.close()


def test_whoever_asked_is_told_of_a_failure_and_the_next_goes_on() -> None:
    def divide(structure: Structure, client: str) -> float:
        return 1 / (len(structure.text) - 1)

    queue = CompileQueue[float]([divide], STACK)
    failed, done = queue.put(named("a"), ""), queue.put(named("abc"), "")
    assert isinstance(failed.exception(10), ZeroDivisionError)
    assert done.result(10) == 0.5
    queue.close()


def test_closing_refuses_whoever_waits() -> None:
    work = Work()
    waiting = work.queue.put(named("a"), "a")
    work.queue.close()
    assert isinstance(waiting.exception(1), EngineStopped)
    assert isinstance(work.held.exception(1), EngineStopped)
    with pytest.raises(EngineStopped):
        work.queue.put(named("b"), "b")
    work.begin.set()
