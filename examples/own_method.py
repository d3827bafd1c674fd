"""A compression method of one's own: full pages are kept in 8 bits. It takes
pip install '.[export]'.

python examples/own_method.py MODEL FOLDER

A method returns what it decides as a ``Decision``; pages, kernels and the scheduler
follow from that. docs/architecture.md says what flows where.
"""

from __future__ import annotations

import sys
from pathlib import Path

from kvlathe import LLM, BuildConfig, SamplingParams, build
from kvlathe.export.methods.method import Decision, Method
from kvlathe.export.methods.options import NoOptions
from kvlathe.export.methods.registry import methods
from kvlathe.plan.formats import Tier


def plan(options: NoOptions, page_tokens: int) -> Decision:
    """``options``: what was written behind the method's name; this one has none.
    ``page_tokens``: tokens of a page, for methods whose groups run along them."""
    return Decision(cold=Tier(8, 8, axis_k="rank", axis_v="rank"))


METHOD = Method("full pages are kept in 8 bits", NoOptions(), plan=plan)


def main(model: str, folder: str) -> None:
    methods()["eight"] = METHOD
    request = BuildConfig(
        model=Path(model),
        output_dir=Path(folder),
        compression="eight",
        use_cache=False,
    )
    with LLM.load(build(request)) as llm:
        if llm.manifest:
            print(f"{llm.manifest.kv_bytes.removed:.0%} of the cache's bytes removed")
        [answer] = llm.generate("def main():\n", SamplingParams(max_new_tokens=16))
        print(repr(answer.text))


if __name__ == "__main__":
    main(*sys.argv[1:])
