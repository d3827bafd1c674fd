"""Wiring: what a decoder's weights do not say of it. It travels in decoder.json."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from kvlathe.layers.bounds import Bound
from kvlathe.layers.gated import HeadPlaces
from kvlathe.layers.latent import LatentForm
from kvlathe.layers.mixers import Mixing
from kvlathe.layers.routing import Routing
from kvlathe.layers.temperature import Temperature


@dataclass(frozen=True)
class LayerWiring:
    """Where layers differ, or values pass a norm (Gemma 4). ``head_dim``: of the layer's
    queries. ``turned``: where keys are made of values, so many of their dims turn.
    ``ranks``: of the values of each lane, after their norm and their map; empty where
    they have no map."""

    head_dim: int
    turned: int = 0
    ranks: tuple[int, ...] = ()


@dataclass(frozen=True)
class Wiring:
    """``norm``: rms or layer. ``activation``: a key of ACTIVATIONS. ``parallel``: the
    MLP reads the layer's input, not the attention's output. ``scales``: what each
    layer's scores are multiplied by before the softmax. ``ropes``: which of the
    rotations each layer has; empty where there is one, or none. ``outputs``: where each
    layer's heads lie in what attention gives; empty without gates. ``latent``: that which
    heads share. ``mixing``: of the layers ``mixes``, which keep a state. ``own``: of each
    layer, where they differ; else empty. The others as in
    Family (export/families/family.py).
    """

    norm: str
    norm_eps: float
    activation: str
    parallel: bool
    head_dim: int
    scales: tuple[float, ...]
    ropes: tuple[int, ...] = ()
    wide_qk_norm: bool = False
    norm_after_rope: bool = False
    soft_gates: bool = False
    logit_softcap: float = 0.0
    bounds: tuple[Bound | None, ...] = ()
    routing: Routing | None = None
    expert_limits: tuple[float, ...] = ()
    temperature: Temperature | None = None
    outputs: tuple[HeadPlaces, ...] = ()
    latent: LatentForm | None = None
    mixing: Mixing | None = None
    mixes: tuple[int, ...] = ()
    streams: int = 0
    own: tuple[LayerWiring, ...] = ()

    def bound(self, layer: int) -> Bound | None:
        """That of a layer's MLP."""
        return self.bounds[layer] if self.bounds else None

    def routing_of(self, layer: int) -> Routing | None:
        """That of a layer's experts."""
        if self.routing is None or not self.expert_limits:
            return self.routing
        return replace(self.routing, limit=self.expert_limits[layer])

    @classmethod
    def from_json(cls, raw: dict[str, Any]) -> Wiring:
        """JSON has lists where this has tuples."""
        fields = dict(raw)
        for name in ("scales", "ropes", "mixes", "expert_limits"):
            fields[name] = tuple(raw.get(name, ()))
        fields["outputs"] = tuple(map(_places, raw.get("outputs", ())))
        fields["bounds"] = tuple(x and Bound(**x) for x in raw.get("bounds", ()))
        if fields.get("routing"):
            fields["routing"] = Routing(**fields["routing"])
        if given := fields.get("temperature"):
            own = {"layers": tuple(given.get("layers", ()))}
            fields["temperature"] = Temperature(**given | own)
        if given := fields.get("latent"):
            fields["latent"] = LatentForm(**given)
        if given := fields.get("mixing"):
            fields["mixing"] = Mixing(**given)
        fields["own"] = tuple(_own_of(**one) for one in raw.get("own", ()))
        return cls(**fields)


def _own_of(head_dim: int, turned: int, ranks: list[int]) -> LayerWiring:
    return LayerWiring(head_dim, turned, tuple(ranks))


def _places(layer: list[list[int]]) -> HeadPlaces:
    return tuple((first, rank) for first, rank in layer)
