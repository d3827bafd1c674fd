"""A decoder layer's rows beside attention and its products: in torch, or by the native kernels where those do it.

Rows [T, columns] of one 16-bit type on the GPU, as views with a row stride; what the kernels do not take goes to torch.
"""

from __future__ import annotations

from ctypes import byref

import torch
import torch.nn.functional as F
from torch import Tensor

from kvlathe.activations import ACTIVATIONS
from kvlathe.runtime.cuda_abi import BF16, F16, CudaLibrary, RowsArgs
from kvlathe.runtime.native import ABI_VERSION

ELEMENTS = {torch.float16: F16, torch.bfloat16: BF16}
PIECE, WIDEST = 8, 16384
"""Elements of 16 bytes; columns of the widest norm."""


class Rows:
    """In torch."""

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        return F.rms_norm(x, weight.shape, weight, eps)

    def gated(self, activation: str, both: Tensor, inner: int) -> Tensor:
        """both [T, gate | up], ``inner`` columns each -> activation(gate) * up."""
        return ACTIVATIONS[activation](both[:, :inner]).mul_(both[:, inner:])


class NativeRows(Rows):
    """By the library: one kernel where torch takes one that waits longer, or two."""

    def __init__(self, library: CudaLibrary) -> None:
        self.library = library

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        if not _fits(x, x.shape[-1]) or x.shape[-1] > WIDEST or weight.dtype != x.dtype:
            return super().rms_norm(x, weight, eps)
        return self._run("cuda_rms_norm", x, x.shape[1], weight, eps)

    def gated(self, activation: str, both: Tensor, inner: int) -> Tensor:
        if ACTIVATIONS[activation] is not F.silu or both.shape[-1] != 2 * inner or not _fits(both, inner):
            return super().gated(activation, both, inner)
        return self._run("cuda_silu_product", both, inner)

    def _run(self, name: str, x: Tensor, columns: int, weight: Tensor | None = None, eps: float = 0.0) -> Tensor:
        out = x.new_empty(len(x), columns)
        args = RowsArgs(ABI_VERSION, ELEMENTS[x.dtype], len(x), columns, eps)
        args.x, args.x_stride, args.out = x.data_ptr(), x.stride(0), out.data_ptr()
        args.weight = weight.data_ptr() if weight is not None else None
        args.stream = torch.cuda.current_stream().cuda_stream
        self.library.call(name, byref(args))
        return out


def _fits(x: Tensor, columns: int) -> bool:
    """Whether the kernels take these rows."""
    if x.dim() != 2 or x.dtype not in ELEMENTS or columns % PIECE or x.stride(1) != 1:
        return False
    return x.stride(0) % PIECE == 0 and x.data_ptr() % 16 == 0 and len(x) < 1 << 16
