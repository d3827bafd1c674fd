"""Faults of the Rust libraries that read tokenizers and structures.

A panic is a BaseException (pyo3's PanicException), so that it passes every ``except
Exception`` and ends a thread; other faults are bare Exceptions. Both become refusals
where such a library is called.
"""

from __future__ import annotations

from kvlathe.base.errors import KvlatheError

PANIC = "PanicException"
"""The class has no module to import it from."""


def refuse_fault(error: BaseException, fact: str, remedy: str) -> None:
    """Raise KvlatheError where ``error`` is a panic, or a fault of no class of its own.
    To be called where it was caught; whatever else it is, is raised again there."""
    if type(error).__name__ == PANIC or type(error) is Exception:
        said = str(error).replace("\n", " ")
        raise KvlatheError(fact, f"its library says: {said:.200}", remedy) from error
