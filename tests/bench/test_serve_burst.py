"""The burst itself is tested: which servers it starts and ends, and what it counts."""

from __future__ import annotations

import shlex
import sys
import time
from pathlib import Path

import pytest

from benchmarks import serve_burst as burst
from kvlathe.bench.client import Outcome
from kvlathe.bench.load import Request

TOLD = (
    "kvlathe_num_requests_running{model_name='m'} 7.0\n",
    'vllm:num_requests_running{engine="0",model_name="m"} 7.0\n',
)


def files_of(folder: Path) -> str:
    """A command that serves the files of ``folder``: ``health`` makes it ready."""
    (folder / "health").touch()
    command = [sys.executable, "-m", "http.server", "--bind", "127.0.0.1"]
    return f"{shlex.join([*command, '--directory', str(folder)])} {{port}}"


def test_a_server_ends_with_what_it_started(tmp_path: Path) -> None:
    child = shlex.quote(f"{files_of(tmp_path)} & wait")
    with burst.served(f"sh -c {child}", [], tmp_path / "log") as url:
        assert burst.answers(url)
    assert not burst.answers(url)


def test_a_server_that_does_not_start_is_a_row() -> None:
    rows = burst.rows_of("broken=false {port}", {"1x8+8": (1, 8, 8)}, [], None)
    assert list(rows) == [{"server": "broken", "error": "the server did not start"}]


@pytest.mark.parametrize("told", TOLD)
def test_the_most_running_is_what_metrics_say(
    tmp_path: Path, told: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(burst, "LOOK_SECONDS", 0.01)
    (tmp_path / "metrics").write_text(told)
    server = burst.served(files_of(tmp_path), [], tmp_path / "log")
    with server as url, burst.most_running(url) as most:
        until = time.monotonic() + 10
        while not most[0] and time.monotonic() < until:
            time.sleep(0.01)
    assert most == [7.0]


def test_tokens_that_arrive_together_count_each() -> None:
    outcome = Outcome(Request([1] * 6, 9), 0.0, [2.0, 4.0, 10.0], 10.0, None, 9)
    said = burst.summary([outcome], 12.0)
    assert said["per_token_p50"] == (10.0 - 2.0) / 8
    assert said["between_tokens_p50"] == 4.0
    assert said["new_tokens_per_second"] == 9 / 12
    assert said["prompt_tokens_per_second"] == 6 / 2


@pytest.mark.parametrize("ended", [None, 10.0])
def test_an_answer_that_is_not_whole_is_no_number(ended: float | None) -> None:
    with pytest.raises(burst.Failed):
        burst.summary([Outcome(Request([1], 2), 0.0, [], ended)], 1.0)
