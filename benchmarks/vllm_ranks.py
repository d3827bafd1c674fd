"""Bytes that vLLM's tensor parallelism sets aside in equal blocks, over those that heads
fill: with the KV heads of each layer in the order of the checkpoint, and as they are dealt.

    PYTHONPATH=.:integrations/vllm python -m benchmarks.vllm_ranks out/hosted

Folders of `kvlathe build --backend vllm`; without one, plans of statistics that are made
up: 32 layers of 8 KV heads.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path

from kvlathe.plan.layer_block import bare
from kvlathe_vllm.dealt import Dealt
from kvlathe_vllm.hosted import Hosted, open_hosted
from tests.plan.test_deal import method_plans


def engines() -> Iterator[tuple[str, Hosted]]:
    folders = [Path(name) for name in sys.argv[1:]]
    for folder in folders:
        yield folder.name, open_hosted(folder)
    if not folders:
        for name, plan in method_plans().items():
            every = range(len(plan.lanes))
            yield name, Hosted(Path(name), bare(plan, every), {})


def main() -> None:
    print("| plan | ranks | order of the checkpoint | dealt |\n|---|---|---|---|")
    found: list[tuple[str, int, float, float]] = []
    for name, whole in engines():
        model = whole.plan.model
        for ranks in (2, 4, 8):
            if ranks > model.kv_heads:
                continue
            dealt, plain = Dealt(whole, ranks), Dealt(whole, ranks)
            plain.orders = [tuple(range(model.kv_heads))] * model.layers
            row = (name, ranks, plain.padding, dealt.padding)
            found.append(row)
            print(f"| {name} | {ranks} | {row[2]:.3f} | {row[3]:.3f} |")
    print(json.dumps({"padding": found}))


if __name__ == "__main__":
    main()
