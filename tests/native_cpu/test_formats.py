"""plugins_cpp/src/common/formats.h says of every number format what
kvlathe/plan/formats.py says."""

from __future__ import annotations

import itertools
import re
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from kvlathe.plan.codec import e4m3_codes, half_from
from kvlathe.plan.formats import (
    META_BYTES,
    NAMES,
    WHOLE_RANK,
    Format,
    Tier,
    aligned,
    sum_bytes,
)
from kvlathe.plan.layer_table import POOLS, format_fields
from kvlathe.plan.packing import pack
from tests.support.format_cases import CODED_BITS, TIERS

HERE = Path(__file__).parent
PLUGINS = HERE.parents[1] / "plugins_cpp"
LETTERS = {"affine": "u", "normal": "n", "float8": "f"}
RANKS, GROUPS, PAGES = (16, 48, 96, 112, 128), (16, 32, 48, 64, 128), (16, 64, 96)

COMPARISON = re.compile(
    r"\bk?[Bb]its(_[kv])?\)? *([=!]=|[<>]=?) *\d|\d *([=!]=|<|>) *k?[Bb]its"
)
"""Of the bits of a format with a number, in C++."""

Answer = list[int]
Table = dict[str, Answer]
"""A question to say_formats.cc, and what Python answers."""


def every_format() -> list[Format]:
    return [form for tier in TIERS for form in tier.formats]


def widths() -> Table:
    """Widths of every number of bits, also of those that are no format."""
    table: Table = {}
    for bits in range(66):
        table[f"width {bits}"] = [0]
    for form in every_format():
        views = sum(1 << i for i, pool in enumerate(POOLS) if pool in form.pools)
        answer = [1, form.is_coded, views]
        if form.is_coded:
            answer += [form.is_packed, form.runs, form.together, 2**form.bits - 1]
        table[f"width {form.bits}"] = answer
    return table


def sizes() -> Table:
    table: Table = {"pair": [META_BYTES]}
    for form, rank, page in itertools.product(every_format(), RANKS, PAGES):
        size = form.element_bytes(rank * page)
        table[f"slab {rank} {page} {form.bits}"] = [size]
    for bits, group in itertools.product(CODED_BITS, GROUPS):
        table[f"sum {bits} {group}"] = [sum_bytes(bits, group)]
    for groups in range(1, 200, 3):
        table[f"sums {groups}"] = [aligned(groups * META_BYTES)]
    return table


def groups() -> Table:
    table: Table = {}
    for rank, group, page in itertools.product(RANKS, GROUPS, PAGES):
        by_rank = Format(8, "rank", group).group_sizes(rank, page)
        by_token = Format(8, "token", group).group_sizes(rank, page)
        table[f"rank_groups {rank} {group}"] = list(by_rank)
        table[f"token_groups {page} {group}"] = [len(by_token)]
    return table


def in_bucket(tier: Tier) -> Answer:
    answer: Answer = []
    for form in tier.formats:
        fixed = form.is_coded and form.coding == "normal"
        answer += [form.bits, form.axis_number, form.group]
        answer += [form.is_coded, form.along_tokens, fixed]
        answer.append(form.halves if form.is_coded else 2)
    return [*answer, tier.is_coded]


def buckets() -> Table:
    """As a layer's table and as a kvlathe_part, whose fields Python writes in order."""
    mixed = Tier(4, 16, "token", "rank", 48, 80)
    table: Table = {}
    for tier in (*TIERS, mixed):
        fields = " ".join(map(str, format_fields(tier)))
        table[f"bucket {fields}"] = in_bucket(tier)
        table[f"part {fields}"] = in_bucket(tier)
    return table


def tables() -> Table:
    """Numbers behind the codes that products of integers take."""
    table: Table = {}
    for form in every_format():
        if form.is_coded and form.decoding.is_whole:
            worth = [int(x) for x in form.table]
            table[f"table {form.bits} {form.axis_number}"] = worth
    return table


