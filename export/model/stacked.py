"""Tensors of a layer that the checkpoint stores in a way of their own: sinks, what
corrects a router's choice, the numbers of a learned activation, and all experts in one
stack, as numbers or in MXFP4 (gpt-oss).

MXFP4 (OCP Microscaling Formats 1.0): 32 codes of 4 bits (E2M1) share a scale of 8 bits
(E8M0, a power of two). Two codes are a byte, the first in its low bits. Codes run along
the inputs of each map, [E, out, in / 32, 16]; their scales are [E, out, in / 32].
"""

from __future__ import annotations

from collections.abc import Callable, Container
from dataclasses import replace

import torch.nn.functional as F
from torch import Tensor

from kvlathe.export.families import Experts
from kvlathe.export.model.fp4 import mxfp4_numbers
from kvlathe.export.model.spec import DecoderSpec

Read = Callable[[str], Tensor]
"""The folder's tensor of a name, as it is stored."""
SINKS = "attend.sinks"
CORRECTION = "experts.correction"
SCALAR = "scalar"
STREAM_SCALE = "stream_scale"
CURVE_PARTS = ("alpha_p", "alpha_n", "beta", "eps")
"""The numbers of an xIELU, as its module stores them."""
CURVE = tuple(f"curve.{part}" for part in CURVE_PARTS)
MAPS = {"gate": "experts_gate_up", "up": "experts_gate_up", "down": "experts_down"}
"""Name in the decoder's ``experts.<name>`` -> role."""
APART = {"gate": "experts_gate", "up": "experts_up", "down": "experts_down"}
"""The same, where gates and ups are stacks of their own."""
STACKED = ("experts.router", *(f"experts.{name}" for name in MAPS))
FACTORS = ("router_scale", "expert_scales", "experts_in_norm")
"""Roles of what is multiplied into routers and experts beside a dense MLP."""
BIASES = tuple(f"{name}_bias" for name in STACKED)
ROLES = {
    SINKS: ("sinks",),
    CORRECTION: ("router_correction",),
    SCALAR: ("scalar",),
    STREAM_SCALE: ("stream_scale",),
    **dict.fromkeys(CURVE, ("curve",)),
    **dict.fromkeys(
        (*STACKED, *BIASES), ("router", *MAPS.values(), *APART.values(), *FACTORS)
    ),
}
"""The family's roles that such tensors are stored under."""
BLOCK = 32


def own_names(spec: DecoderSpec, layer: int | None) -> tuple[str, ...]:
    """The decoder's names of such tensors of one layer; none around the layers."""
    if layer is None:
        return ()
    roles = spec.family.roles(layer)
    experts = spec.family.experts_of(layer)
    names: list[str] = []
    if experts is not None and experts.stacked:
        for name in STACKED:
            names += [name, f"{name}_bias"] if experts.biased else [name]
    if experts is not None and experts.corrected:
        names.append(CORRECTION)
    others = (*CURVE, SINKS, SCALAR, STREAM_SCALE)
    return (*names, *(one for one in others if ROLES[one][0] in roles))


def corrected_as_stored(spec: DecoderSpec, stored: Container[str]) -> DecoderSpec:
    """``spec`` without corrections, where a checkpoint with these tensors may lack them
    and does."""
    experts = spec.family.experts
    if experts is None or not experts.may_lack_correction:
        return spec
    name = spec.family.names["router_correction"]
    if any(name.replace("{i}", f"{i}") in stored for i in range(spec.layers)):
        return spec
    names = {x: at for x, at in spec.family.names.items() if x != "router_correction"}
    plain = replace(experts, corrected=False)
    return replace(spec, family=replace(spec.family, names=names, experts=plain))


def is_own(spec: DecoderSpec, name: str) -> bool:
    """Whether the decoder's tensor ``name`` is one of them."""
    layer, own = _split(name)
    return own in own_names(spec, layer)


def stored_shapes(spec: DecoderSpec) -> dict[str, tuple[int, ...]]:
    """The checkpoint's names of them, with their shapes."""
    found: dict[str, tuple[int, ...]] = {}
    for layer in range(spec.layers):
        own = own_names(spec, layer)
        if SINKS in own:
            found[_stored(spec, "sinks", layer)] = (spec.query_heads,)
        if SCALAR in own:
            found[_stored(spec, "scalar", layer)] = (1,)
        if STREAM_SCALE in own:
            found[_stored(spec, "stream_scale", layer)] = (spec.hidden_size,)
        if CURVE[0] in own:
            module = _stored(spec, "curve", layer)
            for part, shape in zip(CURVE_PARTS, ((1,), (1,), (), ()), strict=True):
                found[f"{module}.{part}"] = shape
        experts = spec.family.experts_of(layer)
        if experts is None:
            continue
        if CORRECTION in own:
            shape = (*experts.correction_lead, experts.count)
            found[_stored(spec, "router_correction", layer)] = shape
        if experts.stacked:
            found |= _stack_shapes(spec, experts, layer)
    return found


