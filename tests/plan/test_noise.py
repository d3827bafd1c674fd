"""The hash behind all noise, against MurmurHash3's finalizer in plain whole numbers."""

from __future__ import annotations

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st

from kvlathe.plan.noise import drawn, mixed, noise, noise_key

NUMBERS = st.integers(-(2**63), 2**63 - 1)


def finalized(x: int) -> int:
    """fmix32 of MurmurHash3.cpp."""
    for shift, factor in ((16, 0x85EBCA6B), (13, 0xC2B2AE35)):
        x = (x ^ x >> shift) * factor % 2**32
    return x ^ x >> 16


def key_of(*numbers: int) -> int:
    key = 0
    for number in numbers:
        key = finalized(((key ^ number % 2**32) + 0x9E3779B9) % 2**32)
    return key


@given(x=st.integers(0, 2**32 - 1))
def test_numpy_and_torch_mix_as_murmur_hash_does(x: int) -> None:
    assert int(mixed(np.array([x]))[0]) == finalized(x)
    assert int(mixed(torch.tensor([x]))[0]) == finalized(x)


@given(numbers=st.lists(NUMBERS, max_size=5))
def test_a_key_is_a_hash_of_its_numbers_in_their_order(numbers: list[int]) -> None:
    assert noise_key(*numbers) == key_of(*numbers)


@given(seed=NUMBERS, first=st.integers(0, 2**40), places=st.booleans())
def test_noise_is_the_first_bits_of_what_a_token_and_a_channel_hash_to(
    seed: int, first: int, places: bool
) -> None:
    """Also where positions are given one by one, and in torch."""
    key = noise_key(seed)
    positions = np.array([first, first + 1, first + 2])
    found = noise(key, positions if places else first, 3, 2)
    for token, row in zip(positions, found, strict=True):
        for channel, value in enumerate(row):
            assert value == (key_of(seed, int(token), channel) >> 8) / 2**24
    by_torch = drawn(
        torch.tensor([key]), torch.from_numpy(positions)[:, None], torch.arange(2)
    )
    np.testing.assert_array_equal(by_torch.double() * 2.0**-24, found)
