"""Chunks of K and V of any engine: with 16 bits every one comes back, with fewer what the
plan's codes stand for; what was not coded so is refused."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pytest

from kvlathe.base.errors import KvlatheError
from kvlathe.plan.codec import PageMatrix
from kvlathe.plan.formats import Tier
from kvlathe_lmcache.codec import ChunkCodec, ChunkForm, Words
from kvlathe_lmcache.sides import apart, joined, shape_apart
from tests.support.coded_pages import need_coder

SHAPES = [(2, 3, 192, 128), (2, 2, 100, 96), (1, 2, 64, 576), (2, 1, 30, 48)]


@pytest.fixture(autouse=True)
def _coder() -> None:
    need_coder()


def random_chunk(shape: tuple[int, ...], brain: bool) -> Words:
    """Channels of unlike sizes, around means of their own."""
    rng = np.random.default_rng(sum(shape))
    sizes = np.exp(rng.standard_normal(shape[-1]))
    numbers = (rng.standard_normal(shape) + rng.standard_normal(shape[-1])) * sizes
    if brain:
        return (numbers.astype(np.float32).view(np.uint32) >> 16).astype(np.uint16)
    return numbers.astype(np.float16).view(np.uint16)


def plain(words: Words, brain: bool) -> npt.NDArray[np.float32]:
    if brain:
        return (words.astype(np.uint32) << 16).view(np.float32)
    return words.view(np.float16).astype(np.float32)


@pytest.mark.parametrize("brain", [False, True])
@pytest.mark.parametrize("shape", SHAPES)
def test_every_word_comes_back_with_16_bits(
    shape: tuple[int, int, int, int], brain: bool
) -> None:
    codec = ChunkCodec(ChunkForm(*shape, brain), 16)
    chunk = random_chunk(shape, brain)
    coded = codec.encode(chunk)
    assert len(coded) < (0.8 if brain else 0.95) * chunk.nbytes
    assert np.array_equal(codec.decode(coded + b"more"), chunk)
    noise = np.random.default_rng(0).integers(0, 1 << 16, shape, np.uint16)
    coded = codec.encode(noise)  # infinities and what is no number are among them
    assert len(coded) <= codec.bound
    assert np.array_equal(codec.decode(coded), noise)


@pytest.mark.parametrize("head_dim", [None, 16, 48])
def test_k_and_v_side_by_side_are_coded_apart(head_dim: int | None) -> None:
    """As chunks [2, layers, tokens, hidden] are; where nobody said how wide a head is, K
    and V are one side."""
    chunk = random_chunk((2, 70, 288), True)
    sides = apart(chunk, head_dim)
    assert np.array_equal(joined(sides, chunk.shape, head_dim), chunk)
    assert sides.shape == shape_apart(chunk.shape, head_dim)
    if head_dim is None:
        assert np.array_equal(sides[0], chunk)
        return
    for head in range(288 // (2 * head_dim)):
        for side in range(2):
            first = (2 * head + side) * head_dim
            own = sides[side, :, :, head * head_dim : (head + 1) * head_dim]
            assert np.array_equal(own, chunk[:, :, first : first + head_dim])
    whole = random_chunk((2, 2, 70, 144), True)
    assert np.array_equal(joined(apart(whole, head_dim), whole.shape, head_dim), whole)
    with pytest.raises(KvlatheError, match="no whole heads"):
        shape_apart((2, 70, 100), head_dim)


@pytest.mark.parametrize("bits", [16, 4])
def test_chunks_that_were_taken_apart_by_another_head_dim_are_refused(
    bits: int,
) -> None:
    """Both give K and V of one shape, and other numbers."""
    chunk = random_chunk((2, 64, 256), brain=False)
    forms = [
        ChunkForm(*shape_apart(chunk.shape, head_dim), False, head_dim)
        for head_dim in (64, 128)
    ]
    assert forms[0].shape == forms[1].shape
    coded = ChunkCodec(forms[0], bits).encode(apart(chunk, 64))
    other = ChunkForm(*forms[0].shape, brain=False)
    for form in (forms[1], other):
        with pytest.raises(KvlatheError, match="another head_dim"):
            ChunkCodec(form, bits).decode(coded)


def expected_of(
    numbers: npt.NDArray[np.float32], tier: Tier, side: str
) -> npt.NDArray[np.float32]:
    """Numbers [64, channels] as their codes stand for them, by the numpy codec, 32
    channels a lane."""
    found: list[npt.NDArray[np.float32]] = []
    for first in range(0, numbers.shape[1], 32):
        form = tier.of(side)
        size = form.data_bytes(32, 64)
        matrix = PageMatrix(form, 0, size, 0, 64, 32)
        page = np.zeros(form.page_bytes(32, 64), np.uint8)
        matrix.write(page, numbers[:, first : first + 32])
        found.append(matrix.read(page))
    return np.concatenate(found, axis=1)


@pytest.mark.parametrize("brain", [False, True])
@pytest.mark.parametrize("bits", [8, 4, 3, 2])
def test_fewer_bits_give_what_the_plans_codes_stand_for(bits: int, brain: bool) -> None:
    shape = (2, 2, 100, 96)
    codec = ChunkCodec(ChunkForm(*shape, brain), bits)
    chunk = random_chunk(shape, brain)
    coded = codec.encode(chunk)
    assert len(coded) <= codec.bound
    back = codec.decode(coded)
    assert np.array_equal(back[:, :, 64:], chunk[:, :, 64:])  # no page is full there
    halves = plain(chunk, brain).astype(np.float16).astype(np.float32)
    assert codec.pages is not None
    for side, name in enumerate("kv"):
        for layer in range(2):
            wanted = expected_of(halves[side, layer, :64], codec.pages.tier, name)
            found = plain(back[side, layer, :64], brain)
            np.testing.assert_allclose(
                found, wanted, rtol=2**-8 if brain else 2**-10, atol=1e-6
            )


@pytest.mark.parametrize("bits", [8, 4, 3, 2])
def test_chunks_that_are_not_cold_have_one_size_and_the_same_values(bits: int) -> None:
    form = ChunkForm(2, 2, 100, 96, brain=False)
    codec, cold = ChunkCodec(form, bits, cold=False), ChunkCodec(form, bits)
    for chunk in (
        random_chunk(form.shape, brain=False),
        np.zeros(form.shape, np.uint16),
    ):
        coded = codec.encode(chunk)
        assert len(coded) == codec.bound
        assert np.array_equal(
            codec.decode(coded + b"more"), cold.decode(cold.encode(chunk))
        )
    with pytest.raises(KvlatheError, match="no code can hold"):
        codec.encode(np.full(form.shape, 0x7C00, np.uint16))
    with pytest.raises(KvlatheError, match="another form"):
        cold.decode(coded)


def test_pages_that_no_half_can_hold_keep_their_numbers() -> None:
    chunk = random_chunk((2, 1, 128, 64), brain=True)
    chunk[1, 0, 70, 3] = 0x7F80  # infinity
    codec = ChunkCodec(ChunkForm(2, 1, 128, 64, brain=True), 4)
    back = codec.decode(codec.encode(chunk))
    assert np.array_equal(back[:, :, 64:], chunk[:, :, 64:])
    assert not np.array_equal(back[:, :, :64], chunk[:, :, :64])


def test_data_of_another_form_and_damaged_data_are_refused() -> None:
    shape = (2, 1, 128, 64)
    codec = ChunkCodec(ChunkForm(*shape, brain=False), 4)
    coded = codec.encode(random_chunk(shape, brain=False))
    for other in (ChunkForm(2, 1, 64, 64, brain=False), ChunkForm(*shape, brain=True)):
        with pytest.raises(KvlatheError, match="another form"):
            ChunkCodec(other, 4).decode(coded)
    with pytest.raises(KvlatheError, match="number of bits"):
        ChunkCodec(codec.form, 8).decode(coded)
    for end in range(0, len(coded), 97):
        with pytest.raises(KvlatheError):
            codec.decode(coded[:end])
    rng = np.random.default_rng(0)
    for at in rng.integers(0, len(coded), 200).tolist():
        wrong = bytearray(coded)
        wrong[at] ^= int(rng.integers(1, 256))
        try:
            assert codec.decode(bytes(wrong)).shape == shape
        except KvlatheError:
            continue


@pytest.mark.parametrize(
    ("form", "bits", "reason"),
    [
        (ChunkForm(1, 2, 64, 576, brain=True), 4, "share a latent"),
        (ChunkForm(2, 2, 64, 40, brain=True), 4, "40 channels"),
        (ChunkForm(2, 2, 64, 64, brain=True), 5, "5 bits"),
    ],
)
def test_forms_that_codes_cannot_hold_are_refused(
    form: ChunkForm, bits: int, reason: str
) -> None:
    with pytest.raises(KvlatheError, match=reason):
        ChunkCodec(form, bits)
