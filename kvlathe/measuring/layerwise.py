"""Both models at once, the uncompressed one and the plan's, layer by layer: one layer's
weights are in memory at a time, and those that the fold leaves as they are, once.

So a model is measured wherever it was calibrated. A layer costs a sequence about what
the one before did: after each of them it is known what the others will cost, and what
the time does not allow is left out early.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial

import torch
import torch.nn.functional as F
from torch import Tensor

from kvlathe.base.console import working
from kvlathe.export.attention.eager import AttendLayer
from kvlathe.export.attention.step import StepTensors
from kvlathe.export.folding.fold import fold
from kvlathe.export.methods.composition import Made
from kvlathe.export.model.blocks import Norm
from kvlathe.export.model.checkpoint import Checkpoint
from kvlathe.export.model.device import ahead
from kvlathe.export.model.layer import DecoderLayer, Widths
from kvlathe.export.model.layer_runner import (
    as_one,
    beside,
    embed,
    first_states,
    rotator,
    stream_products,
)
from kvlathe.export.search.sealed import SealedAttend
from kvlathe.layers.beside import Beside
from kvlathe.layers.decoder import logits, tied_head
from kvlathe.layers.temperature import query_factors
from kvlathe.measuring.sequences import Group, Passage
from kvlathe.plan.plan import CompressionPlan

FOLDED = ("q", "k", "v", "v_map", "o", "attend", "lift")
"""Parts of a layer that a fold may change."""
LEAST_TOKENS = 256
"""Tokens to which the shortest windows may be cut where there is no time for more."""
FIRST_TIMES = 2.0
"""How many times what is allowed the first group may take before it is cut: a few hundred
tokens say little of a cache, most of whose first page is never quantized."""
HEAD_COST = 2.0
"""Time of a number of the head, beside that of a number of a layer: its logits are also
compared."""


@dataclass(eq=False)
class Running:
    """A sequence on its way through the layers, from position ``start`` on: ``hidden``
    [T, D] in the uncompressed model and in the plan's (``planned`` None: it is only read
    uncompressed); ``beside``: what layers are given beside them."""

    ids: Tensor
    hidden: Tensor
    planned: Tensor | None
    start: int = 0
    beside: tuple[Beside, Beside] = field(default_factory=lambda: (Beside(), Beside()))

    def cut(self, tokens: int) -> None:
        """Go on with the first tokens alone: they never see what follows them."""
        self.ids, self.hidden = self.ids[:tokens], self.hidden[:tokens]
        if self.planned is not None:
            self.planned = self.planned[:tokens]
        self.beside = (self.beside[0].cut(tokens), self.beside[1].cut(tokens))


@dataclass(eq=False)
class Work:
    """A group on its way through the layers: each passage's sequence, and where it is an
    exercise, what the uncompressed model reads of its end. ``seconds``: of a layer, on the
    mean of those it passed; other work on the machine slows down single ones."""

    group: Group
    whole: list[Running] = field(default_factory=list)
    near: list[Running | None] = field(default_factory=list)
    seconds: float = 0.0

    @property
    def running(self) -> list[Running]:
        return [*self.whole, *(one for one in self.near if one is not None)]


class LayerPair:
    """One layer of both models on the checkpoint's device."""

    def __init__(self, models: BothModels, layer: int) -> None:
        self.layer = layer
        self.plans = [plan for plan, _ in models.made]
        self._layers: list[DecoderLayer] = []
        known: dict[str, Tensor] = {}
        for (plan, _), folded in zip(models.made, models.folded, strict=True):
            built = _layer(models.checkpoint, plan, layer)
            names = built.state_dict()
            for name in names:
                if name.partition(".")[0] in FOLDED or name not in known:
                    known[name] = folded[f"layers.{layer}.{name}"].float()
                built.load_state_dict({name: known[name]}, strict=False, assign=True)
            if built.attend is not None:
                built.attend = _exact(built.attend)
            self._layers.append(built.to(models.checkpoint.device).eval())
        self._rope = models.rope
        spec = models.checkpoint.spec
        self._rope_of = spec.rope_of[layer] if spec.ropes else 0
        self._temperature = spec.family.temperature
        self._numbers = sum(spec.shape.states)

    def advance(self, running: Running) -> None:
        """Put a sequence through the layer, in place."""
        running.hidden = self._after(running.hidden, running, 0)
        if running.planned is not None:
            running.planned = self._after(running.planned, running, 1)

    def _after(self, hidden: Tensor, running: Running, side: int) -> Tensor:
        """[T, D] of tokens from place ``start`` on, after the layer."""
        start, beside = running.start, running.beside[side]
        places = torch.arange(start, start + len(hidden), device=hidden.device)
        (factors,) = query_factors(self._temperature, places, (self.layer,))
        step = self._step(hidden, start, side)
        layer = self._layers[side]
        return layer(hidden, step, query_factors=factors, beside=beside)[0]

    def _step(self, hidden: Tensor, start: int, side: int) -> StepTensors:
        """A whole sequence with nothing cached."""
        tokens, device = len(hidden), hidden.device
        places = torch.arange(tokens, dtype=torch.int32, device=device)
        cos, sin = None, None
        if self._rope is not None:
            cos, sin = self._rope(start + places, torch.float32)[self._rope_of]
        ends = torch.tensor([0, tokens], dtype=torch.int32, device=device)
        buckets = len(self.plans[side].index.buckets)
        lengths = torch.zeros((1, buckets), dtype=torch.int32, device=device)
        states = first_states(hidden, self._numbers)
        return StepTensors(cos, sin, ends, places, lengths, **states)


