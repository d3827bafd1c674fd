"""The law of reading keys by torch: the numbers of the numpy codec, in every format."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from kvlathe.plan.codec import matrices
from kvlathe.plan.formats import Tier
from kvlathe.plan.layout import CacheLayout
from kvlathe.runtime.sessions.torch_cuda.tokens.keys import read_matrix
from tests.support.format_cases import TIERS, sealing_plan

COLD = 1
"""The bucket of sealed pages in ``sealing_plan``."""


@pytest.mark.parametrize("tier", TIERS, ids=str)
def test_torch_reads_from_pages_what_the_codec_reads(tier: Tier) -> None:
    layout = CacheLayout(sealing_plan(tier))
    rng = np.random.default_rng(5)
    pages = np.zeros((3, layout.page_stride[COLD]), np.uint8)
    for pair in matrices(layout, COLD).values():
        for matrix in pair:
            for page in pages:
                values = rng.normal(size=(matrix.tokens, matrix.rank))
                matrix.write(page, values.astype(np.float32))
            wanted = np.concatenate([matrix.read(pages[page]) for page in (2, 0)])
            places = torch.tensor([2, 0])
            got = read_matrix(torch.from_numpy(pages), places, matrix)
            assert np.array_equal(got.numpy(), wanted)
