"""Experts on one GPU by the cuda backend, random weights in the shapes of Qwen3-30B-A3B and
gpt-oss-20b.

    python -m benchmarks.experts_cuda [--shapes qwen3-30b-a3b ...] [--weights int4]
    python -m benchmarks.experts_cuda --models [--layers 12]
    python -m benchmarks.experts_cuda --engine out/moe-engine --shapes qwen3-30b-a3b
    python -m benchmarks.experts_cuda --sweep

A layer's experts, in CUDA graphs of several layers, so that no weights are left in the L2
cache: ``read``, how many experts some token chose; ``bytes``, microseconds of their weights
at the rate at which torch reads a large tensor; ``chosen``, the kernels of chosen ones;
``every``, every expert for every token; ``dense``, an MLP of as many columns as a token
passes.

``--models``: whole models beside dense ones of the active size, run by an LLM. ``step``: a
token of 16 sequences, as a replayed graph and by the clock; ``bytes``: all weights that it
reads. ``prompt``: to its first token. Models have no windows, sinks and biases of q, k and
v. ``--engine``: the same of an engine's folder, such as one of a checkpoint by
benchmarks.random_checkpoint. Its prompts are those of ``serve_burst --loads 16x64+256``,
and experts are counted as all tokens chose. ``--sweep``: microseconds of a product by its
tuning. Prints rows as JSON, then a table.
"""

from __future__ import annotations

import gc
import json
import random
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain
from pathlib import Path
from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.random_checkpoint import write_tokenizer
from benchmarks.serve_burst import HIGHEST_ID, LOWEST_ID
from benchmarks.support.commands import parser_of
from benchmarks.support.gpu import repeated, seconds_a_call
from kvlathe.base.console import print_table
from kvlathe.layers.experts import ExpertWeights, choose_experts, run_experts
from kvlathe.layers.routing import Routing
from kvlathe.layers.wiring import Wiring
from kvlathe.plan.formats import Tier
from kvlathe.plan.groups import Group
from kvlathe.plan.heads import Lane, ModelShape
from kvlathe.plan.layout import CacheLayout
from kvlathe.plan.lives import KEEP
from kvlathe.plan.manifest import Limits
from kvlathe.plan.plan import CompressionPlan
from kvlathe.runtime.llm import LLM
from kvlathe.runtime.native.cuda import cuda_library
from kvlathe.runtime.sessions.torch_cuda.compute import TorchCompute, session_of
from kvlathe.runtime.sessions.torch_cuda.device import TorchDevice
from kvlathe.runtime.sessions.torch_cuda.model.decoder import TorchDecoder
from kvlathe.runtime.sessions.torch_cuda.model.grouped_experts import (
    TILES,
    GroupedExperts,
    GroupedWeights,
    Tile,
    Tuning,
)
from kvlathe.runtime.sessions.torch_cuda.model.routed_pairs import RoutedPairs
from kvlathe.runtime.sessions.torch_cuda.model.rows import NativeRows
from kvlathe.runtime.sessions.torch_cuda.session import TorchSession
from kvlathe.runtime.text.sampling_params import SamplingParams
from kvlathe.runtime.text.tokenizer import Tokenizer

COPIES, CALLS, REPLAYS = 4, 8, 10
BITS = {"float16": 16.0, "fp8": 8.0, "int4": 4.25}
"""Bits of a weight, with its share of scales."""
GROUP = 64
FEW = 64
"""Tokens up to which every expert is timed: its activations grow with experts."""
BATCH, CHUNK, PROMPTS = 16, 4096, (2048, 4096, 16384)
TOKENIZER = Path(__file__).parents[1] / "models" / "lathe-5m"
Step = Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class Shape:
    """Experts of a layer, of which a token passes ``chosen``, and the model around them.
    ``experts`` 0: a dense MLP of ``inner`` columns."""

    experts: int
    chosen: int
    hidden: int
    inner: int
    layers: int
    query_heads: int
    kv_heads: int
    head_dim: int
    vocab: int
    biased: bool = False

    @property
    def dense(self) -> Shape:
        """One of the active size."""
        return replace(self, experts=0, inner=self.inner * self.chosen)

    @property
    def routing(self) -> Routing:
        if self.biased:
            return Routing(self.chosen, True, alpha=1.702, limit=7.0)
        return Routing(self.chosen, True)

    @property
    def expert_bytes(self) -> int:
        return 2 * 3 * self.hidden * self.inner