def floats() -> Table:
    """What 8-bit floats are worth; and the nearest of them, and the least half, of random
    numbers, of those between two codes, and of their neighbours."""
    worth = np.array(Format(8, "rank", WHOLE_RANK, coding="float8").table, np.float32)
    table: Table = {}
    for code in np.flatnonzero(np.isfinite(worth)):
        table[f"float8 {code}"] = [int(512 * worth[code])]
    positive = worth[:127]
    middles = (positive[1:] + positive[:-1]) / 2
    rng = np.random.default_rng(0)
    several = np.exp(rng.normal(0, 3, 500)).astype(np.float32)
    sizes = np.concatenate(
        [positive, middles, several, np.array([449, 6e4], np.float32)]
    )
    sizes = np.concatenate([np.nextafter(sizes, np.float32(to)) for to in (0, 1e30)])
    numbers = np.concatenate(
        [sizes, middles, positive, -sizes, -middles], dtype=np.float32
    )
    halves = half_from(np.maximum(numbers, 0)).view(np.uint16)
    codes = e4m3_codes(numbers)
    for x, code, half in zip(numbers.view(np.uint32), codes, halves, strict=True):
        table[f"float {x}"] = [int(code), int(half)]
    return table


def threes() -> Table:
    """The places of each eight codes of 3 bits: the first codes of their bytes alone
    are not 0."""
    table: Table = {}
    for count, code in itertools.product((16, 64, 80, 128, 176), range(0, 176, 8)):
        if code < count:
            codes = np.zeros((1, count), np.uint8)
            codes[0, [code, code + 2]] = 1
            at, second = np.flatnonzero(pack(codes, Format(3, "rank", 64))[0])
            table[f"threes {code} {count}"] = [int(at), int(second - at)]
    return table


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    compiler = shutil.which("c++") or shutil.which("g++")
    if compiler is None:
        pytest.skip("no C++ compiler")
    out = tmp_path_factory.mktemp("formats") / "say_formats"
    folders = [f"-I{PLUGINS / name}" for name in ("include", "src")]
    source = HERE / "say_formats.cc"
    subprocess.run([compiler, "-std=c++17", *folders, source, "-o", out], check=True)
    return out


@pytest.mark.parametrize(
    "table", [widths, sizes, groups, buckets, tables, floats, threes]
)
def test_formats_in_c_and_python_say_the_same(
    program: Path, table: Callable[[], Table]
) -> None:
    expected = table()
    questions = "\n".join(expected)
    done = subprocess.run(
        [program], input=questions, capture_output=True, text=True, check=True
    )
    lines = done.stdout.splitlines()
    answers = [list(map(int, line.split())) for line in lines]
    assert dict(zip(expected, answers, strict=True)) == expected


def test_a_name_says_the_bits_and_whether_there_are_codes() -> None:
    for form in every_format():
        kind = LETTERS[form.coding] if form.is_coded else "f"
        assert form.name == f"{kind}{form.bits}"
    assert {form.bits for form in every_format()} == set(NAMES)


@pytest.mark.parametrize(
    "line", ["if (kBits == 8)", "side.bits < 16 ?", "bits_k != 3", "16 == bits"]
)
def test_a_comparison_is_found(line: str) -> None:
    assert COMPARISON.search(line)


@pytest.mark.parametrize("line", ["1 << bits", "bits = 16", "bits >> 20", "kBits / 8"])
def test_arithmetic_is_no_comparison(line: str) -> None:
    assert not COMPARISON.search(line)


def test_no_other_file_compares_bits() -> None:
    """A format that none of them knows by its width needs no change there."""
    found: list[str] = []
    for path in (PLUGINS / "src").rglob("*.*"):
        if path.name == "formats.h":
            continue
        for number, line in enumerate(path.read_text("utf-8").splitlines(), 1):
            code = line.split("//")[0]
            if COMPARISON.search(code):
                found.append(f"{path.name}:{number}: {code.strip()}")
    assert not found
