"""The error that one scale a token makes in V, before and after its heads are rotated
(``kvlathe build --backend hf``).

    python -m benchmarks.rotated --model DIR

transformers runs both; its cache is written through a quantizer of 8, 4 or 3 bits, one
scale and one minimum for each row of a head. Prints the relative error of V's rows and
the perplexity ratio, and one JSON line. ``--outliers N`` makes N channels of every head
20 times as large first, and their readers smaller: the model computes the same, and its
values look like those of models with outlier channels.
"""

from __future__ import annotations

import json
import math
import shutil
import tempfile
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer
from torch import Tensor
from transformers import AutoModelForCausalLM, DynamicCache, PreTrainedModel

from benchmarks.support.commands import DATA, parser_of
from kvlathe.base.console import print_table
from kvlathe.engines.build import BuildConfig, rotate

LARGER = 20.0
COLUMNS = ("checkpoint", "bits", "relative error of V", "perplexity", "ratio")


def coded(rows: Tensor, bits: int) -> Tensor:
    """[..., d], each row to so many bits and back."""
    low, high = rows.amin(-1, True), rows.amax(-1, True)
    step = ((high - low) / (2**bits - 1)).clamp_min(1e-12)
    return ((rows - low) / step).round() * step + low


class Quantized(DynamicCache):
    """Rows of V as an engine would read them back. ``bits`` 0: as they are."""

    def __init__(self, bits: int) -> None:
        super().__init__()
        self.bits = bits
        self.error = self.size = 0.0

    def update(
        self,
        key_states: Tensor,
        value_states: Tensor,
        layer_idx: int,
        *given: Any,  # noqa: ANN401
        **more: Any,  # noqa: ANN401
    ) -> tuple[Tensor, Tensor]:
        if self.bits:
            back = coded(value_states, self.bits)
            self.error += float((back - value_states).square().sum())
            self.size += float(value_states.square().sum())
            value_states = back
        return super().update(key_states, value_states, layer_idx, *given, **more)


def measured(
    model: PreTrainedModel, windows: list[Tensor], bits: int
) -> tuple[float, float]:
    """Relative error of V's rows, and perplexity."""
    error = size = loss = 0.0
    for ids in windows:
        cache = Quantized(bits)
        with torch.no_grad():
            logits = model(ids[None], past_key_values=cache, use_cache=True).logits[0]
        loss += float(torch.nn.functional.cross_entropy(logits[:-1], ids[1:]))
        error, size = error + cache.error, size + cache.size
    return math.sqrt(error / max(size, 1e-30)), math.exp(loss / len(windows))


def text_windows(folder: Path, text: Path, count: int, length: int) -> list[Tensor]:
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    lines = text.read_text("utf-8").splitlines()
    whole = "\n\n".join(json.loads(line)["text"] for line in lines)
    ids = tokenizer.encode(whole[: 20 * count * length]).ids
    places = range(0, count * length, length)
    return [torch.tensor(ids[place : place + length]) for place in places]


def with_outliers(source: Path, folder: Path, channels: int) -> None:
    """The checkpoint with so many large channels in every head of V."""
    model = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32)
    config = model.config
    d = getattr(config, "head_dim", None)
    d = d or config.hidden_size // config.num_attention_heads
    random = torch.manual_seed(0)
    group = config.num_attention_heads // config.num_key_value_heads
    for layer in model.model.layers:
        for head in range(config.num_key_value_heads):
            chosen = torch.randperm(d, generator=random)[:channels]
            layer.self_attn.v_proj.weight.data[head * d + chosen] *= LARGER
            for query in range(head * group, (head + 1) * group):
                layer.self_attn.o_proj.weight.data[:, query * d + chosen] /= LARGER
    shutil.copytree(source, folder)
    model.save_pretrained(folder)


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--outliers", type=int, default=0)
    parser.add_argument("--text", type=Path, default=DATA / "eval_text.jsonl")
    parser.add_argument("--windows", type=int, default=8)
    parser.add_argument("--length", type=int, default=1024)
    given = parser.parse_args()
    windows = text_windows(given.model, given.text, given.windows, given.length)
    rows: list[tuple[str, int, float, float, float]] = []
    with tempfile.TemporaryDirectory() as scratch:
        before, after = given.model, Path(scratch) / "rotated"
        if given.outliers:
            before = Path(scratch) / "outliers"
            with_outliers(given.model, before, given.outliers)
        rotate(BuildConfig(before, after, backend="hf"))
        for folder in (before, after):
            model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
            plain = measured(model.eval(), windows, 0)[1]
            for bits in (8, 4, 3):
                error, perplexity = measured(model, windows, bits)
                rows.append((folder.name, bits, error, perplexity, perplexity / plain))
    print_table("one scale a token", COLUMNS, rows)
    print(json.dumps([dict(zip(COLUMNS, row, strict=True)) for row in rows]))


if __name__ == "__main__":
    main()