def _layer(checkpoint: Checkpoint, plan: CompressionPlan, layer: int) -> DecoderLayer:
    """Without weights."""
    spec = checkpoint.spec
    with torch.device("meta"):
        attend = None
        if spec.attends(layer):
            attend = AttendLayer(plan, plan.model.source(layer), spec.scale(layer))
        widths = Widths.folded(spec, plan, layer)
        return DecoderLayer(spec, layer, widths, attend, torch.float32)


def _exact(attend: torch.nn.Module) -> torch.nn.Module:
    """Attention as a decode computes it, in blocks of queries wherever a whole square
    of scores would have to be in memory."""
    assert isinstance(attend, AttendLayer)
    index = attend.plan.index
    if index.seals or index.sees_less or not attend.plan.model.shifts:
        return SealedAttend.of(attend)
    return attend


class BothModels:
    """The uncompressed model and a plan's, of one checkpoint. ``whole`` and ``planned``:
    plan and basis of either; neither may rank tokens. Without ``planned``, the
    uncompressed model alone."""

    def __init__(
        self, checkpoint: Checkpoint, whole: Made, planned: Made | None
    ) -> None:
        self.checkpoint = checkpoint
        self.made = [whole] if planned is None else [whole, planned]
        self.folded: list[Mapping[str, Tensor]] = [
            fold(checkpoint, *one) for one in self.made
        ]
        self.rope = rotator(checkpoint.spec, checkpoint.device)

    @torch.inference_mode()
    def run(
        self,
        groups: Sequence[Group],
        seconds: float,
        doing: str = "measuring what the plan loses",
    ) -> list[Work]:
        """The groups that ``seconds`` allow, through all layers. The first is always
        among them, if need be cut to its first LEAST_TOKENS tokens. ``doing``: that,
        for who watches."""
        deadline = time.monotonic() + seconds
        longer = (FIRST_TIMES - 1) * seconds
        layers = self.checkpoint.spec.layers
        works = [Work(group) for group in groups]
        pairs = ahead(
            lambda i: LayerPair(self, i), range(layers), self.checkpoint.device
        )
        began = time.monotonic()
        with working(f"{doing}, layer by layer", layers) as advance:
            for layer, pair in enumerate(pairs):
                loading = time.monotonic() - began
                left = layers - layer
                works = self._through(pair, works, deadline - loading * left, left)
                advance(1)
                ahead_of = (left - 1) * loading
                works = self._in_time(works, deadline - ahead_of, longer, left - 1)
                began = time.monotonic()
        return works

    def _through(
        self, pair: LayerPair, works: list[Work], deadline: float, left: int
    ) -> list[Work]:
        """Put each work through a layer of those that are ``left``, unless it begins and
        what others took says that it will not end in time."""
        kept: list[Work] = []
        if not pair.layer:
            self._warm(pair, works[0].group.passages[0])
        for work in works:
            if not work.whole:
                if kept and not self._fits(work, kept, deadline, left):
                    continue
                self._begin(work)
            started = time.monotonic()
            for running in work.running:
                pair.advance(running)
            self._wait()
            took = time.monotonic() - started
            work.seconds += (took - work.seconds) / (pair.layer + 1)
            kept.append(work)
        return kept

    def _warm(self, pair: LayerPair, passage: Passage) -> None:
        """A first product takes longer than the next, and would be taken for all."""
        pair.advance(self._running(passage.ids[:LEAST_TOKENS], planned=True))
        self._wait()

    def _fits(self, work: Work, others: list[Work], deadline: float, left: int) -> bool:
        rate = max(other.seconds / other.group.read for other in others)
        a_layer = rate * work.group.read
        behind = sum(other.seconds for other in others)
        total = left * a_layer + (left - 1) * behind + self._heads([*others, work])
        return time.monotonic() + total <= deadline

    def _in_time(
        self, works: list[Work], deadline: float, longer: float, left: int
    ) -> list[Work]:
        """The works that can end in time, given how long each took in a layer. The first
        may take ``longer``."""
        works = list(works)

        def late(by: float = 0.0) -> bool:
            behind = left * sum(work.seconds for work in works)
            return time.monotonic() + behind + self._heads(works) > deadline + by

        while late() and len(works) > 1:
            last = max(
                works[1:], key=lambda work: (work.group.later, work.group.tokens)
            )
            works.remove(last)
        while late(longer) and works[0].group.tokens > LEAST_TOKENS:
            _halve(works[0])
        return works

    def _heads(self, works: Sequence[Work]) -> float:
        """Seconds that logits will take, by what layers take: both are products."""
        if not works:
            return 0.0
        spec = self.checkpoint.spec
        hidden = spec.hidden_size
        numbers = hidden * (2 * hidden + 3 * spec.family.intermediate_size)
        share = HEAD_COST * spec.vocab_size * hidden / numbers
        rate = works[0].seconds / works[0].group.read
        rows = sum(len(x.rows) for work in works for x in work.group.passages)
        return rate * share * rows

    def _begin(self, work: Work) -> None:
        for passage in work.group.passages:
            whole = self._running(passage.ids, planned=True, start=passage.start)
            work.whole.append(whole)
            near = None
            if passage.near is not None:
                near = self._running(passage.ids[passage.near :], planned=False)
            work.near.append(near)

    def _running(self, ids: Sequence[int], planned: bool, start: int = 0) -> Running:
        device = self.checkpoint.device
        tokens = torch.tensor(ids, device=device)
        places = torch.arange(start, start + len(ids), device=device)
        hidden = embed(self.checkpoint, tokens, places)
        both = planned and len(self.made) > 1
        inputs = beside(self.checkpoint, tokens, hidden).inputs
        given = Beside(inputs), Beside(inputs)
        return Running(tokens, hidden, hidden if both else None, start, given)

    def _wait(self) -> None:
        if self.checkpoint.device.type == "cuda":
            torch.cuda.synchronize(self.checkpoint.device)

    @cached_property
    def head(self) -> Callable[[Tensor], Tensor]:
        """Hidden states [R, D] after the last layer -> logits [R, V] float32."""
        spec = self.checkpoint.spec
        folded = self.folded[0]
        norm = Norm(
            spec.family.norm, spec.hidden_size, spec.family.norm_eps, torch.float32
        )
        state = {name: folded[f"norm.{name}"].float() for name in norm.state_dict()}
        norm.load_state_dict(state, assign=True)
        if spec.tied_head:
            product = tied_head(folded["embed.weight"].float())
        else:
            bias = folded["head.bias"].float() if spec.family.head_bias else None
            weight = folded["head.weight"].float().T  # [V, D]
            product = partial(F.linear, weight=weight, bias=bias)
        softcap = spec.family.logit_softcap
        streams = stream_products(self.checkpoint, "out")
        return lambda x: logits(norm(as_one(x, streams)), product, softcap)


def _halve(work: Work) -> None:
    """Cut every passage of a work to half its tokens."""
    tokens = max(LEAST_TOKENS, work.group.tokens // 2)
    passages = tuple(passage.cut(tokens) for passage in work.group.passages)
    work.group = Group(tokens, passages)
    for running in work.whole:
        running.cut(tokens)
    work.seconds /= 2
