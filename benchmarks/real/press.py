"""Evictions by kvpress itself (NVIDIA), on the samples that engines answer: the outside
measure beside ours at equal bytes.

    python -m benchmarks.real.press CHECKPOINT SAMPLES RESULTS --press kvzip --ratio 0.5

It needs torch, transformers and kvpress, and nothing of ours: give it an environment of
its own, with this repository on PYTHONPATH. Samples are those of
``benchmarks.real ruler --chat``, since KVzip's press counts on the chat template.

The model runs in transformers; the press cuts the cache of the context, and kvpress'
own pipeline asks and answers. Bits are what a count of pairs gives: the context's share
that stays, the rest whole. Presses that cut heads unlike mask pairs and free no bytes;
they are counted as if they did.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import click

from benchmarks.real import samples as asked
from benchmarks.real.results import Record, Results, cells, said
from benchmarks.real.samples import Sample, contained

PRESSES = {
    "kvzip": "KVzipPress",
    "keydiff": "KeyDiffPress",
    "snapkv": "SnapKVPress",
    "expected": "ExpectedAttentionPress",
}
UNCOMPRESSED_BITS = 16.0


class Pressing:
    """A checkpoint in transformers, and kvpress' pipeline over it."""

    def __init__(self, checkpoint: Path, device: str, dtype: str) -> None:
        import kvpress
        import torch
        from transformers import AutoModelForCausalLM, AutoTokenizer

        model: Any = AutoModelForCausalLM.from_pretrained(
            checkpoint, dtype=getattr(torch, dtype)
        )
        self.kvpress, self.torch = kvpress, torch
        self.tokenizer = AutoTokenizer.from_pretrained(checkpoint)
        self.pipeline = kvpress.KVPressTextGenerationPipeline(
            model=model.to(device).eval(), tokenizer=self.tokenizer
        )

    def press(self, name: str, ratio: float) -> Any:  # noqa: ANN401
        return getattr(self.kvpress, PRESSES[name])(compression_ratio=ratio)

    def record(self, row: str, sample: Sample, press: Any, ratio: float) -> Record:  # noqa: ANN401
        context, question = self._ids(sample.context), self._ids(sample.question)
        with self.torch.inference_mode():
            [text] = self.pipeline._forward(
                {"context_ids": context, "questions_ids": [question]},
                max_new_tokens=sample.new,
                press=press,
            )
        whole = question.shape[1] + len(self.tokenizer.encode(text))
        tokens = context.shape[1] + whole
        kept = (1 - ratio) * context.shape[1] + whole
        return Record(
            *(row, sample.task, sample.number),
            score=contained(text, sample.answers),
            bits=round(UNCOMPRESSED_BITS * kept / tokens, 4),
            tokens=tokens,
            text=text,
        )

    def _ids(self, text: str) -> Any:  # noqa: ANN401
        return self.tokenizer.encode(
            text, return_tensors="pt", add_special_tokens=False
        )


@click.command()
@click.argument("checkpoint", type=click.Path(path_type=Path))
@click.argument("samples", type=click.Path(path_type=Path))
@click.argument("results", type=click.Path(path_type=Path))
@click.option("--press", "presses", multiple=True, default=tuple(PRESSES))
@click.option("--ratio", "ratios", multiple=True, default=(0.5, 0.75))
@click.option("--count", type=int, help="Only the first samples of each task.")
@click.option("--device", default="cpu", show_default=True)
@click.option("--dtype", default="float32", show_default=True)
def main(
    checkpoint: Path,
    samples: Path,
    results: Path,
    presses: tuple[str, ...],
    ratios: tuple[float, ...],
    count: int | None,
    device: str,
    dtype: str,
) -> None:
    """Answer samples behind contexts that a press of kvpress has cut."""
    wanted = [s for s in asked.read(samples) if s.check == "contains"]
    wanted = [s for s in wanted if count is None or s.number < count]
    wanted.sort(key=lambda sample: sample.number)
    found = Results(results)
    pressing = Pressing(checkpoint, device, dtype)
    rows = {f"kvpress {p} {r:g}": (p, r) for p in presses for r in ratios}
    for row, (name, ratio) in rows.items():
        press = pressing.press(name, ratio)
        for sample in wanted:
            if (row, sample.task, sample.number) not in found.known:
                found.append(pressing.record(row, sample, press, ratio))
    for cell in cells(found.records):
        print(said(cell))


if __name__ == "__main__":
    sys.exit(main())
