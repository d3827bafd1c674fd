"""The results that compaction of a prefix has to give, from transformers in float64:
the scores of its KV pairs, and answers behind those that stay."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import transformers
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from kvlathe.runtime.requests.compaction import FIRST, LEAD, NEXT
from tests.support.runtime_cases import MODEL, text

Scores = npt.NDArray[np.float64]
PREFIX, QUESTION = 512, 24
PART = 200
"""Tokens that are repeated at once: tests set it in place of the runtime's."""


def prompt() -> list[int]:
    return list(text(PREFIX + QUESTION))


@cache
def model() -> Any:  # noqa: ANN401
    loaded = transformers.AutoModelForCausalLM.from_pretrained(
        MODEL, attn_implementation="eager", dtype=torch.float64
    )
    return loaded.eval()


@cache
def attention_maxima() -> Scores:
    """[lanes, PREFIX]: what the rows that repeat the prefix give its pairs at most."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(MODEL)
    prefix = list(text(PREFIX))
    most = np.zeros(())
    for first in range(0, PREFIX, PART):
        said = tokenizer.encode(NEXT if first else FIRST)
        lead = prefix[max(0, first - LEAD) : first]
        ids = [*prefix, *said, *lead, *prefix[first : first + PART]]
        with torch.inference_mode():
            layers = model()(torch.tensor([ids]), output_attentions=True).attentions
        given = torch.stack(layers)[:, 0, :, PREFIX:, :PREFIX]
        by_lane = given.unflatten(1, (2, 2)).amax((2, 3))
        most = np.maximum(most, by_lane.flatten(0, 1).numpy())
    return most


def masked_logits(ids: list[int], kept: Mapping[int, npt.NDArray[np.int64]]) -> Scores:
    """[QUESTION, vocab] after each place behind the prefix, where lane (layer * heads +
    head) shows them only its ``kept`` places of the prefix."""

    def attend(
        module: Any,  # noqa: ANN401
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        mask: object,
        scaling: float,
        **_: object,
    ) -> tuple[torch.Tensor, None]:
        length, heads = q.shape[2], k.shape[1]
        seen = torch.ones(heads, length, length, dtype=torch.bool).tril()
        for head in range(heads):
            gone = np.setdiff1d(
                np.arange(PREFIX), kept[module.layer_idx * heads + head]
            )
            seen[head, PREFIX:, gone] = False
        groups = q.shape[1] // heads
        k, v, seen = (x.repeat_interleave(groups, -3) for x in (k, v, seen))
        scores = (q @ k.mT * scaling).masked_fill(~seen, -torch.inf)
        return (scores.softmax(-1) @ v).transpose(1, 2), None

    ALL_ATTENTION_FUNCTIONS.register("by lane", attend)
    ALL_MASK_ATTENTION_FUNCTIONS.register("by lane", lambda *_, **__: None)
    chosen = model()
    chosen.set_attn_implementation("by lane")
    try:
        with torch.inference_mode():
            logits = chosen(torch.tensor([ids])).logits
    finally:
        chosen.set_attn_implementation("eager")
    return logits[0, PREFIX:].numpy()


def lanes_apart(kind: str) -> list[list[int]]:
    """The lanes of each bucket that holds a compacted prefix."""
    return [list(range(8))] if kind == "compacted alike" else [[i] for i in range(8)]
