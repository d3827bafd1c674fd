"""Reading weights: every dtype and layout of files is read alike, every defect is
named, nothing is executed."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from kvlathe.base.errors import KvlatheError
from kvlathe.base.tensor_file import ArrayFile
from kvlathe.base.tokenizer_files import read_backend
from kvlathe.export.bases.basis import Basis
from kvlathe.export.folding.fold import decoder_from
from kvlathe.export.gguf.file import GgufFile
from kvlathe.export.model.checkpoint import Checkpoint
from kvlathe.export.model.tensor_files import forget
from kvlathe.export.model.tensors import made
from tests.support.checkpoints import OWN_HEADS, make_model, whole_plan
from tests.support.families.sizes import sizes

Reference = Callable[[str], tuple[Path, torch.nn.Module]]
Q = "model.layers.1.self_attn.q_proj.weight"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    make_model(tmp_path, "Llama", sizes(64, 4, 2))
    return tmp_path


def rewrite(folder: Path, change: Callable[[dict[str, torch.Tensor]], object]) -> None:
    tensors = load_file(folder / "model.safetensors")
    tensors = {name: tensor.clone() for name, tensor in tensors.items()}
    change(tensors)
    save_file(tensors, folder / "model.safetensors")


def logits(folder: Path) -> torch.Tensor:
    checkpoint = Checkpoint(folder)
    plan = whole_plan(checkpoint.spec)
    return decoder_from(checkpoint, plan, Basis()).logits(range(30), range(30))


@pytest.mark.parametrize("name", OWN_HEADS)
def test_every_weight_is_there_once_in_the_decoders_shape(
    name: str, reference: Reference
) -> None:
    """The decoder's tensors hold exactly the model's parameters: the same count and,
    where nothing is multiplied in, the same sum of squares."""
    path, model = reference(name)
    checkpoint = Checkpoint(path)
    tensors = {weight: checkpoint.weight(weight) for weight in checkpoint.weights}
    spec = checkpoint.spec
    kept = model.state_dict()
    buffers = [(where, x) for where, x in model.named_buffers() if where in kept]
    parameters = [
        parameter
        for where, parameter in [*model.named_parameters(), *buffers]
        if not any(part in where for part in spec.family.beside)
        and not any(where.endswith(end) for end in MULTIPLIED)
    ]
    family = spec.family
    own = {weight: t for weight, t in tensors.items() if made(spec, weight) is None}
    # Layers with fewer query heads have heads of zeros in place of the others.
    held = [
        int(t.count_nonzero()) if family.query_heads else t.numel()
        for t in own.values()
    ]
    unread = 0 if family.sinusoidal else family.position_offset * spec.hidden_size
    assert sum(held) + unread == sum(p.numel() for p in parameters)
    changed = family.factors or family.norm_offset or family.embed_norm
    changed = changed or family.mixer  # decays are stored as logarithms
    if unread or changed or "curve" in family.names or len(held) < len(tensors):
        return
    energy = sum(float(t.double().pow(2).sum()) for t in tensors.values())
    assert energy == pytest.approx(
        sum(float(p.detach().double().pow(2).sum()) for p in parameters), rel=1e-9
    )
    assert all(t.is_contiguous() and t.dtype == torch.float32 for t in tensors.values())


MULTIPLIED = (
    *("router.scale", "router.per_expert_scale"),
    "pre_feedforward_layernorm_2.weight",
)
"""Parameters that enter the maps of Gemma 4's experts."""


def test_shards_are_one_file_in_pieces(tmp_path: Path) -> None:
    whole, pieces = tmp_path / "whole", tmp_path / "pieces"
    make_model(whole, "Qwen3", sizes(64, 4, 2, 16))
    make_model(pieces, "Qwen3", sizes(64, 4, 2, 16), max_shard_size="40KB")
    assert len(Checkpoint(pieces).files) > 2
    assert torch.equal(logits(whole), logits(pieces))
    assert (
        Checkpoint(whole).digest
        == Checkpoint(whole).digest
        != Checkpoint(pieces).digest
    )


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_every_float_dtype_is_read_exactly(folder: Path, dtype: torch.dtype) -> None:
    stored = load_file(folder / "model.safetensors")[Q].to(dtype)
    rewrite(
        folder,
        lambda tensors: tensors.update(
            {name: t.to(dtype) for name, t in tensors.items()}
        ),
    )
    assert torch.equal(Checkpoint(folder).tensor(Q), stored.float())
    assert torch.isfinite(logits(folder)).all()


