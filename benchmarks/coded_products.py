"""Products of a decoder layer of an 8B model on a GPU, by the format of its weights and
the number of rows: microseconds of a layer's four, in CUDA graphs.

  python -m benchmarks.coded_products [--library NAME=libkvlathe.so ...]

``few`` is kvlathe_cuda_product, 16 rows a call; ``torch`` is _scaled_mm of rows in
e4m3; ``widened`` are codes that become halves for torch. Each graph has several layers,
so that no weights are left in the L2 cache.
"""

from __future__ import annotations

import ctypes
import json
from collections.abc import Callable
from ctypes import byref
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor

from benchmarks.support.commands import parser_of
from benchmarks.support.gpu import graph_of, repeated
from kvlathe.runtime.native.cuda import CudaLibrary, cuda_library
from kvlathe.runtime.native.library import Status
from kvlathe.runtime.sessions.torch_cuda.model import rows as rows_module
from kvlathe.runtime.sessions.torch_cuda.model.coded import CodeTable, code_table
from kvlathe.runtime.sessions.torch_cuda.model.rows import NativeRows
from tests.support.product_laws import Shape, any_codes

MAPS = {
    "qkv": (6144, 4096),
    "o": (4096, 4096),
    "gate, up": (28672, 4096),
    "down": (4096, 14336),
}
"""Outputs and inputs."""
LAYERS = 6
TOKENS = (1, 2, 4, 8, 16, 32, 64, 256, 2048)
FORMS = ("float16", "fp8 few", "fp8 torch", "int4 few", "int4 widened")
GROUPS = {"fp8": 0, "int4": 64}
Multiply = Callable[[Tensor, Any], Tensor]


class Kernels:
    """The products of another build of plugins_cpp/src/cuda/products."""

    def __init__(self, path: str) -> None:
        self.lib = ctypes.CDLL(path)

    def call(self, name: str, *given: object) -> None:
        status = Status()
        if getattr(self.lib, f"kvlathe_{name}")(*given, byref(status)):
            raise RuntimeError(status.message.decode())


def weights_of(form: str, outputs: int, inputs: int) -> list[Tensor] | list[CodeTable]:
    if form == "float16":
        size = (inputs, outputs)
        return [torch.randn(size, device="cuda").half() for _ in range(LAYERS)]
    shape = Shape(inputs, (outputs,), GROUPS[form.split()[0]])
    return [code_table(any_codes(shape, "cuda")) for _ in range(LAYERS)]


def multiply_of(form: str, rows: NativeRows) -> Multiply:
    few = {"few": 1 << 20}.get(form.split()[-1], 0)

    def multiply(x: Tensor, weights: Any) -> Tensor:  # noqa: ANN401  (of either kind)
        if form == "float16":
            return x @ weights
        rows_module.FEW_ROWS = {8: few, 4: few}
        return rows.product(x, weights, None)

    return multiply


@torch.inference_mode()
def microseconds(multiply: Multiply, x: Tensor, weights: list[Any]) -> float:
    """Microseconds of one product: the best of 5 times 10 replays."""
    graph = graph_of(lambda i: multiply(x, weights[i]), len(weights))
    graph.replay()
    best = min(repeated(graph.replay, 10) for _ in range(5))
    return best * 1e3 / len(weights)


def measured(rows: NativeRows, forms: list[str]) -> dict[str, dict[int, list[float]]]:
    """By form and rows, of each map."""
    found: dict[str, dict[int, list[float]]] = {}
    for form in forms:
        found[form] = {tokens: [] for tokens in TOKENS}
        for outputs, inputs in MAPS.values():
            weights = weights_of(form, outputs, inputs)
            for tokens in TOKENS:
                if "few" in form and tokens > 64:
                    continue
                x = torch.randn(tokens, inputs, device="cuda").half()
                taken = microseconds(multiply_of(form, rows), x, weights)
                found[form][tokens].append(taken)
            del weights
    return found


def shown(name: str, found: dict[str, dict[int, list[float]]]) -> None:
    table = Table("rows", *found, title=f"{name}: microseconds of a layer")
    for tokens in TOKENS:
        times = [of_rows[tokens] for of_rows in found.values()]
        cells = [f"{sum(each):.1f}" if each else "" for each in times]
        table.add_row(str(tokens), *cells)
    single = Table("map, 1 row", *found, title=f"{name}: TB/s of weights")
    for i, (role, (outputs, inputs)) in enumerate(MAPS.items()):
        size = outputs * inputs / 1e6
        bytes_of = {"float16": 2.0, "fp8": 1.0, "int4": 0.53125}
        cells = [
            f"{size * bytes_of[form.split()[0]] / of_rows[1][i]:.2f}"
            for form, of_rows in found.items()
        ]
        single.add_row(role, *cells)
    console = Console(width=110)
    console.print(table)
    console.print(single)


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--library", action="append", default=[], metavar="NAME=PATH")
    args = parser.parse_args()
    torch.manual_seed(0)
    results: dict[str, dict[str, dict[int, list[float]]]] = {}
    own: CudaLibrary = cuda_library("this benchmark")
    results["kvlathe"] = measured(NativeRows(own), list(FORMS))
    shown("kvlathe", results["kvlathe"])
    for asked in args.library:
        name, path = asked.split("=", 1)
        kernels: Any = Kernels(path)
        few = [form for form in FORMS if "few" in form]
        results[name] = measured(NativeRows(kernels), few)
        shown(name, results[name])
    print(json.dumps({"bench": "coded_products", "layers": LAYERS, "us": results}))


if __name__ == "__main__":
    main()
