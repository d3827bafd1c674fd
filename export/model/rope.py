"""Rope: a model's rotary positions as data: a frequency and an amplitude for each
plane, and where a plane's dims lie.

Canonical order of a head's d dims: plane j is the pair (j, j + d/2), for all d/2
planes. A model that turns only the first ``rotary_dim`` dims of a head keeps them as
its first planes; the other dims become planes of frequency 0.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from kvlathe.base.errors import KvlatheError

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedConfig

    from kvlathe.export.families import Family

SUPPORTED = (
    *("default", "linear", "dynamic", "yarn", "longrope", "llama3"),
    "proportional",
)


@dataclass(frozen=True, slots=True)
class Rope:
    """``inv_freq`` [d/2] radians a token; ``amplitude`` [d/2] multiplies cos and sin
    (YaRN, LongRoPE; 1 elsewhere)."""

    inv_freq: tuple[float, ...]
    amplitude: tuple[float, ...]
    rotary_dim: int
    interleaved: bool = False
    short_length: int | None = None
    """LongRoPE: transformers turns sequences of up to this many tokens by other factors
    than these. None where these are right for every sequence that is served."""

    @property
    def order(self) -> list[int]:
        """[d]: canonical dim c is the checkpoint's dim order[c]."""
        half = self.rotary_dim // 2
        if self.interleaved:
            dims = self.rotary_dim
            turned = [*range(0, dims, 2)], [*range(1, dims, 2)]
        else:
            turned = [*range(half)], [*range(half, self.rotary_dim)]
        unturned = len(self.inv_freq) - half
        middle = self.rotary_dim + unturned
        first = [*turned[0], *range(self.rotary_dim, middle)]
        return [*first, *turned[1], *range(middle, middle + unturned)]

    @property
    def still(self) -> Rope:
        """One that turns nothing, for layers without positions."""
        planes = len(self.inv_freq)
        return replace(self, inv_freq=(0.0,) * planes, amplitude=(1.0,) * planes)


def read_ropes(
    config: PreTrainedConfig,
    head_dims: Sequence[int],
    max_seq_len: int,
    family: Family,
) -> tuple[tuple[Rope, ...], tuple[int, ...]]:
    """The rotations of a model without learned positions, and which of them each layer
    has; ``head_dims`` of each layer. Raises as ``read_rope``."""
    if family.rope_parameters:
        config = copy.copy(config)
        config.rope_parameters = dict(family.rope_parameters)
    kinds = family.ropes or ("",) * config.num_hidden_layers
    of_layers = list(zip(kinds, head_dims, strict=True))
    found: dict[tuple[str | None, int], Rope] = {}
    for kind, dims in of_layers:
        if kind is not None and (kind, dims) not in found:
            rope = read_rope(config, dims, max_seq_len, family, kind)
            found[kind, dims] = rope
    turning = list(dict.fromkeys(found.values()))
    for kind, dims in of_layers:
        if kind is None:
            whole = Rope((1.0,) * (dims // 2), (1.0,) * (dims // 2), dims)
            alike = (x for x in turning if 2 * len(x.inv_freq) == dims)
            found[kind, dims] = next(alike, whole).still
    ropes = list(dict.fromkeys([*turning, *found.values()]))
    places = [ropes.index(found[of_layer]) for of_layer in of_layers]
    return tuple(ropes), tuple(places)


def read_rope(
    config: PreTrainedConfig,
    head_dim: int,
    max_seq_len: int,
    family: Family,
    kind: str = "",
) -> Rope:
    """The rotation that transformers applies to sequences of up to ``max_seq_len``
    tokens, in layers of this ``kind``, a key of rope_parameters where it has several.

    transformers chooses LongRoPE's short or long factors by the length of the sequence
    at hand. Cached keys cannot turn again when a sequence grows, so they are chosen
    here once, by ``max_seq_len``; ``short_length`` says where that differs.
    Dynamic NTK scaling changes nothing up to the model's own length.
    Raises KvlatheError for other kinds of scaling, and a partial rotation where the
    family has none.
    """
    parameters = _parameters(config, family, kind)
    try:
        turning = Turning(config, parameters, head_dim, kind)
        rotated, scale = turning.frequencies(max_seq_len)
        short_length = turning.short_length(max_seq_len)
    except (KeyError, TypeError, ValueError, RuntimeError, ZeroDivisionError) as error:
        raise KvlatheError(
            "the RoPE parameters of config.json cannot be used",
            str(error),
            "correct config.json",
        ) from error
    left = head_dim // 2 - len(rotated)
    if left < 0:
        raise KvlatheError(
            f"RoPE turns {2 * len(rotated)} dims of {head_dim}",
            "a head has no more",
            "correct config.json",
        )
    turned = -rotated if family.backward else rotated
    return Rope(
        inv_freq=(*turned.tolist(), *[0.0] * left),
        amplitude=(*[float(scale)] * len(rotated), *[1.0] * left),
        rotary_dim=2 * len(rotated),
        interleaved=family.interleaved,
        short_length=short_length,
    )


def _parameters(config: PreTrainedConfig, family: Family, kind: str) -> dict[str, Any]:
    """Parameters of layers of a ``kind``; refuses what ``read_rope`` cannot read."""
    parameters = config.rope_parameters or {}
    if kind:
        parameters = parameters.get(kind) or {}
    form = parameters.get("rope_type")
    if form not in SUPPORTED:
        raise KvlatheError(
            f"the RoPE type {form!r} is not supported",
            "",
            f"choose a model with one of {', '.join(SUPPORTED)}",
        )
    factor = parameters.get("partial_rotary_factor", 1.0)
    if not family.partial_rotary and factor != 1.0:
        raise KvlatheError(
            "config.json sets partial_rotary_factor",
            f"{config.model_type} turns whole heads",
            "correct config.json",
        )
    return parameters


@dataclass(frozen=True)
class Turning:
    """RoPE of layers of one ``kind``, as transformers computes it from
    ``parameters``."""

    config: PreTrainedConfig
    parameters: dict[str, Any]
    head_dim: int
    kind: str

    def short_length(self, max_seq_len: int) -> int | None:
        """The length up to which LongRoPE has other factors than at ``max_seq_len``."""
        if self.parameters["rope_type"] != "longrope":
            return None
        name = "original_max_position_embeddings"
        original = self.parameters.get(name) or getattr(self.config, name, None)
        if not original or max_seq_len <= original:
            return None
        short, _ = self.frequencies(original)
        long, _ = self.frequencies(max_seq_len)
        return None if bool((short == long).all()) else int(original)

    def frequencies(self, max_seq_len: int) -> tuple[torch.Tensor, float]:
        """Radians a token of every plane that turns, and the amplitude."""
        import torch
        from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

        form = self.parameters["rope_type"]
        if form != "default":
            more = {"layer_type": self.kind} if self.kind else {}
            return ROPE_INIT_FUNCTIONS[form](self.config, seq_len=max_seq_len, **more)
        dim = int(self.head_dim * self.parameters.get("partial_rotary_factor", 1.0))
        exponents = torch.arange(0, dim, 2, dtype=torch.float) / dim
        return 1.0 / (self.parameters["rope_theta"] ** exponents), 1.0