@pytest.mark.parametrize("name", ["gpt2", "falcon-7b"])
def test_base_models_lack_the_first_part_of_every_name(
    name: str, reference: Reference, tmp_path: Path
) -> None:
    path, _ = reference(name)
    tensors = load_file(path / "model.safetensors")
    bare = {key.removeprefix("transformer."): tensor for key, tensor in tensors.items()}
    if name == "gpt2":
        bare |= {
            "h.0.attn.bias": torch.ones(1, 1, 4, 4),
            "h.0.attn.masked_bias": torch.tensor(-1e4),
        }
    save_file(bare, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text((path / "config.json").read_text())
    assert torch.equal(logits(tmp_path), logits(path))


CONSTANTS = {
    "gpt_neo": ("transformer.h.0.attn.attention.bias",),
    "gpt_neox": (
        "gpt_neox.layers.0.attention.bias",
        "gpt_neox.layers.0.attention.masked_bias",
    ),
    "codegen": ("transformer.h.0.attn.causal_mask",),
}
"""Constants of older checkpoints, which transformers leaves out, too."""


@pytest.mark.parametrize("name", CONSTANTS)
def test_constants_of_older_checkpoints_are_left_out(
    name: str, reference: Reference, tmp_path: Path
) -> None:
    path, _ = reference(name)
    tensors = load_file(path / "model.safetensors")
    assert not {*CONSTANTS[name]} & {*tensors}
    constants = {key: torch.ones(1, 1, 4, 4) for key in CONSTANTS[name]}
    save_file(tensors | constants, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text((path / "config.json").read_text())
    assert torch.equal(logits(tmp_path), logits(path))


def test_the_text_of_a_larger_model_may_have_a_head_of_its_own(
    reference: Reference, tmp_path: Path
) -> None:
    """The configuration of Mistral 3 says "tied" where nothing is said."""
    path, _ = reference("ministral3-images-untied")
    raw = json.loads((path / "config.json").read_text())
    raw.pop("tie_word_embeddings")
    (tmp_path / "config.json").write_text(json.dumps(raw))
    shutil.copy(path / "model.safetensors", tmp_path)
    assert torch.equal(logits(tmp_path), logits(path))


def test_of_two_tied_tensors_either_may_be_stored(
    reference: Reference, tmp_path: Path
) -> None:
    path, _ = reference("llama-llama3-tied")
    tensors = load_file(path / "model.safetensors")
    (tmp_path / "config.json").write_text((path / "config.json").read_text())
    embed = tensors.pop("model.embed_tokens.weight")
    for stored in (
        {"lm_head.weight": embed},
        {"lm_head.weight": embed, "model.embed_tokens.weight": embed.clone()},
    ):
        save_file(tensors | stored, tmp_path / "model.safetensors")
        assert Checkpoint(tmp_path).spec.tied_head
        assert torch.equal(logits(tmp_path), logits(path))
    save_file(
        tensors | {"lm_head.weight": 2 * embed, "model.embed_tokens.weight": embed},
        tmp_path / "model.safetensors",
    )
    assert not Checkpoint(tmp_path).spec.tied_head, (
        "a head of its own is used, as transformers does"
    )
    torch.testing.assert_close(logits(tmp_path), 2 * logits(path))


def _truncate(folder: Path) -> None:
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-100])


def _only_pickle(folder: Path) -> None:
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")


def _index(text: str) -> Callable[[Path], object]:
    """Shards in place of the single file, which would go before them."""

    def damage(folder: Path) -> None:
        (folder / "model.safetensors").unlink()
        (folder / "model.safetensors.index.json").write_text(text)

    return damage


