"""Choice of the heads that see everything, by the loss that a window costs each.

Every lane alone gets the window; what the model's answers then lose is measured as for
all prices (sensitivity.py), on the readings that ask for what is far.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path

from kvlathe.export.methods.composition import CacheSettings
from kvlathe.export.methods.compression import Compression
from kvlathe.export.methods.forms import Array
from kvlathe.export.model.checkpoint import Checkpoint
from kvlathe.export.search.measured import PRICED, Sources, exam_note, uncompressed
from kvlathe.export.search.remembered import recall, remember
from kvlathe.export.search.sensitivity import Candidate, losses
from kvlathe.plan.lives import Life


@dataclass(frozen=True)
class Named:
    """A compression whose heads are named, and notes on how they were chosen."""

    compression: Compression
    notes: dict[str, str]


def named(
    compression: Compression,
    checkpoint: Checkpoint,
    window: Life,
    form: CacheSettings,
    sources: Sources,
    remembered: Path | None = None,
) -> Named:
    """``compression`` with the heads named that see everything, the others ``window``.
    ``remembered``: a folder for losses."""
    spec = checkpoint.spec
    lost = window_losses(checkpoint, window, form, sources, remembered)
    whole = compression.with_heads(lost.tolist(), spec.kv_heads)
    notes = {"heads by measured loss": whole.text}
    examined = exam_note(sources.tokens, spec.max_seq_len, spec.windows)
    return Named(whole, notes | examined)


def window_losses(
    checkpoint: Checkpoint,
    window: Life,
    form: CacheSettings,
    sources: Sources,
    remembered: Path | None = None,
) -> Array:
    """[lanes]: what the answers lose where this lane alone sees ``window``, in nats a
    token (exercises and questions counted as in measured.py)."""
    known_by = (
        checkpoint.digest,
        form.page_tokens,
        form.seed,
        sources.digest,
        window.words(),
        PRICED,
    )
    key = hashlib.sha256(json.dumps(known_by).encode()).hexdigest()[:32]
    path = None if remembered is None else remembered / f"{key}.npz"
    if kept := recall(path, 1):
        return kept[0]
    model = uncompressed(checkpoint)
    far = [reading for reading in sources.readings(model, form.seed) if reading.far]
    page, seed = form.page_tokens, form.seed
    found = losses(model, far, _no_forms, [window], page, seed).windows[:, 0]
    remember(path, found)
    return found


def _no_forms(side: str, layer: int, head: int) -> list[Candidate]:
    return []