SHAPES = {
    "qwen3-30b-a3b": Shape(128, 8, 2048, 768, 48, 32, 4, 128, 151936),
    "gpt-oss-20b": Shape(32, 4, 2880, 2880, 24, 64, 8, 64, 201088, True),
}


def drawn(*shape: int) -> Tensor:
    """Halves with the spread of a trained map's [..., in, out]."""
    weights = torch.empty(shape, dtype=torch.float16, device="cuda")
    return weights.normal_(0, shape[-2] ** -0.5 if len(shape) > 1 else 0.02)


def experts_of(shape: Shape) -> dict[str, Tensor]:
    count, hidden, inner = shape.experts, shape.hidden, shape.inner
    found = {
        "router": drawn(hidden, count),
        "gate": drawn(count, hidden, inner),
        "up": drawn(count, hidden, inner),
        "down": drawn(count, inner, hidden),
    }
    if shape.biased:
        found["router_bias"] = drawn(count)
        found["gate_bias"] = drawn(count, 1, inner)
        found["up_bias"] = drawn(count, 1, inner)
        found["down_bias"] = drawn(count, hidden)
    return found


def codes_of(shape: Shape, weights: str) -> dict[str, Tensor]:
    """The same with random codes."""
    found = experts_of(shape)
    for role in ("gate", "up", "down"):
        count, inputs, outputs = found.pop(role).shape
        groups = 1 if weights == "fp8" else inputs // GROUP
        width = inputs // groups // (1 if weights == "fp8" else 2)
        size = (count, outputs, groups, width)
        codes = torch.randint(0, 60, size, dtype=torch.uint8, device="cuda")
        scales = torch.rand(size[:3], device="cuda") / 1e3
        is_float = weights == "fp8"
        found[f"{role}.codes"] = codes.view(torch.float8_e4m3fn) if is_float else codes
        found[f"{role}.scales"] = scales if is_float else scales.half()
    return found


def read_rate() -> float:
    """Bytes a second at which torch sums a tensor of 4 GiB."""
    numbers = torch.zeros(1 << 30, dtype=torch.float32, device="cuda")
    best = min(repeated(numbers.sum, 5) for _ in range(5))
    return numbers.nbytes / best * 1e3


# -- one layer -------------------------------------------------------------------------
def dense_mlp(shape: Shape) -> Step:
    both, down = (
        drawn(shape.hidden, 2 * shape.inner),
        drawn(shape.inner, shape.hidden),
    )

    def mlp(x: Tensor) -> Tensor:
        gate, up = (x @ both).chunk(2, -1)
        return F.silu(gate).mul_(up) @ down

    return mlp


def microseconds(steps: list[Step], x: Tensor) -> float:
    def call(turn: int) -> Tensor:
        return steps[turn % COPIES](x)

    return seconds_a_call(call, CALLS, REPLAYS) * 1e6


@torch.inference_mode()
def layer_rows(
    name: str, tokens: list[int], rate: float, form: str
) -> Iterator[list[str | float]]:
    shape = SHAPES[name]
    routing = shape.routing
    tensors = [experts_of(shape) for _ in range(COPIES)]
    weights = [ExpertWeights(**own) for own in tensors]
    if form != "float16":
        tensors = [codes_of(shape, form) for _ in range(COPIES)]
    chosen: list[Step] = [
        GroupedExperts(GroupedWeights.of(own), routing, "silu") for own in tensors
    ]
    every: list[Step] = [
        partial(run_experts, weights=w, routing=routing, activation="silu")
        for w in weights
    ]
    dense = [dense_mlp(shape.dense) for _ in range(COPIES)]
    for many in tokens:
        x = torch.randn(many, shape.hidden, device="cuda").half()
        reads = [choose_experts(x, w, routing)[1].unique().numel() for w in weights]
        read = sum(reads) / COPIES
        bound = read * shape.expert_bytes * BITS[form] / 16 / rate * 1e6
        found = microseconds(chosen, x)
        old = microseconds(every, x) if many <= FEW else float("nan")
        plain = microseconds(dense, x)
        times = [round(value, 1) for value in (bound, found, old, plain)]
        ratios = [round(found / bound, 2), round(found / plain, 2)]
        yield [name, form, many, round(read, 1), *times, *ratios]


