"""FlashAttention 3's paged decode as vLLM calls it, fp16 and fp8 (e4m3) caches: what
decode_h200.py's --baseline reads, beside FlashInfer's.

  pip download --no-deps vllm==0.25.1 && unzip -j vllm-*.whl '*_vllm_fa3_C.abi3.so'
  python3 -m benchmarks.flash3_decode --library _vllm_fa3_C.abi3.so | tee -a flashinfer.txt

The library is that of vLLM's wheel for the torch that runs this. With an fp8 cache
queries are fp8, too, and the output is bf16, as in vLLM. The schedule is made outside
of the timed calls. Pages hold K and V of all heads, [tokens][heads] as in vLLM
(``fa3``), or [heads][tokens] as in FlashInfer (``fa3_hnd``). Timing, copies of the cache
and the error are flashinfer_decode.py's. Needs torch and a Hopper GPU; prints one table
and one JSON line.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from benchmarks.flashinfer_decode import Cache, compared, parser_with_cases


class FlashCache(Cache):
    """A Cache that FlashAttention reads."""

    def _call(self, pages: Callable[[torch.Tensor], Any]) -> Callable[[int], None]:
        """``pages``: K and V [pages, tokens, heads, dim] of a copy."""
        a, ops = self.a, torch.ops._vllm_fa3_C
        fp8 = self.dtype == torch.float8_e4m3fn
        q = self.q.to(self.dtype)
        o = torch.bfloat16 if fp8 else torch.float16
        self.out = torch.empty(q.shape, dtype=o, device="cuda")
        lengths = torch.full((self.batch,), self.tokens, dtype=torch.int32).cuda()
        starts = torch.arange(self.batch + 1, dtype=torch.int32, device="cuda")
        ones = torch.ones(self.batch, a.heads, device="cuda") if fp8 else None
        schedule = ops.get_scheduler_metadata(
            self.batch, 1, self.tokens, a.heads * a.group, a.heads, a.dim, a.dim, q.dtype, lengths,
            starts, None, None, None, None, a.page_tokens, 0, True, -1, -1, False, 0, None, 0,
        )  # fmt: skip

        def call(i: int) -> None:
            k, v = pages(self.copies[i % len(self.copies)])
            ops.fwd(
                q, k, v, None, None, None, self.out, starts, None, None, None, lengths, 1, self.tokens,
                self.table, None, None, None, None, None, ones, ones, ones, 1 / math.sqrt(a.dim), True,
                -1, -1, 0.0, True, schedule, 0, None, 0, None, 1, 0, None,
            )  # fmt: skip

        return call

    def fa3(self) -> Callable[[int], None]:
        shape = self.copies[0].shape
        turned = (*shape[:2], shape[3], shape[2], shape[4])
        return self._call(lambda copy: copy.view(turned).unbind(1))

    def fa3_hnd(self) -> Callable[[int], None]:
        return self._call(lambda copy: copy.transpose(2, 3).unbind(1))

    def keys_and_values(self, backend: str) -> torch.Tensor:
        pages = super().keys_and_values(backend)
        if backend != "fa3":
            return pages
        shape = pages.shape
        return pages.view(*shape[:2], shape[3], shape[2], shape[4]).transpose(2, 3)


def main() -> None:
    parser = parser_with_cases(__doc__, "fa3,fa3_hnd")
    parser.add_argument("--library", type=Path, required=True)
    a = parser.parse_args()
    torch.ops.load_library(a.library.resolve())
    compared(a, FlashCache, "flash3_decode", "FlashAttention 3")


if __name__ == "__main__":
    main()
