"""Every family at full rank computes what transformers computes."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from checkpoints import FAMILIES, full_plan, make

from kvlathe.export.basis import Basis
from kvlathe.export.checkpoint import Checkpoint
from kvlathe.export.fold import decoder_from

TOLERANCE = 1e-4


@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize("length", [1, 37, 150])
def test_identity_plan_equals_transformers(name: str, length: int, tmp_path: Path) -> None:
    model = make(tmp_path, name)
    checkpoint = Checkpoint(tmp_path, 64 if length <= 64 else None)
    spec = checkpoint.spec
    decoder = decoder_from(checkpoint, full_plan(spec.shape, spec.rope is not None), Basis())
    ids = torch.randint(0, spec.vocab_size, (length,), generator=torch.Generator().manual_seed(length))
    with torch.no_grad():
        expected = model(ids[None]).logits[0]
    found = decoder.logits(ids.tolist(), range(length))
    assert expected.abs().max() > 1, "the reference says too little to compare with"
    torch.testing.assert_close(found, expected, atol=TOLERANCE, rtol=0)