# -- tunings ---------------------------------------------------------------------------
SWEEP = {
    16: [
        Tuning(columns, inputs, 4, stages)
        for columns, inputs in ((32, 128), (64, 64), (64, 128), (128, 64), (32, 256))
        for stages in (2, 3, 4)
    ],
    64: [
        Tuning(128, 64, 4, 3),
        Tuning(128, 64, 4, 4),
        Tuning(128, 64, 8, 3),
        Tuning(64, 64, 4, 4),
        Tuning(256, 64, 8, 3),
    ],
    128: [
        Tuning(128, 64, 8, 3),
        Tuning(128, 64, 8, 4),
        Tuning(64, 64, 4, 4),
        Tuning(256, 64, 8, 3),
        Tuning(128, 32, 8, 4),
        Tuning(128, 64, 4, 3),
    ],
}
SWEPT = {16: 16, 64: 1024, 128: 8192}
"""Tokens at which tiles of so many rows are timed."""


class Swept:
    """The two products of several layers, in tiles of one form."""

    def __init__(self, shape: Shape, tile: Tile) -> None:
        self.tile, routing = tile, shape.routing
        weights = [GroupedWeights.of(experts_of(shape)) for _ in range(COPIES)]
        self.layers = [GroupedExperts(one, routing, "silu") for one in weights]
        self.x = torch.randn(SWEPT[tile.rows], shape.hidden, device="cuda").half()
        self.pairs = [layer.pairs.routed(self.x, tile.rows) for layer in self.layers]
        self.between = self.first(tile.inner, 0)

    def first(self, tuning: Tuning, call: int) -> Tensor:
        at, form = call % COPIES, replace(self.tile, inner=tuning)
        return self.layers[at]._inner(self.x, *self.pairs[at], form)

    def second(self, tuning: Tuning, call: int) -> Tensor:
        at, form = call % COPIES, replace(self.tile, outer=tuning)
        return self.layers[at]._outer(self.between, *self.pairs[at], form)


@torch.inference_mode()
def sweep_rows(name: str) -> Iterator[list[str | float]]:
    for tile in TILES:
        swept = Swept(SHAPES[name], tile)
        for tuning in SWEEP[tile.rows]:
            calls = (partial(one, tuning) for one in (swept.first, swept.second))
            times = [timed_or_none(call) for call in calls]
            yield [name, len(swept.x), tile.rows, str(tuning), *times]


def timed_or_none(call: Callable[[int], Tensor]) -> float:
    """Microseconds; no number where the kernel does not fit."""
    try:
        return round(seconds_a_call(call, CALLS, 5) * 1e6, 1)
    except Exception as error:  # Triton's
        print(f"# {error!r:.200}")
        return float("nan")


# -- whole models ----------------------------------------------------------------------
def plan_of(shape: Shape) -> CompressionPlan:
    sizes = (shape.layers, shape.query_heads, shape.kv_heads, shape.head_dim)
    model = ModelShape(*sizes, shape.hidden, shape.vocab, 131072)
    d = shape.head_dim
    lanes = tuple(
        Lane(i, h, d, d, d, projected=False)
        for i in range(shape.layers)
        for h in range(shape.kv_heads)
    )
    group = Group(tuple(range(len(lanes))), Tier(16, 16), (), KEEP)
    return CompressionPlan(model, lanes, (group,), 64, CHUNK, compression="none")


