"""Builders of one group of layers share what its table has; engines of one process share
nothing."""

from __future__ import annotations

from weakref import WeakValueDictionary

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvlathe.base.errors import KvlatheError
from kvlathe_vllm.calls import Calls
from kvlathe_vllm.tables import MOST_TABLES, Table, Tables
from tests.support.block_cases import plan_of

PLAN = plan_of(16)
GROUP = Table("out", 3, guesses=False, device="cuda:0", address=1 << 20)


def made() -> Calls:
    return Calls(PLAN, GROUP.sequences)


def test_builders_of_one_table_share_and_leave_nothing_behind() -> None:
    shared = WeakValueDictionary[Table, Calls]()
    builders = [Tables(shared) for _ in range(2)]
    calls = builders[0].of(GROUP, made)
    assert builders[1].of(GROUP, made) is calls is builders[0].of(GROUP, made)
    del builders[0], calls
    assert len(shared) == 1
    builders.clear()
    assert not shared


@pytest.mark.parametrize(
    "other",
    [
        GROUP._replace(guesses=True),
        GROUP._replace(device="cuda:1"),
        GROUP._replace(folder="another"),
        GROUP._replace(sequences=4),
        GROUP._replace(address=1 << 21),
    ],
)
def test_another_engine_at_the_same_address_has_its_own(other: Table) -> None:
    """One with guesses needs pages of which those of one without are half."""
    shared = WeakValueDictionary[Table, Calls]()
    one, two = Tables(shared), Tables(shared)
    calls = one.of(GROUP, made)
    own = two.of(other, lambda: Calls(PLAN, other.sequences, other.guesses))
    assert own is not calls
    assert own.pages.count == other.sequences * (1 + other.guesses)


@given(st.lists(st.integers(0, 9), min_size=1))
def test_tables_that_are_made_anew_each_step_are_refused(drawn: list[int]) -> None:
    """Each would begin with hot pages that know of no sequence."""
    tables = Tables(WeakValueDictionary[Table, Calls]())
    known = set[int]()
    for address in drawn:
        if len({*known, address}) > MOST_TABLES:
            with pytest.raises(KvlatheError, match="tables for the same layers"):
                tables.of(GROUP._replace(address=address), made)
        else:
            known.add(address)
            tables.of(GROUP._replace(address=address), made)
