"""Trains a small model of another family than the shipped ones, from what any machine
has: a model that nothing here was decided on.

    python3 -m benchmarks.train_small out/third [--seconds 150] [--from FOLDER] [--compile]
            [--tiny] [--flat]

The family is Qwen3 (RMS norms of each head's q and k). Its text is the source of
Python's standard library and of the installed packages, and the notes under
/usr/share/doc; the tokenizer is trained on it. Half of what it reads are records of keys
and values, and questions about them, in forms of their own (FORMS). Beside the
checkpoint the folder gets documents and questions that it was not trained on:
calibration.jsonl, text.jsonl, retrieval.jsonl. Needs torch, tokenizers and safetensors.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from tokenizers import Tokenizer
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset, get_worker_info
from transformers import Qwen3Config, Qwen3ForCausalLM

from benchmarks.support.any_text import END, Corpus
from benchmarks.support.commands import parser_of
from benchmarks.support.recall import DIGITS, Records, slices


@dataclass(frozen=True)
class Shape:
    """Sizes of the model and of its training."""

    vocab: int = 8192
    width: int = 384
    inner: int = 1024
    layers: int = 6
    heads: int = 8
    kv_heads: int = 4
    head_dim: int = 64
    length: int = 3072
    batch: int = 20  # of the longest sequences; of shorter ones as many tokens
    first: int = 128
    corpus: int = 48 << 20
    rate: float = 2e-3

    def model(self) -> Qwen3ForCausalLM:
        config = Qwen3Config(
            vocab_size=self.vocab,
            hidden_size=self.width,
            intermediate_size=self.inner,
            num_hidden_layers=self.layers,
            num_attention_heads=self.heads,
            num_key_value_heads=self.kv_heads,
            head_dim=self.head_dim,
            max_position_embeddings=self.length + 1024,
            tie_word_embeddings=True,
            use_cache=False,
            bos_token_id=0,
            eos_token_id=0,
        )
        return Qwen3ForCausalLM(config)


TINY = Shape(1024, 128, 256, 4, 4, 2, 32, 384, 10, 128, 1 << 20)
ENOUGH_STEPS = 20
ENOUGH_RIGHT = 0.85  # of the answers in so many steps: sequences grow
LONGEST_BY = 0.6  # of the time
FALL = 0.3  # of the time: the learning rate falls
EXAM = 32  # questions


# -- batches ---------------------------------------------------------------------------
@dataclass
class Batches(IterableDataset):
    """Batches [rows, length + 1] of ids, half of them text, and which tokens are answers.
    At the first length there is no text: its loss would hide the answers'. ``length`` [1]
    is shared with the processes that make them."""

    shape: Shape
    records: Records
    text: np.ndarray
    length: Tensor
    seed: int = 0

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        worker = get_worker_info()
        number = 0 if worker is None else worker.id
        rng = np.random.default_rng((self.seed, number))
        while True:
            yield self.batch(rng)

    def batch(self, rng: np.random.Generator) -> tuple[Tensor, Tensor]:
        length = int(self.length)
        rows = self.shape.batch * self.shape.length // length
        of_text = 0 if length == self.shape.first else rows // 2
        plain = slices(self.text, of_text, length + 1, rng)
        packed = [
            self.records.packed(length + 1, self.text, rng)
            for _ in range(rows - of_text)
        ]
        ids = np.concatenate([plain, np.stack([own for own, _ in packed])])
        answers = np.zeros(ids.shape, bool)
        answers[of_text:] = np.stack([is_answer for _, is_answer in packed])
        return torch.from_numpy(ids), torch.from_numpy(answers)


# -- training --------------------------------------------------------------------------
@dataclass
class Progress:
    """The share of a training that is done: of its steps, or of its seconds. ``ends``:
    the share at which it ends."""

    steps: int | None
    seconds: float
    step: int = 0
    ends: float = 1.0
    began: float = dataclasses.field(default_factory=time.monotonic)

    @property
    def share(self) -> float:
        if self.steps is not None:
            return self.step / self.steps
        return (time.monotonic() - self.began) / self.seconds

    @property
    def rate(self) -> float:
        """A share of the largest learning rate: a short rise, and a fall over the last
        ``FALL``."""
        rise = (self.step + 1) / 100
        return max(0.0, min(1.0, rise, (self.ends - self.share) / FALL))


@dataclass
class Curriculum:
    """Sequences grow from ``shape.first`` tokens to ``shape.length``: twofold where the
    last steps' answers are right, and at the latest by a share of the time."""

    shape: Shape
    flat: bool = False  # the whole length from the beginning
    recent: list[float] = dataclasses.field(default_factory=list)

    def __post_init__(self) -> None:
        first = self.shape.length if self.flat else self.shape.first
        self.length = torch.tensor([first]).share_memory_()

    def saw(self, right: float, length: int, share: float) -> None:
        """``right``: the share of the answers in a batch of this length."""
        if length != int(self.length):
            return  # made before the last change
        self.recent = [*self.recent[1 - ENOUGH_STEPS :], right]
        enough = len(self.recent) == ENOUGH_STEPS
        learned = enough and sum(self.recent) > ENOUGH_RIGHT * ENOUGH_STEPS
        longest = share > LONGEST_BY
        if (learned or longest) and length < self.shape.length:
            grown = self.shape.length if longest else min(2 * length, self.shape.length)
            self.length.fill_(grown)
            self.recent = []


