"""At full rank nothing changes, family by family: folded = original, exported = torch,
paged = at once.

    python benchmarks/identity.py [FAMILY ...]

Random-weight checkpoints (tests/support/checkpoints.py), float32; every number is the
largest difference of any logit.
``identity``: the plan that projects nothing against transformers. ``rotated``: random
full-rank bases and centres for every lane against transformers. ``exported``: ONNX
Runtime against torch, rotated. ``paged``: the engine over its pages (a batch of mixed
lengths, prompts in pieces and single tokens) against one pass over each text, rotated.
One table and one JSON line.
"""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from kvlathe.base.console import print_table, progress
from kvlathe.export.bases.basis import Basis
from kvlathe.export.folding.fold import decoder_from, fold
from kvlathe.export.model.checkpoint import Checkpoint
from kvlathe.export.onnx.model import export_onnx
from kvlathe.plan.layout import CacheLayout
from kvlathe.runtime.llm import LLM
from kvlathe.runtime.sessions.host.onnx import OrtSession
from kvlathe.runtime.text.tokenizer import Tokenizer
from tests.support.checkpoints import FAMILIES, make, random_basis, whole_plan
from tests.support.runtime_cases import LIMITS, MODEL, forced

LENGTHS = (66, 81, 130)
"""Beyond the 64 positions up to which transformers would give LongRoPE models their
short factors."""
TARGETS = {"identity": 1e-4, "rotated": 1e-4, "exported": 1e-3, "paged": 1e-3}


def ragged(left: np.ndarray, seed: int) -> Iterator[list[int]]:
    """Chunk sizes of each text until all are done: pieces of any size, single tokens
    among them."""
    random = np.random.default_rng(seed)
    while left.any():
        sizes = random.choice([0, 1, 1, 7, 16, 32], len(left))
        left = np.maximum(left - sizes, 0)
        yield sizes.tolist()


def apart(
    found: np.ndarray | torch.Tensor, expected: np.ndarray | torch.Tensor
) -> float:
    return float(np.abs(np.asarray(found) - np.asarray(expected)).max())


def measure(name: str, folder: Path) -> dict[str, float]:
    model = make(folder / "model", name)
    checkpoint = Checkpoint(folder / "model")
    spec, rope = checkpoint.spec, checkpoint.spec.rope is not None
    texts = [
        list(np.random.default_rng(n).integers(0, spec.vocab_size, n)) for n in LENGTHS
    ]
    with torch.no_grad():
        expected = [model(torch.tensor([text])).logits[0] for text in texts]
    plain = decoder_from(checkpoint, whole_plan(spec), Basis())
    plan = whole_plan(spec, projected=rope)
    basis = random_basis(plan, 1, orthogonal=False)
    turned = decoder_from(checkpoint, plan, basis)
    export_onnx(spec, plan, fold(checkpoint, plan, basis), folder / "engine")
    size = 16 * sum(CacheLayout(plan).page_stride) * sum(LENGTHS) // plan.page_tokens
    session = OrtSession(folder / "engine", plan, LIMITS, size, threads=2)
    llm = LLM(session, plan, LIMITS, Tokenizer(MODEL), size)
    at_once = [turned.logits(text, range(len(text))) for text in texts]
    whole = forced(llm, texts, [LENGTHS])
    pieces = forced(llm, texts, ragged(np.array(LENGTHS), 3))
    rounds = list(zip(texts, expected, at_once, whole, pieces, strict=True))
    return {
        "identity": max(
            apart(plain.logits(text, range(len(text))), e)
            for text, e, _, _, _ in rounds
        ),
        "rotated": max(apart(a, e) for _, e, a, _, _ in rounds),
        "exported": max(apart(w, a) for _, _, a, w, _ in rounds),
        "paged": max(apart(p, a) for _, _, a, _, p in rounds),
    }


def main() -> None:
    results = {}
    for name in progress(sys.argv[1:] or list(FAMILIES), "families"):
        with tempfile.TemporaryDirectory() as folder:
            results[name] = measure(name, Path(folder))
    rows = [
        (name, *(f"{errors[column]:.1e}" for column in TARGETS))
        for name, errors in results.items()
    ]
    targets = ("at most", *(f"{target:.0e}" for target in TARGETS.values()))
    print_table(
        "Largest difference of any logit at full rank",
        ("family", *TARGETS),
        [*rows, targets],
    )
    ok = all(
        errors[column] <= target
        for errors in results.values()
        for column, target in TARGETS.items()
    )
    print(json.dumps({"bench": "identity", "families": results, "ok": ok}))
    sys.exit(not ok)


if __name__ == "__main__":
    main()
