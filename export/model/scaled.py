"""Linear maps as codes of 4 or 8 bits with scales beside them: FP8 of Hugging Face and
DeepSeek, and what compressed-tensors and ModelOpt write (export/model/scaled_config.py
says which of them a folder has).

A weight is number * scale. A scale is of one weight block, as many outputs and inputs as
the scheme says; with NVFP4 all of them are times, or divided by, one more. Integers may
have a zero: (number - zero) * scale. FP4 is E2M1, two codes a byte, the first in its low
bits; scales of MX formats are E8M0, powers of two (OCP Microscaling Formats 1.0).

Sizes: N outputs, K inputs, R x G blocks of them. Experts in one stack have a dim before.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from kvlathe.base.errors import KvlatheError
from kvlathe.export.model.fp4 import fp4_numbers, powers_of_two
from kvlathe.export.model.packed import HeaderOf, Read, unpack_words
from kvlathe.export.model.quantize import Grid
from kvlathe.layers.coded_weight import middle

FLOATS = ("F32", "BF16", "F16")
EXPONENTS = ("U8", "F8_E8M0")


@dataclass(frozen=True)
class Numbers:
    """``dtype``: of what is stored; ``many``: codes in one of it; ``bits``: of an
    integer code, 0 for floats."""

    dtype: str
    many: int = 1
    bits: int = 0


E4M3 = Numbers("F8_E4M3")
E2M1 = Numbers("U8", 2)
INT8 = Numbers("I8", 1, 8)
WORDS = {4: Numbers("I32", 8, 4), 8: Numbers("I32", 4, 8)}
"""Integers in words of 32 bits, the middle code for 0, by their bits."""


@dataclass(frozen=True)
class Parts:
    """The names of a map's tensors: ends that follow the name of its weight.
    ``whole``: the scale of all scales, which ``divides`` them or multiplies; none where
    empty."""

    scales: str = "_scale"
    codes: str = ""
    whole: str = ""
    divides: bool = False

    zeros = "_zero_point"
    order = "_g_idx"
    shape = "_shape"


@dataclass(frozen=True)
class Scheme:
    """``block``: outputs and inputs that share a scale, 0 for all of them.
    ``scale_dtypes``: how scales may be stored. ``symmetric``: without zeros."""

    numbers: Numbers
    block: tuple[int, int]
    parts: Parts
    scale_dtypes: tuple[str, ...] = FLOATS
    symmetric: bool = True

    def blocks(self, outputs: int, inputs: int) -> tuple[int, int]:
        """Blocks of a map along its outputs and its inputs; the last may be cut."""
        rows, columns = self.block
        return -(-outputs // (rows or outputs)), -(-inputs // (columns or inputs))


class ScaledMap:
    """The map whose weight a folder calls ``name``, stored as ``scheme`` says.
    ``header_of`` and ``read`` give its parts."""

    def __init__(
        self,
        scheme: Scheme,
        name: str,
        read: Read,
        header_of: HeaderOf,
    ) -> None:
        self.scheme, self.name = scheme, name
        self._read, self._header = read, header_of

    def checked(self, shape: tuple[int, ...]) -> set[str]:
        """The names of its parts. ``shape``: [N, K], or [E, N, K]. Raises KvlatheError
        where a part is missing, misshapen, or holds what it cannot, and where they
        contradict one another."""
        parts, numbers = self.scheme.parts, self.scheme.numbers
        *lead, outputs, inputs = shape
        blocks = self.scheme.blocks(outputs, inputs)
        self._check(
            parts.codes, (*lead, outputs, -(-inputs // numbers.many)), (numbers.dtype,)
        )
        self._check(
            parts.scales, (*lead, *blocks), self.scheme.scale_dtypes, loose=True
        )
        found = [parts.codes, parts.scales]
        if parts.whole:
            self._check(parts.whole, tuple(lead), FLOATS, loose=True)
            found.append(parts.whole)
        if parts.codes == "_packed" and numbers.bits:
            self._check(parts.shape, (len(shape),), ("I64", "I32"))
            if self._part(parts.shape).tolist() != list(shape):
                raise self._wrong(f"{parts.shape} is not {list(shape)}")
            found.append(parts.shape)
        if self._has(parts.zeros) or not self.scheme.symmetric:
            self._check_zeros((outputs, blocks[1]))
            found.append(parts.zeros)
        if self._has(parts.order):
            self._check_order(inputs, blocks[1])
            found.append(parts.order)
        return {f"{self.name}{part}" for part in found}

    def _check(
        self,
        part: str,
        shape: tuple[int, ...],
        dtypes: tuple[str, ...],
        loose: bool = False,
    ) -> None:
        """``loose``: whatever dims of 1 it has: one scale may be [], [1] or [1, 1]."""
        header = self._header(f"{self.name}{part}")
        called = self._called(part)
        if header is None:
            raise self._wrong(f"there is no {called}")
        found, wanted = header[0], shape
        if loose:
            found, wanted = _without_ones(found), _without_ones(wanted)
        if found != wanted:
            raise self._wrong(
                f"{called} has shape {list(header[0])}, and should have {list(shape)}"
            )
        if header[1] not in dtypes:
            raise self._wrong(
                f"{called} is {header[1]}, and should be {' or '.join(dtypes)}"
            )

    def _check_zeros(self, shape: tuple[int, int]) -> None:
        bits = self.scheme.numbers.bits
        if not bits:
            raise self._wrong("floats have no zeros")
        header = self._header(f"{self.name}{self.scheme.parts.zeros}")
        if header is not None and header[1] == "I32":
            words = (-(-shape[0] * bits // 32), shape[1])
            self._check(self.scheme.parts.zeros, words, ("I32",))
        else:
            self._check(self.scheme.parts.zeros, shape, ("I8",), loose=True)
        zeros = self._zeros(shape)
        if bool((zeros.abs() > middle(bits)).any()):
            raise self._wrong(f"a zero is beyond {bits} bits")
        if self.scheme.symmetric and bool(zeros.any()):
            raise self._wrong(
                "config.json says that zeros are in the middle, and they are not"
            )

    def _check_order(self, inputs: int, groups: int) -> None:
        self._check(self.scheme.parts.order, (inputs,), ("I32", "I64"))
        order = self._part(self.scheme.parts.order).long()
        if bool((order == -1).all()):
            return  # compressed-tensors' way to say that there is none
        if bool(((order < 0) | (order >= groups)).any()):
            raise self._wrong(f"g_idx names groups beside 0 to {groups - 1}")
        regular = torch.arange(inputs) // (self.scheme.block[1] or inputs)
        if not torch.equal(
            torch.bincount(order, minlength=groups), torch.bincount(regular)
        ):
            raise self._wrong("g_idx does not give each group its number of inputs")

    @property
    def order(self) -> Tensor | None:
        """The group of each input [K]; None where groups follow one another."""
        if not self._has(self.scheme.parts.order):
            return None
        order = self._part(self.scheme.parts.order).long()
        regular = torch.arange(len(order)) // (self.scheme.block[1] or len(order))
        return None if order[0] == -1 or torch.equal(order, regular) else order

    def grid(self) -> Grid | None:
        """Scales and zeros [G, N] of integers, scales [1, N] of e4m3; None where a block
        is of other sizes, or of numbers in 4 bits."""
        numbers, (rows, columns), shape = (
            self.scheme.numbers,
            self.scheme.block,
            self._shape(),
        )
        if numbers == E4M3 and columns == 0:
            scales = self._scales(shape).expand(shape[-2], 1)
            return Grid(scales.T, None, is_float=True)
        if not numbers.bits or rows != 1:
            return None
        scales = self._scales(shape)
        zeros = torch.full_like(scales, middle(numbers.bits))
        if not self.scheme.symmetric:
            zeros += self._zeros((scales.shape[0], scales.shape[1]))
        return Grid(scales.T, zeros.T)

    def matrix(self) -> Tensor:
        """[..., K, N] float32."""
        shape = self._shape()
        numbers = self._numbers(shape[-1])
        scales, order = self._scales(shape), self.order
        if not self.scheme.symmetric:
            zeros = self._zeros((shape[-2], scales.shape[-1]))
            numbers -= self._spread(zeros, shape, order)
        return (numbers * self._spread(scales, shape, order)).mT

    def _shape(self) -> tuple[int, ...]:
        """[..., N, K]"""
        parts, numbers = self.scheme.parts, self.scheme.numbers
        header = self._header(f"{self.name}{parts.codes}")
        assert header is not None
        *lead, inputs = header[0]
        if self._has(parts.shape):
            return (*lead, int(self._part(parts.shape)[-1]))
        return (*lead, inputs * numbers.many)

    def _numbers(self, inputs: int) -> Tensor:
        codes, numbers = self._part(self.scheme.parts.codes), self.scheme.numbers
        if numbers == E2M1:
            return fp4_numbers(codes)
        if numbers.many == 1:
            return codes.float()
        return (
            unpack_words(codes, numbers.bits)[..., :inputs] - middle(numbers.bits)
        ).float()

    def _scales(self, shape: tuple[int, ...]) -> Tensor:
        """[..., R, G] float32"""
        *lead, outputs, inputs = shape
        stored = self._part(self.scheme.parts.scales)
        scales = (
            powers_of_two(stored) if stored.dtype == torch.uint8 else stored.float()
        )
        scales = scales.reshape(*lead, *self.scheme.blocks(outputs, inputs))
        if not self.scheme.parts.whole:
            return scales
        whole = self._part(self.scheme.parts.whole).float().reshape(*lead, 1, 1)
        return scales / whole if self.scheme.parts.divides else scales * whole

    def _spread(
        self, blocks: Tensor, shape: tuple[int, ...], order: Tensor | None
    ) -> Tensor:
        """[..., R, G] -> a number for each weight, or dims of 1."""
        rows, columns = self.scheme.block
        if rows > 1:
            blocks = blocks.repeat_interleave(rows, -2)[..., : shape[-2], :]
        if order is not None:
            return blocks[..., order]
        if columns:
            blocks = blocks.repeat_interleave(columns, -1)[..., : shape[-1]]
        return blocks

    def _zeros(self, shape: tuple[int, int]) -> Tensor:
        """[N, G] float32, 0 for the middle code."""
        stored, bits = self._part(self.scheme.parts.zeros), self.scheme.numbers.bits
        if stored.dtype != torch.int32:
            return stored.float().reshape(shape)
        codes = unpack_words(stored.T.contiguous(), bits).T[: shape[0]]
        return (codes - middle(bits)).float()

    def _part(self, part: str) -> Tensor:
        return self._read(f"{self.name}{part}")

    def _has(self, part: str) -> bool:
        return self._header(f"{self.name}{part}") is not None

    def _called(self, part: str) -> str:
        return f"{self.name.rpartition('.')[2]}{part}"

    def _wrong(self, reason: str) -> KvlatheError:
        return KvlatheError(
            f"the codes of {self.name} are not what config.json says",
            reason,
            "download the checkpoint again",
        )


def _without_ones(shape: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(size for size in shape if size != 1)