def weights_of(shape: Shape) -> dict[str, Tensor]:
    """By the decoder's names."""
    hidden, d = shape.hidden, shape.head_dim
    ones = partial(torch.ones, dtype=torch.float16, device="cuda")
    found: dict[str, Tensor] = {}
    for i in range(shape.layers):
        layer = {
            "attn_norm.weight": ones(hidden),
            "mlp_norm.weight": ones(hidden),
            "q.weight": drawn(hidden, shape.query_heads * d),
            "k.weight": drawn(hidden, shape.kv_heads * d),
            "v.weight": drawn(hidden, shape.kv_heads * d),
            "o.weight": drawn(shape.query_heads * d, hidden),
        }
        if not shape.biased:
            layer |= {"q_norm.weight": ones(d), "k_norm.weight": ones(d)}
        if shape.experts:
            layer |= {f"experts.{role}": x for role, x in experts_of(shape).items()}
        else:
            for role in ("gate", "up"):
                layer[f"{role}.weight"] = drawn(hidden, shape.inner)
            layer["down.weight"] = drawn(shape.inner, hidden)
        found |= {f"layers.{i}.{role}": x for role, x in layer.items()}
    angles = 1e6 ** -(torch.arange(d // 2, device="cuda") / (d // 2))
    found |= {"rope.inv_freq": angles, "rope.amplitude": torch.ones_like(angles)}
    embed = drawn(shape.vocab, hidden).mul_(shape.vocab**0.5)
    head = drawn(hidden, shape.vocab)
    return found | {
        "embed.weight": embed,
        "head.weight": head,
        "norm.weight": ones(hidden),
    }


class Timed:
    """A model of one shape, run by an LLM, and times of its steps."""

    def __init__(self, shape: Shape, llm: LLM) -> None:
        self.shape, self.llm = shape, llm
        self.session = cast(TorchSession, llm.session)
        self.decoder = cast(TorchCompute, self.session.compute).decoder

    def seconds(self, batch: int, tokens: int, new: int) -> float:
        draw = random.Random(2)  # as serve_burst draws those of its first load
        ids = [
            [draw.randint(LOWEST_ID, HIGHEST_ID) for _ in range(tokens)]
            for _ in range(batch)
        ]
        params = SamplingParams(max_new_tokens=new, ignore_eos=True)
        start = time.perf_counter()
        self.llm.generate(ids, params)
        return time.perf_counter() - start

    def step(self) -> tuple[float, float]:
        """Milliseconds of a token of all sequences: the graph's, and by the clock."""
        self.seconds(BATCH, 64, 72)
        times = [
            self.seconds(BATCH, 64, 136) - self.seconds(BATCH, 64, 8) for _ in range(3)
        ]
        graph = self.session._graph_of(BATCH)
        return repeated(graph.replay, 30), min(times) / 128 * 1e3

    def prompt(self, tokens: int) -> float:
        """Milliseconds to the first token."""
        return min(self.seconds(1, tokens, 1) for _ in range(4)) * 1e3

    def step_bytes(self) -> float:
        """Bytes of the weights that a step of all sequences reads."""
        shape, heads = self.shape, self.shape.query_heads + self.shape.kv_heads
        attention = 2 * 2 * shape.hidden * heads * shape.head_dim
        mlps = shape.layers * shape.expert_bytes
        if shape.experts:
            mlps = sum(self._read()) * shape.expert_bytes
        head = 2 * shape.hidden * shape.vocab
        return shape.layers * attention + mlps + head

    def _read(self) -> list[float]:
        """Experts that a step of all sequences reads, by layer, on average: counted in
        graphs that are captured anew."""
        counts = torch.zeros(self.shape.layers, 2, dtype=torch.int64, device="cuda")
        for layer, count in zip(self.decoder.layers, counts, strict=True):
            experts = layer.experts
            assert isinstance(experts, GroupedExperts)
            setattr(experts.pairs, "routed", _counted(experts.pairs, count))  # noqa: B010
        self.session.forget_graphs()
        self.seconds(BATCH, 64, 8)
        counts.zero_()
        self.seconds(BATCH, 64, 256)
        return (counts[:, 0] / counts[:, 1]).tolist()


def _counted(
    pairs: RoutedPairs, count: Tensor
) -> Callable[[Tensor, int], tuple[Tensor, Tensor, Tensor]]:
    """``pairs.routed``, which also adds to ``count`` [2] how many experts own a tile, and 1,
    in steps of all sequences."""
    routed = pairs.routed

    def counting(x: Tensor, tile: int) -> tuple[Tensor, Tensor, Tensor]:
        shares, rows, owners = routed(x, tile)
        if len(x) == BATCH:
            every = torch.zeros(pairs.count + 1, dtype=torch.int64, device=x.device)
            every.scatter_(0, owners.long() + 1, 1)  # -1 owns those that none has
            count[0].add_(every[1:].sum())
            count[1].add_(1)
        return shares, rows, owners

    return counting


def random_model(shape: Shape, folder: Path) -> Timed:
    """A model of random weights. ``folder``: of a tokenizer."""
    plan, scales = plan_of(shape), (shape.head_dim**-0.5,) * shape.layers
    routing = shape.routing if shape.experts else None
    wiring = Wiring("rms", 1e-6, "silu", False, shape.head_dim, scales, routing=routing)
    library = cuda_library("the cuda backend")
    decoder = TorchDecoder(wiring, weights_of(shape), NativeRows(library))
    torch.cuda.empty_cache()
    longest = max(PROMPTS) + 256
    limits = Limits(BATCH, CHUNK + BATCH, longest, longest)
    size = CacheLayout(plan).bytes_for(longest + 512 * BATCH)
    session = session_of(TorchDevice(), library, decoder, plan, limits, size)
    return Timed(shape, LLM(session, plan, limits, Tokenizer(folder), size))


def model_row(name: str, model: Timed, kind: str, rate: float) -> list[str | float]:
    graph, clock = model.step()
    able = [n for n in PROMPTS if n < model.llm.limits.max_seq_len]
    prompts = [model.prompt(tokens) for tokens in able]
    prompts += [float("nan")] * (len(PROMPTS) - len(prompts))
    read = model.step_bytes()
    model.llm.close()
    bound = read / rate * 1e3
    numbers = (read / 1e9, bound, graph, graph / bound, clock, *prompts)
    return [name, kind, model.shape.layers, *(round(number, 2) for number in numbers)]


def model_rows(
    names: list[str], layers: int | None, rate: float
) -> Iterator[list[str | float]]:
    for name in names:
        shape = SHAPES[name]
        if layers is not None:
            shape = replace(shape, layers=layers)
        with tempfile.TemporaryDirectory() as folder:
            write_tokenizer(TOKENIZER, Path(folder), shape.vocab)
            for one in (shape, shape.dense):
                kind = "experts" if one.experts else "dense"
                yield model_row(name, random_model(one, Path(folder)), kind, rate)
                gc.collect()
                torch.cuda.empty_cache()


def engine_row(name: str, folder: Path, rate: float) -> list[str | float]:
    llm = LLM.load(folder, cache_bytes=8 << 30, verify=False)
    shape = replace(SHAPES[name], layers=llm.plan.model.layers)
    return model_row(name, Timed(shape, llm), "engine", rate)


# -- tables ----------------------------------------------------------------------------
LAYER = [
    "shape",
    "weights",
    "tokens",
    "read",
    "bytes us",
    "chosen us",
    "every us",
    "dense us",
]
LAYER += ["chosen / bytes", "chosen / dense"]
SWEPT_COLUMNS = ["shape", "tokens", "rows", "tuning", "first us", "second us"]
MODEL = ["shape", "MLP", "layers", "GB a step", "bytes ms", "step ms", "step / bytes"]
MODEL += ["step by the clock ms", *(f"prompt {tokens} ms" for tokens in PROMPTS)]


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--shapes", nargs="+", choices=SHAPES, default=list(SHAPES))
    parser.add_argument("--tokens", default="1,16,64,512,2048,8192")
    parser.add_argument("--weights", choices=BITS, default="float16")
    parser.add_argument("--models", action="store_true")
    parser.add_argument("--layers", type=int, help="of models; default: all of them")
    parser.add_argument("--engine", type=Path, help="of the one shape that is given")
    parser.add_argument("--sweep", action="store_true")
    asked = parser.parse_args()
    rate = read_rate()
    torch.cuda.empty_cache()
    title = f"{torch.cuda.get_device_name()}, {rate / 1e12:.2f} TB/s"
    tokens = [int(number) for number in asked.tokens.split(",")]
    columns, found = (
        LAYER,
        (layer_rows(x, tokens, rate, asked.weights) for x in asked.shapes),
    )
    if asked.models:
        columns, found = MODEL, [model_rows(asked.shapes, asked.layers, rate)]
    elif asked.engine:
        (name,) = asked.shapes
        columns, found = MODEL, [[engine_row(name, asked.engine, rate)]]
    elif asked.sweep:
        columns, found = SWEPT_COLUMNS, map(sweep_rows, asked.shapes)
    rows: list[list[str | float]] = []
    for row in chain.from_iterable(found):
        rows.append(row)
        print(json.dumps(row), flush=True)
    print_table(f"Experts: {title}", columns, rows)


if __name__ == "__main__":
    main()
