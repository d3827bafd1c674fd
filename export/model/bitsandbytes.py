"""Linear maps as bitsandbytes stores them in 4 bits (QLoRA, arXiv 2305.14314; NF4 and
FP4): codes along the rows, two a byte with the first in its high bits, of a table of 16
numbers, which each block multiplies by its largest. Those may be codes themselves, of 8
bits in larger blocks, around an offset. JSON in a tensor says sizes.

Sizes: N outputs, K inputs, B blocks.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from kvlathe.base.errors import KvlatheError
from kvlathe.export.model.packed import HeaderOf, Read, not_read

if TYPE_CHECKING:
    from kvlathe.export.model.quantize import Grid
    from kvlathe.export.model.spec import Settings

KINDS = ("nf4", "fp4")
MOST_BLOCK = 1 << 16


@dataclass(frozen=True)
class FourBit:
    """``kind``: of KINDS."""

    kind: str

    @property
    def state(self) -> str:
        """The end of the name of what says a map's sizes."""
        return f".quant_state.bitsandbytes__{self.kind}"


@dataclass(frozen=True)
class State:
    """Sizes of one map: weights of a block, and largest numbers of a nested one."""

    shape: tuple[int, ...]
    block: int
    nested: int
    offset: float


def read_four_bit(said: Settings) -> FourBit | None:
    """Read ``quantization_config``; None for other methods. Raises KvlatheError for what
    is not read."""
    if said.get("quant_method") != "bitsandbytes":
        return None
    kind = said.get("bnb_4bit_quant_type") or "fp4"
    if not said.get("load_in_4bit") or kind not in KINDS:
        raise not_read("by bitsandbytes", "its 4 bits alone are read, nf4 and fp4")
    if said.get("bnb_4bit_quant_storage") not in (None, "uint8"):
        raise not_read("by bitsandbytes", "its codes are stored as other numbers")
    return FourBit(str(kind))


class FourBitMap:
    """The map whose weight a folder calls ``name``. ``header_of`` and ``read`` give its
    parts."""

    order = None
    """Groups of inputs follow one another."""

    def __init__(
        self, form: FourBit, name: str, read: Read, header_of: HeaderOf
    ) -> None:
        self.form, self.name = form, name
        self._read, self._header = read, header_of

    def checked(self, shape: tuple[int, ...]) -> set[str]:
        """The names of its parts. ``shape``: [N, K]. Raises KvlatheError where a part is
        missing, misshapen, or holds what it cannot."""
        state = self._state()
        if state.shape != shape:
            raise self._wrong(f"its state says {list(state.shape)}, not {list(shape)}")
        blocks = -(-math.prod(shape) // state.block)
        parts: dict[str, tuple[tuple[int, ...], str]] = {
            "": ((-(-math.prod(shape) // 2), 1), "U8"),
            ".quant_map": ((16,), "F32"),
            ".absmax": ((blocks,), "U8" if state.nested else "F32"),
        }
        if state.nested:
            parts[".nested_absmax"] = ((-(-blocks // state.nested),), "F32")
            parts[".nested_quant_map"] = ((256,), "F32")
        for part, wanted in parts.items():
            if self._header(f"{self.name}{part}") != wanted:
                raise self._wrong(
                    f"weight{part} should be {wanted[1]} {list(wanted[0])}"
                )
        return {f"{self.name}{part}" for part in (*parts, self.form.state)}

    def grid(self) -> Grid | None:
        """None: the numbers lie on no grid."""
        return None

    def matrix(self) -> Tensor:
        """[K, N] float32."""
        state = self._state()
        codes = self._part("").flatten()
        numbers = self._part(".quant_map")[
            torch.stack([codes >> 4, codes & 15], -1).flatten().int()
        ]
        largest = self._part(".absmax")
        if state.nested:
            outer = self._part(".nested_absmax").repeat_interleave(state.nested)
            inner = self._part(".nested_quant_map")[largest.int()]
            largest = inner * outer[: len(inner)] + state.offset
        numbers = numbers[: math.prod(state.shape)]
        each = largest.repeat_interleave(state.block)[: len(numbers)]
        return (numbers * each).reshape(state.shape).mT

    def _state(self) -> State:
        try:
            said = json.loads(bytes(self._part(self.form.state).tolist()))
            nested = int(said.get("nested_blocksize") or 0)
            state = State(
                tuple(int(size) for size in said["shape"]),
                int(said["blocksize"]),
                nested,
                float(said["nested_offset"]) if nested else 0.0,
            )
        except (
            ArithmeticError,
            AttributeError,
            LookupError,
            TypeError,
            ValueError,
        ) as at:
            raise self._wrong(f"its state cannot be read: {at!r:.80}") from at
        fits = 0 < state.block <= MOST_BLOCK and 0 <= state.nested <= MOST_BLOCK
        if not fits or said.get("quant_type") != self.form.kind:
            raise self._wrong("its state is of other codes")
        return state

    def _part(self, part: str) -> Tensor:
        return self._read(f"{self.name}{part}")

    def _wrong(self, reason: str) -> KvlatheError:
        return KvlatheError(
            f"the codes of {self.name} are not what config.json says",
            reason,
            "download the checkpoint again",
        )
