"""``kvlathe compact``: what it says of a prefix, and answers behind it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner

from kvlathe.cli.main import cli
from kvlathe.runtime.text.sampling_params import SamplingParams
from tests.support.runtime_cases import MODEL, built_folder, llm

TEXT = (MODEL.parents[1] / "README.md").read_text("utf-8")[:1200]


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return built_folder(tmp_path_factory.mktemp("engine"), "compacted")


def compacted(tmp_path: Path, engine: Path, *options: str) -> dict[str, object]:
    prefix = tmp_path / "prefix.txt"
    prefix.write_text(TEXT, "utf-8")
    arguments = ["compact", str(engine), "--prefix-file", str(prefix), "--json"]
    found = CliRunner().invoke(cli, [*arguments, *options], catch_exceptions=False)
    return json.loads(found.stdout)


def test_compacting_to_all_of_a_prefix_changes_no_answer(
    tmp_path: Path, engine: Path
) -> None:
    options = ("--keep", "1", "--prompt", "# How", "--max-new-tokens", "8")
    found = compacted(tmp_path, engine, *options)
    params = SamplingParams(max_new_tokens=8)
    expected = llm("torch", "compacted").generate([TEXT + "# How"], params)[0]
    assert found["answers"] == [expected.text]
    assert found["bytes"] == found["whole_bytes"] and found["kept"] == 1


def test_the_share_of_the_plan_is_kept_unless_another_is_asked_for(
    tmp_path: Path, engine: Path
) -> None:
    assert compacted(tmp_path, engine)["kept"] == pytest.approx(0.5, abs=0.05)
    fewer = compacted(tmp_path, engine, "--keep", "0.2")
    assert fewer["kept"] == pytest.approx(0.2, abs=0.05) and fewer["answers"] == []
