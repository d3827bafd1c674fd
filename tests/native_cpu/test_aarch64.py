"""The laws of the CPU kernels on emulated aarch64 processors: NEON, NEON with dot
products, SVE with vectors of 256 and 512 bits, and portable C++. Their times were never
measured."""

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
    test_native_mass_is_what_observed_rows_attend as test_native_mass_is_what_observed_rows_attend,
)
from tests.native_cpu.test_attend import (
    test_the_native_op_is_softmax_attention_in_float64 as test_the_native_op_is_softmax_attention_in_float64,
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


PROCESSORS = {
    "neon": "max,sve=off",
    "sve256": "max,sve-default-vector-length=32",
    "sve512": "a64fx",
}
"""Each as qemu names it."""


@pytest.fixture(scope="module", params=PROCESSORS)
def native(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Guest]:
    """In place of this machine's library."""
    guest = Guest(PROCESSORS[request.param], tmp_path_factory.mktemp("aarch64"))
    yield guest
    guest.close()


@pytest.fixture(autouse=True)
def _once(request: pytest.FixtureRequest) -> None:
    """Skip on other processors what all of them have: it is tried on the first. An emulated one is slow, so less
    of two things is tried: portable C++, which is other machines' too, and pages of 64
    tokens, with neondot alone."""
    given = request.node.callspec.params
    sve, isa = given.get("native", "neon") != "neon", given.get("isa")
    if sve and isa not in (None, "sve"):
        pytest.skip("the first processor tries it")
    if "tier" in given and (
        isa == "portable" or (isa != "neondot" and given.get("page") == 64)
    ):
        pytest.skip("this machine and other processors try it")


@pytest.mark.parametrize(
    ("processor", "asked", "isa"),
    [
        ("cortex-a72", "", "neon"),
        ("neoverse-n1", "", "neondot"),
        ("max,sve-default-vector-length=16", "", "neondot"),
        ("max,sve-default-vector-length=32", "", "neondot"),
        ("max,sve-default-vector-length=32", "sve", "sve"),
        ("a64fx", "", "sve"),
        ("max,sve-default-vector-length=128", "", "neondot"),
    ],
)
def test_the_best_that_a_processor_has_is_chosen(
    tmp_path: Path, processor: str, asked: str, isa: str
) -> None:
    """Or what ``KVLATHE_ISA`` asks for."""
    guest = Guest(processor, tmp_path, "-E", f"KVLATHE_ISA={asked}")
    assert guest.isa == isa
    guest.close()
