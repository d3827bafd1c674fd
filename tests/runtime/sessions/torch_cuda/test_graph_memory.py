"""CUDA graphs of a device share memory as torch has it: it goes with the last of them."""

from __future__ import annotations

from collections.abc import Callable, Generator
from contextlib import contextmanager
from itertools import count
from weakref import finalize

import numpy as np
import pytest
import torch

from kvlathe.runtime.sessions.torch_cuda.device import TorchDevice


class Allocator:
    """What torch's allocator does with the memory of graphs: it counts those that use
    it, and captures nothing in memory that none uses any more."""

    def __init__(self) -> None:
        self.users: dict[int, int] = {}
        self.fresh = count()

    def begin(self, memory: int) -> None:
        assert self.users.get(memory, 1) > 0, "use_count > 0 INTERNAL ASSERT FAILED"
        self.users[memory] = self.users.get(memory, 0) + 1

    def end(self, memory: int) -> None:
        self.users[memory] -= 1

    def alive(self) -> int:
        """Memories that graphs use."""
        return sum(users > 0 for users in self.users.values())


class Graph:
    """A torch.cuda.CUDAGraph that has captured nothing yet."""

    memory: int

    def pool(self) -> int:
        return self.memory

    def replay(self) -> None: ...


@pytest.fixture
def allocator(monkeypatch: pytest.MonkeyPatch) -> Allocator:
    """The one of a stand-in for torch's graphs."""
    allocator = Allocator()

    @contextmanager
    def graph(
        graph: Graph, pool: int | None, capture_error_mode: str
    ) -> Generator[None]:
        assert capture_error_mode == "thread_local"  # else other threads' work ends it
        graph.memory = next(allocator.fresh) if pool is None else pool
        allocator.begin(graph.memory)
        finalize(graph, allocator.end, graph.memory)
        yield

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "CUDAGraph", Graph)
    monkeypatch.setattr(torch.cuda, "graph", graph)
    return allocator


def test_a_graph_is_captured_whatever_graphs_went_before(allocator: Allocator) -> None:
    """All that are there have one memory, and the first after the last has another."""
    device, draw = TorchDevice(), np.random.default_rng(0)
    replays: list[Callable[[], None]] = []
    emptied = 0
    for _ in range(400):
        if replays and draw.random() < 0.7:
            replays.pop(draw.integers(len(replays)))
            emptied += not replays
        else:
            replays.append(device.capture(lambda: None))
        assert allocator.alive() == bool(replays)
        assert sum(allocator.users.values()) == len(replays)
    assert emptied > 5


def test_a_capture_that_fails_leaves_the_next_one_its_memory(
    allocator: Allocator,
) -> None:
    def fail() -> None:
        raise MemoryError

    device = TorchDevice()
    for _ in range(2):
        with pytest.raises(MemoryError):
            device.capture(fail)
        assert not allocator.alive()
    replay = device.capture(lambda: None)
    with pytest.raises(MemoryError):
        device.capture(fail)
    replays = [replay, device.capture(lambda: None)]
    assert allocator.alive() == 1 and sum(allocator.users.values()) == len(replays)
