"""The decoder of the cuda backend: the folded model in torch, with as few kernels a
layer as plain torch allows.

What a layer computes is defined in kvlathe/layers/decoder.py, for this backend and for
the exporter. Here are its products: q, k and v are one, so are gate and up, and the
products add to the residual themselves. The tensors have the exporter's names; how
layers are wired comes with them in decoder.json (export/model/weights_file.py).

Sizes: T packed tokens of a step, R logit rows, D hidden size, d head dim, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from kvlathe.layers.decoder import (
    RowMap,
    joined,
    logits,
    rope_angles,
    rope_names,
    run_layer,
    tied_head,
)
from kvlathe.layers.gated import HeadOutputs
from kvlathe.layers.latent import keys_of_values, turned_queries
from kvlathe.layers.mixers import MixerMemory, Mixing, mix
from kvlathe.layers.rows import Rows, xielu
from kvlathe.layers.streams import narrowed, widened
from kvlathe.layers.temperature import query_factors
from kvlathe.layers.wiring import LayerWiring, Wiring
from kvlathe.runtime.sessions.adapters import LoadedAdapter
from kvlathe.runtime.sessions.torch_cuda.model.adapters import AdaptedMap, AdapterRows
from kvlathe.runtime.sessions.torch_cuda.model.coded import Product, coded_product
from kvlathe.runtime.sessions.torch_cuda.model.grouped_experts import (
    GroupedExperts,
    experts_map,
)
from kvlathe.runtime.sessions.torch_cuda.model.latent import LatentMaps
from kvlathe.runtime.sessions.torch_cuda.model.linear import (
    LayerMap,
    Linear,
    QkvMaps,
    beside,
    has_map,
    output_map,
)
from kvlathe.runtime.sessions.torch_cuda.model.mixer import mixer_parts
from kvlathe.runtime.sessions.torch_cuda.model.own_parts import (
    LayerParts,
    inputs_of,
    products,
)
from kvlathe.runtime.sessions.torch_cuda.model.rows import FusedRows
from kvlathe.runtime.sessions.torch_cuda.model.shard_group import OneShard, ShardGroup

Angles = tuple[Tensor, Tensor]
"""cos and sin of the tokens of a step, [T, d / 2] each."""
Attend = Callable[
    [
        int,
        Tensor,
        Tensor | None,
        Tensor | None,
        Angles | None,
        Mapping[str, Tensor],
    ],
    Tensor,
]
"""(layer, q, k, v, (cos, sin), Attend's weights by name) -> o; K and V are in
the cache afterwards. None in place of k and v: the layer reads another's cache."""

Memories = Callable[[int, Mixing], MixerMemory]
"""(where a layer's numbers begin in a sequence's state, its mixing) -> its states in a
step."""

ALIGNMENT = 8
"""Elements: rows of q, k and v begin at multiples of 16 bytes."""
ONE_SHARD = OneShard()


class TorchDecoder:
    """Runs a packed step. ``tensors`` is emptied while the layers take theirs: a large
    model exists once."""

    def __init__(
        self,
        wiring: Wiring,
        tensors: dict[str, Tensor],
        rows: Rows | None = None,
        group: ShardGroup = ONE_SHARD,
        first_token: int = 0,
        adapts: bool = False,
    ) -> None:
        """``rows``: norms and gated activations, torch's where it is not given.
        ``adapts``: whether adapters may be loaded.
        ``group``: the shards of the weights, of which ``tensors`` are one;
        ``first_token``: of this shard's part of the vocabulary."""
        rows = rows or FusedRows()
        self.wiring, self.group, self.first_token = wiring, group, first_token
        self.layers = [
            _Layer(wiring, i, rows, _taken(tensors, f"layers.{i}."), group)
            for i in range(len(wiring.scales))
        ]
        self.layer_inputs = inputs_of(wiring, rows, tensors)
        self.adapter_rows = AdapterRows()
        self.adapted: list[AdaptedMap] = []
        if adapts:
            for i, layer in enumerate(self.layers):
                self.adapted += layer.adapted(f"layers.{i}.", self.adapter_rows)
        self.embed = tensors["embed.weight"]
        self.positions = tensors.get("positions.weight")
        head = tensors.get("head.weight")
        bias = tensors.get("head.bias")
        self.head = tied_head(self.embed) if head is None else Linear(head, bias)
        self.last_norm = _norm(wiring, rows, _taken(tensors, "norm."))
        self.to_streams, self.of_streams = (
            products([*_taken(tensors, f"stream_{way}_").values()])
            for way in ("in", "out")
        )
        self.guess_join = None
        if "guess_join.weight" in tensors:
            self.guess_join = Linear(tensors["guess_join.weight"], None)
            own = (_taken(tensors, f"guess_{one}_norm.") for one in ("embed", "hidden"))
            before, after = (_norm(wiring, rows, weights) for weights in own)
            self.guess_norms = before, after
        self.ropes = _ropes(_taken(tensors, "rope."))
        self._firsts = _first_numbers(wiring)

    def load_adapters(self, adapters: Sequence[LoadedAdapter]) -> None:
        """Have these adapters, and no others."""
        self.adapter_rows.device = self.embed.device
        for one in self.adapted:
            one.load(adapters, self.embed.dtype)
        self.adapter_rows.keep({one.layout for one in self.adapted})

    @property
    def sinks(self) -> list[Tensor]:
        """Sink logits [H, G] of each layer; none where the model has none."""
        found = [layer.projections.get("sinks") for layer in self.layers]
        return [sinks for sinks in found if sinks is not None]

    @torch.inference_mode()
    def __call__(
        self, input_ids: Tensor, positions: Tensor, logit_rows: Tensor, attend: Attend
    ) -> Tensor:
        """input_ids, positions [T], logit_rows [R] int32 -> logits [R, V], or of this
        shard's tokens."""
        x = self.embedded(input_ids, positions)
        inputs = self.inputs(input_ids, x)
        layers = range(len(self.layers))
        given = attend, logit_rows, None, inputs
        x = self.run(x, positions, layers, *given)
        return self.logits(self.norm(x))

    def embedded(
        self, input_ids: Tensor, positions: Tensor, hidden: Tensor | None = None
    ) -> Tensor:
        """The input of the first layer [T, D]. ``hidden`` [T, D]: of a decoder that
        guesses, what the model gave."""
        x = self._embedded(input_ids)
        if self.positions is not None:
            x = x + F.embedding(positions, self.positions)
        x = self.group.sum(x)
        if self.to_streams:
            return widened(x, self.to_streams)
        if hidden is None or self.guess_join is None:
            return x
        return joined(x, hidden, *self.guess_norms, self.guess_join)

    def norm(self, x: Tensor) -> Tensor:
        """x [R, D], which left the last layer -> [R, D], which the head reads."""
        return self.last_norm(narrowed(x, self.of_streams) if self.of_streams else x)

    def inputs(self, input_ids: Tensor, x: Tensor) -> Tensor | None:
        """Embeddings of tokens for each layer [T, L, P], of which the first one reads ``x``
        [T, D]; None where layers are given none."""
        return None if self.layer_inputs is None else self.layer_inputs(input_ids, x)

    def run(
        self,
        x: Tensor,
        positions: Tensor,
        layers: range,
        attend: Attend,
        rows: Tensor | None = None,
        memories: Memories | None = None,
        inputs: Tensor | None = None,
    ) -> Tensor:
        """x [T, D] after ``layers``; x itself may hold it, too. With ``rows`` [R], which
        tokens leave the last of them: [R, D]. ``memories``: where layers keep states.
        ``inputs``: as of `inputs`."""
        angles = self._angles(positions, x.dtype)
        every = range(len(self.layers))
        factors = query_factors(self.wiring.temperature, positions, every)
        ropes = self.wiring.ropes or (0,) * len(self.layers)
        for i in layers:
            leave = rows if i == layers[-1] else None
            if leave is not None:
                self.adapter_rows.leave(leave)
            rope = angles[ropes[i]]
            memory = None
            if memories is not None and self.wiring.mixing and i in self._firsts:
                memory = memories(self._firsts[i], self.wiring.mixing)
            own = None if inputs is None else inputs[:, i]
            given = rope, leave, factors[i], memory, own
            x = self.layers[i](x, partial(attend, i), *given)
        return x

    def logits(self, x: Tensor) -> Tensor:
        """[R, V] of tokens that left the last layer and its norm [R, D]."""
        return logits(x, self.head, self.wiring.logit_softcap)

    def _embedded(self, input_ids: Tensor) -> Tensor:
        """[T, D]: zeros for tokens of other shards."""
        if self.group.size == 1:
            return F.embedding(input_ids, self.embed)
        places = input_ids - self.first_token
        foreign = (places < 0) | (places >= len(self.embed))
        rows = F.embedding(places.masked_fill(foreign, 0), self.embed)
        return rows.masked_fill_(foreign[:, None], 0)

    def _angles(self, positions: Tensor, dtype: torch.dtype) -> list[Angles | None]:
        """cos and sin of each rotation."""
        found: list[Angles | None] = []
        for rope in self.ropes:
            cos, sin = rope_angles(positions, *rope)
            found.append((cos.to(dtype), sin.to(dtype)))
        return found or [None]


def _ropes(tensors: dict[str, Tensor]) -> list[Angles]:
    """Frequencies and amplitudes of each rotation."""
    found: list[Angles] = []
    while (names := rope_names(len(found)))[0] in tensors:
        inv_freq, amplitude = (tensors[name] for name in names)
        found.append((inv_freq, amplitude))
    return found


def _first_numbers(wiring: Wiring) -> dict[int, int]:
    """The place in a sequence's state where the numbers of each layer begin."""
    if wiring.mixing is None:
        return {}
    each = wiring.mixing.numbers
    return {layer: each * i for i, layer in enumerate(sorted(wiring.mixes))}


class _Layer:
    """One layer; ``tensors`` by role."""

    out_gate: LayerMap | None
    qkv_maps: LatentMaps | QkvMaps
    o: LayerMap
    gate_up_map: LayerMap
    down: LayerMap | None

    def __init__(
        self,
        wiring: Wiring,
        layer: int,
        rows: Rows,
        tensors: dict[str, Tensor],
        group: ShardGroup,
    ) -> None:
        self.group, self.norm_after_rope = group, wiring.norm_after_rope
        own = wiring.own[layer] if wiring.own else LayerWiring(wiring.head_dim)
        self.head_dim, self.turned = own.head_dim, own.turned
        self.k_weight = tensors.get("k_norm.weight")
        self.activation, self.parallel = wiring.activation, wiring.parallel
        self.rows, self.bound = rows, wiring.bound(layer)

        def norm(role: str) -> RowMap | None:
            if f"{role}.weight" not in tensors:
                return None
            return _norm(wiring, rows, _taken(tensors, f"{role}."))

        self.wide_qk_norm, self.soft_gates = wiring.wide_qk_norm, wiring.soft_gates
        self.attn_norm = norm("attn_norm")
        self.attn_out_norm = norm("attn_out_norm")
        self.mlp_norm = norm("mlp_norm")
        self.mlp_out_norm = norm("mlp_out_norm")
        of_heads = norm
        if wiring.wide_qk_norm and group.size > 1:
            of_heads = partial(_wide_norm, tensors, wiring.norm_eps, group)
        self.q_norm, self.k_norm = of_heads("q_norm"), of_heads("k_norm")
        self.experts = _experts(wiring, layer, _taken(tensors, "experts."), group)
        self.parts = LayerParts(wiring, own, rows, tensors, norm)
        curve = _taken(tensors, "curve.")
        self.curve = partial(xielu, **curve) if curve else None
        shared_gate = tensors.pop("shared_gate.weight", None)
        self.shared_gate = None if shared_gate is None else Linear(shared_gate, None)
        gate_up_roles = [role for role in ("gate", "up") if has_map(tensors, role)]
        self.is_gated = "gate" in gate_up_roles
        product = rows.product if isinstance(rows, FusedRows) else coded_product
        self.attends = has_map(tensors, "o")
        if self.attends:
            self._add_attention(wiring, layer, tensors, product)
        self.mixing = wiring.mixing
        self.mixer = mixer_parts(_taken(tensors, "mixer."), product)
        if gate_up_roles:
            both = beside(tensors, gate_up_roles, 1, product)
            self.gate_up_map, self.gate_up_widths = both
        self.down = (
            output_map(tensors, "down", group, product) if gate_up_roles else None
        )
        self.projections = _taken(tensors, "attend.")

    def _add_attention(
        self, wiring: Wiring, layer: int, tensors: dict[str, Tensor], product: Product
    ) -> None:
        self.out_gate, self.whole_heads = _out_gates(wiring, layer, tensors, product)
        self.caches = has_map(tensors, "k")
        if wiring.latent is None:
            self.qkv_maps = QkvMaps(tensors, ALIGNMENT, product)
        else:
            given = wiring.latent, self.rows, tensors, product, ALIGNMENT
            self.qkv_maps = LatentMaps(*given)
        self.turns = wiring.latent is not None or self.norm_after_rope
        self.o = output_map(tensors, "o", self.group, product)

    def adapted(self, at: str, rows: AdapterRows) -> list[AdaptedMap]:
        """Have maps that take adapters, in place of those that do not. ``at``: before
        their names."""
        found: list[AdaptedMap] = []

        def taking(
            own: LayerMap,
            roles: Sequence[str],
            widths: Sequence[int] = (),
            early: bool = False,
        ) -> AdaptedMap:
            names = [f"{at}{role}" for role in roles]
            found.append(AdaptedMap(own, names, widths, rows, early))
            return found[-1]

        if self.attends and isinstance(self.qkv_maps, QkvMaps):
            maps = self.qkv_maps
            maps.together = taking(maps.together, maps.roles, maps.widths, early=True)
            self.o = taking(self.o, ["o"])
            if self.out_gate is not None:
                self.out_gate = taking(self.out_gate, ["out_gate"])
        if self.down is not None:
            roles = ["gate", "up"] if self.is_gated else ["up"]
            self.gate_up_map = taking(self.gate_up_map, roles, self.gate_up_widths)
            self.down = taking(self.down, ["down"])
        return found

    def __call__(
        self,
        x: Tensor,
        attend: Callable[..., Tensor],
        angles: Angles | None,
        rows: Tensor | None = None,
        query_factors: Tensor | None = None,
        memory: MixerMemory | None = None,
        inputs: Tensor | None = None,
    ) -> Tensor:
        """x [T, D] becomes the next layer's, in place; with ``rows`` [R], that of these
        tokens alone, [R, D]. Queries times ``query_factors`` [T, 1]. ``memory``: of a
        layer that keeps a state. ``inputs`` [T, P]: what the layer is given of the
        tokens."""

        turned = angles if self.attends and self.turns else None
        left = angles if turned is None else None
        if turned is not None and self.norm_after_rope:
            left = torch.ones_like(turned[0]), torch.zeros_like(turned[1])

        def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            if self.turned and angles is not None:
                q, k = self._with_turned(q, k, v, angles)
            given = (k, v) if self.caches else (None, None)
            o = attend(q, *given, left, self.projections)
            return o if rows is None else o.index_select(0, rows)

        def mixed(x: Tensor) -> Tensor:
            assert self.mixing and self.mixer and memory is not None
            return mix(self.mixing, self.mixer, x, memory)

        attends = attention if self.attends else None
        mixes = None if self.mixer is None else mixed
        predicted = None
        if self.parts.streams is not None:
            predicted = self.parts.streams.predicted(x)
            x = predicted[:, 0]
        own = self.parts.of_step(inputs, rows, self.experts, predicted)
        given = rows, query_factors, turned, mixes, own
        return run_layer(self, x, attends, *given)

    def _with_turned(
        self, q: Tensor, k: Tensor, v: Tensor, angles: Angles
    ) -> tuple[Tensor, Tensor]:
        """q and k of heads whose keys begin with their values."""
        assert self.k_weight is not None
        form = (self.head_dim, self.turned), angles
        return turned_queries(q, self.k_weight, *form), keys_of_values(k, v, *form)

    def qkv(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return self.qkv_maps(x)

    def gate_up(self, x: Tensor) -> tuple[Tensor | None, Tensor]:
        both = self.gate_up_map(x)
        if not self.is_gated:
            return None, both
        gate, up, _ = both.split_with_sizes(self.gate_up_widths, -1)
        return gate, up

    def add_o(self, x: Tensor, o: Tensor) -> Tensor:
        part = self.o.begin(x, o)
        # The sum of a parallel block waits for that of the MLP; experts have none.
        waits = self.parallel and self.experts is None
        return part if waits else self.group.sum(part)

    def add_down(self, x: Tensor, inner: Tensor) -> Tensor:
        assert self.down is not None
        if self.parallel:  # x is this shard's part of what o gave: one sum for both
            return self.group.sum(self.down.add_to(x, inner))
        return self.group.sum(self.down.begin(x, inner))

    def add_experts(self, x: Tensor, read: Tensor) -> Tensor:
        assert self.experts is not None
        if isinstance(self.experts, GroupedExperts):
            return self.experts(read, x)
        return x + self.experts(read)


def _out_gates(
    wiring: Wiring, layer: int, tensors: dict[str, Tensor], product: Product
) -> tuple[LayerMap | None, RowMap]:
    """The map of gates, and what turns attention's output back before them."""
    lift = _taken(tensors, "lift.")
    if not lift:
        return None, lambda o: o
    gates, _ = beside(tensors, ["out_gate"], 1, product)
    return gates, HeadOutputs(wiring.outputs[layer], lift["weight"], lift["bias"])


def _experts(
    wiring: Wiring, layer: int, tensors: dict[str, Tensor], group: ShardGroup
) -> RowMap | None:
    """Every shard has some columns of each expert."""
    routing = wiring.routing_of(layer)
    if not tensors or routing is None:
        return None
    own = experts_map(tensors, routing, wiring.activation)
    return own if group.size == 1 else lambda x: group.sum(own(x))


def _norm(wiring: Wiring, rows: Rows, tensors: dict[str, Tensor]) -> RowMap:
    weight = tensors["weight"]
    bias = tensors.get("bias")
    eps = wiring.norm_eps
    return lambda x: rows.norm(x, weight, bias, eps)


def _wide_norm(
    tensors: dict[str, Tensor], eps: float, group: ShardGroup, role: str
) -> RowMap:
    """An RMS norm of rows of which every shard has a part."""
    weight = tensors.pop(f"{role}.weight")
    width = int(group.sum(torch.tensor([len(weight)], device=weight.device)))

    def norm(x: Tensor) -> Tensor:
        wide = x.float()
        squares = group.sum(wide.square().sum(-1, keepdim=True))
        wide = wide * torch.rsqrt(squares / width + eps)
        return weight * wide.to(x.dtype)

    return norm


def _taken(tensors: dict[str, Tensor], prefix: str) -> dict[str, Tensor]:
    """Those whose names begin with ``prefix``, without it, taken out of ``tensors``."""
    names = [name for name in tensors if name.startswith(prefix)]
    taken: dict[str, Tensor] = {}
    for name in names:
        taken[name.removeprefix(prefix)] = tensors.pop(name)
    return taken
