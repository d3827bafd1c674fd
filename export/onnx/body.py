"""Body: writes the nodes of an ONNX function one expression at a time."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx
from onnx import NodeProto, helper, numpy_helper

FLOAT, HALF, INT32 = (
    onnx.TensorProto.FLOAT,
    onnx.TensorProto.FLOAT16,
    onnx.TensorProto.INT32,
)


@dataclass
class Body:
    """Nodes of the function under construction. ``op`` adds one and returns its
    output's name."""

    nodes: list[NodeProto] = field(default_factory=list)
    constants: dict[bytes, str] = field(default_factory=dict)

    def op(self, kind: str, *inputs: str, **attributes: Any) -> str:  # noqa: ANN401 (onnx's own signature)
        return self.ops(kind, 1, *inputs, **attributes)[0]

    def ops(
        self,
        kind: str,
        outputs: int,
        *inputs: str,
        **attributes: Any,  # noqa: ANN401
    ) -> list[str]:
        names = [
            f"{kind.lower()}_{len(self.nodes)}" + (f"_{i}" if outputs > 1 else "")
            for i in range(outputs)
        ]
        self.nodes.append(
            helper.make_node(
                kind, inputs, names, name=f"{kind}_{len(self.nodes)}", **attributes
            )
        )
        return names

    def output(self, name: str, x: str) -> None:
        """The function's output ``name`` is x, the result of the last node."""
        last = self.nodes[-1]
        assert list(last.output) == [x]
        last.output[:] = [name]

    def attribute(self, name: str) -> str:
        """A float attribute of the function, as a value."""
        value = self.op("Constant")
        reference = onnx.AttributeProto(
            name="value_float", ref_attr_name=name, type=onnx.AttributeProto.FLOAT
        )
        self.nodes[-1].attribute.append(reference)
        return value

    def const(self, value: npt.ArrayLike, dtype: type = np.int64) -> str:
        tensor = numpy_helper.from_array(np.asarray(value, dtype))
        key = tensor.SerializeToString()
        if key not in self.constants:
            self.constants[key] = self.op("Constant", value=tensor)
        return self.constants[key]

    def int32(self, value: npt.ArrayLike) -> str:
        return self.const(value, np.int32)

    def float(self, value: npt.ArrayLike) -> str:
        return self.const(value, np.float32)

    def reshape(self, x: str, *shape: int) -> str:
        """0 keeps the dimension of that place."""
        return self.op("Reshape", x, self.const(shape))

    def unsqueeze(self, x: str, *axes: int) -> str:
        return self.op("Unsqueeze", x, self.const(axes))

    def gather(self, x: str, index: str, axis: int) -> str:
        return self.op("Gather", x, index, axis=axis)

    def slice(self, x: str, start: int, end: int) -> str:
        return self.op("Slice", x, self.const([start]), self.const([end]))

    def transpose(self, x: str, *perm: int) -> str:
        return self.op("Transpose", x, perm=perm)

    def cast(self, x: str, to: int) -> str:
        """Runtimes drop casts that change nothing."""
        return self.op("Cast", x, to=to)

    def arange(self, length: str) -> str:
        """0 .. length-1 int32; ``length`` is a scalar."""
        return self.op("Range", self.int32(0), self.cast(length, INT32), self.int32(1))
