"""The laws of the CPU kernels on an emulated aarch64 processor: NEON, NEON with dot
products, and portable C++. Their times were never measured."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.native_cpu.test_attend import (
    test_integers_hold_the_sums_of_the_largest_codes as test_integers_hold_the_sums_of_the_largest_codes,
)
from tests.native_cpu.test_attend import (
    test_long_sequences_are_cut_into_spans_and_tiles as test_long_sequences_are_cut_into_spans_and_tiles,
)
from tests.native_cpu.test_attend import (
    test_native_is_plain_attention as test_native_is_plain_attention,
)
from tests.native_cpu.test_attend import (
    test_native_mass_is_what_observed_rows_attend as test_native_mass_is_what_observed_rows_attend,
)
from tests.native_cpu.test_attend import (
    test_wide_heads_are_plain_attention as test_wide_heads_are_plain_attention,
)
from tests.native_cpu.test_attend import (
    test_windows_of_long_sequences_are_masked_attention as test_windows_of_long_sequences_are_masked_attention,
)
from tests.native_cpu.test_seal import (
    test_native_seals_the_same_bytes as test_native_seals_the_same_bytes,
)
from tests.support.aarch64 import Guest

pytestmark = pytest.mark.nightly


@pytest.fixture(scope="module")
def native(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Guest]:
    """In place of this machine's library."""
    guest = Guest("max", tmp_path_factory.mktemp("aarch64"))
    yield guest
    guest.close()


@pytest.mark.parametrize(
    ("processor", "isa"), [("cortex-a72", "neon"), ("neoverse-n1", "neondot")]
)
def test_the_best_that_a_processor_has_is_chosen(
    tmp_path: Path, processor: str, isa: str
) -> None:
    guest = Guest(processor, tmp_path)
    assert guest.isa == isa
    guest.close()
