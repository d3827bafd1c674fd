"""FlashInfer's paged decode attention, fp16 and fp8 (e4m3) caches: what
decode_h200.py's --baseline reads.

  pip install flashinfer-python==0.6.18
  python3 -m benchmarks.flashinfer_decode | tee flashinfer.txt
  python3 -m benchmarks.decode_h200 --library build/native/libkvlathe.so --baseline flashinfer.txt

Backends: ``fa2_tc`` (tensor cores) and ``xqa`` (TensorRT-LLM's), both compiled when
first asked for: minutes, with nvcc and ninja. One page is K and V of all heads (HND);
pages are shuffled. Timing as in decode_h200.py: one call on each of several copies of
the cache (at least four times the L2 cache) in one CUDA graph, median of the replays.
The error is relative to float32 attention on the same numbers. Needs torch and a GPU;
prints one table and one JSON line.
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Callable
from importlib.util import find_spec
from typing import Any

import torch

from benchmarks.support.commands import parser_of
from benchmarks.support.gpu import seconds_a_call

TYPES = {"fp16": torch.float16, "fp8": torch.float8_e4m3fn}


class Cache:
    """Random pages [copies][pages, 2, heads, page, dim] and ``batch`` sequences of
    ``tokens`` tokens."""

    def __init__(
        self, a: argparse.Namespace, batch: int, tokens: int, dtype: torch.dtype
    ) -> None:
        self.a, self.batch, self.tokens, self.dtype = a, batch, tokens, dtype
        self.pages = -(-tokens // a.page_tokens)
        shape = (batch * self.pages, 2, a.heads, a.page_tokens, a.dim)
        size = math.prod(shape) * dtype.itemsize
        cached = torch.cuda.get_device_properties(0).L2_cache_size
        self.copies = [
            self._random(shape)
            for _ in range(min(max(1, math.ceil(4 * cached / size)), 32))
        ]
        self.calls = max(len(self.copies), min(20, max(2, int(8e9 / size))))
        self.table = (
            torch.randperm(shape[0], device="cuda").int().view(batch, self.pages)
        )
        self.q = torch.randn(
            batch, a.heads * a.group, a.dim, dtype=torch.float16, device="cuda"
        )
        self.out = torch.empty_like(self.q)
        self.space = torch.zeros(512 << 20, dtype=torch.uint8, device="cuda")

    def _random(self, shape: tuple[int, ...]) -> torch.Tensor:
        made = torch.empty(shape, dtype=self.dtype, device="cuda")
        for some in made.split(max(1, (128 << 20) // math.prod(shape[1:]))):
            some.copy_(torch.randn(some.shape, dtype=torch.float16, device="cuda"))
        return made

    def bytes(self) -> float:
        """K, V, q and o once."""
        kept = (
            2
            * self.batch
            * self.tokens
            * self.a.heads
            * self.a.dim
            * self.dtype.itemsize
        )
        return kept + 2 * self.q.numel() * 2

    def keys_and_values(self, backend: str) -> torch.Tensor:
        """The last sequence's pages as ``backend`` reads them, [pages, 2, heads, page,
        dim]."""
        return self.copies[0][self.table[-1].long()]

    def error(self, backend: str) -> float:
        """The error of the last sequence's answer, relative."""
        a, page = self.a, self.keys_and_values(backend).float()
        k, v = (
            page[:, i].transpose(0, 1).reshape(a.heads, -1, a.dim)[:, : self.tokens]
            for i in range(2)
        )
        q = self.q[-1].float().view(a.heads, a.group, a.dim)
        exact = torch.softmax(q @ k.transpose(1, 2) / math.sqrt(a.dim), -1) @ v
        return float(
            (self.out[-1].float().view_as(exact) - exact).norm() / exact.norm()
        )

    def fa2_tc(self) -> Callable[[int], None]:
        import flashinfer

        a = self.a
        wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(
            self.space, "HND", use_tensor_cores=True, backend="fa2"
        )
        starts = (
            torch.arange(self.batch + 1, dtype=torch.int32, device="cuda") * self.pages
        )
        last = torch.full_like(
            starts[1:], self.tokens - (self.pages - 1) * a.page_tokens
        )
        wrapper.plan(
            starts, self.table.flatten(), last, a.heads * a.group, a.heads, a.dim, a.page_tokens,
            q_data_type=torch.float16, kv_data_type=self.dtype,
        )  # fmt: skip
        return lambda i: wrapper.run(
            self.q, self.copies[i % len(self.copies)], out=self.out
        )

    def xqa(self) -> Callable[[int], None]:
        import flashinfer

        lengths = torch.full(
            (self.batch,), self.tokens, dtype=torch.int32, device="cuda"
        )
        return lambda i: flashinfer.decode.trtllm_batch_decode_with_kv_cache(
            self.q, self.copies[i % len(self.copies)], self.space, self.table, lengths, self.tokens,
            bmm1_scale=self.a.dim**-0.5, bmm2_scale=1.0, kv_layout="HND", backend="xqa", out=self.out,
        )  # fmt: skip


