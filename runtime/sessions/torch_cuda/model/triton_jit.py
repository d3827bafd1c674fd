"""Triton's decorator with the type of what it makes. Types are checked where Triton is
missing, and there its kernels would be plain functions."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import Protocol, overload

from torch import Tensor


class Kernel(Protocol):
    """A kernel: called by other kernels, launched as ``kernel[grid](...)``, or compiled
    by ``warmup``."""

    def __call__(self, *arguments: object) -> Tensor: ...
    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., object]: ...
    def warmup(self, *arguments: object, **constants: object) -> object: ...


class Jit(Protocol):
    """As ``triton.jit``."""

    @overload
    def __call__(self, function: Callable[..., object]) -> Kernel: ...
    @overload
    def __call__(
        self,
        *,
        do_not_specialize: list[str],
        do_not_specialize_on_alignment: list[str] = ...,
    ) -> Callable[[Callable[..., object]], Kernel]: ...


jit: Jit = import_module("triton").jit
