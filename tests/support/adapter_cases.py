"""Engines that take LoRA adapters, and what transformers makes of the same adapters."""

from __future__ import annotations

import dataclasses
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
from transformers import AutoModelForCausalLM

from kvlathe.export.bases.basis import Basis, LaneBasis
from kvlathe.export.folding.adapter_maps import adapter_maps
from kvlathe.export.folding.fold import fold
from kvlathe.export.model.checkpoint import Checkpoint
from kvlathe.export.model.spec import DecoderSpec
from kvlathe.export.onnx.model import export_onnx
from kvlathe.plan import manifest as manifests
from kvlathe.plan.heads import Lane
from kvlathe.plan.manifest import Limits
from kvlathe.plan.plan import CompressionPlan
from tests.support.adapters import RANK, with_sum, write_adapter
from tests.support.checkpoints import make, random_basis, whole_plan
from tests.support.made_once import made_once
from tests.support.runtime_cases import manifest_of

SIZES = Limits(max_batch_size=8, max_num_tokens=256, max_input_len=400, max_seq_len=440)
ALPHAS = {"red": 3.0, "green": 5.0, "blue": 4.0}
"""lora_alpha of adapters by name; their ranks differ, too."""
RANKS = {"red": RANK, "green": 7, "blue": 2}


def write_engine(
    checkpoint: Checkpoint,
    plan: CompressionPlan,
    basis: Basis,
    folder: Path,
    dtype: str = "float32",
) -> Path:
    """An engine of ONNX Runtime as a build with --enable-lora leaves it, report
    aside."""
    maps = adapter_maps(checkpoint, plan, basis)
    weights = fold(checkpoint, plan, basis)
    export_onnx(checkpoint.spec, plan, weights, folder, dtype, adapters=maps.maps)
    maps.write(folder)
    shutil.copyfile(checkpoint.path / "tokenizer.json", folder / "tokenizer.json")
    (folder / manifests.PLAN_FILE).write_text(plan.to_json())
    said = dataclasses.replace(manifest_of(plan), limits=SIZES, compute_dtype=dtype)
    manifests.write(folder, said)
    return folder


def cut_plan(spec: DecoderSpec) -> tuple[CompressionPlan, Basis]:
    """Half of each head's K and V in random bases, centred, and head 1 of layer 0
    removed."""
    plan, basis, rng = (
        whole_plan(spec, projected=True),
        Basis(),
        np.random.default_rng(1),
    )
    lanes: list[Lane] = []
    for lane in plan.lanes:
        d = spec.heads(lane.layer).head_dim
        turn = np.linalg.qr(rng.normal(size=(d, d)))[0][:, : d // 2]
        if (lane.layer, lane.head) == (0, 1):
            gone = dataclasses.replace(lane, rank_k=0, rank_v=0, fill_from=0)
            lanes.append(gone)
            continue
        lanes.append(dataclasses.replace(lane, rank_k=d // 2, rank_v=d // 2))
        centre_k, centre_v = rng.normal(size=(2, d)) / 3
        basis[lane.layer, lane.head] = LaneBasis(
            turn, turn, centre_k, turn, turn.T, centre_v
        )
    kept = tuple(i for i, lane in enumerate(lanes) if not lane.removed)
    group = dataclasses.replace(plan.groups[0], lanes=kept)
    return dataclasses.replace(plan, lanes=tuple(lanes), groups=(group,)), basis


def made_case(kind: str) -> Path:
    """A folder with ``model``, the tiny model ``kind``, ``engine``, the same in random
    bases, and an adapter by each name of ALPHAS. Made once a test run; read only."""

    def make_all(folder: Path) -> None:
        model = make(folder / "model", kind)
        checkpoint = Checkpoint(folder / "model")
        rotates = checkpoint.spec.rope is not None
        plan = whole_plan(checkpoint.spec, projected=rotates)
        write_engine(checkpoint, plan, case_basis(plan), folder / "engine")
        three_adapters(folder, model)

    return made_once(f"adapters {kind}", make_all)


def case_basis(plan: CompressionPlan) -> Basis:
    """The bases of ``made_case``."""
    return random_basis(plan, 3, orthogonal=False)


def merged_models(folder: Path) -> dict[str | None, torch.nn.Module]:
    """The model of ``made_case`` as it is (None), and with each adapter put in."""
    plain = AutoModelForCausalLM.from_pretrained(
        folder / "model", attn_implementation="eager"
    )
    return {None: plain.float().eval(), **three_adapters(None, plain)}


def three_adapters(
    folder: Path | None, model: torch.nn.Module
) -> Mapping[str, torch.nn.Module]:
    """Write an adapter in a folder of each name; the model with each of them put in.
    None: they were written before."""
    merged: dict[str, torch.nn.Module] = {}
    for i, (name, alpha) in enumerate(ALPHAS.items()):
        rank = RANKS[name]
        deltas = write_adapter(
            None if folder is None else folder / name,
            model,
            seed=i,
            rank_of=lambda _, rank=rank: rank,
            r=rank,
            lora_alpha=alpha,
        )
        scale = alpha / rank
        merged[name] = with_sum(model, deltas, lambda _, scale=scale: scale)
    return merged


def expected(model: torch.nn.Module, ids: Sequence[int]) -> npt.NDArray[np.float32]:
    """[len(ids), vocab]"""
    with torch.no_grad():
        return model(torch.tensor([list(ids)])).logits[0].numpy()
