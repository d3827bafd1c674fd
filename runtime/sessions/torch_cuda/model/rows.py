"""Row-wise ops of a decoder layer on a GPU: torch's fused kernels, and ours where they
take the rows."""

from __future__ import annotations

from ctypes import byref

import torch
import torch.nn.functional as F
from torch import Tensor

from kvlathe.layers.rows import ACTIVATIONS, Rows
from kvlathe.runtime.native.cuda import BF16, F16, CudaLibrary, RowsArgs
from kvlathe.runtime.native.library import ABI_VERSION
from kvlathe.runtime.native.products import MOST_ROWS, ProductArgs
from kvlathe.runtime.sessions.torch_cuda.model.coded import (
    FP8,
    CodeTable,
    coded_product,
    fp8_rows,
    scaled_product,
)

ELEMENTS = {torch.float16: F16, torch.bfloat16: BF16}
PIECE = 8
"""Elements of 16 bytes, which a thread reads at once."""
WIDEST, WIDEST_HEAD = 16384, 256
"""Columns of the widest RMS norm that the kernels take, and of those of heads."""
FEW_ROWS = {8: 16, 4: 64}
"""By the bits of codes: up to so many rows our products take less time than torch's."""
SLICE = 1 << 24
"""Weights of 4 bits that become halves at once: 32 MB, which stay in a GPU's L2."""


