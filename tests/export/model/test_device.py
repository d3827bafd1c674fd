"""The device of the original model: every tensor of a calibration, a fold, a search's
reading and a measurement is made on the checkpoint's device, and on a GPU the numbers
are the CPU's."""

from __future__ import annotations

import threading
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
import torch

from kvlathe.base.errors import KvlatheError
from kvlathe.base.memory import OutOfMemory
from kvlathe.engines.build import BuildConfig, build
from kvlathe.export.bases.basis import Basis
from kvlathe.export.calibration.calibrate import calibrate_on, random_sequences
from kvlathe.export.calibration.stats import ARRAYS, Stats
from kvlathe.export.folding.fold import decoder_from, fold
from kvlathe.export.methods.composition import CacheSettings, compose
from kvlathe.export.methods.compression import parse
from kvlathe.export.methods.options import RankOptions
from kvlathe.export.model import memory
from kvlathe.export.model.checkpoint import Checkpoint
from kvlathe.export.model.device import CPU, _one_ahead, choose_device, within_share
from kvlathe.export.search.measured import Sources, price
from kvlathe.export.search.sealed import reading
from kvlathe.export.search.search import Exam
from kvlathe.plan.plan import CompressionPlan
from tests.support.checkpoints import make

MODEL = Path(__file__).resolve().parents[3] / "models" / "lathe-5m"
COMPRESSION = "fdc+hack:bits=8"
gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no GPU")


@contextmanager
def nothing_by_default() -> Generator[None]:
    """Inside, a tensor that is made without saying where has no memory: it cannot meet
    another."""
    with torch.device("meta"):
        yield


def statistics(checkpoint: Checkpoint, sequences: list[torch.Tensor]) -> Stats:
    return calibrate_on(checkpoint, sequences, seed=0, source={})


def plan_of(checkpoint: Checkpoint, stats: Stats) -> tuple[CompressionPlan, Basis]:
    shape = checkpoint.spec.shape
    has_rope = checkpoint.spec.rope is not None
    return compose(
        parse(COMPRESSION),
        shape,
        has_rope,
        stats,
        RankOptions(centre=True),
        CacheSettings(16),
    )


