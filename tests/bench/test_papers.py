"""Claims are of engines that are measured, and a refusal is a row."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks import papers
from benchmarks.papers import MEASUREMENTS, Builds, Measurement, Row, Settings
from kvlathe.base.errors import KvlatheError


@pytest.mark.parametrize("name", MEASUREMENTS)
def test_a_claim_is_the_ratio_of_two_rows(name: str) -> None:
    wanted = MEASUREMENTS[name]
    numbers = {claim.number for claim in wanted.claims}
    rows: list[Row] = []
    for place, engine in enumerate((*wanted.engines, "palu"), 2):
        rows.append({"engine": engine, **dict.fromkeys(numbers, float(place))})
    places = {row["engine"]: place for place, row in enumerate(rows, 2)}
    claims = papers.compared(name, wanted, rows)
    for claim, found in zip(wanted.claims, claims, strict=True):
        ratio = places[claim.engine] / places[claim.against]
        assert found["ours"] == pytest.approx(ratio)


def test_a_refused_build_is_a_row_and_the_next_one_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(builds: Builds, name: str, folder: Path) -> None:
        raise KvlatheError(f"{name} was not built", "no kernel does it", "wait")

    monkeypatch.setattr(Builds, "build", refuse)
    builds = Builds(tmp_path, tmp_path / "engines", False, ())
    wanted = Measurement(("none", "uncomp"), (1, 8, 8), ())
    rows = papers.rows_of("x", wanted, builds, Settings(1 << 20, None, None))
    assert ["no kernel does it" in row["error"] for row in rows] == [True, True]
