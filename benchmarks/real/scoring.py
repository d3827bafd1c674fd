"""Scores of answers, 0 to 1."""

from __future__ import annotations

from collections.abc import Sequence

from benchmarks.real import sandbox
from benchmarks.real.samples import Sample, contained, parting
from kvlathe.base.errors import KvlatheError


def score(
    sample: Sample, text: str, ids: Sequence[int], reference: Sequence[int]
) -> float:
    """The score of an answer. ``reference``: the tokens of the uncompressed one, for
    answers that are compared with it."""
    if sample.check == "contains":
        return contained(text, sample.answers)
    if sample.check == "program":
        before, behind = sample.program
        return float(sandbox.run(before + text + behind).passed)
    if not reference:
        raise KvlatheError(
            f"there is nothing to compare {sample.task} with",
            "the uncompressed engine has not answered it",
            "ask the row none first",
        )
    return parting(ids, reference) / len(reference)
