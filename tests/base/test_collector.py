"""Laws of the collector's rest: it ends with the last of those that asked for it."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import AbstractContextManager
from threading import Barrier, Thread

import numpy as np
import pytest

from kvlathe.base.collector import nothing_collected


@pytest.fixture(params=[True, False], ids=["on", "off"])
def collects(request: pytest.FixtureRequest) -> Iterator[bool]:
    """Whether the collector was on before."""
    before = gc.isenabled()
    (gc.enable if request.param else gc.disable)()
    yield request.param
    (gc.enable if before else gc.disable)()


def test_the_collector_rests_until_the_last_of_those_that_asked_has_ended(
    collects: bool,
) -> None:
    """Those that ask end in any order, as captures of several engines do."""
    draw = np.random.default_rng(0)
    asked: list[AbstractContextManager[None]] = []
    ended = 0
    for _ in range(300):
        if asked and draw.random() < 0.6:
            asked.pop(draw.integers(len(asked))).__exit__(None, None, None)
            ended += not asked
        else:
            asked.append(nothing_collected())
            asked[-1].__enter__()
        assert gc.isenabled() == (collects and not asked)
    while asked:
        asked.pop().__exit__(None, None, None)
    assert gc.isenabled() == collects and ended > 5


def test_a_rest_ends_with_an_error_too(collects: bool) -> None:
    with pytest.raises(MemoryError), nothing_collected():
        raise MemoryError
    assert gc.isenabled() == collects


def test_threads_may_ask_at_once(collects: bool) -> None:
    together = Barrier(4)
    seen: list[bool] = []

    def ask() -> None:
        together.wait()
        for _ in range(500):
            with nothing_collected():
                seen.append(gc.isenabled())

    threads = [Thread(target=ask) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(seen) == 2000 and not any(seen) and gc.isenabled() == collects
