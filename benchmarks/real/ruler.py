"""RULER's tasks by the generators of lm-evaluation-harness (arXiv 2404.06654), as
samples. Six tasks need no download. Their sizes are counted by the model's tokenizer.

Importing the harness's needles asks for a splitter of sentences (nltk's punkt). Only
its essays need it, which are none of these tasks: without a network it goes on.
"""

from __future__ import annotations

import contextlib
import io
import json
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, cast

import numpy as np

from benchmarks.real.samples import Checkpoint, Sample, split
from kvlathe.plan.engine_folder import open_engine

NEW = {
    "niah_single_1": 128,
    "niah_multikey_2": 128,
    "niah_multikey_3": 128,
    "vt": 30,
    "fwe": 50,
    "cwe": 120,
}
"""Task -> tokens of an answer, the harness's ``max_gen_toks``."""
DELIMITERS = {"cwe": "\n\n"}
"""What the harness puts between a question and its answer's beginning, where it is no
blank (``target_delimiter``)."""
QUESTIONS = ("\nQuestion:", "\nWhat ")
"""Beginnings of the questions, which stand at the end of an input."""
ROOM = 128
"""Tokens by which inputs are shorter where a model has no more positions than the
length: for the chat template, and for answers that a generator does not count."""
Doc = dict[str, Any]


def documents(
    task: str, tokenizer: Callable[..., Any], tokens: int, count: int, seed: int
) -> list[Doc]:
    """``count`` documents of at most ``tokens`` tokens as the harness makes them. Every
    task and length is drawn from ``seed`` anew. ``tokenizer``: of transformers."""
    from lm_eval.tasks.ruler import cwe_utils, fwe_utils, niah_utils, vt_utils

    random.seed(seed)
    np.random.seed(seed)
    cwe_utils.RNG.seed(seed)
    niah: dict[str, tuple[str, str, str]] = {
        "niah_single_1": ("repeat", "words", "numbers"),
        "niah_multikey_2": ("needle", "words", "numbers"),
        "niah_multikey_3": ("needle", "uuids", "uuids"),
    }
    if task in niah:
        haystack, keys, values = niah[task]
        return niah_utils.generate_samples(
            niah_utils.get_haystack(type_haystack=haystack),
            max_seq_length=tokens,
            template=niah_utils.TEMPLATE,
            type_haystack=haystack,
            type_needle_k=keys,
            type_needle_v=values,
            num_samples=count,
            TOKENIZER=tokenizer,
        )
    if task == "vt":
        chains = vt_utils.sys_vartrack_w_noise_random
        example = chains(
            tokenizer=tokenizer, num_samples=1, max_seq_length=500, incremental=5
        )[0]
        return chains(
            tokenizer=tokenizer,
            num_samples=count,
            max_seq_length=tokens,
            icl_example=example,
        )
    if task == "fwe":
        return fwe_utils.sys_kwext(tokenizer, tokens, num_samples=count)
    return cwe_utils.sys_word_pair_random(count, tokens, tokenizer=tokenizer)


def samples(
    folder: Path, tokens: int, count: int, seed: int, chat: bool, tasks: list[str]
) -> Iterator[Sample]:
    """Samples of ``tokens`` tokens for the model in ``folder``."""
    from transformers import PreTrainedTokenizerFast

    from kvlathe.runtime.text.tokenizer import Tokenizer

    counts = PreTrainedTokenizerFast(tokenizer_file=str(folder / "tokenizer.json"))
    asked = min(tokens, positions(folder) - ROOM)
    own = cast(Checkpoint, Tokenizer(folder))
    for task in tasks:
        with contextlib.redirect_stdout(io.StringIO()):
            made = documents(task, counts, asked, count, seed)
        for number, doc in enumerate(made):
            yield sample(own, f"{task}@{tokens}", number, doc, chat)


def positions(folder: Path) -> int:
    """Tokens of the longest sequence: of a checkpoint, or of an engine."""
    config = folder / "config.json"
    if config.exists():
        return json.loads(config.read_text("utf-8"))["max_position_embeddings"]
    return open_engine(folder, deep=False).manifest.limits.max_seq_len


def sample(
    tokenizer: Checkpoint, task: str, number: int, doc: Doc, chat: bool
) -> Sample:
    """A document of the harness, cut before its question."""
    name = task.partition("@")[0]
    at = max(doc["input"].rfind(begin) for begin in QUESTIONS)
    begun = DELIMITERS.get(name, " ") + doc["gen_prefix"]
    texts = split(tokenizer, doc["input"][:at], doc["input"][at:], begun, chat)
    answers = tuple(doc["outputs"])
    return Sample(task, number, *texts, NEW[name], "contains", answers)
