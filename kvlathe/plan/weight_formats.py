"""The number formats of a decoder's weights, where they have fewer bits than what it
computes in.

A map [in, out] is cut into groups along its inputs. Each group of each output has a
scale: weight = (code - zero) * scale. The zero is the middle of the codes, unless it is
stored. fp8 codes are e4m3 numbers (arXiv 2209.05433), and have none.
"""

from __future__ import annotations

from dataclasses import dataclass

FLOATS = ("float32", "float16")
BITS = {"int8": 8, "int4": 4, "fp8": 8}


@dataclass(frozen=True, slots=True)
class WeightFormat:
    """``group``: inputs that share a scale, a power of two; 0 for all of an output's.
    ``zeros``: whether groups have zeros of their own."""

    name: str
    group: int
    zeros: bool = False

    @property
    def bits(self) -> int:
        return BITS[self.name]

    def groups(self, inputs: int) -> int:
        """The groups of a map with so many inputs. The last one may be filled up."""
        return -(-inputs // self.group) if self.group else 1

    def bytes_of(self, inputs: int, outputs: int, scale: int) -> int:
        """Bytes of a map; ``scale``: bytes of a number of its scales."""
        groups = self.groups(inputs)
        codes = groups * (self.group or inputs) * self.bits // 8
        zeros = -(-groups * self.bits // 8) if self.zeros else 0
        return outputs * (codes + scale * groups + zeros)


@dataclass(frozen=True, slots=True)
class WeightFormats:
    """Formats of the maps of the layers, and of the embedding and the head. None: what
    the engine computes in."""

    maps: WeightFormat | None = None
    table: WeightFormat | None = None


PLAIN = WeightFormats()
"""Weights in what the engine computes in, everywhere."""
