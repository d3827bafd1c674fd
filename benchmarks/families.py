"""Every model type that transformers knows as a causal LM, tried: works, or refused with a
reason.

    python -m benchmarks.families [MODEL_TYPE ...] [--markdown]

A type that works is measured on the last of its tiny random checkpoints
(tests/support/families/; tests hold the others), far past every window.
``identity``: the largest difference of any logit from transformers. ``CPU``: the same of
an engine over its pages. ``compressed``: the mean difference of an engine with
fdc+hack:bits=8 at a removal rate of 1 %, as a share of the mean logit; with hack:bits=8
where heads share a latent, which is not cut. ``cuda``: whether
the cuda backend takes the plan. One table and one JSON line; a type that ends in
anything but a refusal makes the exit status 1.
"""

from __future__ import annotations

import json
import sys
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from benchmarks.support.markdown import print_markdown
from kvlathe.base.console import print_table, progress
from kvlathe.base.errors import KvlatheError
from kvlathe.engines.build import BuildConfig, build
from kvlathe.engines.targets import cuda
from kvlathe.export.families import OTHER_NAMES, SUPPORTED
from kvlathe.export.model.spec import read_spec
from kvlathe.plan.plan import CompressionPlan
from kvlathe.runtime.llm import LLM
from tests.support.checkpoints import make_model
from tests.support.families import FAMILIES
from tests.support.families.seeing import TEXTS, settings_of, text_of

TOKENS = 150
MOST = 1e-3
"""The largest difference of a logit that counts as none."""
COMPRESSED, OF_LATENT = "fdc+hack:bits=8", "hack:bits=8"
RATE = 0.01
"""The removal rate: nothing of random weights can be spared."""


@dataclass(frozen=True)
class Tried:
    """One checkpoint: what was measured, or why its type is refused."""

    model_type: str
    identity: float = 0.0
    cpu: float = 0.0
    compressed: float = 0.0
    cuda: str = ""
    refused: str = ""

    @property
    def is_wrong(self) -> bool:
        return not self.refused and max(self.identity, self.cpu) > MOST


def logits_of(
    folder: Path, engine: Path, compression: str, ids: list[int]
) -> np.ndarray:
    """Logits of an engine over its pages."""
    bits = 32 if compression == "none" else 16
    rate = RATE if compression == COMPRESSED else None
    request = BuildConfig(
        folder, engine, compression, rate, kv_bits=bits, use_cache=False
    )
    with LLM.load(build(request)) as llm:
        return llm.logits(ids, range(len(ids)))


def on_cuda(plan: Path) -> str:
    """Whether the cuda backend takes a plan, or why not."""
    try:
        cuda.check_plan("cuda", CompressionPlan.from_json(plan.read_text("utf-8")))
    except KvlatheError as refusal:
        return refusal.reason
    return "yes"


def measured(kind: str, settings: dict[str, Any], folder: Path) -> Tried:
    """A tiny checkpoint of a transformers class prefix."""
    model = make_model(folder / "model", kind, settings)
    model_type = json.loads((folder / "model" / "config.json").read_text())[
        "model_type"
    ]
    spec = read_spec(folder / "model")
    ids = np.random.default_rng(TOKENS).integers(0, spec.vocab_size, TOKENS).tolist()
    with torch.no_grad():
        expected = text_of(model)(torch.tensor([ids])).logits[0].numpy()
    whole = logits_of(folder / "model", folder / "whole", "none", ids)
    compression = COMPRESSED if spec.family.latent is None else OF_LATENT
    small = logits_of(folder / "model", folder / "small", compression, ids)
    apart = float(np.abs(whole - expected).max())
    lost = float(np.abs(small - expected).mean() / np.abs(expected).mean())
    return Tried(
        model_type,
        identity=plain_difference(folder / "model", ids, expected),
        cpu=apart,
        compressed=lost,
        cuda=on_cuda(folder / "small" / "plan.json"),
    )


def plain_difference(folder: Path, ids: list[int], expected: np.ndarray) -> float:
    """The largest difference of the decoder's own logits, without pages."""
    from kvlathe.export.model.checkpoint import Checkpoint
    from kvlathe.export.search.measured import uncompressed

    found = uncompressed(Checkpoint(folder)).logits(ids, range(len(ids))).numpy()
    return float(np.abs(found - expected).max())


def refused(model_type: str, folder: Path) -> Tried:
    """The refusal of a type that is not among ours, from its default configuration."""
    try:
        config = CONFIG_MAPPING[model_type]().to_dict()
    except Exception:  # each family validates in its own way
        config = {"model_type": model_type}  # it has no default configuration
    (folder / "config.json").write_text(json.dumps(config, default=str))
    try:
        read_spec(folder)
    except KvlatheError as refusal:
        return Tried(model_type, refused=refusal.reason)
    raise SystemExit(f"{model_type} was read, and no record is of it")


def main() -> None:
    arguments = [word for word in sys.argv[1:] if not word.startswith("-")]
    types = arguments or sorted(
        {*MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, *SUPPORTED} - {*OTHER_NAMES}
    )
    others = [x for x in types if CONFIG_MAPPING[x].model_type not in SUPPORTED]
    tried: list[Tried] = []
    made = [*FAMILIES.values(), *((x, settings_of(x)) for x in TEXTS)]
    last = {type_of(prefix): (prefix, settings) for prefix, settings in made}
    ours = [one for model_type, one in last.items() if model_type in types]
    for prefix, settings in progress(ours, "families"):
        with tempfile.TemporaryDirectory() as folder:
            tried.append(measured(prefix, settings, Path(folder)))
    for model_type in progress(others, "other types"):
        with tempfile.TemporaryDirectory() as folder:
            tried.append(refused(model_type, Path(folder)))
    show_all(tried)
    print(json.dumps({"bench": "families", "tried": [asdict(x) for x in tried]}))
    sys.exit(any(x.is_wrong for x in tried))


def type_of(prefix: str) -> str:
    import transformers

    return getattr(transformers, f"{prefix}Config").model_type


def rows_of(tried: list[Tried]) -> list[list[str]]:
    """Types that work, by name."""
    rows: list[list[str]] = []
    for one in sorted(tried, key=lambda x: x.model_type):
        if not one.refused:
            numbers = [f"{x:.0e}" for x in (one.identity, one.cpu)]
            share = f"{one.compressed:.1%}"
            rows.append([one.model_type, *numbers, share, one.cuda])
    return rows


def show_all(tried: list[Tried]) -> None:
    columns = ["model type", "identity", "CPU", "compressed", "cuda"]
    by_reason: dict[str, list[str]] = {}
    for one in tried:
        if one.refused:
            by_reason.setdefault(one.refused, []).append(one.model_type)
    reasons = [[reason, ", ".join(types)] for reason, types in by_reason.items()]
    show = print_markdown if "--markdown" in sys.argv else print_table
    show("Works", columns, rows_of(tried))
    show("Refused", ["refused, because", "model types"], reasons)


if __name__ == "__main__":
    main()
