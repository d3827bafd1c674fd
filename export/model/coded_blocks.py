"""Modules of the decoder whose weights are codes (kvlathe/layers/coded_weight.py):
linear maps, and the table of the embedding, which may be the head too.

In an exported graph their products are com.microsoft.MatMulNBits. Run here, they are
products with the weights that the codes stand for.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from kvlathe.layers.coded_weight import CodedWeight, middle
from kvlathe.plan.weight_formats import WeightFormat

INT8 = 4
"""MatMulNBits' accuracy_level: rows become 8-bit integers too, group by group. Without
it 8-bit weights take 40 times as long on a CPU."""


def _fixed(*shape: int, dtype: torch.dtype) -> nn.Parameter:
    return nn.Parameter(torch.empty(*shape, dtype=dtype), requires_grad=False)


class CodedMap(nn.Module):
    """x [T, in] -> x W [T, out], W in ``form``; or so many such maps, ``lead``. Weights
    start as whatever the memory held."""

    def __init__(
        self,
        inputs: int,
        outputs: int,
        form: WeightFormat,
        dtype: torch.dtype,
        lead: tuple[int, ...] = (),
    ) -> None:
        super().__init__()
        groups = form.groups(inputs)
        width = (form.group or inputs) * form.bits // 8
        is_float = form.name == "fp8"
        kind = torch.float8_e4m3fn if is_float else torch.uint8
        self.form = form
        self.inputs, self.outputs = inputs, outputs
        of_scales = torch.float32 if is_float else dtype
        self.codes = _fixed(*lead, outputs, groups, width, dtype=kind)
        self.scales = _fixed(*lead, outputs, groups, dtype=of_scales)
        self.zeros = None
        if form.zeros:
            stored = -(-groups * form.bits // 8)
            self.zeros = _fixed(*lead, outputs, stored, dtype=torch.uint8)

    @property
    def weight(self) -> Tensor:
        """[out, in], in the type of the scales."""
        coded = CodedWeight(self.codes, self.scales, self.zeros, self.form.bits)
        return coded.matrix(self.inputs)

    def product(self, x: Tensor) -> Tensor:
        if not torch.compiler.is_exporting():
            return x @ self.weight.T.to(x.dtype)
        operands: list[Tensor | None] = [x, self.codes, self.scales]
        if self.zeros is not None:
            operands.append(self.zeros)
        sizes = {"K": self.inputs, "N": self.outputs}
        form = {"bits": self.form.bits, "block_size": self.form.group}
        return torch.onnx.ops.symbolic(
            "com.microsoft::MatMulNBits",
            operands,
            attrs={**sizes, **form, "accuracy_level": INT8},
            dtype=x.dtype,
            shape=(x.shape[0], self.outputs),
            version=1,
        )


class CodedExperts(CodedMap):
    """One map of so many experts."""

    def __init__(
        self,
        count: int,
        inputs: int,
        outputs: int,
        form: WeightFormat,
        dtype: torch.dtype,
    ) -> None:
        super().__init__(inputs, outputs, form, dtype, (count,))

    def maps(self) -> Tensor:
        """[E, in, out], float32."""
        each: list[Tensor] = []
        for expert, (codes, scales) in enumerate(
            zip(self.codes, self.scales, strict=True)
        ):
            zeros = None if self.zeros is None else self.zeros[expert]
            own = CodedWeight(codes, scales, zeros, self.form.bits)
            each.append(own.matrix(self.inputs).T)
        return torch.stack(each)


class CodedLinear(CodedMap):
    """y = x W (+ bias); the bias starts as zeros."""

    def __init__(
        self,
        inputs: int,
        outputs: int,
        bias: bool,
        dtype: torch.dtype,
        form: WeightFormat,
    ) -> None:
        super().__init__(inputs, outputs, form, dtype)
        zeros = torch.zeros(outputs, dtype=dtype)
        self.bias = nn.Parameter(zeros, requires_grad=False) if bias else None

    def forward(self, x: Tensor) -> Tensor:
        y = self.product(x)
        return y if self.bias is None else y + self.bias


class CodedTable(CodedMap):
    """Picks rows of W^T [rows, width], in 8 bits. ``product`` makes it the head of a
    model that ties them: the codes exist once."""

    def __init__(
        self, rows: int, width: int, dtype: torch.dtype, form: WeightFormat
    ) -> None:
        super().__init__(width, rows, form, dtype)

    def forward(self, index: Tensor) -> Tensor:
        codes = _rows(self.codes, index)
        scales = _rows(self.scales, index)
        centred = codes.to(scales.dtype) - middle(self.form.bits)
        rows = (centred * scales.unsqueeze(-1)).reshape(-1, self.codes[0].numel())
        return rows[:, : self.inputs]


def _rows(tensor: Tensor, index: Tensor) -> Tensor:
    """tensor[index]. The exporter makes six nodes of that, and here it is one."""
    if not torch.compiler.is_exporting():
        return tensor[index]
    return torch.onnx.ops.symbolic(
        "Gather",
        [tensor, index],
        dtype=tensor.dtype,
        shape=(index.shape[0], *tensor.shape[1:]),
        version=1,
    )