def measure(cache: Cache, backend: str, replays: int) -> dict[str, Any]:
    call = getattr(cache, backend)()
    cache.space.zero_()
    call(0)
    torch.cuda.synchronize()
    error = cache.error(backend)
    seconds = seconds_a_call(call, cache.calls, replays)
    return {
        "backend": backend,
        "us": seconds * 1e6,
        "gb_s": cache.bytes() / seconds / 1e9,
        "error": error,
    }


def parser_with_cases(doc: str | None, backends: str) -> argparse.ArgumentParser:
    """Arguments of a benchmark of ``backends``."""
    parser = parser_of(doc)
    parser.add_argument("--cases", default="16x32768,64x16384,16x4096,1x32768")
    parser.add_argument("--kv", default="fp16,fp8", help="comma-separated")
    parser.add_argument("--backends", default=backends, help="comma-separated")
    parser.add_argument(
        "--label", default="llama8b", help="first column: what --baseline-model names"
    )
    parser.add_argument("--heads", type=int, default=8)
    parser.add_argument("--group", type=int, default=4)
    parser.add_argument("--dim", type=int, default=128)
    parser.add_argument("--page-tokens", type=int, default=64)
    parser.add_argument("--replays", type=int, default=11)
    return parser


def compared(
    a: argparse.Namespace, kind: type[Cache], bench: str, version: str
) -> None:
    """Prints the table and the JSON line of ``version``'s backends."""
    name, results = torch.cuda.get_device_name(), []
    print(f"# {name}, {version}, {a.heads} heads x {a.group}, d = {a.dim}")
    for case in a.cases.split(","):
        batch, tokens = (int(x) for x in case.split("x"))
        for kv in a.kv.split(","):
            cache = kind(a, batch, tokens, TYPES[kv])
            for backend in a.backends.split(","):
                where = {"label": a.label, "batch": batch, "tokens": tokens, "kv": kv}
                head = f"{a.label:11s} {batch:4d} {tokens:7d} {kv:>5s} {backend:8s}"
                try:
                    r = where | measure(cache, backend, a.replays)
                except Exception as error:  # a shape that a backend has no kernel for
                    print(
                        f"{head} not there: {type(error).__name__}: {str(error)[:120]!r}",
                        flush=True,
                    )
                    continue
                print(
                    f"{head} {r['us']:9.1f} us {r['gb_s']:6.0f} GB/s  error {r['error']:.1e}",
                    flush=True,
                )
                results.append(r)
            del cache
            torch.cuda.empty_cache()
    line = {"bench": bench, "device": name, "version": version, "results": results}
    print(json.dumps(line))


def main() -> None:
    a = parser_with_cases(__doc__, "fa2_tc,xqa").parse_args()
    if find_spec("flashinfer") is None or not torch.cuda.is_available():
        raise SystemExit(
            "skipped: no flashinfer (pip install flashinfer-python) or no GPU"
        )
    import flashinfer

    compared(a, Cache, "flashinfer_decode", f"FlashInfer {flashinfer.__version__}")


if __name__ == "__main__":
    main()
