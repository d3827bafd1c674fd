"""A build asks the GPU of its machine whether it has room for the engine."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from kvlathe.base.errors import KvlatheError
from kvlathe.engines.backends import Built
from kvlathe.engines.targets import room
from kvlathe.engines.targets.child import ChildFailed
from tests.support.mixed_cases import model_plan

GPUS, BOTH = Built({}, ("sm_80",)), Built({}, ("cpu", "sm_80"))


@pytest.fixture
def plan_file(tmp_path: Path) -> Path:
    path = tmp_path / "plan.json"
    path.write_text(model_plan(64).to_json(), "utf-8")
    return path


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Plans that a child process was asked about, which refuses all."""
    plans: list[str] = []

    def run_module(module: str, argument: str) -> str:
        assert module == room.MODULE
        plans.append(argument)
        return json.dumps(["it does not run", "it is small", "do less"])

    monkeypatch.setattr(room, "run_module", run_module)
    return plans


def test_a_refusal_of_this_gpu_ends_a_build_for_it(
    plan_file: Path, asked: list[str]
) -> None:
    for device in (None, "cuda"):
        with pytest.raises(KvlatheError, match="it is small") as refusal:
            room.check_gpu(plan_file, GPUS, device)
        assert "do less" in refusal.value.remedy
        assert "--device cpu" in refusal.value.remedy
    assert asked == [str(plan_file)] * 2


def test_nobody_is_asked_where_the_gpu_is_not_known(
    plan_file: Path, asked: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A build on the CPU, and an engine that runs there too."""
    room.check_gpu(plan_file, GPUS, "cpu")
    room.check_gpu(plan_file, BOTH, "cuda")
    monkeypatch.setenv("KVLATHE_DEVICE", "cpu")
    room.check_gpu(plan_file, GPUS, None)
    assert not asked


def test_a_machine_refuses_nothing_that_it_has_room_for(plan_file: Path) -> None:
    """The child process itself; no GPU refuses nothing."""
    assert room.run_module(room.MODULE, str(plan_file)) == ""
    room.check_gpu(plan_file, GPUS, None)


def test_a_child_that_fails_does_not_end_a_build(
    plan_file: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fails(module: str, argument: str) -> str:
        raise ChildFailed("its process was ended by SIGSEGV")

    monkeypatch.setattr(room, "run_module", fails)
    room.check_gpu(plan_file, GPUS, None)
    assert "SIGSEGV" in caplog.text
