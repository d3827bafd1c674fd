"""Linear maps as GPTQ and AWQ checkpoints store them: codes of 32-bit words, with a
scale and a zero for each group of inputs.

GPTQ (arXiv 2210.17323; AutoGPTQ and GPTQModel): words run along the inputs, zeros are
stored less one unless the format is gptq_v2, and ``g_idx`` may say which group an input
is in. AWQ (arXiv 2306.00978; AutoAWQ's gemm): words run along the outputs, in an order
of their own.

Sizes: K inputs, N outputs, G groups.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from kvlathe.base.errors import KvlatheError
from kvlathe.export.model.quantize import Grid

if TYPE_CHECKING:
    from kvlathe.export.model.spec import Settings

WORD = 32
AWQ_ORDER = (0, 4, 1, 5, 2, 6, 3, 7)
"""Places in a word of the first output, the second ..., in AWQ's order."""
LEAST_GROUP = 16
PARTS = ("qweight", "qzeros", "scales")
Read = Callable[[str], Tensor]
"""A tensor of the folder, by its name."""


@dataclass(frozen=True)
class Packing:
    """``group``: inputs, 0 for all of them. ``symmetric``: whether every zero is the
    middle code. ``less_one``: whether zeros are stored so."""

    method: str
    bits: int
    group: int
    symmetric: bool
    less_one: bool

    def groups(self, inputs: int) -> int:
        return -(-inputs // self.group) if self.group else 1

    def shapes(self, inputs: int, outputs: int) -> dict[str, tuple[int, int]]:
        """Shapes of a map's stored parts."""
        groups = self.groups(inputs)
        words = self.bits * outputs // WORD
        weight = (self.bits * inputs // WORD, outputs)
        if self.method == "awq":
            weight = (inputs, words)
        return dict(
            zip(PARTS, (weight, (groups, words), (groups, outputs)), strict=True)
        )


def read_packing(config: Settings) -> Packing | None:
    """Read the packing from config.json; None for weights that are no codes. Raises
    KvlatheError for codes that are not read."""
    said = config.get("quantization_config") or config.get("compression_config")
    if not said or has_mxfp4(config):
        return None
    method = said.get("quant_method")
    if method == "gptq":
        stored = said.get("checkpoint_format") or "gptq"
        known = stored in ("gptq", "gptq_v2")
        symmetric = bool(said.get("sym", True))
    elif method == "awq":
        stored = said.get("version") or "gemm"
        known = str(stored).lower() == "gemm"
        symmetric = False
    else:
        raise _refusal(f"by {method!r}", "only GPTQ and AWQ are read")
    if not known:
        raise _refusal(f"in the layout {stored!r}", f"{method} is not read so")
    bits = said.get("bits", 4)
    group = said.get("group_size", 128)
    if bits not in ((4,) if method == "awq" else (4, 8)):
        raise _refusal(f"to {bits} bits", f"{method} is read in 4 bits, and GPTQ in 8")
    group = 0 if group == -1 else group
    if group and (group < LEAST_GROUP or group & (group - 1)):
        raise _refusal(f"in groups of {group}", "groups are powers of two from 16 up")
    return Packing(
        method, bits, group, symmetric, method == "gptq" and stored == "gptq"
    )


def has_mxfp4(config: Settings) -> bool:
    """Whether experts are in MXFP4, which become numbers as they are read
    (stacked.py)."""
    said = config.get("quantization_config")
    if not isinstance(said, dict) or config.get("model_type") != "gpt_oss":
        return False
    return said.get("quant_method") == "mxfp4"


def _refusal(how: str, reason: str) -> KvlatheError:
    return KvlatheError(
        f"the checkpoint is quantized {how}",
        reason,
        "give the checkpoint it was made from",
    )


class PackedMap:
    """The map ``name`` of a folder, of which ``read`` gives the parts."""

    def __init__(
        self, packing: Packing, name: str, read: Read, ordered: bool = False
    ) -> None:
        """``ordered``: whether there is a g_idx."""
        self.packing, self.name, self._read = packing, name, read
        self._ordered = ordered

    def checked(
        self,
        inputs: int,
        outputs: int,
        shape_of: Callable[[str], tuple[int, ...] | None],
    ) -> set[str]:
        """The names of its parts. Raises KvlatheError where one is missing or
        misshapen."""
        wanted = self.packing.shapes(inputs, outputs)
        for part, shape in wanted.items():
            if shape_of(f"{self.name}.{part}") != shape:
                raise KvlatheError(
                    f"the codes of {self.name} are not what config.json says",
                    f"{part} should have shape {list(shape)}",
                    "download the checkpoint again",
                )
        return {f"{self.name}.{part}" for part in (*wanted, "g_idx")}

    @property
    def order(self) -> Tensor | None:
        """The group of each input [K]; None where groups follow one another."""
        if not self._ordered:
            return None
        order = self._read(f"{self.name}.g_idx").long()
        return None if torch.equal(order, self._regular(len(order))) else order

    def grid(self) -> Grid:
        """Scales and zeros [G, N]."""
        zeros = _numbers(self.packing, self._read(f"{self.name}.qzeros"))
        if self.packing.less_one:
            zeros = (zeros + 1) & ((1 << self.packing.bits) - 1)
        return Grid(self._read(f"{self.name}.scales").float(), zeros.float())

    def matrix(self) -> Tensor:
        """[K, N] float32."""
        words = self._read(f"{self.name}.qweight")
        if self.packing.method == "awq":
            codes = _numbers(self.packing, words)
        else:
            codes = _unpack(words.T.contiguous(), self.packing.bits).T
        own, order = self.grid(), self.order
        group = self._regular(len(codes)) if order is None else order
        assert own.zeros is not None
        return (codes - own.zeros[group]) * own.scales[group]

    def _regular(self, inputs: int) -> Tensor:
        return torch.arange(inputs) // (self.packing.group or inputs)


def _numbers(packing: Packing, words: Tensor) -> Tensor:
    """Words along the outputs: [..., N * bits / 32] -> [..., N]."""
    numbers = _unpack(words, packing.bits)
    if packing.method != "awq":
        return numbers
    return numbers.unflatten(-1, (-1, len(AWQ_ORDER)))[..., list(AWQ_ORDER)].flatten(-2)


def _unpack(words: Tensor, bits: int) -> Tensor:
    """int32 [..., n] -> [..., n * 32 / bits], the lowest bits first."""
    shifts = torch.arange(0, WORD, bits, dtype=torch.int32)
    numbers = (words.unsqueeze(-1) >> shifts) & ((1 << bits) - 1)
    return numbers.flatten(-2)
