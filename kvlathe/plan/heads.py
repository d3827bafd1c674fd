"""The shape of a model's attention, and what every head of it caches."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

RANK_MULTIPLE = 16
"""Ranks are multiples of this: one 16-wide matrix-unit step, one 32-byte sector in 16
bit."""


@dataclass(frozen=True, slots=True)
class Lane:
    """One (layer, KV head): how its Q and K are projected and how many dimensions of K
    and V are cached.

    ``input_dim`` is the width of this lane's rows of q (each query head) and of k as
    they reach Attend, before RoPE. ``rope`` says what Attend does to them: rotate every
    plane (``full``), rotate the planes listed in ``planes`` (the input holds only
    those, first halves then second halves), or nothing (``none``).
    ``projected``: Q and K then pass their matrices A and B [input_dim, rank_k] inside
    Attend. A lane that is not projected has ``rank_k`` = input_dim rounded up to 16
    (the padding is cached as zeros and counted).
    ``fill_from``: a removed lane (ranks 0) whose output is the output of that KV head
    of the same layer; fold adds its W_O to that head's, so a removed lane costs nothing
    at run time and does not appear in Attend.
    ``values_in_keys``: V is the first ``rank_v`` dims of K as it is cached, and no page
    holds it apart.
    """

    layer: int
    head: int
    input_dim: int
    rank_k: int
    rank_v: int
    rope: Literal["full", "none", "planes"] = "full"
    planes: tuple[int, ...] = ()
    projected: bool = False
    fill_from: int | None = None
    values_in_keys: bool = False

    @property
    def removed(self) -> bool:
        return self.rank_k == 0

    def row(self, side: str) -> int:
        """Numbers in a token's row of pages that K or V is read from ("k" or "v")."""
        return self.rank_k if side == "k" or self.values_in_keys else self.rank_v

    @property
    def numbers(self) -> int:
        """Numbers of a token that are cached."""
        return self.rank_k if self.values_in_keys else self.rank_k + self.rank_v


@dataclass(frozen=True, slots=True)
class HeadShape:
    """KV heads of a layer, and dims of a key of each. ``turned``: of keys and values that
    are made of one map, the dims that RoPE turns; 0 where that is not so, or where
    nothing can be stored once (docs/models.md)."""

    kv_heads: int
    head_dim: int
    turned: int = 0


@dataclass(frozen=True, slots=True)
class ModelShape:
    """The attention shape a plan was made for. ``max_positions`` in tokens.

    ``own_heads``: those of each layer, where layers differ; ``kv_heads`` and
    ``head_dim`` are then the most that any layer has. ``sources``: the layer whose keys
    and values each layer reads, an earlier one or itself; empty where all read their
    own. A layer that reads another's caches nothing, and so does one without heads.

    ``states``: numbers, of 32 bits, of the state that each layer keeps of a sequence
    beside its cache or in place of it; empty where none does (docs/hybrids.md).

    ``softcap``: scores are softcap * tanh(score / softcap) before the softmax; 0 leaves
    them (Gemma 2, arXiv 2408.00118). ``sinks``: each query head has a learned logit
    beside its scores, whose value is zero (gpt-oss; attention sinks, arXiv 2309.17453).
    ``values``: dims of a value that the model has, where keys have more: zeros fill it up
    to theirs, and are of no uncompressed cache (MiMo V2); 0: as many.
    ``latent``: a value is the first so many dims of its key (MLA, arXiv 2405.04434); 0:
    values are of their own, and as wide as keys.
    """

    layers: int
    query_heads: int
    kv_heads: int
    head_dim: int
    hidden_size: int
    vocab_size: int
    max_positions: int
    softcap: float = 0.0
    sinks: bool = False
    latent: int = 0
    own_heads: tuple[HeadShape, ...] = ()
    sources: tuple[int, ...] = ()
    states: tuple[int, ...] = ()
    values: int = 0

    def source(self, layer: int) -> int:
        """The layer whose cache a layer reads."""
        return self.sources[layer] if self.sources else layer

    def heads(self, layer: int) -> HeadShape:
        """The heads that a layer reads."""
        if not self.own_heads:
            return HeadShape(self.kv_heads, self.head_dim)
        return self.own_heads[self.source(layer)]

    def lanes(self, layer: int) -> int:
        """KV heads that a layer caches."""
        return self.heads(layer).kv_heads if self.source(layer) == layer else 0

    def lanes_before(self, layer: int) -> int:
        """Those of all layers before it."""
        if self.alike:
            return layer * self.kv_heads
        return sum(map(self.lanes, range(layer)))

    @property
    def places(self) -> tuple[tuple[int, int], ...]:
        """(layer, KV head) of everything that is cached, in order."""
        layers = range(self.layers)
        return tuple((i, head) for i in layers for head in range(self.lanes(i)))

    def states_before(self, layer: int) -> int:
        """Numbers of the states of all layers before one."""
        return sum(self.states[:layer])

    @property
    def state_bytes(self) -> int:
        """Bytes of what all layers keep of one sequence, however long it is."""
        return 4 * sum(self.states)

    @property
    def alike(self) -> bool:
        """Whether all layers have the same heads, each its own."""
        return not (self.own_heads or self.sources)

    @property
    def alike_heads(self) -> bool:
        """Whether all layers that have heads have the same ones, each its own."""
        found = {one for one in self.own_heads if one.kv_heads}
        return len(found) < 2 and not self.sources

    def part(self, layers: range) -> ModelShape:
        """That of some layers alone, counted from 0, which read no others' caches."""
        own = self.own_heads[layers.start : layers.stop]
        sources = self.sources[layers.start : layers.stop]
        return replace(
            self,
            layers=len(layers),
            own_heads=own,
            sources=tuple(source - layers.start for source in sources),
            states=self.states[layers.start : layers.stop],
        )

    def value_dim(self, layer: int) -> int:
        """Dims of a value of a layer."""
        return self.latent or self.heads(layer).head_dim

    @property
    def numbers(self) -> int:
        """Numbers of one token that the uncompressed cache of all layers holds."""
        of_key = [self.heads(layer).head_dim for layer, _ in self.places]
        if self.latent:
            return sum(of_key)
        return sum(of_key) + sum(self.values or dims for dims in of_key)

    @property
    def shifts(self) -> bool:
        """Whether scores may all be shifted by one number: softmax then ignores it."""
        return not (self.softcap or self.sinks)

    @property
    def group_size(self) -> int:
        """Query heads for each KV head, where layers are alike."""
        return self.query_heads // self.kv_heads

    def group(self, layer: int) -> int:
        """Query heads for each KV head of a layer; 0 where it has none."""
        heads = self.heads(layer).kv_heads
        return self.query_heads // heads if heads else 0

    def readers(self, layer: int) -> int:
        """Layers that read a layer's cache, itself included."""
        return self.sources.count(layer) if self.sources else 1