class FusedRows(Rows):
    """One torch kernel a norm; the gated product overwrites the activation."""

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        return F.rms_norm(x, weight.shape, weight, eps)

    def unit_norm(self, x: Tensor, eps: float) -> Tensor:
        return F.rms_norm(x, x.shape[-1:], None, eps)

    def layer_norm(self, x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
        return F.layer_norm(x, weight.shape, weight, bias, eps)

    def gated(self, activation: str, gate: Tensor, up: Tensor) -> Tensor:
        return ACTIVATIONS[activation](gate).mul_(up)

    def fp8(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """x [T, K] -> codes [T, K] of e4m3, and a scale for each row [T, 1] float32."""
        return fp8_rows(x)

    def product(self, x: Tensor, table: CodeTable, residual: Tensor | None) -> Tensor:
        """As ``Product`` in coded.py."""
        return coded_product(x, table, residual)


class NativeRows(FusedRows):
    """By the native library: one kernel where torch takes one that waits longer, or
    two.

    Its kernels take rows [T, columns] of one 16-bit type, as views with a row stride.
    Everything else goes to torch.
    """

    def __init__(self, library: CudaLibrary) -> None:
        self.library = library

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        columns = x.shape[-1]
        if weight.dtype == x.dtype:
            if _fits(x, columns) and columns <= WIDEST:
                return self._run("cuda_rms_norm", x, columns, weight, eps)
            if columns <= WIDEST_HEAD and _are_heads(x) and _fits(x[:, 0], columns):
                out = x.new_empty(x.shape)
                heads = x.shape[1]
                self._call("cuda_norm_heads", x[:, 0], columns, out, weight, eps, heads)
                return out
        return super().rms_norm(x, weight, eps)

    def gated(self, activation: str, gate: Tensor, up: Tensor) -> Tensor:
        is_silu = ACTIVATIONS[activation] is F.silu
        if not (is_silu and _fits(gate, gate.shape[-1]) and follows(gate, up)):
            return super().gated(activation, gate, up)
        return self._run("cuda_silu_product", gate, gate.shape[1])

    def fp8(self, x: Tensor) -> tuple[Tensor, Tensor]:
        count, columns = x.shape
        if not _fits(x, columns) or columns > WIDEST:
            return super().fp8(x)
        end = count * columns
        out = torch.empty(end + 4 * count, dtype=torch.uint8, device=x.device)
        self._call("cuda_fp8_rows", x, columns, out)
        codes = out[:end].view(FP8)
        scales = out[end:].view(torch.float32)
        return codes.view(count, columns), scales.view(count, 1)

    def product(self, x: Tensor, table: CodeTable, residual: Tensor | None) -> Tensor:
        """Rows stay in 16 bits where they are few, whatever the codes are."""
        fits = _fits_codes(x, table)
        if fits and len(x) <= FEW_ROWS[table.bits]:
            return self._few_rows(x, table, residual)
        if table.is_fp8:
            y = scaled_product(self.fp8(x), table, x)
        elif fits:
            y = self._in_slices(x, table)
        else:
            return super().product(x, table, residual)
        return y if residual is None else residual.add_(y)

    def _few_rows(self, x: Tensor, table: CodeTable, residual: Tensor | None) -> Tensor:
        outputs = len(table.codes)
        out = residual
        if out is None:
            out = x.new_empty(len(x), outputs)
        for first in range(0, len(x), MOST_ROWS):
            end = first + MOST_ROWS
            some = x[first:end]
            to = out[first:end]
            args = _product_args(table, 0, outputs)
            args.rows = len(some)
            args.x = some.data_ptr()
            args.x_stride = x.stride(0)
            args.out = to.data_ptr()
            args.out_stride = to.stride(0)
            if residual is not None:
                args.residual = args.out
            self.library.call("cuda_product", byref(args))
        return out

    def _in_slices(self, x: Tensor, table: CodeTable) -> Tensor:
        """By torch, of codes that become halves a slice of outputs at a time."""
        outputs = len(table.codes)
        y = x.new_empty(len(x), outputs)
        tiles = SLICE // (16 * table.inputs)
        step = 16 * max(tiles, 1)
        for first in range(0, outputs, step):
            end = min(first + step, outputs)
            weights = x.new_empty(end - first, table.inputs)
            args = _product_args(table, first, end)
            args.out = weights.data_ptr()
            self.library.call("cuda_widen", byref(args))
            some = y[:, first:end]
            torch.mm(x, weights.T, out=some)
        return y

    def _run(
        self,
        name: str,
        x: Tensor,
        columns: int,
        weight: Tensor | None = None,
        eps: float = 0.0,
    ) -> Tensor:
        out = x.new_empty(len(x), columns)
        self._call(name, x, columns, out, weight, eps)
        return out

    def _call(
        self,
        name: str,
        x: Tensor,
        columns: int,
        out: Tensor,
        weight: Tensor | None = None,
        eps: float = 0.0,
        heads: int = 1,
    ) -> None:
        args = RowsArgs(ABI_VERSION, ELEMENTS[x.dtype], len(x), columns, eps, heads)
        args.x = x.data_ptr()
        args.x_stride = x.stride(0)
        args.out = out.data_ptr()
        args.weight = weight.data_ptr() if weight is not None else None
        args.stream = torch.cuda.current_stream().cuda_stream
        self.library.call(name, byref(args))


def _fits(x: Tensor, columns: int) -> bool:
    """Whether the kernels take these rows."""
    if x.dim() != 2 or x.dtype not in ELEMENTS:
        return False
    if columns % PIECE or x.stride(1) != 1:
        return False
    is_aligned = x.stride(0) % PIECE == 0 and x.data_ptr() % 16 == 0
    return is_aligned and len(x) < 1 << 16


def _are_heads(x: Tensor) -> bool:
    """Whether x is [T, heads, columns], with the heads of a token side by side."""
    return x.dim() == 3 and x.shape[1] > 0 and x.stride(1) == x.shape[2]


def _fits_codes(x: Tensor, table: CodeTable) -> bool:
    """Whether the products by our kernels take these rows and codes."""
    of_codes = torch.float32 if table.is_fp8 else torch.float16
    is_taken = x.dtype == torch.float16 and table.scales.dtype == of_codes
    return is_taken and _fits(x, table.inputs)


def _product_args(table: CodeTable, first: int, end: int) -> ProductArgs:
    """The outputs from ``first`` to ``end``, without x and out."""
    args = ProductArgs()
    args.abi_version = ABI_VERSION
    args.element = F16
    args.inputs = table.inputs
    args.outputs = end - first
    args.bits = table.bits
    args.group = table.group
    args.scale_stride = len(table.codes)
    codes = table.codes[first:]
    args.codes = codes.data_ptr()
    scales = table.scales[:, first:]
    args.scales = scales.data_ptr()
    if table.zeros is not None:
        zeros = table.zeros[:, first:]
        args.zeros = zeros.data_ptr()
    if table.codes.is_cuda:
        args.stream = torch.cuda.current_stream().cuda_stream
    return args


def follows(gate: Tensor, up: Tensor) -> bool:
    """Whether rows of ``up`` begin where those of ``gate`` end: [T, gate | up]."""
    alike = up.shape == gate.shape and up.stride() == gate.stride()
    row_bytes = gate.shape[-1] * gate.element_size()
    end = gate.data_ptr() + row_bytes
    return alike and up.dtype == gate.dtype and up.data_ptr() == end
