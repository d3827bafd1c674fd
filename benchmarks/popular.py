"""The share of popular models that run, by model type and by checkpoint format.

    python -m benchmarks.popular [--markdown]

``popular_models.csv`` beside it has the 199 most downloaded models that generate text,
also those that read images, of the list that llmfit kept of the Hugging Face Hub on 12
May 2026 (github.com/AlexsJones/llmfit, MIT, commit 5bdc9df, llmfit-core/data/
hf_models.json: the Hub's downloads of 30 days, and the model type of config.json). Models
that embed, rank or recognise, test stubs and encoders are left out. ``format`` is said by
a model's name, or is what its maker stores it in.

A model counts as running where a record is of its type and its codes are read. Nothing
is downloaded: a setting that no record says may still refuse one of them. Two tables and
one JSON line.
"""

from __future__ import annotations

import csv
import json
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.support.markdown import print_markdown
from kvlathe.base.console import print_table
from kvlathe.base.errors import KvlatheError
from kvlathe.export.families import SUPPORTED
from kvlathe.export.model.spec import Settings
from kvlathe.export.model.stored_codes import read_codes

LIST = Path(__file__).parent / "popular_models.csv"
INT4 = {"num_bits": 4, "type": "int", "group_size": 32}
SAID: dict[str, Settings] = {
    "16 bit": {},
    "fp8": {"quant_method": "fp8", "weight_block_size": [128, 128]},
    "fp8 and fp4": {"quant_method": "fp8", "expert_dtype": "fp4"},
    "awq": {"quant_method": "awq", "bits": 4},
    "gptq": {"quant_method": "gptq", "bits": 4},
    "mxfp4": {"quant_method": "mxfp4"},
    "nvfp4": {"quant_method": "modelopt", "quant_algo": "NVFP4"},
    "compressed-tensors": {
        "quant_method": "compressed-tensors",
        "format": "pack-quantized",
        "config_groups": {"group_0": {"targets": ["Linear"], "weights": INT4}},
    },
    "bitsandbytes": {"quant_method": "bitsandbytes", "load_in_4bit": True},
    "mlx": {"group_size": 64, "bits": 4},
}
"""Format -> the quantization_config that such checkpoints have."""


@dataclass(frozen=True)
class Popular:
    """One model of the list, with its downloads of 30 days."""

    downloads: int
    name: str
    model_type: str
    format: str

    @property
    def has_record(self) -> bool:
        return self.model_type in SUPPORTED

    @property
    def is_read(self) -> bool:
        """Whether checkpoints of its format are read."""
        return reads(self.format, self.model_type)

    @property
    def runs(self) -> bool:
        return self.has_record and self.is_read


def reads(form: str, model_type: str = "gpt_oss") -> bool:
    """Whether codes of a format are read; ``model_type`` has a say in MXFP4 alone."""
    try:
        read_codes({"model_type": model_type, "quantization_config": SAID[form]})
    except KvlatheError:
        return False
    return True


def popular() -> list[Popular]:
    """The list, most downloaded first."""
    with LIST.open(encoding="utf-8", newline="") as file:
        return [
            Popular(int(x["downloads"]), x["name"], x["model_type"], x["format"])
            for x in csv.DictReader(file)
        ]


KINDS: dict[str, Callable[[Popular], bool]] = {
    "has a record": lambda model: model.has_record,
    "codes are read": lambda model: model.is_read,
    "runs": lambda model: model.runs,
}


def shares(models: Sequence[Popular]) -> list[list[str]]:
    """Of the first ones and of all: the share of models, and of their downloads."""
    rows: list[list[str]] = []
    for many in (50, 100, len(models)):
        rows.append([f"the first {many}"])
        for counts in KINDS.values():
            kept = [x.downloads if counts(x) else 0 for x in models[:many]]
            total = sum(x.downloads for x in models[:many])
            share = sum(map(bool, kept)) / many
            rows[-1].append(f"{share:.0%} ({sum(kept) / total:.0%})")
    return rows


def grouped(
    models: Iterable[Popular], key: Callable[[Popular], str]
) -> list[list[str]]:
    """Number of models and millions of downloads by ``key``, most downloads first."""
    counts, downloads = Counter[str](), Counter[str]()
    for model in models:
        counts[key(model)] += 1
        downloads[key(model)] += model.downloads
    return [
        [name, str(counts[name]), f"{many / 1e6:.1f}"]
        for name, many in downloads.most_common()
    ]


def main() -> None:
    models = popular()
    show = print_markdown if "--markdown" in sys.argv else print_table
    show("Share that runs", ["", *KINDS], shares(models))
    columns = ["models", "million downloads"]
    formats = [
        [*row, "yes" if reads(row[0]) else "no"]
        for row in grouped(models, lambda x: x.format)
    ]
    show("Formats", ["format", *columns, "read"], formats)
    missing = grouped((x for x in models if not x.has_record), lambda x: x.model_type)
    show("Types without a record", ["model type", *columns], missing)
    runs = [model.name for model in models if model.runs]
    print(json.dumps({"bench": "popular", "of": len(models), "runs": runs}))


if __name__ == "__main__":
    main()