def _stack_shapes(
    spec: DecoderSpec, experts: Experts, layer: int
) -> dict[str, tuple[int, ...]]:
    """All experts of one layer, and the router."""
    count, hidden, inner = experts.count, spec.hidden_size, experts.intermediate_size
    router = _stored(spec, "router", layer)
    found: dict[str, tuple[int, ...]] = {f"{router}.weight": (count, hidden)}
    if experts.biased:
        found[f"{router}.bias"] = (count,)
    if experts.beside:
        found[_stored(spec, "router_scale", layer)] = (hidden,)
        found[_stored(spec, "expert_scales", layer)] = (count,)
        found[f"{_stored(spec, 'experts_in_norm', layer)}.weight"] = (hidden,)
    roles = spec.family.roles(layer)
    for role, ins, outs in (
        ("experts_gate_up", hidden, 2 * inner),
        ("experts_gate", hidden, inner),
        ("experts_up", hidden, inner),
        ("experts_down", inner, hidden),
    ):
        if role not in roles:
            continue
        stored = _stored(spec, role, layer)
        if experts.biased:
            found[f"{stored}_bias"] = (count, outs)
        if experts.mxfp4:
            blocks = (count, outs, ins // BLOCK)
            found[f"{stored}_blocks"] = (*blocks, BLOCK // 2)
            found[f"{stored}_scales"] = blocks
        else:
            found[stored] = (count, outs, ins) if experts.out_in else (count, ins, outs)
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
        return every.unflatten(0, (-1, spec.group(layer)))
    if own in (SCALAR, STREAM_SCALE):
        return stored(_stored(spec, own, layer)).float()
    if own in CURVE:
        return _of_curve(own, _stored(spec, "curve", layer), stored)
    if own == CORRECTION:
        every = stored(_stored(spec, "router_correction", layer)).float().flatten()
        return every[: spec.family.experts.count] if spec.family.experts else every
    _, _, part = own.partition(".")
    role = part.removesuffix("_bias")
    is_bias = role != part
    factor = _factor(spec, role, layer, stored)
    if role == "router":
        router = _stored(spec, "router", layer)
        if is_bias:
            return stored(f"{router}.bias").float()
        return (stored(f"{router}.weight").float().T * factor).contiguous()
    experts = spec.family.experts
    assert experts is not None
    apart = APART[role] in spec.family.roles(layer)
    at = _stored(spec, (APART if apart else MAPS)[role], layer)
    outputs = slice(None) if apart else _outputs(experts, role)
    if is_bias:
        bias = stored(f"{at}_bias").float()
        return bias if role == "down" else bias[:, None, outputs].contiguous()
    if experts.mxfp4:
        blocks = stored(f"{at}_blocks")[:, outputs]  # [E, out, n, 16]
        scales = stored(f"{at}_scales")[:, outputs]
        return mxfp4_numbers(blocks, scales).mT.contiguous()
    every = stored(at)
    every = every.mT if experts.out_in else every  # [E, in, out]
    return (every[..., outputs].float() * factor).contiguous()


def _factor(spec: DecoderSpec, role: str, layer: int, stored: Read) -> Tensor | float:
    """The factor of a map of experts beside a dense MLP. They and their router
    read rows of length 1 a dim: their norm's weight, the router's scale of its inputs,
    and what experts count, are in their maps."""
    experts = spec.family.experts_of(layer)
    if experts is None or not experts.beside:
        return 1.0
    end = ""
    if role == "router":
        own, places = "router_scale", (slice(None), None)  # [D, 1]
    elif role == "down":
        own, places = "expert_scales", (slice(None), None, None)  # [E, 1, 1]
    else:
        own, places, end = "experts_in_norm", (slice(None), None), ".weight"
    factor = stored(f"{_stored(spec, own, layer)}{end}").float()[places]
    return factor * spec.hidden_size**-0.5 if role == "router" else factor


def _outputs(experts: Experts, role: str) -> slice:
    """A map's outputs among those of its stored tensor."""
    if role == "down":
        return slice(None)
    part = ("gate", "up").index(role)
    if experts.halves:
        size = experts.intermediate_size
        return slice(part * size, (part + 1) * size)
    return slice(part, None, 2)  # gate and up are stored in turn


def _of_curve(own: str, module: str, stored: Read) -> Tensor:
    """[1] as ``xielu`` takes it: alphas are stored before a softplus."""
    part = own.partition(".")[2]
    number = stored(f"{module}.{part}").float().reshape(1)
    if part not in CURVE_PARTS[:2]:
        return number
    least = stored(f"{module}.beta").float() if part == "alpha_n" else 0.0
    return F.softplus(number) + least


def _split(name: str) -> tuple[int | None, str]:
    """``layers.3.attend.sinks`` -> (3, "attend.sinks")."""
    start, _, rest = name.partition(".")
    layer, _, own = rest.partition(".")
    return (int(layer), own) if start == "layers" else (None, name)


def _stored(spec: DecoderSpec, role: str, layer: int) -> str:
    return spec.family.roles(layer)[role].replace("{i}", str(layer))
