"""Linear maps as GPTQ and AWQ checkpoints store them: codes of 32-bit words, with a
scale and a zero for each group of inputs.

GPTQ (arXiv 2210.17323; AutoGPTQ and GPTQModel): words run along the inputs, zeros are
stored less one unless the format is gptq_v2, and ``g_idx`` may say which group an input
is in. AWQ (arXiv 2306.00978; AutoAWQ's gemm): words run along the outputs, in an order
of their own.

Sizes: K inputs, N outputs, G groups.
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from kvlathe.base.errors import KvlatheError
from kvlathe.export.model.quantize import Grid

if TYPE_CHECKING:
    from kvlathe.export.model.spec import Settings

log = logging.getLogger("kvlathe")
WORD = 32
AWQ_ORDER = (0, 4, 1, 5, 2, 6, 3, 7)
"""Places in a word of the first output, the second ..., in AWQ's order."""
LEAST_GROUP = 16
PARTS = ("qweight", "qzeros", "scales")
STORED = {
    "qweight": ("I32",),
    "qzeros": ("I32",),
    "scales": ("F16", "BF16", "F32"),
    "g_idx": ("I32", "I64"),
}
"""Part -> the dtypes in which checkpoints have it."""
AUTO_ROUND = {"auto_round:auto_gptq": "gptq", "auto_round:auto_awq": "awq"}
"""AutoRound's name of a layout (github.com/intel/auto-round) -> whose it is."""
SAMPLE, SAMPLED = 128, 8
"""Inputs of a map that say where its zeros are, and maps that are asked."""
FORMATS = {True: "gptq", False: "gptq_v2"}
"""Whether zeros are stored less one -> GPTQ's name of that."""
NEAR = 0.3
"""Codes lie around their zero: the typical distance is below this, in codes."""
Read = Callable[[str], Tensor]
"""A tensor of the folder, by its name."""
Header = tuple[tuple[int, ...], str]
"""Shape and dtype of a stored tensor."""
HeaderOf = Callable[[str], Header | None]
"""The header of a tensor of the folder, by its name; None where there is none."""


@dataclass(frozen=True)
class Packing:
    """``group``: inputs, 0 for all of them. ``symmetric``: whether every zero is the
    middle code. ``less_one``: whether zeros are stored so. ``reordered``: whether groups
    need not follow one another. None: config.json does not say."""

    method: str
    bits: int
    group: int
    symmetric: bool | None
    less_one: bool
    reordered: bool | None = None

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


def read_packing(said: Settings) -> Packing:
    """Read ``quantization_config`` of GPTQ or AWQ. Raises KvlatheError for codes that
    are not read."""
    method = said.get("quant_method")
    if method == "auto-round":
        method = AUTO_ROUND.get(str(said.get("packing_format")), method)
    if method == "gptq":
        stored = said.get("checkpoint_format") or "gptq"
        known = stored in ("gptq", "gptq_v2")
        symmetric = _truth(said, "sym")
    elif method == "awq":
        stored = said.get("version") or "gemm"
        known = str(stored).lower() == "gemm"
        symmetric = False
    else:
        raise not_read(
            f"by {method!r:.60}",
            "read are GPTQ, AWQ, FP8, compressed-tensors, ModelOpt and bitsandbytes",
        )
    if not known:
        raise not_read(f"in the layout {stored!r:.60}", f"{method} is not read so")
    bits, group = _whole(said, "bits", 4), _whole(said, "group_size", 128)
    if bits not in ((4,) if method == "awq" else (4, 8)):
        raise not_read(f"to {bits} bits", f"{method} is read in 4 bits, and GPTQ in 8")
    if group != -1 and (group < LEAST_GROUP or group & (group - 1)):
        raise not_read(f"in groups of {group}", "groups are powers of two from 16 up")
    less_one = method == "gptq" and stored == "gptq"
    reordered = _truth(said, "desc_act") if method == "gptq" else False
    return Packing(method, bits, max(0, group), symmetric, less_one, reordered)


