"""Structures that are allowed, and what is refused before anything compiles it."""

from __future__ import annotations

import json
from typing import Any

import pytest

from kvlathe.base.errors import KvlatheError
from kvlathe.runtime.text.sampling_params import SamplingParams
from kvlathe.runtime.text.structure import Structure, literal

WRONG = {
    "kind": lambda: Structure("xml", "<a/>"),
    "text": lambda: Structure("regex", ""),
    "bytes": lambda: Structure("regex", WRONG_TEXT),
    "no JSON": lambda: Structure.json("{"),
    "no schema": lambda: Structure.json("[1]"),
    "no data": lambda: Structure.json({"const": {1, 2}}),
    "not a number": lambda: Structure.json({"const": float("nan")}),
    "nested": lambda: Structure.json("[" * 100_000),
    "large schema": lambda: Structure.json({"enum": ["x" * 70_000]}),
    "long regex": lambda: Structure.regex("a?" * 5000),
    "long grammar": lambda: Structure.grammar("start: " + '"a" ' * 5000),
    "many rules": lambda: Structure.grammar("start: a\n" + "a: b\n" * 500),
    "schema in a grammar": lambda: Structure.grammar("start: %json {}"),
    "patterns": lambda: Structure.json(
        {"properties": {str(i): {"pattern": "a?" * 300} for i in range(10)}}
    ),
    "pattern names": lambda: Structure.json({"patternProperties": {"a?" * 3000: True}}),
    "multiple": lambda: Structure.json({"type": "integer", "multipleOf": 999_983}),
    "multiples": lambda: Structure.json(
        {"items": [{"multipleOf": 997 - i} for i in range(30)]}
    ),
    "common multiple": lambda: Structure.json(
        {"allOf": [{"multipleOf": n} for n in (101, 103, 107)]}
    ),
    "fine multiple": lambda: Structure.json({"multipleOf": 0.123457}),
    "digits": lambda: Structure.json({"maximum": 10**400}),
    "no choice": lambda: Structure.choice([]),
    "empty choice": lambda: Structure.choice(["a", ""]),
}
WRONG_TEXT: Any = b"a"


@pytest.mark.parametrize("name", WRONG)
def test_wrong_or_too_large_structures_are_refused_in_words(name: str) -> None:
    with pytest.raises(KvlatheError) as refused:
        WRONG[name]()
    assert refused.value.fact and refused.value.reason and refused.value.remedy


def test_structures_take_ordinary_multiples_of_numbers() -> None:
    for multiple in (1, 7, 100, 0.01, 0.5, 2.5, 1e-3):
        schema = {"type": "number", "multipleOf": multiple}
        assert json.loads(Structure.json(schema).text) == schema


def test_multiples_of_several_numbers_are_taken() -> None:
    schema = {"properties": {"a": {"multipleOf": 0.01}, "b": {"multipleOf": 12}}}
    assert json.loads(Structure.json(schema).text) == schema


def test_sampling_parameters_take_only_structures() -> None:
    wrong: Any = {"type": "object"}
    with pytest.raises(KvlatheError, match=r"Structure.json\(\)"):
        SamplingParams(structure=wrong)
    assert SamplingParams(structure=Structure.json()).looks_back
    assert not SamplingParams().looks_back


def test_literals_in_a_structure_are_escaped() -> None:
    assert literal("a.é\n") == "a\\x{2E}é\\x{A}"