@dataclass(frozen=True)
class Learner:
    """A model, what it is trained on, and the exams that say how far it is."""

    model: Qwen3ForCausalLM
    batches: Batches
    curriculum: Curriculum
    progress: Progress
    unseen: np.ndarray  # tokens

    def optimizer(self) -> torch.optim.Optimizer:
        matrices = [weight for weight in self.model.parameters() if weight.dim() == 2]
        vectors = [weight for weight in self.model.parameters() if weight.dim() < 2]
        groups = [{"params": matrices}, {"params": vectors, "weight_decay": 0.0}]
        fused = self.model.device.type == "cuda"
        return torch.optim.AdamW(
            groups, betas=(0.9, 0.95), weight_decay=0.1, fused=fused
        )

    def train(self, workers: int, every: float) -> None:
        """Until the time is over; ``every`` so many seconds it says how far it is."""
        on_gpu = self.model.device.type == "cuda"
        optimizer = self.optimizer()
        loader = DataLoader(
            self.batches, batch_size=None, num_workers=workers, pin_memory=on_gpu
        )
        progress, said = self.progress, time.monotonic()
        for ids, answers in loader:
            if progress.share >= progress.ends:
                break
            for group in optimizer.param_groups:
                group["lr"] = self.batches.shape.rate * progress.rate
            of_text, of_answers, right = self.losses(ids, answers)
            (of_text + of_answers).backward()
            torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            of_text, of_answers = of_text.detach(), of_answers.detach()
            progress.step += 1
            length = ids.shape[1] - 1
            self.curriculum.saw(float(right), length, progress.share)
            if time.monotonic() - said > every:
                said = time.monotonic()
                losses = (float(of_text), float(of_answers), float(right))
                print(self.report(length, *losses), flush=True)

    def losses(self, ids: Tensor, answers: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Nats a token of text, nats a digit of answers, and the share of
        answers whose first digit is right: the others follow it."""
        device = self.model.device
        ids, answers = ids.to(device), answers.to(device)
        is_text = ~answers.any(1)
        targets, asked = ids[:, 1:], answers[:, 1:]
        with torch.autocast(device.type, torch.bfloat16, device.type == "cuda"):
            hidden = self.model.model(ids[:, :-1]).last_hidden_state
            told = self.model.lm_head(hidden[is_text]).flatten(0, 1)
            said = self.model.lm_head(hidden[asked])
        sums = F.cross_entropy(
            told.float(), targets[is_text].flatten(), reduction="sum"
        )
        of_text = sums / max(1, len(told))
        of_answers = F.cross_entropy(said.float(), targets[asked])
        is_first = (asked & ~answers[:, :-1])[asked]
        right = (said.argmax(-1) == targets[asked])[is_first].float().mean()
        return of_text, of_answers, right

    def report(
        self, length: int, of_text: float, of_answers: float, right: float
    ) -> str:
        """Ends the training soon where the longest questions are answered."""
        shape, progress = self.batches.shape, self.progress
        longest = shape.length - 80
        shares = {}
        for size in (longest // 16, longest // 4, longest):
            exam = self.batches.records.exam(size, EXAM, self.unseen)
            shares[size] = answered(self.model, *exam)
        if shares[longest] > 0.99:
            progress.ends = min(progress.ends, progress.share + FALL)
        losses = f"text {of_text:.3f}, answers {of_answers:.3f} nats, {right:.2f} right"
        retrieval = ", ".join(f"{one:.2f} of {size}" for size, one in shares.items())
        when = f"{progress.share:.0%}, step {progress.step}, {length} tokens"
        return f"{when}: {losses}; retrieval {retrieval}"


@torch.no_grad()
def answered(model: Qwen3ForCausalLM, ids: np.ndarray, places: np.ndarray) -> float:
    """The share of questions of which all digits at places [count, DIGITS] are said."""
    device = model.device
    right = []
    with torch.compiler.set_stance("force_eager"):
        for some, at in zip(np.split(ids, len(ids)), places, strict=True):
            rows = torch.from_numpy(some[:, : at[-1] + 1]).to(device)
            with torch.autocast(device.type, torch.bfloat16, device.type == "cuda"):
                hidden = model.model(rows[:, :-1]).last_hidden_state
                said = model.lm_head(hidden[0, at - 1]).argmax(-1)
            right.append(bool((said == rows[0, at]).all()))
    return sum(right) / len(right)


# -- what comes out --------------------------------------------------------------------
def write(folder: Path, model: Qwen3ForCausalLM, encoder: Tokenizer) -> None:
    """The checkpoint, in halves."""
    model.half().save_pretrained(folder)
    encoder.save(str(folder / "tokenizer.json"))
    words = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": END,
        "eos_token": END,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(words) + "\n")


def write_lines(path: Path, rows: list[dict[str, str]]) -> None:
    lines = [json.dumps(row) + "\n" for row in rows]
    path.write_text("".join(lines), "utf-8")


def questions(
    records: Records, encoder: Tokenizer, shape: Shape, text: np.ndarray, count: int
) -> list[dict[str, str]]:
    """One question behind records: prompts of up to ``shape.length`` tokens."""
    rng = np.random.default_rng(1)
    made = []
    for size in np.linspace(shape.length // 8, shape.length - 80, count):
        ids, is_answer = records.episode(int(size), 1, text, rng)
        start = int(is_answer.argmax())
        prompt = encoder.decode(ids[:start].tolist(), skip_special_tokens=False)
        answer = encoder.decode(ids[start : start + DIGITS].tolist())
        made.append({"prompt": prompt, "answer": answer})
    return made


def write_exams(folder: Path, corpus: Corpus, asked: list[dict[str, str]]) -> None:
    """Text to calibrate on, text to predict, and questions."""
    half = len(corpus.kept_back) // 2
    rows = [{"text": text} for text in corpus.kept_back]
    write_lines(folder / "calibration.jsonl", rows[:half])
    write_lines(folder / "text.jsonl", rows[half:])
    write_lines(folder / "retrieval.jsonl", asked)


def share_answered(
    model: Qwen3ForCausalLM, encoder: Tokenizer, asked: list[dict[str, str]]
) -> float:
    """The share of the questions, as they were written, that are answered right."""
    right = []
    for question in asked:
        ids = np.array([encoder.encode(question["prompt"] + question["answer"]).ids])
        places = np.arange(ids.size - DIGITS, ids.size)
        right.append(answered(model, ids, places[None]))
    return sum(right) / len(right)


def begin(shape: Shape, folder: Path | None) -> Qwen3ForCausalLM:
    """A new model, or that of a folder."""
    torch.manual_seed(0)
    torch.set_float32_matmul_precision("high")
    device = "cuda" if torch.cuda.is_available() else "cpu"
    with torch.device(device):
        model = shape.model()
    if folder is not None:  # the head is tied to the embedding, so it is not there
        saved = load_file(folder / "model.safetensors")
        model.load_state_dict(saved, strict=False)
    return model


def arguments() -> argparse.Namespace:
    parser = parser_of(__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--from", dest="start", type=Path, help="Go on from a folder.")
    parser.add_argument("--seconds", type=float, default=150.0, help="Of training.")
    parser.add_argument("--steps", type=int, help="In place of --seconds.")
    parser.add_argument("--workers", type=int, default=4)
    parser.add_argument("--questions", type=int, default=50)
    parser.add_argument("--every", type=float, default=15.0, help="Seconds.")
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--flat", action="store_true", help="No growing lengths.")
    parser.add_argument("--compile", action="store_true")
    return parser.parse_args()


def main() -> None:
    options = arguments()
    shape = TINY if options.tiny else Shape()
    began = time.monotonic()
    corpus = Corpus.of(shape.corpus, shape.vocab, options.start)
    text, unseen = corpus.ids(corpus.texts), corpus.ids(corpus.kept_back)
    records = Records.of(corpus.encoder)
    print(f"{time.monotonic() - began:.0f} s: {len(text):,} tokens of text", flush=True)
    model = begin(shape, options.start)
    if options.compile:
        for layer in model.model.layers:
            layer.compile(dynamic=True)
    curriculum = Curriculum(shape, options.flat)
    batches = Batches(shape, records, text, curriculum.length)
    progress = Progress(options.steps, options.seconds)
    asked = questions(records, corpus.encoder, shape, unseen, options.questions)
    try:
        learner = Learner(model, batches, curriculum, progress, unseen)
        learner.train(options.workers, options.every)
    finally:
        options.folder.mkdir(parents=True, exist_ok=True)
        write_exams(options.folder, corpus, asked)
        share = share_answered(model, corpus.encoder, asked)
        write(options.folder, model, corpus.encoder)
    took = time.monotonic() - began
    print(f"{took:.0f} s: {progress.step} steps, retrieval {share:.2f}")


if __name__ == "__main__":
    main()