def test_a_single_file_goes_before_stale_shards(folder: Path) -> None:
    stale = {"weight_map": {Q: "model-00001-of-1.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(stale))
    assert [path.name for path in Checkpoint(folder).files] == ["model.safetensors"]


def point(path: Path) -> None:
    """Put there what a clone without Git LFS holds in place of a file."""
    path.write_text(
        "version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 9\n"
    )


@pytest.mark.parametrize("read", [read_backend, GgufFile, ArrayFile])
def test_a_pointer_in_place_of_any_file_is_named(
    read: Callable[[Path], object], tmp_path: Path
) -> None:
    path = tmp_path / "tokenizer.json"
    point(path)
    with pytest.raises(KvlatheError, match=r"a pointer of Git LFS.*git lfs pull"):
        read(tmp_path if read is read_backend else path)


DEFECTS: dict[str, tuple[Callable[[Path], object], str]] = {
    "no config": (lambda f: (f / "config.json").unlink(), "no config.json"),
    "no json": (
        lambda f: (f / "config.json").write_text("{"),
        "config.json cannot be read",
    ),
    "no text": (
        lambda f: (f / "config.json").write_bytes(b"\xff\xfe\x00"),
        "config.json cannot be read",
    ),
    "a list": (lambda f: (f / "config.json").write_text("[]"), "not a JSON object"),
    "no weights": (lambda f: (f / "model.safetensors").unlink(), "has no weights"),
    "pickle": (_only_pickle, "pytorch_model.bin.*hidden in it.*save_pretrained"),
    "truncated": (_truncate, "truncated or damaged"),
    "empty": (
        lambda f: (f / "model.safetensors").write_bytes(b""),
        "truncated or damaged",
    ),
    "pointer": (lambda f: point(f / "model.safetensors"), "a pointer of Git LFS"),
    "missing": (lambda f: rewrite(f, lambda t: t.pop(Q)), f"lacks the tensor {Q}"),
    "shape": (
        lambda f: rewrite(f, lambda t: t.update({Q: torch.ones(3, 64)})),
        rf"{Q} has shape \[3, 64\].*\[64, 64\]",
    ),
    "foreign": (
        lambda f: rewrite(f, lambda t: t.update({"model.extra.weight": torch.ones(2)})),
        "model.extra.weight",
    ),
    "int8": (
        lambda f: rewrite(f, lambda t: t.update({Q: t[Q].to(torch.int8)})),
        f"{Q} is stored as I8",
    ),
    "bad index": (_index("{}"), "index.json cannot be read"),
    "lost shard": (
        _index(json.dumps({"weight_map": {Q: "model-00002-of-3.safetensors"}})),
        "model-00002.* is missing",
    ),
    "outside": (
        _index(json.dumps({"weight_map": {Q: "../model.safetensors"}})),
        "the checkpoint's folder",
    ),
}


@pytest.mark.parametrize("defect", DEFECTS)
def test_every_defect_is_named_on_opening(defect: str, folder: Path) -> None:
    damage, said = DEFECTS[defect]
    damage(folder)
    with pytest.raises(KvlatheError, match=said):
        Checkpoint(folder)


def test_a_missing_folder_is_named(tmp_path: Path) -> None:
    with pytest.raises(KvlatheError, match=r"no checkpoint folder .*nowhere"):
        Checkpoint(tmp_path / "nowhere")


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_weights_that_are_not_finite_are_named_when_read(
    value: float, folder: Path
) -> None:
    rewrite(folder, lambda tensors: tensors[Q].view(-1)[77].fill_(value))
    checkpoint = Checkpoint(folder)
    with pytest.raises(KvlatheError, match=f"{Q} holds NaN or infinite"):
        checkpoint.weight("layers.1.q.weight")
    assert torch.isfinite(checkpoint.weight("layers.0.q.weight")).all()


def test_a_pickle_is_never_opened(folder: Path) -> None:
    """A folder with both kinds is read from its safetensors; the pickle beside them may
    hold anything."""
    (folder / "pytorch_model.bin").write_bytes(b"cos\nsystem\n(S'exit 1'\ntR.")
    assert torch.isfinite(logits(folder)).all()


def test_pages_of_a_mapped_checkpoint_are_let_go_and_read_again(
    folder: Path,
) -> None:
    """Memory of the file falls by the tensor that was copied; a tensor that is no copy
    stays, and a second reading is the first."""

    def resident() -> int:
        """Bytes of mapped weight files in memory, in kB as the kernel counts."""
        total, ours = 0, False
        for line in Path("/proc/self/smaps").read_text().splitlines():
            if "-" in line.split(" ")[0]:
                ours = str(folder) in line
            elif ours and line.startswith("Rss:"):
                total += int(line.split()[1])
        return total

    rewrite(folder, lambda tensors: tensors.update({Q: torch.randn(64, 64)}))
    checkpoint = Checkpoint(folder)
    stored = checkpoint._read(Q)
    copy = stored.double()
    before = resident()
    forget(stored, stored.view(-1))
    assert resident() == before
    forget(stored, copy)
    assert resident() < before
    assert torch.equal(stored.double(), copy)
