"""The device of the original model while an engine is made: the one place that decides
it, and the work that is done ahead there.

All of export/ computes where the checkpoint's tensors are (Checkpoint.device). Products
in float32 are products in float32 on a GPU too: torch's default, without TF32.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Generator, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import torch

from kvlathe.base import devices
from kvlathe.base.console import human_bytes, log
from kvlathe.base.errors import KvlatheError
from kvlathe.base.memory import missing_memory, out_of_memory

Item = TypeVar("Item")
Made = TypeVar("Made")

CPU = torch.device("cpu")


def choose_device(name: str | None) -> torch.device:
    """The device called ``name`` (kvlathe/base/devices.py); auto is a GPU where torch
    sees one. Raises KvlatheError where there is none and one was asked for."""
    asked = devices.requested(name)
    has_gpu = torch.cuda.is_available()
    if asked == "cuda" and not has_gpu:
        raise KvlatheError(
            "the device cuda cannot be used", "torch sees no GPU", "use --device cpu"
        )
    if asked == "cpu" or not has_gpu:
        return CPU
    return torch.device("cuda", torch.cuda.current_device())


@contextlib.contextmanager
def within_share(device: torch.device, share: float) -> Generator[None]:
    """Inside, torch takes at most ``share`` of a GPU's memory, whatever others hold of
    it. Raises OutOfMemory where that does not suffice."""
    if device.type != "cuda":
        yield
        return
    free, total = torch.cuda.mem_get_info(device)
    most = min(free, int(share * total))
    log.info(
        "computing on %s with up to %s of its memory (--gpu-memory-utilization %g of %s, "
        "%s free)",
        torch.cuda.get_device_name(device),
        *(human_bytes(most), share, human_bytes(total), human_bytes(free)),
    )
    before = torch.cuda.get_per_process_memory_fraction(device)
    torch.cuda.set_per_process_memory_fraction(share, device)
    try:
        yield
    except Exception as error:
        if not out_of_memory(error):
            raise
        remedy = "end what else runs there, raise --gpu-memory-utilization, or give a smaller --max-seq-len"
        fact = f"this build needs more than {human_bytes(most)} of GPU memory"
        raise missing_memory(error, fact, remedy) from error
    finally:
        torch.cuda.set_per_process_memory_fraction(before, device)


def ahead(
    make: Callable[[Item], Made], items: Iterable[Item], device: torch.device
) -> Iterator[Made]:
    """``make`` of every item, in order. On a GPU the next one is made in a thread while
    this one is used: reading files overlaps with computing.

    Whoever asks for the next one is done with this one.
    """
    if device.type == "cpu":
        yield from map(make, items)
        return
    stream = torch.cuda.Stream(device)

    def made(item: Item) -> Made:
        with torch.cuda.device(device), torch.cuda.stream(stream):
            result = make(item)
            stream.synchronize()
        return result

    yield from _one_ahead(made, items, torch.cuda.current_stream(device).synchronize)


def _one_ahead(
    make: Callable[[Item], Made], items: Iterable[Item], finish: Callable[[], None]
) -> Iterator[Made]:
    """``finish`` ends what was begun with the last one, whose memory the next but one
    may take."""
    waiting = None
    with ThreadPoolExecutor(1) as thread:
        for item in items:
            finish()
            following = thread.submit(make, item)
            if waiting is not None:
                yield waiting.result()
            waiting = following
        if waiting is not None:
            yield waiting.result()
