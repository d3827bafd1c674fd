"""An evaluation's memory does not grow with the vocabulary."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from kvlathe.engines.build import build
from kvlathe.engines.config import BuildConfig

MEASURED = """
import json, resource, sys
from kvlathe.evaluation.evaluate import text_scores
from kvlathe.runtime.llm import LLM

def peak():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10

engine, baseline = (LLM.load(sys.argv[1], cache_bytes=1 << 22) for _ in range(2))
engine.logits([1, 2, 3], [0])
baseline.logits([1, 2, 3], [0])
before = peak()
windows = [[7 * i % 262144 for i in range(257)]]
found = text_scores(engine, baseline, windows)
print(json.dumps([peak() - before, found["agreement"], found["kl"]]))
"""


@pytest.mark.nightly
def test_a_large_vocabulary_takes_less_than_a_gigabyte(tmp_path: Path) -> None:
    """256 rows of 262,144 logits are 0.27 GB, of each engine, and 0.54 in each array of
    the numbers that KL is computed in."""
    pytest.importorskip("onnxruntime")
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=262144,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=1,
        num_attention_heads=1,
        num_key_value_heads=1,
        max_position_embeddings=512,
    )
    LlamaForCausalLM(config).save_pretrained(tmp_path / "model")
    engine = tmp_path / "engine"
    build(BuildConfig(tmp_path / "model", engine, "none", use_cache=False))
    done = subprocess.run(
        [sys.executable, "-c", MEASURED, str(engine)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    taken, agreement, kl = json.loads(done.stdout)
    assert agreement == 1 and kl == 0
    assert taken < 1e9
