"""An ordinary checkpoint whose heads are rotated, and which computes the same.

For lane (KV head) h with its query heads g, and orthogonal S:

    V   W_V <- W_V S,  b_V <- b_V S,  W_O[g] <- S^T W_O[g]      (v S S^T = v)
    K   W_K <- W_K S,  b_K <- b_K S,  the same of W_Q and b_Q   (q S (k S)^T = q k^T)

K turns only where nothing stands between W_K and the scores: no norm of q and k, and
the dims that RoPE leaves alone. S spreads every channel over all of them, so that one
scale a token serves them better, in any engine that quantizes its cache (QuaRot, arXiv
2404.00456). Tensors stay where they are, in their own number format: they are rounded
once more. Peak memory: one file of weights, and copies of one tensor.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from kvlathe.export.bases.hadamard import hadamard
from kvlathe.export.model.checkpoint import Checkpoint
from kvlathe.export.model.spec import DecoderSpec
from kvlathe.export.model.tensors import cut, stored_name

QUERIES, KEYS, VALUES, OUTPUTS = "q", "k", "v", "o"


@dataclass(frozen=True)
class HeadRotations:
    """Random rotations of every lane of a model, drawn from ``seed``."""

    spec: DecoderSpec
    seed: int

    def of_values(self, layer: int) -> Tensor:
        """[H, d, d] float64"""
        own = self.spec.heads(layer)
        heads, d = range(own.kv_heads), own.head_dim
        return torch.stack([self._drawn(layer, head, 1, d) for head in heads])

    def of_keys(self, layer: int) -> Tensor:
        """[H, d, d] float64, in Rope's canonical order: the identity but on the dims
        that do not turn."""
        own = self.spec.heads(layer)
        every = torch.eye(own.head_dim, dtype=torch.double).repeat(own.kv_heads, 1, 1)
        free = self.free(layer)
        for head in range(len(every) if len(free) else 0):
            every[head, free[:, None], free] = self._drawn(layer, head, 0, len(free))
        return every

    def free(self, layer: int) -> Tensor:
        """The dims of K that may be rotated. One alone would gain nothing."""
        spec = self.spec
        if "q_norm" in spec.family.names:
            return torch.arange(0)
        if not spec.ropes:
            return torch.arange(spec.heads(layer).head_dim)
        rope = spec.ropes[spec.rope_of[layer]]
        planes = zip(rope.inv_freq, rope.amplitude, strict=True)
        still = torch.tensor([pair == (0.0, 1.0) for pair in planes])
        return still.repeat(2).nonzero()[:, 0]

    def _drawn(self, layer: int, head: int, side: int, size: int) -> Tensor:
        rng = np.random.default_rng((self.seed, layer, head, side))
        return torch.from_numpy(hadamard(size, rng))


class RotatedCheckpoint:
    """``checkpoint`` with every head rotated. ``keys``: layers whose K is, too."""

    def __init__(self, checkpoint: Checkpoint, seed: int = 0) -> None:
        self._checkpoint = checkpoint
        self._rotations = HeadRotations(checkpoint.spec, seed)

    @property
    def keys(self) -> list[int]:
        layers = range(self._checkpoint.spec.layers)
        attending = filter(self._checkpoint.spec.attends, layers)
        return [layer for layer in attending if len(self._rotations.free(layer))]

    def write(self, folder: Path) -> None:
        """The files of weights, under their own names. Raises KvlatheError for one that
        cannot be read."""
        for file in self._checkpoint.files:
            tensors = load_file(file)
            for name, stored in tensors.items():
                tensors[name] = self.rotated(name, stored)
            save_file(tensors, folder / file.name, {"format": "pt"})

    def rotated(self, name: str, stored: Tensor) -> Tensor:
        """The folder's tensor ``name``, rotated; itself where it has no part in
        that."""
        result = stored
        for own, layer, role in self._parts.get(name, ()):
            if result is stored:
                result = stored.clone()
            self._rotate(own, layer, role, result)
        return result

    @cached_property
    def _parts(self) -> dict[str, list[tuple[str, int, str]]]:
        """Stored tensor that changes -> the decoder's tensors in it, their layers and
        roles."""
        found: dict[str, list[tuple[str, int, str]]] = {}
        for own, layer, role in self._changed():
            stored = stored_name(self._checkpoint.spec, own)
            name = self._checkpoint.aliases.get(stored, stored)
            found.setdefault(name, []).append((own, layer, role))
        return found

    def _changed(self) -> Iterator[tuple[str, int, str]]:
        turned = set(self.keys)
        for layer in range(self._checkpoint.spec.layers):
            roles = [VALUES, *([QUERIES, KEYS] if layer in turned else [])]
            kinds = [(role, kind) for role in roles for kind in ("weight", "bias")]
            for role, kind in (*kinds, (OUTPUTS, "weight")):
                own = f"layers.{layer}.{role}.{kind}"
                if self._checkpoint.has(own):
                    yield own, layer, role

    def _rotate(self, name: str, layer: int, role: str, stored: Tensor) -> None:
        """Rotate the decoder's tensor ``name`` where it lies in ``stored``."""
        spec = self._checkpoint.spec
        # What finds a tensor in the stored one finds the places of its numbers, too.
        places = torch.arange(stored.numel()).view(stored.shape)
        place = cut(spec, name, places).contiguous()
        flat = stored.view(-1)
        before = flat[place.view(-1)].view(place.shape).double()
        own = spec.heads(layer)
        if role == OUTPUTS:
            turn = self._rotations.of_values(layer)
            heads = before.unflatten(0, (own.kv_heads, -1, own.head_dim))
            after = torch.einsum("hgdo,hde->hgeo", heads, turn)
        else:
            of = (
                self._rotations.of_values if role == VALUES else self._rotations.of_keys
            )
            heads = before.unflatten(-1, (own.kv_heads, -1, own.head_dim))
            after = torch.einsum("...hgd,hde->...hge", heads, of(layer))
        flat[place.view(-1)] = after.reshape(-1).to(stored.dtype)
