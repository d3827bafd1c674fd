"""Row-wise ops of a decoder layer on a GPU: torch's fused kernels, and ours where they
take the rows."""

from __future__ import annotations

from ctypes import byref

import torch
import torch.nn.functional as F
from torch import Tensor

from kvlathe.layers.activations import ACTIVATIONS
from kvlathe.layers.rows import Rows
from kvlathe.runtime.native.cuda import BF16, F16, CudaLibrary, RowsArgs
from kvlathe.runtime.native.library import ABI_VERSION
from kvlathe.runtime.sessions.torch_cuda.coded import FP8, fp8_rows

ELEMENTS = {torch.float16: F16, torch.bfloat16: BF16}
PIECE = 8
"""Elements of 16 bytes, which a thread reads at once."""
WIDEST = 16384
"""Columns of the widest RMS norm that the kernels take."""


class FusedRows(Rows):
    """One torch kernel a norm; the gated product overwrites the activation."""

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        return F.rms_norm(x, weight.shape, weight, eps)

    def layer_norm(self, x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
        return F.layer_norm(x, weight.shape, weight, bias, eps)

    def gated(self, activation: str, gate: Tensor, up: Tensor) -> Tensor:
        return ACTIVATIONS[activation](gate).mul_(up)

    def fp8(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """x [T, K] -> codes [T, K] of e4m3, and a scale for each row [T, 1] float32."""
        return fp8_rows(x)


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
        runs = _fits(x, columns) and columns <= WIDEST and weight.dtype == x.dtype
        if not runs:
            return super().rms_norm(x, weight, eps)
        return self._run("cuda_rms_norm", x, columns, weight, eps)

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
        codes = out[:end].view(FP8).view(count, columns)
        return codes, out[end:].view(torch.float32).view(count, 1)

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
    ) -> None:
        args = RowsArgs(ABI_VERSION, ELEMENTS[x.dtype], len(x), columns, eps)
        args.x, args.x_stride, args.out = x.data_ptr(), x.stride(0), out.data_ptr()
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


def follows(gate: Tensor, up: Tensor) -> bool:
    """Whether rows of ``up`` begin where those of ``gate`` end: [T, gate | up]."""
    alike = up.shape == gate.shape and up.stride() == gate.stride()
    row_bytes = gate.shape[-1] * gate.element_size()
    end = gate.data_ptr() + row_bytes
    return alike and up.dtype == gate.dtype and up.data_ptr() == end
