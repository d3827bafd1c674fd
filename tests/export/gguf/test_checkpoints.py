"""A GGUF file gives the decoder that its model is, in every architecture and type that
is read; what it would give otherwise is refused."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

from kvlathe.base.errors import KvlatheError
from kvlathe.base.gguf_files import gguf_of
from kvlathe.engines.build import BuildConfig, build
from kvlathe.engines.job import prepare
from kvlathe.engines.order import accept, folder_of
from kvlathe.export.bases.basis import Basis
from kvlathe.export.folding.fold import decoder_from, fold
from kvlathe.export.gguf.file import READ, GgufFile
from kvlathe.export.model.checkpoint import Checkpoint
from kvlathe.export.model.coded_weights import CodedWeights
from kvlathe.layers.coded_weight import CodedWeight
from kvlathe.plan import manifest as manifests
from kvlathe.plan.weight_formats import WeightFormat, WeightFormats
from kvlathe.runtime.llm import LLM
from kvlathe.runtime.text.sampling_params import SamplingParams
from tests.support.checkpoints import make_model, whole_plan

gguf = pytest.importorskip("gguf", reason="gguf is not installed")

from tests.support import gguf_cases as cases  # noqa: E402

TOLERANCE = 1e-4
ROUNDED = ("F16", "BF16", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0")
"""Types that the gguf package writes."""


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVLATHE_CACHE", str(tmp_path / "cache"))


def logits(opened: Checkpoint, ids: list[int]) -> Tensor:
    decoder = decoder_from(opened, whole_plan(opened.spec), Basis())
    return decoder.logits(ids, range(len(ids)))


def some_ids(vocabulary: int, length: int) -> list[int]:
    chosen = torch.Generator().manual_seed(length)
    return torch.randint(vocabulary, (length,), generator=chosen).tolist()


def made(tmp_path: Path, name: str, kind: str = "F32") -> tuple[Path, PreTrainedModel]:
    """A file, and the model that it holds."""
    case = cases.CASES[name]
    model = make_model(tmp_path / "model", case.kind, case.settings)
    if kind != "F32":
        cases.rounded(model, kind)
    file = tmp_path / "tiny.gguf"
    cases.write_gguf(file, model, case, kind)
    return file, model


@pytest.mark.parametrize("name", cases.CASES)
def test_every_architecture_computes_what_transformers_computes(
    name: str, tmp_path: Path
) -> None:
    """Lengths on both sides of the 64 positions at which LongRoPE changes its factors,
    and past every window."""
    file, model = made(tmp_path, name)
    for length, served in ((37, 64), (150, None)):
        opened = Checkpoint(folder_of(file), served)
        ids = some_ids(opened.spec.vocab_size, length)
        with torch.no_grad():
            expected = model(torch.tensor([ids])).logits[0]
        assert expected.abs().max() > 1
        torch.testing.assert_close(
            logits(opened, ids), expected, atol=TOLERANCE, rtol=0
        )


@pytest.mark.parametrize("kind", ROUNDED)
@pytest.mark.parametrize("name", ["llama3-tied", "qwen3moe", "phi3-window"])
def test_types_that_round_give_the_rounded_model(
    name: str, kind: str, tmp_path: Path
) -> None:
    file, model = made(tmp_path, name, kind)
    opened = Checkpoint(folder_of(file))
    ids = some_ids(opened.spec.vocab_size, 40)
    with torch.no_grad():
        expected = model(torch.tensor([ids])).logits[0]
    torch.testing.assert_close(logits(opened, ids), expected, atol=TOLERANCE, rtol=0)


@pytest.mark.parametrize("name", ["llama", "mistral", "qwen2"])
def test_transformers_reads_the_same_logits(name: str, tmp_path: Path) -> None:
    """Of the same file, where its own reading knows all of it: sizes of heads, of
    experts and of windows it leaves at its defaults."""
    pytest.importorskip("accelerate", reason="accelerate is not installed")
    from transformers import AutoModelForCausalLM

    file, _ = made(tmp_path, name, "Q5_0")
    theirs = AutoModelForCausalLM.from_pretrained(
        tmp_path, gguf_file=file.name, dtype=torch.float32
    ).eval()
    opened = Checkpoint(folder_of(file))
    ids = some_ids(opened.spec.vocab_size, 60)
    with torch.no_grad():
        expected = theirs(torch.tensor([ids])).logits[0]
    torch.testing.assert_close(logits(opened, ids), expected, atol=TOLERANCE, rtol=0)


BLOCKS = {
    "Q2_K": (80, 82),
    "Q3_K": (108,),
    "Q4_K": (0, 2),
    "Q5_K": (0, 2),
    "Q6_K": (208,),
}
"""Type -> where a block of it has numbers of 16 bits. Every other byte may be any."""


@pytest.mark.parametrize("kind", BLOCKS)
def test_k_quants_are_what_transformers_makes_of_their_bytes(
    kind: str, tmp_path: Path
) -> None:
    theirs = pytest.importorskip("transformers.integrations.gguf.dequant")
    known = cases.Kind[kind]
    block, size = gguf.GGML_QUANT_SIZES[known]
    rows, columns = 70, 3
    chosen = torch.Generator().manual_seed(0)
    stored = torch.randint(
        256, (rows, columns, size), dtype=torch.uint8, generator=chosen
    )
    for place in BLOCKS[kind]:
        halves = torch.randn(rows, columns, 1, generator=chosen).half()
        stored[..., place : place + 2] = halves.view(torch.uint8)
    stored = stored.flatten(1)

    case = cases.CASES["qwen2"]
    settings = case.settings | {
        "hidden_size": columns * block,
        "vocab_size": rows,
        "num_hidden_layers": 1,
    }
    model = make_model(tmp_path / "model", case.kind, settings)
    file = tmp_path / "tiny.gguf"
    own = cases.add

    def with_blocks(writer: cases.Writer, name: str, tensor: Tensor, as_: str) -> None:
        if name == "token_embd.weight":
            writer.add_tensor(name, stored.numpy(), raw_dtype=known)
        else:
            own(writer, name, tensor, as_)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cases, "add", with_blocks)
        cases.write_gguf(file, model, case)
    expected = theirs.dequantize(stored, known.value).view(rows, columns * block)
    opened = Checkpoint(folder_of(file))
    torch.testing.assert_close(opened.weight("embed.weight"), expected)
    some = torch.tensor([69, 0, 5, 5])
    torch.testing.assert_close(opened.rows("embed.weight", some), expected[some])


def test_every_type_that_is_read_is_tried() -> None:
    assert {*ROUNDED, *BLOCKS, "F32"} == set(READ)


@pytest.mark.parametrize(
    ("kind", "form"),
    [("Q4_0", "int4"), ("Q4_0", "int8"), ("Q5_0", "int8"), ("Q8_0", "int8")],
)
@pytest.mark.parametrize("name", ["llama", "phi3-window", "granite"])
def test_codes_with_their_zero_in_the_middle_are_kept(
    name: str, kind: str, form: str, tmp_path: Path
) -> None:
    """What an engine's codes stand for is what the file's stand for."""
    file, _ = made(tmp_path, name, kind)
    opened = Checkpoint(folder_of(file))
    weights = fold(opened, whole_plan(opened.spec), Basis())
    maps = WeightFormat(form, 32)
    codes = CodedWeights(weights, WeightFormats(maps), torch.float32, opened.grid)
    seen = 0
    for weight in opened.kinds():
        base = weight.removesuffix(".weight")
        scales = codes[f"{base}.scales"]
        kept = CodedWeight(codes[f"{base}.codes"], scales, None, maps.bits)
        found = kept.matrix(weights[weight].shape[0]).T
        torch.testing.assert_close(found, weights[weight], rtol=1e-6, atol=1e-7)
        seen += 1
    assert seen == 7 * opened.spec.layers


@pytest.mark.parametrize(
    ("kind", "weights", "group"),
    [
        *(("Q4_0", "int4", 32), ("Q8_0", "int8", 32), ("Q8_0", "int4", 64)),
        *(("Q4_1", "int4", 64), ("F16", "int8", 128)),
    ],
)
def test_an_engine_has_the_files_groups_where_they_gain(
    kind: str, weights: str, group: int, tmp_path: Path
) -> None:
    file, _ = made(tmp_path, "llama", kind)
    job = prepare(accept(BuildConfig(file, tmp_path / "engine", weights=weights)))
    assert job.formats.maps == WeightFormat(weights, group)


def test_the_same_file_elsewhere_is_the_same_model(tmp_path: Path) -> None:
    """So that statistics of it are found again; a changed one is another."""
    file, model = made(tmp_path, "qwen2")
    (tmp_path / "other").mkdir()
    moved = tmp_path / "other" / "renamed.gguf"
    moved.write_bytes(file.read_bytes())
    first, second = (Checkpoint(folder_of(path)) for path in (file, moved))
    assert first.path != second.path and first.digest == second.digest
    assert folder_of(file) == folder_of(first.path) == first.path
    assert folder_of(moved.parent) == second.path
    with torch.no_grad():
        next(model.parameters()).mul_(2)
    cases.write_gguf(file, model, cases.CASES["qwen2"])
    assert Checkpoint(folder_of(file)).digest != first.digest


@pytest.mark.slow
def test_an_engine_serves_without_its_file(tmp_path: Path) -> None:
    """And answers as one from the model's own folder. It is named after the file."""
    file, _ = made(tmp_path, "qwen2")
    options: dict[str, Any] = {"max_seq_len": 128, "use_cache": False}
    built = build(BuildConfig(file, tmp_path / "engine", **options))
    other = build(BuildConfig(tmp_path / "model", tmp_path / "other", **options))
    file.unlink()
    shutil.rmtree(tmp_path / "cache")
    assert manifests.read(built).model == "tiny"
    asked = some_ids(97, 20), SamplingParams(max_new_tokens=30, ignore_eos=True)
    answers = [LLM.load(path).generate([asked[0]], asked[1]) for path in (built, other)]
    assert answers[0][0].token_ids == answers[1][0].token_ids


