"""LayeredModel: the original model, run layer by layer, for gradients by what its
layers compute.

Between layers one hidden state a token is kept. All else that gradients need is
computed again, a layer at a time: memory does not grow with the number of layers.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from kvlathe.export.model.checkpoint import Checkpoint
from kvlathe.export.model.device import ahead
from kvlathe.export.model.layer_runner import Captured, LayerRunner, beside, embed
from kvlathe.export.model.shared_caches import SharedCaches
from kvlathe.export.model.sliced_head import SlicedHead, SlopesOf
from kvlathe.export.model.spec import DecoderSpec
from kvlathe.layers.beside import Beside

Advance = Callable[[float], None]
"""Says what further share of a pass is done."""


Asked = tuple[tuple[int, ...], tuple[int, ...]]
"""A sequence's token ids and positions."""


def _unsaid(share: float) -> None:
    """Nobody asked."""


@dataclass(frozen=True)
class LayerPull:
    """One layer of a sequence of T tokens: ``captured`` is what it computes, ``pull``
    [S, T, Hq, d] the gradients of S scores by what its attention gives."""

    layer: int
    runner: LayerRunner
    captured: Captured
    pull: Tensor


@dataclass(frozen=True)
class Pass:
    """A forward pass: what each layer reads, [T, D] each, and what the last one gives of
    ``rows``, [R, D]."""

    rows: tuple[int, ...]
    states: list[Tensor]
    last: Tensor

    def of(self, rows: Sequence[int]) -> Tensor:
        """Some rows of what the last layer gives."""
        return self.last[[self.rows.index(row) for row in rows]]


