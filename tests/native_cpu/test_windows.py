"""The CUDA kernels leave out of a window's pages what sight.Sight hides:
plugins_cpp/src/common/windows.h, asked by a program."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvlathe.plan.lives import Window
from kvlathe.plan.sight import SEES_ALL, Sight

HERE = Path(__file__).parent
SOURCES = HERE.parents[1] / "plugins_cpp"
PAGES = (16, 64, 128)
STAGES = (64, 128)


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    compiler = shutil.which("c++") or shutil.which("g++")
    if compiler is None:
        pytest.skip("no C++ compiler")
    path = tmp_path_factory.mktemp("windows") / "say"
    includes = [f"-I{SOURCES}/src", f"-I{SOURCES}/include"]
    source = HERE / "say_windows.cc"
    command = [compiler, "-std=c++17", *includes, str(source), "-o", str(path)]
    subprocess.run(command, check=True)
    return path


def answers(program: Path, lines: Sequence[str]) -> list[list[int]]:
    text = "\n".join(lines)
    done = subprocess.run(
        [program], input=text, capture_output=True, text=True, check=True
    )
    return [[int(x) for x in line.split()] for line in done.stdout.splitlines()]


@dataclass(frozen=True)
class Row:
    """A query: ``sealed`` whole pages of its lane's tokens, then ``fresh`` ones, its
    own the last."""

    page: int
    window: Sight
    sealed: int
    fresh: int

    @property
    def place(self) -> int:
        return self.sealed + self.fresh - 1

    @property
    def words(self) -> str:
        window = self.window
        numbers = (window.sink, window.recent, window.exact, self.place, self.page)
        return " ".join(map(str, numbers))

    def sees(self, token: int) -> bool:
        first = self.window.first_seen(self.place, self.page)
        return token < self.window.sink or first <= token <= self.place


@st.composite
def rows(draw: st.DrawFn) -> Row:
    page = draw(st.sampled_from(PAGES))
    pages = st.integers(0, 3)
    sink = draw(pages) * page
    window = Sight(sink, draw(pages) * page)
    kind = draw(st.sampled_from(["page", "token", "all"]))
    if kind == "token":
        held = Window.of_tokens(draw(st.integers(1, 3 * page)), page)
        window = Sight(sink, held.recent, held.exact)
    if kind == "all":
        window = SEES_ALL
    sealed = draw(st.integers(0, 8)) * page
    return Row(page, window, sealed, draw(st.integers(1, 8 * page)))


@settings(deadline=None, max_examples=30)
@given(cases=st.lists(rows(), min_size=1, max_size=20))
def test_kernels_keep_the_pages_that_a_window_sees(
    program: Path, cases: list[Row]
) -> None:
    """Both buckets: the pages that stay hold all that is seen, the places that are said
    to be hidden are those that are not, and less than a page is hidden where any is
    seen."""
    buckets = [
        (row, offset, tokens)
        for row in cases
        for offset, tokens in ((0, row.sealed), (row.sealed, row.fresh))
    ]
    lines = [f"kept {row.words} {offset} {tokens}" for row, offset, tokens in buckets]
    said = answers(program, lines)
    for (row, offset, tokens), answer in zip(buckets, said, strict=True):
        length, sink, gone, begin, end = answer
        assert length == tokens - gone * row.page and gone >= 0
        stays = [t for t in range(tokens) if not sink <= t // row.page < sink + gone]
        assert len(stays) == length
        shown = [t for i, t in enumerate(stays) if not begin <= i < end]
        assert shown == [t for t in range(tokens) if row.sees(offset + t)]
        assert 0 <= begin <= end <= length
        assert end - begin < row.page
        assert row.window.exact or begin == end


@settings(deadline=None, max_examples=30)
@given(cases=st.lists(rows(), min_size=1, max_size=20), later=st.integers(0, 300))
def test_skipped_stages_are_seen_by_no_row_of_a_tile(
    program: Path, cases: list[Row], later: int
) -> None:
    """A tile's first row decides: neither it nor a later one sees what is skipped; a
    stage that lies wholly in the first row's gap is."""
    asked = [
        (row, offset, stage)
        for row in cases
        for offset in (0, row.sealed)
        for stage in STAGES
    ]
    lines = [f"stages {row.words} {offset} {stage}" for row, offset, stage in asked]
    said = answers(program, lines)
    for (row, offset, stage), (begin, end) in zip(asked, said, strict=True):
        assert begin % stage == 0 and end % stage == 0 and 0 <= begin <= end
        last = Row(row.page, row.window, row.sealed, row.fresh + later)
        for token in range(begin, min(end, begin + 600)):
            assert not row.sees(offset + token)
            assert offset + token > last.place or not last.sees(offset + token)
        gap = [
            first
            for first in range(0, row.place + 1 - offset - stage, stage)
            if not any(row.sees(offset + first + i) for i in range(stage))
        ]
        assert all(begin <= first < end for first in gap)
