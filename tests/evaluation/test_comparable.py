"""Two engines are compared where both were built from one checkpoint, and nowhere
else."""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace
from typing import Any

import pytest

from kvlathe.base.errors import KvlatheError
from kvlathe.evaluation import continuations
from kvlathe.evaluation.evaluate import require_comparable
from kvlathe.evaluation.suite import Exam, run_suite
from kvlathe.runtime.text.tokenizer import Tokenizer
from tests.support.runtime_cases import MODEL, llm


def model(**changes: Any) -> Any:  # noqa: ANN401
    """A stand-in for an engine of the shipped model, with other facts."""
    facts = {"vocab_size": 4096, "model": "lathe-5m", "model_digest": "a"} | changes
    return SimpleNamespace(
        plan=SimpleNamespace(model=SimpleNamespace(vocab_size=facts["vocab_size"])),
        tokenizer=facts.get("tokenizer", Tokenizer(MODEL)),
        manifest=SimpleNamespace(
            model=facts["model"], model_digest=facts["model_digest"]
        ),
    )


def test_engines_of_one_checkpoint_are_comparable() -> None:
    require_comparable(model(), model())
    require_comparable(model(), model(model="renamed"))


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"vocab_size": 5000}, "they have 4096 and 5000 token ids"),
        ({"model_digest": "b", "model": "other"}, "lathe-5m and other differ in their"),
    ],
)
def test_engines_of_other_models_are_refused(
    changes: dict[str, Any], words: str
) -> None:
    with pytest.raises(KvlatheError, match=words):
        require_comparable(model(), model(**changes))


def test_engines_of_other_vocabularies_are_refused() -> None:
    other = Tokenizer(MODEL)
    other.backend.add_tokens(["an-extra-token"])
    with pytest.raises(KvlatheError, match="vocabularies differ"):
        require_comparable(model(), model(tokenizer=other))


def test_a_suite_that_cannot_compare_texts_is_refused_before_it_runs(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def missing(_module: str, package: str) -> None:
        raise KvlatheError("texts cannot be compared", f"{package} is missing")

    monkeypatch.setattr(continuations, "_library", missing)
    engine = llm("torch", "one")
    monkeypatch.setattr(engine, "logits", lambda *_: pytest.fail("it ran"))
    exam = dataclasses.replace(Exam(), samples=2)
    with pytest.raises(KvlatheError, match="is missing"):
        run_suite(engine, None, MODEL.parents[1] / "data" / "eval_text.jsonl", exam)
