"""Group: what ranks of tensor parallelism compute together. Every rank makes the same
calls in the same order; they are queued on the current stream, and may be captured."""

from __future__ import annotations

from typing import Protocol

from torch import Tensor


class Group(Protocol):
    """``rank`` of ``size`` ranks."""

    @property
    def rank(self) -> int: ...
    @property
    def size(self) -> int: ...

    def sum(self, x: Tensor) -> Tensor:
        """``x``, a whole tensor, with those of the other ranks added to it, in place.
        All ranks have the same bits afterwards."""
        ...

    def gather(self, x: Tensor) -> Tensor:
        """[size, ...]: the tensors of all ranks, which have one shape."""
        ...

    def abort(self) -> None:
        """End what is queued, where a rank is missing. From any thread."""
        ...


class Alone:
    """One rank."""

    rank, size = 0, 1

    def sum(self, x: Tensor) -> Tensor:
        return x

    def gather(self, x: Tensor) -> Tensor:
        return x[None]

    def abort(self) -> None: ...


def parts(count: int, ranks: int, multiple: int = 8) -> tuple[int, ...]:
    """Where the part of each rank begins, and the end: of ``count`` columns or tokens.
    Parts are multiples of 16 bytes where there are enough of them."""
    if count < ranks * multiple:
        multiple = 1
    units = count // multiple
    borders = [units * rank // ranks * multiple for rank in range(ranks)]
    return (*borders, count)
