"""The plugin reads on the host what vLLM writes into its tables of blocks."""

from __future__ import annotations

import numpy as np
import pytest

from kvlathe_vllm.host_tables import HostRows, note, take


@pytest.mark.parametrize("seed", range(5))
def test_rows_are_those_of_a_table_that_had_room_from_the_start(seed: int) -> None:
    random = np.random.default_rng(seed)
    rows, table, counts = HostRows(), np.zeros((40, 400), np.int32), [0] * 40
    for _ in range(200):
        row, anew = int(random.integers(40)), bool(random.integers(2))
        start = 0 if anew or counts[row] > 300 else counts[row]
        blocks = random.integers(1, 1000, random.integers(0, 60)).tolist()
        counts[row] = start + len(blocks)
        rows.write(row, start, blocks)
        table[row, start : counts[row]] = blocks
        places = random.permutation(40)[: random.integers(1, 40)]
        most = max(counts)
        found = rows.of(places)[:, :most]
        wide = table[places, : found.shape[1]]
        written = [counts[place] for place in places]
        for one, other, count in zip(found, wide, written, strict=True):
            assert np.array_equal(one[:count], other[:count])


def test_a_step_is_told_once_and_padded_with_zeros() -> None:
    note({8: np.array([[4, 5, 6], [7, 8, 9]], np.int32), 16: np.ones((1, 1), np.int32)})
    said = take(8, 3, 2)
    assert said is not None
    assert said.tolist() == [[4, 5], [7, 8], [0, 0]]
    assert take(8, 3, 2) is None
    note({})
    assert take(16, 1, 1) is None


def test_rows_of_a_step_stay_when_the_next_one_is_written() -> None:
    rows = HostRows()
    rows.write(1, 0, [3, 4])
    said = rows.of(np.array([1]))
    rows.write(1, 0, [5, 6])
    assert said[0, :2].tolist() == [3, 4]
