"""The GPU's time by kernels: those that some work launched, in groups.

torch's profiler names and times them. Its own cost lies on the host, so time in which the
GPU is idle is an upper bound of what it is otherwise.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch._C._autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

GROUPS = {
    "attention of prompts": r"attend_prompt",
    "attention of single rows": r"attend_|merge_",
    "copies of sealed pages": r"copy_codes|place_copies",
    "seal": r"seal_pages|code_rows",
    "RoPE, projection, append": r"append_",
    "products with weights": r"nvjet|gemm|gemv|xmma|cutlass|multiply_rows|splitK",
    "activations, norms": r"silu|norm_rows|gelu|vectorized_elementwise|elementwise",
    "lists of a step": r"spread_|list_prompts|plan_calls|bundle_rows",
    "copies between host and GPU": r"^Memcpy|^Memset",
}
"""The first pattern that is found names a kernel's group."""
OTHERS = "others"


@dataclass
class KernelTimes:
    """Milliseconds by group, the span from the first kernel to the last one's end, how
    long some kernel ran, and the kernels of no group."""

    groups: dict[str, float]
    span: float
    busy: float
    unknown: dict[str, float] = field(default_factory=dict)


def group_of(kernel: str) -> str:
    for group, pattern in GROUPS.items():
        if re.search(pattern, kernel):
            return group
    return OTHERS


def busy_time(spans: list[tuple[float, float]]) -> float:
    """The time in which at least one of the ``spans`` (begin, end) lasts."""
    busy, reached = 0.0, float("-inf")
    for begin, end in sorted(spans):
        busy += max(0.0, end - max(begin, reached))
        reached = max(reached, end)
    return busy


def summed(kernels: list[tuple[str, float, float]]) -> KernelTimes:
    """Times of kernels (name, begin, end) in microseconds."""
    groups = dict.fromkeys([*GROUPS, OTHERS], 0.0)
    unknown: dict[str, float] = {}
    for name, begin, end in kernels:
        group = group_of(name)
        groups[group] += (end - begin) / 1e3
        if group == OTHERS:
            unknown[name] = unknown.get(name, 0.0) + (end - begin) / 1e3
    spans = [(begin, end) for _, begin, end in kernels]
    span = max(end for _, end in spans) - min(begin for begin, _ in spans)
    return KernelTimes(groups, span / 1e3, busy_time(spans) / 1e3, unknown)


def kernel_times(work: Callable[[], object]) -> KernelTimes:
    """Times of the kernels that ``work`` launches. Needs a CUDA GPU."""
    with profile(activities=[ProfilerActivity.CUDA]) as profiled:
        work()
        torch.cuda.synchronize()
    kernels: list[tuple[str, float, float]] = []
    for event in profiled.events() or ():
        if event.device_type == DeviceType.CUDA:
            kernels.append((event.name, event.time_range.start, event.time_range.end))
    return summed(kernels)
