"""Facts that a build learned of its model are said again by ``kvlathe inspect`` and by
the report."""

from __future__ import annotations

import html
import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from kvlathe.cli import main as cli
from kvlathe.engines.build import BuildConfig, build
from kvlathe.plan.plan import WARNINGS, CompressionPlan
from tests.support.checkpoints import make_model
from tests.support.families import FAMILIES

Reference = Callable[[str], tuple[Path, torch.nn.Module]]


def test_warnings_of_a_build_stay_with_its_engine(
    reference: Reference, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder, _ = reference("phi3-longrope")
    engine = build(
        BuildConfig(
            folder,
            tmp_path / "engine",
            compression="fdc:removal_rate=0",
            calibration="random",
            max_seq_len=512,
            use_cache=False,
        )
    )
    capsys.readouterr()
    plan = CompressionPlan.from_json((engine / "plan.json").read_text("utf-8"))
    true = [name for name in WARNINGS if name not in ("reach", "uncentred")]
    texts = {name: plan.notes[name] for name in true}
    assert "removes no dimension" in texts["ranks"]
    assert "differ from transformers" in texts["rope"]

    page = html.unescape((engine / "report.html").read_text("utf-8"))
    assert all(text in page for text in texts.values())

    assert cli.run(["inspect", str(engine), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["warnings"] == texts
    assert cli.run(["inspect", str(engine)]) == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert all(shown.count(f"warning: {name}") == 1 for name in true)


@pytest.mark.nightly
def test_a_model_whose_scores_may_not_be_shifted_says_that_nothing_is_centred(
    tmp_path: Path,
) -> None:
    make_model(tmp_path / "model", *FAMILIES["gemma2"])
    request = BuildConfig(
        tmp_path / "model",
        tmp_path / "engine",
        compression="fdc:removal_rate=0.1",
        calibration="random",
        max_seq_len=512,
        centre=True,
        use_cache=False,
    )
    plan = CompressionPlan.from_json((build(request) / "plan.json").read_text("utf-8"))
    assert "--centre has no effect" in plan.notes["uncentred"]