# -- refusals --------------------------------------------------------------------------
def refused(file: Path) -> str:
    with pytest.raises(KvlatheError) as error:
        Checkpoint(folder_of(file))
    said = str(error.value)
    assert "\n" not in said and error.value.remedy
    return said


def test_an_architecture_that_is_not_read_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "tiny.gguf"
    writer = cases.Writer(file, "rwkv7")
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    assert "architecture 'rwkv7'" in refused(file)


def test_a_type_that_is_not_read_is_refused(tmp_path: Path) -> None:
    case = cases.CASES["qwen2"]
    model = make_model(tmp_path / "model", case.kind, case.settings)
    file = tmp_path / "tiny.gguf"
    kind = cases.Kind.IQ4_NL
    rows = torch.zeros(97, 64 // 32 * 18, dtype=torch.uint8).numpy()
    cases.write_gguf(
        file,
        model,
        case,
        more=lambda writer: writer.add_tensor("extra", rows, raw_dtype=kind),
    )
    assert "stores extra as IQ4_NL" in refused(file)


@pytest.mark.parametrize(
    ("key", "value", "said"),
    [
        ("qwen2.attention.clamp_kqv", 8.0, "nothing here obeys it"),
        ("qwen2.expert_count", 8, "nothing here obeys it"),
        ("qwen2.rope.scaling.type", "longrope", "scales RoPE in the way 'longrope'"),
        ("split.count", 3, "one of 3 parts"),
    ],
)
def test_keys_that_nothing_obeys_are_refused(
    key: str, value: float | str, said: str, tmp_path: Path
) -> None:
    case = cases.CASES["qwen2"]
    model = make_model(tmp_path / "model", case.kind, case.settings)
    file = tmp_path / "tiny.gguf"

    def more(writer: cases.Writer) -> None:
        if isinstance(value, str):
            writer.add_string(key, value)
        elif isinstance(value, float):
            writer.add_float32(key, value)
        else:
            writer.add_uint32(key, value)

    cases.write_gguf(file, model, case, more=more)
    assert said in refused(file)


def test_a_tensor_that_means_nothing_is_refused_by_its_name(tmp_path: Path) -> None:
    case = cases.CASES["qwen2"]
    model = make_model(tmp_path / "model", case.kind, case.settings)
    file = tmp_path / "tiny.gguf"
    zeros = torch.zeros(64).numpy()
    cases.write_gguf(
        file, model, case, more=lambda w: w.add_tensor("blk.0.attn_sinks", zeros)
    )
    assert "blk.0.attn_sinks" in refused(file)


def test_a_damaged_file_is_refused_wherever_it_ends(tmp_path: Path) -> None:
    file, _ = made(tmp_path, "qwen2", "Q8_0")
    whole = file.read_bytes()
    header = min(one.start for one in GgufFile(file).tensors.values())
    for end in (0, 3, 12, 40, header // 3, header // 2, header - 8, len(whole) - 1):
        file.write_bytes(whole[:end])
        assert "cannot be read" in refused(file)
    file.write_bytes(b"GGML" + whole[4:])
    assert "does not begin as a GGUF file" in refused(file)


def test_a_folder_of_several_files_asks_for_one(tmp_path: Path) -> None:
    for name in ("model-Q4_0.gguf", "model-Q8_0.gguf", "mmproj-F16.gguf"):
        (tmp_path / name).touch()
    said = refused(tmp_path)
    assert "holds 2 GGUF files" in said
    assert "model-Q4_0.gguf, model-Q8_0.gguf" in said
    (tmp_path / "model-Q4_0.gguf").unlink()
    assert gguf_of(tmp_path) == tmp_path / "model-Q8_0.gguf"
    (tmp_path / "model.safetensors").touch()
    assert gguf_of(tmp_path) is None


@pytest.mark.parametrize("backend", ["vllm", "hf"])
def test_backends_that_need_a_whole_checkpoint_refuse_a_file(
    backend: str, tmp_path: Path
) -> None:
    file, _ = made(tmp_path, "qwen2")
    with pytest.raises(KvlatheError, match="takes no GGUF file"):
        folder_of(file, backend)
