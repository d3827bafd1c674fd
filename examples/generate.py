"""The Python API: a batch, a stream, and questions from several threads.

python examples/generate.py ENGINE
"""

from __future__ import annotations

import sys
from concurrent.futures import ThreadPoolExecutor
from functools import partial

from kvlathe import LLM, SamplingParams

PROMPTS = ["def main():\n", "# How to install\n", "import os\n"]


def main(engine: str) -> None:
    params = SamplingParams(max_new_tokens=16, stop="\n\n")
    with LLM.load(engine) as llm:
        print("-- a batch")
        for answer in llm.generate(PROMPTS, params):
            print(repr(answer.text), answer.finish_reason)

        print("-- a stream")
        for piece in llm.stream(PROMPTS[0], params):
            print(piece, end="", flush=True)
        print()

        print("-- threads")
        with ThreadPoolExecutor() as threads:
            answers = threads.map(partial(llm.generate, params=params), PROMPTS)
            for [answer] in answers:
                print(f"{answer.timings.decode_tokens_per_second:.0f} tokens/s")


if __name__ == "__main__":
    main(*sys.argv[1:])
