"""A model with coded weights is the model that holds what the codes stand for."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest
import torch
from torch import Tensor

from kvlathe.export.bases.basis import Basis
from kvlathe.export.folding.fold import fold
from kvlathe.export.model.checkpoint import Checkpoint
from kvlathe.export.model.coded_weights import CodedWeights
from kvlathe.export.model.decoder import Decoder
from kvlathe.export.onnx.model import export_onnx
from kvlathe.layers.coded_weight import CodedWeight
from kvlathe.plan.weight_formats import WeightFormat, WeightFormats
from tests.export.onnx.test_onnx import run_in_chunks, session
from tests.support.checkpoints import make, whole_plan

TABLE = WeightFormat("int8", 32)
FORMATS = {
    "int4": WeightFormats(WeightFormat("int4", 32), TABLE),
    "int4 with zeros": WeightFormats(WeightFormat("int4", 16, True), TABLE),
}


def held(
    codes: CodedWeights, formats: WeightFormats, plain: Decoder
) -> dict[str, Tensor]:
    """The state of a float decoder, ``plain``, that holds what ``codes`` stand for."""
    shapes = plain.state_dict()
    state: dict[str, Tensor] = {}
    for name, tensor in codes.items():
        base, _, part = name.rpartition(".")
        if part == "codes":
            is_table = base in ("embed", "head")
            form = formats.table if is_table else formats.maps
            assert form is not None
            zeros = codes[f"{base}.zeros"] if form.zeros else None
            coded = CodedWeight(tensor, codes[f"{base}.scales"], zeros, form.bits)
            name = f"{base}.weight"
            own, other = shapes[name].shape
            rows = coded.matrix(other if base == "embed" else own)
            state[name] = rows if base == "embed" else rows.T.contiguous()
        elif part not in ("scales", "zeros"):
            state[name] = tensor
    return state


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "kind"),
    [
        ("llama-llama3-tied", "int4"),
        ("phi", "int4 with zeros"),
    ],
)
def test_a_model_of_codes_is_the_float_model_of_what_they_stand_for(
    family: str, kind: str, tmp_path: Path
) -> None:
    make(tmp_path, family)
    checkpoint = Checkpoint(tmp_path)
    formats = FORMATS[kind]
    plan = whole_plan(checkpoint.spec)
    weights = fold(checkpoint, plan, Basis())
    codes = CodedWeights(weights, formats, torch.float32)
    path = export_onnx(
        checkpoint.spec, plan, codes, tmp_path / "engine", formats=formats
    )
    plain = Decoder(checkpoint.spec, plan)
    plain.load_state_dict(held(codes, formats, plain))
    coded = Decoder(checkpoint.spec, plan, formats=formats)
    coded.load_state_dict(dict(codes))
    text = np.random.default_rng(0).integers(3, 90, 24).tolist()
    expected = plain.logits(text, range(24))
    torch.testing.assert_close(coded.logits(text, range(24)), expected)
    if checkpoint.spec.tied_head:
        assert readers(path, "embed.codes") == ["Gather", "MatMulNBits"]
    (near,) = run_in_chunks(session(str(path)), plan, [text], [[16], [8]])
    assert np.abs(near - expected.numpy()).max() < 0.1 * expected.abs().max()
    exactly(path)
    (exact,) = run_in_chunks(session(str(path)), plan, [text], [[16], [8]])
    np.testing.assert_allclose(exact, expected, rtol=1e-3, atol=1e-3)


def exactly(path: Path) -> None:
    """The rows stay as they are: no accuracy_level."""
    model = onnx.load(str(path), load_external_data=False)
    products = [node for node in model.graph.node if node.op_type == "MatMulNBits"]
    assert len(products) >= 2 * 6
    for node in products:
        kept = [one for one in node.attribute if one.name != "accuracy_level"]
        del node.attribute[:]
        node.attribute.extend(kept)
    path.write_bytes(model.SerializeToString())


def readers(path: Path, name: str) -> list[str]:
    """Operators that read an initializer: a tied table is written once."""
    graph = onnx.load(str(path), load_external_data=False).graph
    return sorted(node.op_type for node in graph.node if name in node.input)


def test_a_float16_engine_has_float16_scales(tmp_path: Path) -> None:
    make(tmp_path, "llama")
    checkpoint = Checkpoint(tmp_path)
    plan = whole_plan(checkpoint.spec, bits=16)
    formats = FORMATS["int4"]
    codes = CodedWeights(fold(checkpoint, plan, Basis()), formats, torch.float16)
    path = export_onnx(
        checkpoint.spec, plan, codes, tmp_path / "e", "float16", formats=formats
    )
    text = np.random.default_rng(0).integers(3, 90, 24).tolist()
    (found,) = run_in_chunks(session(str(path)), plan, [text], [[24]])
    coded = Decoder(checkpoint.spec, plan, formats=formats)
    coded.load_state_dict(
        {
            name: x.float() if x.dtype == torch.float16 else x
            for name, x in codes.items()
        }
    )
    expected = coded.logits(text, range(24)).numpy()
    assert np.abs(found - expected).max() < 0.1 * np.abs(expected).max()