def _whole(said: Settings, name: str, default: int) -> int:
    value = said.get(name, default)
    if isinstance(value, bool) or not isinstance(value, int):
        raise not_read(f"with {name} {value!r:.60}", "that is no whole number")
    return value


def _truth(said: Settings, name: str) -> bool | None:
    value = said.get(name)
    if value is not None and not isinstance(value, bool):
        raise not_read(f"with {name} {value!r:.60}", "that is neither true nor false")
    return value


def has_mxfp4(config: Settings) -> bool:
    """Whether experts are in MXFP4, which become numbers as they are read
    (stacked.py)."""
    said = config.get("quantization_config")
    if not isinstance(said, dict) or config.get("model_type") != "gpt_oss":
        return False
    return said.get("quant_method") == "mxfp4"


def not_read(how: str, reason: str) -> KvlatheError:
    """A refusal of codes: ``how`` they are quantized, and the ``reason``."""
    return KvlatheError(
        f"the checkpoint is quantized {how}",
        reason,
        "give the checkpoint it was made from",
    )


class PackedMap:
    """The map ``name`` of a folder. ``header_of`` and ``read`` give its parts."""

    def __init__(
        self, packing: Packing, name: str, read: Read, header_of: HeaderOf
    ) -> None:
        self.packing, self.name = packing, name
        self._read, self._header = read, header_of
        self._ordered = header_of(f"{name}.g_idx") is not None

    def checked(self, shape: tuple[int, ...]) -> set[str]:
        """The names of its parts. ``shape``: [N, K]. Raises KvlatheError where a part is
        missing, misshapen, or holds what it cannot, and where they contradict one
        another."""
        if len(shape) != 2:
            raise self._wrong("a stack of maps is not packed so")
        outputs, inputs = shape
        rows = outputs if self.packing.method == "awq" else inputs
        if rows * self.packing.bits % WORD or outputs * self.packing.bits % WORD:
            raise self._wrong(f"{inputs} x {outputs} codes do not fill whole words")
        wanted: dict[str, tuple[int, ...]] = {**self.packing.shapes(inputs, outputs)}
        if self._ordered:
            wanted["g_idx"] = (inputs,)
        for part, shape in wanted.items():
            header = self._header(f"{self.name}.{part}")
            if header is None or header[0] != shape:
                raise self._wrong(f"{part} should have shape {list(shape)}")
            if header[1] not in STORED[part]:
                allowed = " or ".join(STORED[part])
                raise self._wrong(f"{part} is {header[1]}, and should be {allowed}")
        self._check_order(inputs)
        return {f"{self.name}.{part}" for part in (*wanted, "g_idx")}

    def _check_order(self, inputs: int) -> None:
        """Raise KvlatheError unless every group has its inputs."""
        groups = self.packing.groups(inputs)
        if not self._ordered:
            if self.packing.reordered and groups > 1:
                raise self._wrong("desc_act reorders inputs, and there is no g_idx")
            return
        order, regular = self._read(f"{self.name}.g_idx").long(), self._regular(inputs)
        if bool(((order < 0) | (order >= groups)).any()):
            raise self._wrong(f"g_idx names groups beside 0 to {groups - 1}")
        counts = torch.bincount(order, minlength=groups)
        if not torch.equal(counts, torch.bincount(regular)):
            raise self._wrong("g_idx does not give each group its number of inputs")
        if self.packing.reordered is False and not torch.equal(order, regular):
            raise self._wrong("g_idx reorders inputs, and desc_act is false")

    def _wrong(self, reason: str) -> KvlatheError:
        return KvlatheError(
            f"the codes of {self.name} are not what config.json says",
            reason,
            "download the checkpoint again",
        )

    def zeros(self) -> Tensor:
        """The zeros as they are stored [G, N]."""
        return _numbers(self.packing, self._read(f"{self.name}.qzeros"))

    def beside(self) -> float:
        """The typical distance of GPTQ's codes from the zeros as they are stored, over
        the first SAMPLE inputs."""
        bits, words = self.packing.bits, self._read(f"{self.name}.qweight")
        codes = self._codes(words[: SAMPLE * bits // WORD])
        order = self.order
        group = self._regular(len(words) * WORD // bits) if order is None else order
        distances = (codes - self.zeros()[group[: len(codes)]]).float()
        return float(distances.mean(0).median())

    def _codes(self, words: Tensor) -> Tensor:
        """[K, N] codes of rows of words."""
        if self.packing.method == "awq":
            return _numbers(self.packing, words)
        return unpack_words(words.T.contiguous(), self.packing.bits).T

    @property
    def order(self) -> Tensor | None:
        """The group of each input [K]; None where groups follow one another."""
        if not self._ordered:
            return None
        order = self._read(f"{self.name}.g_idx").long()
        return None if torch.equal(order, self._regular(len(order))) else order

    def grid(self) -> Grid:
        """Scales and zeros [G, N]."""
        zeros = self.zeros()
        if self.packing.less_one:
            zeros = (zeros + 1) & ((1 << self.packing.bits) - 1)
        return Grid(self._read(f"{self.name}.scales").float(), zeros.float())

    def matrix(self) -> Tensor:
        """[K, N] float32."""
        codes = self._codes(self._read(f"{self.name}.qweight"))
        own, order = self.grid(), self.order
        group = self._regular(len(codes)) if order is None else order
        assert own.zeros is not None
        return (codes - own.zeros[group]) * own.scales[group]

    def _regular(self, inputs: int) -> Tensor:
        return torch.arange(inputs) // (self.packing.group or inputs)


def resolved(packing: Packing, maps: Sequence[PackedMap]) -> Packing:
    """The packing as the zeros of ``maps`` show it. Where config.json says one of GPTQ's
    formats and zeros are stored as in the other, they are read as they are stored, and a
    warning says so. Raises KvlatheError where it says that zeros are in the middle, and
    they are not."""
    if packing.method != "gptq" or not maps:
        return packing
    middle = 1 << (packing.bits - 1)
    found = {one.name: set(one.zeros().unique().tolist()) for one in maps}
    values = set[int]().union(*found.values())
    is_middle = values in ({middle}, {middle - 1})
    if packing.symmetric and not is_middle:
        odd = max(found, key=lambda name: (len(found[name]), *found[name]))
        raise KvlatheError(
            f"the zeros of {odd} are not in the middle of its codes",
            'the quantization_config of config.json says "sym": true',
            "write false there if its zeros are meant, or download the checkpoint again",
        )
    less_one = values == {middle - 1} if is_middle else _less_one(packing, maps)
    if less_one != packing.less_one:
        log.warning(
            "config.json says the format %s, and zeros are stored as in %s: they are "
            "read so",
            *(FORMATS[packing.less_one], FORMATS[less_one]),
        )
    symmetric = is_middle if packing.symmetric is None else packing.symmetric
    return dataclasses.replace(packing, less_one=less_one, symmetric=symmetric)


def _less_one(packing: Packing, maps: Sequence[PackedMap]) -> bool:
    """Whether zeros that differ are stored less one: the codes lie around them, or
    around one more. Where they show neither, it is as config.json says."""
    sampled = maps[:: -(-len(maps) // SAMPLED)]
    distance = median(one.beside() for one in sampled)
    shown = [less for less in (False, True) if abs(distance - less) < NEAR]
    return shown[0] if shown else packing.less_one


def _numbers(packing: Packing, words: Tensor) -> Tensor:
    """Words along the outputs: [..., N * bits / 32] -> [..., N]."""
    numbers = unpack_words(words, packing.bits)
    if packing.method != "awq":
        return numbers
    return numbers.unflatten(-1, (-1, len(AWQ_ORDER)))[..., list(AWQ_ORDER)].flatten(-2)


def unpack_words(words: Tensor, bits: int) -> Tensor:
    """int32 [..., n] -> [..., n * 32 / bits], the lowest bits first."""
    shifts = torch.arange(0, WORD, bits, dtype=torch.int32)
    numbers = (words.unsqueeze(-1) >> shifts) & ((1 << bits) - 1)
    return numbers.flatten(-2)
