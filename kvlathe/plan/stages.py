"""Stages: layers that compute the same tokens of a prompt, and how a prompt passes
them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Stage:
    """Consecutive layers that compute the same tokens of a prompt, and are one graph:
    from ``first_layer`` to the layer before the next stage's. At most ``tokens`` tokens
    of a prompt enter it: its last rows that the observation window observes, and of the others those
    of most saliency in the layer before, summed over its lanes. The rest leave for all
    later layers. The first stage has them all, and its ``tokens`` is 0.
    """

    first_layer: int
    tokens: int = 0


@dataclass(frozen=True, slots=True)
class Pass:
    """Stages ``first`` .. ``end`` - 1, which all compute the same ``tokens`` tokens of
    a prompt."""

    first: int
    end: int
    tokens: int


def layers_of(stages: Sequence[Stage], layers: int, stage: int) -> range:
    """The layers of one of the ``stages`` of a model of ``layers``; all where there are
    none."""
    if not stages:
        return range(layers)
    borders = [*(one.first_layer for one in stages), layers]
    return range(borders[stage], borders[stage + 1])


def passes(stages: Sequence[Stage], tokens: int) -> tuple[Pass, ...]:
    """The passes of a prompt of ``tokens`` tokens through the stages; stages between
    which it loses none are one pass."""
    ranges = [Pass(0, 1, tokens)]
    for i, stage in enumerate(stages[1:], 1):
        last = ranges[-1]
        if last.tokens <= stage.tokens:
            ranges[-1] = Pass(last.first, i + 1, last.tokens)
        else:
            ranges.append(Pass(i, i + 1, stage.tokens))
    return tuple(ranges)
