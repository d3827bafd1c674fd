"""A compressed engine, built and read as a stream in asyncio. It takes
pip install '.[export]'.

python examples/compressed_stream.py MODEL FOLDER
"""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

from kvlathe import LLM, SamplingParams, build
from kvlathe.engines.config import BuildConfig

PROMPTS = ["def main():\n", "# How to install\n"]


async def read(llm: LLM, prompt: str) -> str:
    params = SamplingParams(max_new_tokens=16)
    return "".join([piece async for piece in llm.astream(prompt, params)])


async def read_all(llm: LLM) -> None:
    """Both streams at once: the steps of the engine serve them together."""
    texts = await asyncio.gather(*(read(llm, prompt) for prompt in PROMPTS))
    for text in texts:
        print(repr(text))


def main(model: str, folder: str) -> None:
    # Codes of 4 bits for the pages that are full.
    request = BuildConfig(
        model=Path(model), output_dir=Path(folder), compression="hack:bits=4"
    )
    with LLM.load(build(request)) as llm:
        if llm.manifest:
            print(f"{llm.manifest.kv_bytes.removed:.0%} of the cache's bytes removed")
        asyncio.run(read_all(llm))


if __name__ == "__main__":
    main(*sys.argv[1:])
