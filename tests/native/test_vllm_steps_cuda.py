"""Decode steps of the vLLM plugin on a GPU without vLLM: queued layer by layer, queued
for graphs, and in a CUDA graph. All three give the same numbers.

The steps run in a process of their own, which says how far it came. Where that stands
still it is ended, and the test says which step did not end.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest

torch = pytest.importorskip("torch")
from torch import Tensor  # noqa: E402

from kvlathe.plan.formats import Tier  # noqa: E402
from kvlathe.plan.groups import Group  # noqa: E402
from kvlathe.plan.heads import Lane, ModelShape  # noqa: E402
from kvlathe.plan.lives import KEEP, SEAL  # noqa: E402
from kvlathe.plan.plan import CompressionPlan  # noqa: E402
from kvlathe_vllm.calls import Calls, Step  # noqa: E402
from kvlathe_vllm.cuda import CudaLayer  # noqa: E402
from kvlathe_vllm.gpu_step import DecodeBuffers, run_next  # noqa: E402
from kvlathe_vllm.hosted import Hosted  # noqa: E402
from kvlathe_vllm.layer import Most  # noqa: E402
from tests.native.library import ROOT, Library  # noqa: E402

MOST, PAGE, PAGES = 64, 64, 4
"""Sequences, tokens of a page, pages of a sequence at most."""
HEADS, GROUP, DIMS = 8, 4, 128
LAYERS = int(os.environ.get("KVLATHE_TEST_LAYERS", "4"))
STEPS = 5
LIMIT = 120 + 10 * LAYERS
"""Seconds until the GPU counts as standing still."""
CLOSE = {"rtol": 2e-2, "atol": 2e-2}


def engine_of(sealed: bool) -> Hosted:
    """An engine with the heads of Llama-3.1-8B: 4 bits where it seals, else 16."""
    shape = ModelShape(LAYERS, HEADS * GROUP, HEADS, DIMS, 64, 100, PAGE * PAGES)
    lanes = tuple(
        Lane(layer, head, DIMS, DIMS, DIMS, "none")
        for layer in range(LAYERS)
        for head in range(HEADS)
    )
    every = tuple(range(len(lanes)))
    cold = (Tier(4, 4),) if sealed else ()
    group = Group(every, Tier(16, 16), cold, SEAL if sealed else KEEP)
    plan = CompressionPlan(shape, lanes, (group,), PAGE, PAGE)
    return Hosted(Path("engine"), plan, {})


class Played:
    """The layers of one engine on blocks of their own, and the steps that they take."""

    def __init__(self, engine: Hosted, in_buffers: bool) -> None:
        self.engine = engine
        self.calls = Calls(engine.plan, MOST)
        self.layers: list[CudaLayer] = []
        buckets = len(engine.plan.index.buckets)
        device = torch.device("cuda")
        self.buffers = DecodeBuffers(MOST, buckets, device) if in_buffers else None
        self.table = torch.zeros(MOST, PAGES, dtype=torch.int32, device=device)

    def send(self, table: Tensor, lengths: np.ndarray, tokens: int = 1) -> None:
        """A step of ``tokens`` rows each. ``lengths`` with them."""
        self.table.copy_(table)
        starts = np.arange(len(lengths) + 1, dtype=np.int32) * tokens
        step = Step(starts, lengths.astype(np.int32), table.numpy().copy())
        self.call = self.calls.of(step)
        if self.buffers is not None and tokens == 1:
            run_next(self.call, self.buffers.send(self.call, self.table))

    def run(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """o of all layers. They are made by the first step, as vLLM makes them."""
        found: list[Tensor] = []
        for i in range(LAYERS):
            if i == len(self.layers):
                self.layers.append(self._made(i))
            found.append(self.layers[i].run(q, k, v, self.call))
        return torch.stack(found)

    def _made(self, layer: int) -> CudaLayer:
        block = self.engine.blocks[layer]
        size = (MOST * PAGES + 1, 1, PAGE, block.token_bytes)
        cache = torch.zeros(size, dtype=torch.uint8, device="cuda")
        most = Most(MOST, MOST * PAGE * PAGES, PAGE * PAGES)
        return CudaLayer(self.engine, layer, cache, most, DIMS**-0.5, torch.float16)


def drawn(rows: int, seed: int) -> tuple[Tensor, Tensor, Tensor]:
    random = torch.Generator("cuda").manual_seed(seed)

    def one(heads: int) -> Tensor:
        size = (rows, heads, DIMS)
        x = torch.randn(size, generator=random, device="cuda")
        return x.to(torch.float16)

    return one(HEADS * GROUP), one(HEADS), one(HEADS)


@contextmanager
def saying(what: str) -> Generator[None]:
    """``what`` is begun, and ends when the GPU has done it."""
    print(f"begun: {what}", flush=True)
    start = time.monotonic()
    yield
    torch.cuda.synchronize()
    print(f"ended: {what}, {time.monotonic() - start:.2f} s", flush=True)


def check_steps(sealed: bool) -> None:
    """Rehearsals on the null block as of vLLM, on a stream beside; prompts; then decode
    steps in which pages fill up, and others begin."""
    # Layers of one engine are spread together, so each has an engine of its own.
    single, graphed = Played(engine_of(sealed), False), Played(engine_of(sealed), True)
    null, ones = torch.zeros(MOST, PAGES, dtype=torch.int32), np.ones(MOST)
    inputs = drawn(MOST, 0)
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        graphed.send(null, ones)
        with saying("rehearsal for graphs, which makes the layers"):
            graphed.run(*inputs)
        graphed.send(null, ones)
        with saying("rehearsal for graphs, once more"):
            graphed.run(*inputs)
        graphed.send(null, ones)
        graph = torch.cuda.CUDAGraph()
        with saying("capture"), torch.cuda.graph(graph):
            o = graphed.run(*inputs)
        with saying("replay of the rehearsal"):
            graph.replay()
    table = 1 + torch.arange(MOST * PAGES, dtype=torch.int32).view(MOST, PAGES)
    size = 2 * PAGE - 2
    prompts = drawn(MOST * size, 1)
    for played in (single, graphed):
        played.send(table, np.full(MOST, size), size)
        with saying("prompts"):
            played.run(*prompts)
    for step in range(STEPS):
        fresh = drawn(MOST, 2 + step)
        lengths = np.full(MOST, size + step + 1)
        single.send(table, lengths)
        with saying(f"step {step}, layer by layer"):
            want = single.run(*fresh)
        graphed.send(table, lengths)
        for own, new in zip(inputs, fresh, strict=True):
            own.copy_(new)
        with saying(f"step {step}, graph"):
            graph.replay()
        torch.testing.assert_close(o, want, **CLOSE)


@pytest.mark.parametrize("sealed", [True, False], ids=["4 bits", "16 bits"])
def test_decode_steps_in_a_graph_end_and_give_the_same(
    library: Library, tmp_path: Path, sealed: bool
) -> None:
    if not (torch.cuda.is_available() and library.has_cuda):
        pytest.skip("no GPU, or a library without CUDA kernels")
    paths = [str(ROOT), str(ROOT / "integrations" / "vllm")]
    own = {"KVLATHE_LIBRARY": str(library.path), "PYTHONPATH": os.pathsep.join(paths)}
    command = [sys.executable, "-m", __name__, *(["sealed"] if sealed else [])]
    log = tmp_path / "said"
    with log.open("w") as said:
        child = subprocess.Popen(
            command,
            env=os.environ | own,
            cwd=ROOT,
            stdout=said,
            stderr=subprocess.STDOUT,
        )
    try:
        code = child.wait(LIMIT)
    except subprocess.TimeoutExpired:
        child.kill()  # its end is not waited for: the GPU may not let it go
        pytest.fail(f"it stood still for {LIMIT} s. It said:\n{log.read_text()}")
    print(log.read_text())
    assert code == 0, log.read_text()


if __name__ == "__main__":
    import faulthandler

    # Says where the host is before it is ended from outside.
    faulthandler.dump_traceback_later(LIMIT - 20)
    check_steps("sealed" in sys.argv)
