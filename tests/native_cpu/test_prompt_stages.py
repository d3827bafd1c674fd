"""Stages of the prompt kernel between those who fetch and those who attend, with its own
Room, on a CPU (tests/native_cpu/emulated/stages.cc)."""

from __future__ import annotations

from pathlib import Path

from tests.support.emulated import emulated_kernels


def test_stages_go_round_whoever_is_slow(tmp_path: Path) -> None:
    """Nobody waits for ever, and nothing is overwritten that is still read."""
    stages = emulated_kernels(tmp_path, "stages")
    ended = {seed: stages.stages_end(seed) for seed in range(500)}
    assert {seed: end for seed, end in ended.items() if end} == {}