class LayeredModel:
    """The model of ``checkpoint``, on its device, in float32. ``kept``: layers stay in
    memory once they are read, else each is read again for each pass."""

    def __init__(self, checkpoint: Checkpoint, kept: bool = True) -> None:
        self._checkpoint = checkpoint
        self._kept = kept
        self._layers: dict[int, LayerRunner] = {}
        self._passes: dict[Asked, Pass] = {}
        self._head = SlicedHead(checkpoint)

    @property
    def spec(self) -> DecoderSpec:
        return self._checkpoint.spec

    @property
    def device(self) -> torch.device:
        return self._checkpoint.device

    def logits(
        self,
        ids: Sequence[int],
        rows: Sequence[int],
        remembered: bool = False,
        advance: Advance = _unsaid,
        positions: Sequence[int] = (),
    ) -> Tensor:
        """[len(rows), V] float32: next-token logits of one sequence. ``remembered``: for
        the next gradients of scores of some of these rows, unless ``forget`` comes
        first. ``advance`` comes to 1. ``positions`` of the tokens, rising, with or
        without gaps; none: one after the other."""
        passed = self._passed(ids, rows, advance, positions)
        last: Tensor
        if remembered:
            *states, last = passed
            asked = tuple(ids), tuple(positions)
            self._passes[asked] = Pass(tuple(rows), states, last)
        else:
            (last,) = deque(passed, maxlen=1)
        return self._head.logits(last)

    def forget(self, ids: Sequence[int], positions: Sequence[int] = ()) -> None:
        """Let go of a pass that was remembered."""
        self._passes.pop((tuple(ids), tuple(positions)), None)

    def pulls(
        self,
        ids: Sequence[int],
        rows: Sequence[int],
        slopes_of: SlopesOf,
        advance: Advance = _unsaid,
        positions: Sequence[int] = (),
    ) -> Iterator[LayerPull]:
        """Every layer, the last one first, with the gradients of scores of the logits of
        ``rows``. ``advance`` comes to 1 with the forward pass; the layers are another.
        Of the last layer no other rows pass the MLP. ``positions``: as in ``logits``."""
        states, last = self._states(ids, rows, advance, positions)
        places = self._places(ids, positions)
        given = beside(self._checkpoint, self._ids(ids), states[0])
        shared = self._shared(states, places, given)
        after = self._head.pulls(last, slopes_of)  # [S, R, D]
        before = after.new_empty((len(after), *states[0].shape))  # [S, T, D]
        own_rows: Tensor | None = self._rows(rows)
        falling = range(self.spec.layers)[::-1]
        for layer, runner in zip(falling, self._runners(falling), strict=True):
            own = states.pop().clone().requires_grad_()
            with torch.enable_grad():
                captured = runner.run(own, places, own_rows, given)
            pull = before.new_empty((len(before), *captured.o.shape))
            attends = self.spec.attends(layer)
            made = [captured.hidden, *shared.made(layer)]
            wanted = [captured.o] if attends else []
            wanted += [*shared.read(layer), *([own] if layer else [])]
            for score, one in enumerate(after if wanted else ()):
                slopes = [one, *shared.slopes(layer, score)]
                again = score + 1 < len(after)
                found = torch.autograd.grad(made, wanted, slopes, retain_graph=again)
                left = [*found]
                if layer:
                    before[score] = left.pop()
                if attends:
                    pull[score] = left.pop(0)
                shared.add(layer, score, left)
            after, own_rows = before, None
            if not attends:
                continue
            detached = Captured(*(x.detach() for x in captured))
            del captured, own, wanted, made
            yield LayerPull(layer, runner, detached, pull)

    def _shared(
        self, states: Sequence[Tensor], places: Tensor, given: Beside
    ) -> SharedCaches:
        """Keys and values that several layers read, of what each layer reads; ``given``
        has them afterwards."""
        shape = self.spec.shape
        read = [layer for layer in range(shape.layers) if shape.readers(layer) > 1]
        for layer, runner in zip(read, self._runners(read), strict=True):
            runner(states[layer], places, None, given)
        return SharedCaches(shape, given)

    def _states(
        self,
        ids: Sequence[int],
        rows: Sequence[int],
        advance: Advance,
        positions: Sequence[int],
    ) -> tuple[list[Tensor], Tensor]:
        """Inputs of each layer, and what the last one gives of ``rows``."""
        known = self._passes.pop((tuple(ids), tuple(positions)), None)
        if known is not None and set(rows) <= set(known.rows):
            advance(1)
            return known.states, known.of(rows)
        *states, last = self._passed(ids, rows, advance, positions)
        return states, last

    def _passed(
        self,
        ids: Sequence[int],
        rows: Sequence[int],
        advance: Advance,
        positions: Sequence[int],
    ) -> Iterator[Tensor]:
        """Inputs of each layer, one after the other, and what the last one gives of
        ``rows``."""
        places = self._places(ids, positions)
        tokens = self._ids(ids)
        hidden = embed(self._checkpoint, tokens, places)
        given = beside(self._checkpoint, tokens, hidden)
        yield hidden
        every = range(self.spec.layers)
        for layer, runner in zip(every, self._runners(every), strict=True):
            own = self._rows(rows) if layer == every[-1] else None
            hidden = runner(hidden, places, own, given).hidden
            advance(1 / self.spec.layers)
            yield hidden

    def _ids(self, ids: Sequence[int]) -> Tensor:
        return torch.tensor(ids, device=self.device)

    def _rows(self, rows: Sequence[int]) -> Tensor:
        return torch.tensor(list(rows), device=self.device)

    def _places(self, ids: Sequence[int], positions: Sequence[int]) -> Tensor:
        given = positions or range(len(ids))
        return torch.tensor(given, device=self.device)

    def _runners(self, layers: Sequence[int]) -> Iterator[LayerRunner]:
        if not self._kept:
            read = ahead(self._read, layers, self.device)
            yield from read
            return
        for layer in layers:
            if layer not in self._layers:
                self._layers[layer] = self._read(layer)
            yield self._layers[layer]

    def _read(self, layer: int) -> LayerRunner:
        # Gradients pass what was read, whoever asked first.
        with torch.inference_mode(False):
            return LayerRunner(self._checkpoint, layer)
