"""Tensors of a layer that the checkpoint stores under names without an ending: sinks,
and all experts in one stack, as numbers or in MXFP4 (gpt-oss).

MXFP4 (OCP Microscaling Formats 1.0): 32 codes of 4 bits (E2M1) share a scale of 8 bits
(E8M0, a power of two). Two codes are a byte, the first in its low bits. Codes run along
the inputs of each map, [E, out, in / 32, 16]; their scales are [E, out, in / 32].
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from kvlathe.export.model.spec import DecoderSpec

Read = Callable[[str], Tensor]
"""The folder's tensor of a name, as it is stored."""
SINKS = "attend.sinks"
MAPS = {"gate": "experts_gate_up", "up": "experts_gate_up", "down": "experts_down"}
"""Name in the decoder's ``experts.<name>`` -> role."""
STACKED = (
    "experts.router",
    "experts.router_bias",
    *(f"experts.{name}{end}" for name in MAPS for end in ("", "_bias")),
)
ROLES = {
    SINKS: ("sinks",),
    **dict.fromkeys(STACKED, ("router", *MAPS.values())),
}
"""The family's roles that such tensors are stored under."""
E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
"""Values of the codes; with the highest bit, their negatives."""
BLOCK = 32
EXPONENT_BIAS = 127


def own_names(spec: DecoderSpec) -> tuple[str, ...]:
    """The decoder's names of such tensors of one layer."""
    experts = spec.family.experts
    names = STACKED if experts is not None and experts.stacked else ()
    return (*names, SINKS) if "sinks" in spec.family.names else names


def is_own(spec: DecoderSpec, name: str) -> bool:
    """Whether the decoder's tensor ``name`` is one of them."""
    return _split(name)[1] in own_names(spec)


def stored_shapes(spec: DecoderSpec) -> dict[str, tuple[int, ...]]:
    """The checkpoint's names of them, with their shapes."""
    family = spec.family
    found: dict[str, tuple[int, ...]] = {}
    for layer in range(spec.layers):
        if "sinks" in family.names:
            found[_stored(spec, "sinks", layer)] = (spec.query_heads,)
        experts = family.experts
        if experts is None or not experts.stacked:
            continue
        count, hidden, inner = (
            experts.count,
            spec.hidden_size,
            experts.intermediate_size,
        )
        router = _stored(spec, "router", layer)
        found[f"{router}.weight"] = (count, hidden)
        found[f"{router}.bias"] = (count,)
        for role, ins, outs in (
            ("experts_gate_up", hidden, 2 * inner),
            ("experts_down", inner, hidden),
        ):
            stored = _stored(spec, role, layer)
            found[f"{stored}_bias"] = (count, outs)
            if experts.mxfp4:
                blocks = (count, outs, ins // BLOCK)
                found[f"{stored}_blocks"] = (*blocks, BLOCK // 2)
                found[f"{stored}_scales"] = blocks
            else:
                found[stored] = (count, ins, outs)
    return found


def bytes_names(spec: DecoderSpec) -> set[str]:
    """Stored tensors that hold bytes, not numbers."""
    ends = ("_blocks", "_scales")
    return {name for name in stored_shapes(spec) if name.endswith(ends)}


def read(spec: DecoderSpec, name: str, stored: Read) -> Tensor:
    """The decoder's tensor ``name``, float32, where ``stored`` puts tensors."""
    layer, own = _split(name)
    assert layer is not None
    if own == SINKS:
        every = stored(_stored(spec, "sinks", layer)).float()
        return every.unflatten(0, (spec.kv_heads, spec.group_size))
    _, _, part = own.partition(".")
    role = part.removesuffix("_bias")
    is_bias = role != part
    if role == "router":
        router = _stored(spec, "router", layer)
        if is_bias:
            return stored(f"{router}.bias").float()
        return stored(f"{router}.weight").float().T.contiguous()
    first = ("gate", "up").index(role) if role != "down" else 0
    step = 1 if role == "down" else 2  # gate and up are stored in turn
    at = _stored(spec, MAPS[role], layer)
    if is_bias:
        bias = stored(f"{at}_bias").float()
        return bias if role == "down" else bias[:, None, first::step].contiguous()
    experts = spec.family.experts
    assert experts is not None
    if not experts.mxfp4:
        return stored(at)[..., first::step].float().contiguous()
    blocks = stored(f"{at}_blocks")[:, first::step]  # [E, out, n, 16]
    return dequantize(blocks, stored(f"{at}_scales")[:, first::step]).mT.contiguous()


def dequantize(blocks: Tensor, scales: Tensor) -> Tensor:
    """blocks uint8 [..., n, 16], scales uint8 [..., n] -> float32 [..., 32 n]."""
    levels = torch.tensor([*E2M1, *(-x for x in E2M1)], device=blocks.device)  # [16]
    numbers = levels[torch.stack([blocks & 15, blocks >> 4], -1).int()].flatten(-2)
    return torch.ldexp(numbers, (scales.int() - EXPONENT_BIAS)[..., None]).flatten(-2)


def _split(name: str) -> tuple[int | None, str]:
    """``layers.3.attend.sinks`` -> (3, "attend.sinks")."""
    start, _, rest = name.partition(".")
    layer, _, own = rest.partition(".")
    return (int(layer), own) if start == "layers" else (None, name)


def _stored(spec: DecoderSpec, role: str, layer: int) -> str:
    return spec.family.names[role].replace("{i}", str(layer))
