"""A host's memory for blocks of one layer."""

from __future__ import annotations

import torch
from torch import Tensor

from kvlathe.plan.formats import ALIGN
from kvlathe.plan.layer_block import LayerBlock


def block_cache(block: LayerBlock, blocks: int, fill: int = 0) -> Tensor:
    """uint8 [blocks, 1, page, bytes of a token] full of ``fill``, aligned as pages are."""
    page = block.plan.page_tokens
    size = blocks * page * block.token_bytes
    room = torch.full((size + ALIGN,), fill, dtype=torch.uint8)
    start = -room.data_ptr() % ALIGN
    return room[start : start + size].view(blocks, 1, page, -1)
