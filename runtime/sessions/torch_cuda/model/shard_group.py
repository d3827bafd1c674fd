"""ShardGroup: what the shards of a model compute together. Every shard makes the same
calls in the same order. They are queued on the current stream, and may be captured."""

from __future__ import annotations

from typing import Protocol

from torch import Tensor


class ShardGroup(Protocol):
    """Shard ``shard`` of ``size``."""

    @property
    def shard(self) -> int: ...
    @property
    def size(self) -> int: ...

    def sum(self, x: Tensor) -> Tensor:
        """``x``, a whole tensor, with those of the other shards added to it, in place.
        All shards have the same bits afterwards."""
        ...

    def gather(self, x: Tensor) -> Tensor:
        """[size, ...]: the tensors of all shards, which have one shape."""
        ...

    def abort(self) -> None:
        """End what is queued, where a worker is missing. From any thread."""
        ...


class OneShard:
    """A model that is whole on one GPU."""

    shard, size = 0, 1

    def sum(self, x: Tensor) -> Tensor:
        return x

    def gather(self, x: Tensor) -> Tensor:
        return x[None]

    def abort(self) -> None: ...


def shard_borders(count: int, num_shards: int, multiple: int = 8) -> tuple[int, ...]:
    """Where the part of each shard begins, and the end: of ``count`` columns or tokens.
    Parts are multiples of 16 bytes where there are enough of them."""
    if count < num_shards * multiple:
        multiple = 1
    units = count // multiple
    borders = [units * shard // num_shards * multiple for shard in range(num_shards)]
    return (*borders, count)
