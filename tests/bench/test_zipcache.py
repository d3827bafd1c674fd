"""The formulas of ZipCache's paper, by its own numbers."""

from __future__ import annotations

from benchmarks.zipcache import ratio


def test_ratios_are_those_that_the_paper_prints() -> None:
    sizes = (8, 4096, 4096)
    schemes = ("groupwise", "tokenwise", "separable")
    found = [round(ratio(scheme, *sizes), 3) for scheme in schemes]
    assert found == [3.2, 3.992, 3.995]
