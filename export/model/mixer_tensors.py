"""Tensors of layers that keep a state: their names and shapes in the checkpoint, and the
cuts that make the decoder's own of them.

The decoder's names are ``layers.<i>.mixer.<role>``; roles are those of Mixer. Outputs of
``project`` and ``gates`` are in the order of kvlathe/layers/mixers.py.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from kvlathe.export.families.family import Mixer
from kvlathe.export.model.spec import DecoderSpec

Read = Callable[[str], Tensor]
"""The folder's tensor of a name, as it is stored."""
PREFIX = "mixer."
MAPS = ("project", "gates", "out")


def own_names(spec: DecoderSpec, layer: int) -> tuple[str, ...]:
    """The decoder's names of such tensors of one layer, after its number."""
    mixer = spec.family.mixer_of(layer)
    if mixer is None:
        return ()
    names: list[str] = []
    for role in mixer.names:
        if role in MAPS:
            names.append(f"{role}.weight")
            names += [f"{role}.bias"] if mixer.bias else []
        elif role == "conv":
            names += [f"taps.{tap}" for tap in range(mixer.mixing.taps)]
            names += ["conv_bias"] if mixer.conv_bias else []
        else:
            names.append(role)
    return tuple(f"{PREFIX}{name}" for name in names)


def is_own(name: str) -> bool:
    """Whether the decoder's tensor ``name`` is one of them."""
    return name.startswith("layers.") and name.split(".", 2)[2].startswith(PREFIX)


def stored_shapes(spec: DecoderSpec) -> dict[str, tuple[int, ...]]:
    """The checkpoint's names of them, with their shapes."""
    found: dict[str, tuple[int, ...]] = {}
    for layer in range(spec.layers):
        mixer = spec.family.mixer_of(layer)
        for role in mixer.names if mixer else ():
            assert mixer is not None
            for name, shape in _role_shapes(spec, mixer, role).items():
                found[name.replace("{i}", str(layer))] = shape
    return found


def _role_shapes(
    spec: DecoderSpec, mixer: Mixer, role: str
) -> dict[str, tuple[int, ...]]:
    names, own = mixer.names[role], mixer.mixing
    if role == "conv":
        found: dict[str, tuple[int, ...]] = {}
        for name, channels in zip(names, _channels(mixer), strict=True):
            found[f"{name}.weight"] = (channels, 1, own.taps)
            if mixer.conv_bias:
                found[f"{name}.bias"] = (channels,)
        return found
    if role not in MAPS:
        width = own.heads
        if role == "norm":
            width = own.value_dim if own.kind == "delta" else own.inner
        return {names[0]: (width,)}
    found = {}
    inputs = own.inner if role == "out" else spec.hidden_size
    for name, rows in zip(names, _outputs(spec, mixer, role), strict=True):
        found[f"{name}.weight"] = (rows, inputs)
        if mixer.bias:
            found[f"{name}.bias"] = (rows,)
    return found


def _channels(mixer: Mixer) -> tuple[int, ...]:
    """Channels of each of the modules that hold the convolution: all, or those of
    queries, keys and values."""
    own = mixer.mixing
    keys = own.groups * own.key_dim
    return (keys, keys, own.inner) if len(mixer.names["conv"]) > 1 else (own.channels,)


def _outputs(spec: DecoderSpec, mixer: Mixer, role: str) -> tuple[int, ...]:
    """Rows of each of the modules that hold a map."""
    own, apart = mixer.mixing, len(mixer.names[role]) > 1
    if role == "out":
        return (spec.hidden_size,)
    if own.kind == "conv":
        return (3 * own.channels,)
    if mixer.stored == "space":
        return (own.inner + own.channels + own.heads,)
    parts = (own.channels, own.inner) if role == "project" else (own.heads, own.heads)
    if len(mixer.names[role]) > len(parts):
        keys = own.groups * own.key_dim
        return keys, keys, own.inner, own.inner
    return parts if apart else (sum(parts),)


def _rows(mixer: Mixer, role: str) -> Tensor | slice:
    """Rows of what is stored that a map has, in order."""
    own = mixer.mixing
    if mixer.stored == "space" and role == "project":
        gates, channels, _ = _ranges(own.inner, own.channels, own.heads)
        return torch.cat([channels, gates])
    if mixer.stored == "space" and role == "gates":
        return _ranges(own.inner, own.channels, own.heads)[2]
    if mixer.stored != "group" or role == "out":
        return slice(None)
    each = own.heads // own.groups
    sizes = [own.key_dim, own.key_dim, each * own.value_dim, each * own.value_dim]
    if role == "gates":
        sizes = [each, each]
    by_group = torch.arange(own.groups * sum(sizes)).unflatten(0, (own.groups, -1))
    return torch.cat([part.flatten() for part in by_group.split(sizes, 1)])


def _scales(mixer: Mixer, role: str) -> Tensor:
    """The factor of each output of a state space's map."""
    own = mixer.mixing
    gates, values, keys, queries, steps = mixer.factors
    if role == "gates":
        return torch.full((own.heads,), steps)
    size = own.groups * own.key_dim
    parts = ((own.inner, values), (size, keys), (size, queries), (own.inner, gates))
    return torch.cat([torch.full((count,), factor) for count, factor in parts])


def _ranges(*sizes: int) -> tuple[Tensor, ...]:
    return torch.arange(sum(sizes)).split(list(sizes))


def read(spec: DecoderSpec, name: str, stored: Read) -> Tensor:
    """The decoder's tensor ``name``, float32, where ``stored`` puts tensors."""
    _, number, end = name.split(".", 2)
    role, _, kind = end.removeprefix(PREFIX).partition(".")
    mixer = spec.family.mixer_of(int(number))
    assert mixer is not None
    first = "conv" if role in ("taps", "conv_bias") else role
    at = [one.replace("{i}", number) for one in mixer.names[first]]
    if role == "taps":
        taps = [stored(f"{one}.weight")[:, 0, int(kind)].float() for one in at]
        return torch.cat(taps)
    if role == "conv_bias":
        return torch.cat([stored(f"{one}.bias").float() for one in at])
    if role == "decay":
        return -stored(at[0]).float().exp()
    if role not in MAPS:
        number_of = stored(at[0]).float()
        return number_of.unsqueeze(-1) if role == "skip" else number_of
    whole = torch.cat([stored(f"{one}.{kind}").float() for one in at])
    rows = _rows(mixer, role)
    part = whole[rows.to(whole.device) if isinstance(rows, Tensor) else rows]
    if role == "out":
        part = part * mixer.factor
    elif mixer.factors:
        part = part * _scales(mixer, role).to(part.device)[:, None]
    return part.T.contiguous() if kind == "weight" else part
