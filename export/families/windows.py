"""Sliding windows of a model's layers, as transformers' configurations spell them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from collections.abc import Sequence


class Windowed(Protocol):
    """Fields that are read of a configuration with windows."""

    @property
    def num_hidden_layers(self) -> int: ...
    @property
    def sliding_window(self) -> int | None: ...


class Typed(Windowed, Protocol):
    @property
    def layer_types(self) -> Sequence[str] | None: ...


def every_layer(config: Windowed) -> tuple[int, ...]:
    """``sliding_window`` is that of all layers."""
    return (config.sliding_window or 0,) * config.num_hidden_layers


def sliding_layers(config: Typed) -> tuple[int, ...]:
    """Only layers of the type ``sliding_attention`` have a window."""
    tokens = config.sliding_window or 0
    kinds = config.layer_types or ()
    return tuple(tokens if kind == "sliding_attention" else 0 for kind in kinds)
