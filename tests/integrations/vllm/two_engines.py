"""A program for an environment with vLLM: an engine without guesses, and then one with
them, in one process. Prints "as without guesses", or fails.
``test_two_engines.py`` runs it, with the folder of a checkpoint; KVLATHE_VLLM names our
engine."""

from __future__ import annotations

import gc
import sys

from vllm.entrypoints.llm import LLM
from vllm.sampling_params import SamplingParams

from kvlathe_vllm import backend

NGRAM = {
    "method": "ngram",
    "prompt_lookup_max": 3,
    "prompt_lookup_min": 1,
    "num_speculative_tokens": 4,
}
PROMPTS = [[7 + (i * i) % 19 for i in range(size)] for size in (3, 150, 641)]


def answers(model: str, guesses: dict[str, object] | None) -> list[list[int]]:
    """Greedy ones, of an engine that ends here."""
    llm = LLM(
        model,
        dtype="float32",
        enforce_eager=True,
        max_model_len=2048,
        max_num_seqs=4,
        max_num_batched_tokens=100,
        speculative_config=guesses,
    )
    asked = [{"prompt_token_ids": ids} for ids in PROMPTS]
    params = SamplingParams(max_tokens=24, temperature=0, ignore_eos=True)
    found = llm.generate(asked, params, use_tqdm=False)
    kinds = {table.guesses for table in backend.MAKERS}
    assert kinds == {guesses is not None}, f"makers of another engine: {kinds}"
    return [list(one.outputs[0].token_ids) for one in found]


def main() -> None:
    """Without guesses, and then with them."""
    alone = answers(sys.argv[1], None)
    gc.collect()
    assert answers(sys.argv[1], dict(NGRAM)) == alone
    print("as without guesses")


if __name__ == "__main__":
    main()