@pytest.fixture(scope="module", params=["llama", "qwen2-g7", "gpt2"])
def tiny(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Checkpoint:
    folder = tmp_path_factory.mktemp(request.param)
    make(folder, request.param)
    return Checkpoint(folder)


def test_every_tensor_is_made_on_the_checkpoints_device(tiny: Checkpoint) -> None:
    sequences = random_sequences(tiny.spec.vocab_size, 96, 0, 48)
    expected = statistics(tiny, sequences)
    plan, basis = plan_of(tiny, expected)
    folded = fold(tiny, plan, basis)
    whole = {name: folded[name] for name in folded}
    decoder = reading(decoder_from(tiny, plan, basis))
    ids = sequences[0].tolist()
    logits = decoder.logits(ids, range(48))
    with nothing_by_default():
        found = statistics(tiny, sequences)
        again = {name: folded[name] for name in folded}
        as_before = reading(decoder_from(tiny, plan, basis)).logits(ids, range(48))
    assert found.digest == expected.digest
    assert all(torch.equal(again[name], tensor) for name, tensor in whole.items())
    assert torch.equal(as_before, logits)


def test_a_measurement_makes_nothing_on_another_device(tiny: Checkpoint) -> None:
    if tiny.spec.rope is None:
        pytest.skip("one family is enough")
    text = random_sequences(tiny.spec.vocab_size, 200, 1, 100)
    exam = Exam("perplexity", windows=tuple(tuple(ids.tolist()) for ids in text))
    sources = Sources([exam], 128)
    stats = statistics(tiny, text)
    form = CacheSettings(16, 16, 16)
    expected = price(tiny, stats, form, sources)
    with nothing_by_default():
        found = price(tiny, stats, form, sources)
    np.testing.assert_array_equal(found.loss, expected.loss)
    np.testing.assert_array_equal(found.window_loss, expected.window_loss)


def test_a_word_names_a_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.delenv("KVLATHE_DEVICE", raising=False)
    assert choose_device(None) == choose_device("auto") == choose_device("cpu") == CPU
    with pytest.raises(KvlatheError, match="torch sees no GPU"):
        choose_device("cuda")
    monkeypatch.setenv("KVLATHE_DEVICE", "cuda")
    assert choose_device("cpu") == CPU
    with pytest.raises(KvlatheError, match="torch sees no GPU"):
        choose_device(None)
    monkeypatch.setenv("KVLATHE_DEVICE", "tpu")
    with pytest.raises(KvlatheError, match="no device 'tpu'"):
        choose_device(None)


def test_folding_makes_one_layer_ahead_and_says_what_fails() -> None:
    """The next one is begun before this one is given, and never the one after."""
    begun: list[int] = []
    finished: list[int] = []
    here = threading.current_thread()

    def make_it(item: int) -> int:
        assert threading.current_thread() is not here
        begun.append(item)
        if item == 3:
            raise ValueError("the third")
        return 10 * item

    given = _one_ahead(make_it, range(5), lambda: finished.append(len(begun)))
    for i in range(3):
        assert next(given) == 10 * i
        assert max(begun) <= i + 1
    with pytest.raises(ValueError, match="the third"):
        next(given)
    assert len(finished) == 5


# -- on a GPU --------------------------------------------------------------------------
@gpu
def test_statistics_of_a_gpu_are_those_of_the_cpu() -> None:
    """Sums are float64 on both; what they sum is computed in float32. Every sum differs
    by less than 2e-5 of its array's largest number, effective ranks by a
    hundredth: a window may keep another token of equal attention."""
    here = Checkpoint(MODEL)
    there = Checkpoint(MODEL, device=choose_device("cuda"))
    sequences = random_sequences(here.spec.vocab_size, 4096, 0, 1024)
    on_cpu, on_gpu = (statistics(x, sequences) for x in (here, there))
    for name in ARRAYS:
        expected, found = getattr(on_cpu.whole, name), getattr(on_gpu.whole, name)
        limit = 2e-5 * np.abs(expected).max()
        np.testing.assert_allclose(found, expected, rtol=0, atol=limit, err_msg=name)
    for name in ("wv_gram", "wo_gram"):
        expected, found = getattr(on_cpu, name), getattr(on_gpu, name)
        np.testing.assert_allclose(found, expected, rtol=1e-9, err_msg=name)
    for name, expected in on_cpu.entropies.arrays().items():
        found = on_gpu.entropies.arrays()[name]
        if name != "likeness":  # an elbow is a whole number, and may be the next one
            found, expected = found[..., 1:], expected[..., 1:]
        np.testing.assert_allclose(found, expected, rtol=1e-2, err_msg=name)


@gpu
def test_weights_folded_on_a_gpu_are_those_of_the_cpu() -> None:
    """The same plan: products are float64 on both, so float32 weights differ in the
    last digit at most."""
    here = Checkpoint(MODEL)
    there = Checkpoint(MODEL, device=choose_device("cuda"))
    sequences = random_sequences(here.spec.vocab_size, 2048, 0, 1024)
    plan, basis = plan_of(here, statistics(here, sequences))
    on_gpu = fold(there, plan, basis)
    for name, expected in fold(here, plan, basis).items():
        found = on_gpu[name]
        assert found.is_cuda, name
        torch.testing.assert_close(found.cpu(), expected, rtol=3e-7, atol=1e-9)


@gpu
def test_an_engine_made_on_a_gpu_answers_as_one_made_on_the_cpu(tmp_path: Path) -> None:
    """The whole path, each with its own calibration."""
    sizes = []
    for device in ("cpu", "cuda"):
        request = BuildConfig(
            MODEL,
            tmp_path / device,
            compression=COMPRESSION,
            removal_rate=0.15,
            device=device,
            use_cache=False,
        )
        folder = build(request)
        plan = CompressionPlan.from_json((folder / "plan.json").read_text())
        sizes.append([(lane.rank_k, lane.rank_v) for lane in plan.lanes])
    same = np.mean(np.array(sizes[0]) == np.array(sizes[1]))
    assert same >= 0.9
    loaded = [np.load(tmp_path / x / "basis.npz") for x in ("cpu", "cuda")]
    assert loaded[0].files == loaded[1].files


GIB = 1 << 30
CARD = torch.device("cuda", 0)


@pytest.fixture
def card(monkeypatch: pytest.MonkeyPatch) -> dict[str, float]:
    """A GPU of 80 GiB, of which others hold 50 and this process 4, 3 of them in
    tensors."""
    held: dict[str, float] = {"share": 1.0}
    for name, value in (
        ("mem_get_info", (26 * GIB, 80 * GIB)),
        ("memory_allocated", 3 * GIB),
        ("memory_reserved", 4 * GIB),
        ("get_device_name", "a card"),
    ):
        monkeypatch.setattr(torch.cuda, name, lambda _, value=value: value)
    fraction = "per_process_memory_fraction"
    monkeypatch.setattr(torch.cuda, f"get_{fraction}", lambda _: held["share"])

    def put(share: float, _: torch.device) -> None:
        held["share"] = share

    monkeypatch.setattr(torch.cuda, f"set_{fraction}", put)
    return held


def test_a_build_beside_others_takes_its_share_and_says_it(
    card: dict[str, float], logged: list[str]
) -> None:
    assert memory.free_bytes(CARD) == 27 * GIB
    with within_share(CARD, 0.25):
        assert card["share"] == 0.25  # torch holds it
        assert memory.free_bytes(CARD) == 17 * GIB
    assert card["share"] == 1.0 and memory.free_bytes(CARD) == 27 * GIB
    (said,) = logged
    assert "up to 20 GiB" in said and "26 GiB free" in said and "80 GiB" in said
    with within_share(CARD, 0.9):
        assert memory.free_bytes(CARD) == 27 * GIB  # others leave no more
    with within_share(CPU, 0.1):
        assert card["share"] == 1.0


def test_a_share_that_does_not_suffice_is_a_sentence(card: dict[str, float]) -> None:
    with (
        pytest.raises(OutOfMemory, match="raise --gpu-memory-utilization"),
        within_share(CARD, 0.25),
    ):
        raise torch.cuda.OutOfMemoryError("CUDA out of memory.")
    assert card["share"] == 1.0
    with pytest.raises(ZeroDivisionError), within_share(CARD, 0.25):
        _ = 1 / 0


@pytest.mark.parametrize("share", [0.0, -1.0, 1.5, float("nan")])
def test_a_share_of_a_gpu_is_a_share(share: float, tmp_path: Path) -> None:
    asked = BuildConfig(MODEL, tmp_path / "engine", gpu_memory_utilization=share)
    with pytest.raises(KvlatheError, match="share of a GPU"):
        build(asked)
