"""vLLM itself with our pages, over its HTTP: the texts of our engine of the same plan,
and the tokens that the plan promises.

`scripts/vllm_env.sh` makes the environment; KVLATHE_VLLM_PYTHON names another one's
Python. KVLATHE_VLLM_DEVICE=cuda: vLLM for GPUs, beside the cuda backend.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import time
import urllib.request
from collections.abc import Generator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from kvlathe.runtime.llm import LLM
from kvlathe.runtime.text.sampling_params import SamplingParams
from kvlathe.tasks.tasks import FolderEncoder

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
from kvlathe.engines.build import BuildConfig, build  # noqa: E402
from kvlathe.plan.engine_folder import open_engine  # noqa: E402
from kvlathe_vllm.dealt import Dealt  # noqa: E402
from kvlathe_vllm.hosted import open_hosted  # noqa: E402

pytestmark = pytest.mark.nightly
ROOT = Path(__file__).resolve().parents[3]
MODEL = ROOT / "models/lathe-5m"
PYTHON = Path(os.environ.get("KVLATHE_VLLM_PYTHON", ROOT / ".vllm/bin/python"))
ON_GPU = os.environ.get("KVLATHE_VLLM_DEVICE") == "cuda"
GIB = 1 << 30
OF_DEVICE = (
    ("--dtype", "float16", "--block-size", "64", "--kv-cache-memory-bytes", str(GIB))
    if ON_GPU
    else ("--dtype", "float32", "--enforce-eager")
)
OURS = "cuda" if ON_GPU else "onnxruntime"
TWO_SHARDS, CORES = ("--tensor-parallel-size", "2"), "0|1"
NEW = 60
TIE = 0.02
"""Nats between two tokens of which a number on the border of two codes chooses one: of
seven answers in 4 bits one parted at 0.0075."""
Ids = Sequence[int]


@dataclass
class Server:
    """vLLM on loopback, and what it has said."""

    port: int
    log: Path

    def complete(self, prompts: Sequence[Ids], **options: object) -> list[Ids]:
        """Greedy answers as token ids."""
        return [choice["token_ids"] for choice in self._asked(prompts, **options)]

    def gap(self, prompt: Ids, one: int, other: int) -> float:
        """Nats between two tokens behind a prompt, which are its likeliest."""
        options = {"max_tokens": 1, "logprobs": 2, "return_tokens_as_token_ids": True}
        [choice] = self._asked([prompt], **options)
        [found] = choice["logprobs"]["top_logprobs"]
        return abs(found[f"token_id:{one}"] - found[f"token_id:{other}"])

    def check(self, *told: Sequence[Ids]) -> None:
        """Check that answers to prompts are those that were wanted, or part at a tie."""
        for prompt, one, two in zip(*told, strict=True):
            if one != two:
                at = [a == b for a, b in zip(one, two, strict=True)].index(False)
                assert self.gap([*prompt, *one[:at]], one[at], two[at]) < TIE

    def _asked(self, prompts: Sequence[Ids], **options: object) -> list[Any]:
        asked = {
            "model": "served",
            "prompt": [list(ids) for ids in prompts],
            "max_tokens": NEW,
            "temperature": 0,
            "ignore_eos": True,
            "return_token_ids": True,
            **options,
        }
        request = urllib.request.Request(
            f"http://127.0.0.1:{self.port}/v1/completions",
            json.dumps(asked).encode(),
            {"Content-Type": "application/json"},
        )
        with urllib.request.urlopen(request, timeout=300) as answer:
            choices = json.load(answer)["choices"]
        return sorted(choices, key=lambda choice: choice["index"])

    @property
    def cached(self) -> float:
        """Tokens of prompts that it has found in its cache so far."""
        return self._metric("prefix_cache_hits")

    def count(self, what: str) -> float:
        """Tokens that were guessed (``draft``), or of those ``accepted``."""
        return self._metric(f"spec_decode_num_{what}_tokens")

    def _metric(self, name: str) -> float:
        url = f"http://127.0.0.1:{self.port}/metrics"
        with urllib.request.urlopen(url, timeout=30) as answer:
            said = answer.read().decode()
        found = re.findall(rf"^vllm:{name}_total\S* (\S+)$", said, re.M)
        return sum(map(float, found))

    @property
    def tokens(self) -> int:
        """Tokens of its whole cache."""
        found = re.search(r"KV cache size: ([\d,]+) tokens", self.log.read_text())
        assert found is not None
        return int(found[1].replace(",", ""))


@contextlib.contextmanager
def serving(
    engine: Path, folder: Path, *options: str, model: Path = MODEL
) -> Generator[Server]:
    """The server of one engine, ended with its workers."""
    if not PYTHON.exists():
        pytest.skip(f"{PYTHON} is missing: run scripts/vllm_env.sh")
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        port = one.getsockname()[1]
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "integrations/vllm")]),
        "KVLATHE_VLLM": str(engine),
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_CPU_OMP_THREADS_BIND": CORES if TWO_SHARDS[0] in options else "auto",
        "VLLM_NO_USAGE_STATS": "1",
        "HF_HUB_OFFLINE": "1",
    }
    command = [str(PYTHON), "-m", "vllm.entrypoints.openai.api_server"]
    command += ["--model", str(model), "--served-model-name", "served"]
    command += ["--host", "127.0.0.1", "--port", str(port), *OF_DEVICE]
    command += ["--attention-backend", "CUSTOM"]
    command += ["--max-model-len", "2048", "--max-num-seqs", "8", *options]
    log = folder / f"{port}.log"
    with log.open("w") as said:
        process = subprocess.Popen(
            command, env=environment, stdout=said, stderr=said, start_new_session=True
        )
        try:
            _wait(process, port, log)
            yield Server(port, log)
        finally:
            process.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(30)
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def _wait(process: subprocess.Popen[bytes], port: int, log: Path) -> None:
    for _ in range(600):
        assert process.poll() is None, log.read_text()[-4000:]
        with contextlib.suppress(OSError):
            url = f"http://127.0.0.1:{port}/health"
            with urllib.request.urlopen(url, timeout=5):
                return
        time.sleep(0.5)
    raise AssertionError(log.read_text()[-4000:])


def prompts() -> list[Ids]:
    """Prompts of unlike lengths; two share 256 tokens, and one ends with a page."""
    encoder = FolderEncoder(MODEL)
    lines = (ROOT / "data/eval_text.jsonl").read_text("utf-8").splitlines()
    texts = [json.loads(line)["text"] for line in lines[:6]]
    ids = [list(encoder.encode(text)) for text in texts]
    lengths = (3, 64, 200, 641, 130, 1000)
    cut = [one[:size] for one, size in zip(ids, lengths, strict=True)]
    return [*cut, [*ids[3][:256], *ids[4][:90]]]


def built(folder: Path, compression: str, backend: str, model: Path = MODEL) -> Path:
    rate = 0.15 if "fdc" in compression else None
    request = BuildConfig(
        model,
        folder / backend,
        compression,
        backend=backend,
        prefill_chunk=64,
        max_batch_size=8,
        removal_rate=rate,
    )
    return build(request)


@pytest.mark.parametrize(
    "compression", ["none", "hack:bits=4,sink=0", "fdc+hack:bits=8,sink=0"]
)
def test_vllm_writes_what_our_engine_writes(compression: str, tmp_path: Path) -> None:
    """Greedy, in chunks of 100 tokens that fit no page, then again with every prefix
    cached. Answers may part where the last digits choose one of two tokens."""
    asked = prompts()
    ours, theirs = (built(tmp_path, compression, x) for x in (OURS, "vllm"))
    plan = open_engine(ours).plan
    assert plan.digest == open_engine(theirs).plan.digest
    params = SamplingParams(max_new_tokens=NEW, temperature=0, ignore_eos=True)
    with LLM.load(ours, threads=1) as llm:
        wanted = [list(answer.token_ids) for answer in llm.generate(asked, params)]
    options = ("--max-num-batched-tokens", "100", "--enable-chunked-prefill")
    with serving(theirs, tmp_path, *options) as server:
        first = server.complete(asked)
        before = server.cached
        again = server.complete(asked)
        tokens, cached = server.tokens, server.cached
        server.check(asked, first, wanted)
        log = server.log.read_text()
    assert first == again
    assert cached - before > sum(map(len, asked)) // 2
    promised = GIB / open_engine(theirs).manifest.kv_bytes.per_token
    assert promised * 0.999 < tokens <= promised
    assert "Traceback" not in log


def with_windows(folder: Path) -> Path:
    """A checkpoint of random weights: two of three layers see 200 tokens."""
    config = transformers.Gemma3TextConfig(
        vocab_size=8192,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=6,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
        query_pre_attn_scalar=64,
        max_position_embeddings=4096,
        sliding_window=200,
        layer_types=["sliding_attention", "sliding_attention", "full_attention"] * 2,
        initializer_range=0.1,
        eos_token_id=0,
    )
    torch.manual_seed(0)
    transformers.Gemma3ForCausalLM(config).save_pretrained(folder)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(MODEL / name, folder)
    return folder


NGRAM = {"method": "ngram", "prompt_lookup_max": 3, "prompt_lookup_min": 1}
DRAFT = {"method": "draft_model", "model": str(MODEL)}


@pytest.mark.parametrize("windows", [True, False], ids=["windows", "draft"])
def test_windows_and_guesses_change_no_answer(windows: bool, tmp_path: Path) -> None:
    """vLLM frees blocks behind windows, and takes back what was guessed wrong."""
    model = with_windows(tmp_path / "model") if windows else MODEL
    asked_for = {**(NGRAM if windows else DRAFT), "num_speculative_tokens": 4}
    compression = "hack:bits=4,sink=0"
    ours, theirs = (built(tmp_path, compression, x, model) for x in (OURS, "vllm"))
    asked = prompts()
    params = SamplingParams(max_new_tokens=NEW, temperature=0, ignore_eos=True)
    with LLM.load(ours, threads=1) as llm:
        wanted = [list(answer.token_ids) for answer in llm.generate(asked, params)]
    options = ("--max-num-batched-tokens", "100", "--enable-chunked-prefill")
    with serving(theirs, tmp_path, *options, model=model) as server:
        alone = server.complete(asked)
        server.check(asked, alone, wanted)
    guesses = ("--speculative-config", json.dumps(asked_for))
    with serving(theirs, tmp_path, *options, *guesses, model=model) as server:
        first = server.complete(asked)
        before = server.cached
        again = server.complete(asked)
        cached, log = server.cached, server.log.read_text()
        drafted, accepted = map(server.count, ("draft", "accepted"))
    assert cached - before > sum(map(len, asked)) // 2
    assert 0 < accepted < drafted
    assert first == again == alone
    assert "Traceback" not in log


def unlike_heads(folder: Path) -> Path:
    """A checkpoint of random weights: KV heads 0 and 1 of four keep half of V."""
    config = transformers.AutoConfig.from_pretrained(MODEL)
    config.num_attention_heads, config.num_key_value_heads = 8, 4
    config.head_dim, config.initializer_range = 32, 0.15
    torch.manual_seed(0)
    made = transformers.AutoModelForCausalLM.from_config(config)
    for layer in made.model.layers:
        values = layer.self_attn.v_proj.weight.data
        values[:16] = values[32:48] = 0
    made.save_pretrained(folder)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(MODEL / name, folder)
    return folder


def test_shards_of_vllm_write_what_our_engine_writes(tmp_path: Path) -> None:
    """Heads that keep unlike ranks are read in another order, so that shards have about
    the same bytes. What a block of the largest shard takes says how many tokens fit."""
    if os.cpu_count() == 1 or ON_GPU:
        pytest.skip("it takes two cores")
    model, compression = unlike_heads(tmp_path / "model"), "fdc+hack:bits=8,sink=0"
    ours, theirs = (built(tmp_path, compression, x, model) for x in (OURS, "vllm"))
    dealt = Dealt(open_hosted(theirs), 2)
    assert dealt.orders[0] == (0, 2, 1, 3) or dealt.orders[0] == (0, 3, 1, 2)
    params = SamplingParams(max_new_tokens=NEW, temperature=0, ignore_eos=True)
    asked = prompts()
    with LLM.load(ours, threads=1) as llm:
        wanted = [list(answer.token_ids) for answer in llm.generate(asked, params)]
    with serving(theirs, tmp_path, *TWO_SHARDS, model=model) as server:
        first = server.complete(asked)
        again = server.complete(asked)
        tokens, log = server.tokens, server.log.read_text()
        server.check(asked, first, wanted)
    assert first == again
    per_token = sum(map(dealt.engines[0].token_bytes, range(4)))
    assert GIB / per_token * 0.999 < tokens <= GIB / per_token
    assert "heads are dealt to 2 shards" in log and "Traceback" not in log


@pytest.mark.parametrize("option", ["--enable-lora", "--load-format=runai_streamer"])
def test_weights_that_would_miss_the_order_are_refused(
    option: str, tmp_path: Path
) -> None:
    """Before any is read: they would land on other heads without a word."""
    model = unlike_heads(tmp_path / "model")
    theirs = built(tmp_path, "fdc+hack:bits=8", "vllm", model)
    options = (*TWO_SHARDS, option)
    with (
        pytest.raises(AssertionError),
        serving(theirs, tmp_path, *options, model=model),
    ):
        pass
    log = next(tmp_path.glob("*.log")).read_text()
    assert "put into another order" in log


def test_vllm_refuses_blocks_that_hold_no_pages(tmp_path: Path) -> None:
    theirs = built(tmp_path, "hack:bits=4", "vllm")
    option = ("--block-size", "32")
    with pytest.raises(AssertionError), serving(theirs, tmp_path, *option):
        pass
    log = next(tmp_path.glob("*.log")).read_text()
    assert re.search("hold no whole pages.*--block-size 64", log)
