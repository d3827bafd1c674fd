"""Trains a small model of another family than the shipped ones, from what any machine
has: a model that nothing here was decided on.

    python3 tests/bench/train_small.py out/third [--seconds 200] [--compile] [--tiny --steps 20]

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
import hashlib
import json
import math
import sysconfig
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset, get_worker_info
from transformers import Qwen3Config, Qwen3ForCausalLM

END = "<|end|>"
BLANK = "Ġ"  # as a byte-level tokenizer writes it
PLACES = ("/usr/share/doc", "/usr/share/common-licenses")
SUFFIXES = ("", ".py", ".md", ".rst", ".txt")
MOST_BYTES = 1 << 16  # of a document
WORDS = 512  # that keys are made of, two each
DIGITS = 4  # of a value
FORMS = (
    ("\n|{key} | {value} |", "\nlookup({key}) -> {value}"),
    ("\n* the{key} weighs {value} grams;", "\nHow heavy is the{key}? It has {value}"),
    ("\n    add({key}, default={value})", "\n>>> parser.get({key})\n{value}"),
)
"""A record, and a question about it whose answer is the value. A key's words come with
the blanks before them."""
FILLERS = (0, 0, 0, 16, 64)  # tokens of text behind a record
SHORTEST = 64  # tokens of an episode: records, then questions


@dataclass(frozen=True)
class Shape:
    """Of the model and of its training."""

    vocab: int = 8192
    width: int = 384
    inner: int = 1024
    layers: int = 8
    heads: int = 8
    kv_heads: int = 2
    head_dim: int = 64
    length: int = 3072
    batch: int = 20
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


TINY = Shape(1024, 64, 128, 2, 4, 2, 16, 256, 4, 1 << 20)


# -- text ------------------------------------------------------------------------------
def places() -> list[Path]:
    paths = sysconfig.get_paths()
    return sorted({Path(root) for root in (*PLACES, paths["stdlib"], paths["purelib"])})


def documents(roots: list[Path], most: int) -> list[str]:
    """Up to ``most`` bytes of distinct files below the roots, shuffled."""
    found: dict[str, str] = {}
    size = 0
    files = (path for root in roots for path in root.rglob("*"))
    chosen = [path for path in files if path.suffix in SUFFIXES and path.is_file()]
    for path in sorted(chosen, key=_order):
        text = _text(path)
        digest = hashlib.sha256(text.encode()).hexdigest()
        if len(text) < 500 or digest in found:
            continue
        found[digest] = text
        size += len(text)
        if size > most:
            break
    return list(found.values())


def _order(path: Path) -> str:
    return hashlib.sha256(str(path).encode()).hexdigest()


def _text(path: Path) -> str:
    """Nothing where it is no text."""
    try:
        with path.open("rb") as file:
            return file.read(MOST_BYTES).decode("utf-8")
    except (OSError, UnicodeDecodeError):
        return ""


def tokenizer(texts: list[str], vocab: int) -> Tokenizer:
    """A byte-level BPE in which every digit is a token."""
    made = Tokenizer(models.BPE())
    digits = pre_tokenizers.Digits(individual_digits=True)
    by_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.pre_tokenizer = pre_tokenizers.Sequence([digits, by_bytes])
    made.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab,
        special_tokens=[END],
        initial_alphabet=alphabet,
        show_progress=False,
    )
    made.train_from_iterator(texts, trainer)
    return made


# -- records and questions -------------------------------------------------------------
@dataclass(frozen=True)
class Form:
    """Tokens before a key, between it and its value, and behind it: of a record, and of
    a question."""

    record: tuple[list[int], ...]
    question: tuple[list[int], ...]


def forms(encoder: Tokenizer) -> list[Form]:
    made = []
    for record, question in FORMS:
        made.append(Form(_pieces(encoder, record), _pieces(encoder, question)))
    return made


def _pieces(encoder: Tokenizer, text: str) -> tuple[list[int], ...]:
    before, rest = text.split("{key}")
    between, behind = rest.split("{value}")
    pieces = (before, between, behind)
    return tuple(encoder.encode(piece).ids if piece else [] for piece in pieces)


def words(encoder: Tokenizer) -> np.ndarray:
    """Tokens that are words with a blank before them."""
    found = []
    for token, number in sorted(
        encoder.get_vocab().items(), key=lambda entry: entry[1]
    ):
        word = token[1:]
        is_word = token[0] == BLANK and word.isascii() and word.isalpha()
        if is_word and word.islower() and len(word) > 2:
            found.append(number)
    return np.array(found[:WORDS])


@dataclass(frozen=True)
class Records:
    """Makes episodes: some records, text between them, and questions about them."""

    forms: list[Form]
    words: np.ndarray
    digits: np.ndarray  # the ten tokens

    @classmethod
    def of(cls, encoder: Tokenizer) -> Records:
        digits = [encoder.token_to_id(str(digit)) for digit in range(10)]
        return cls(forms(encoder), words(encoder), np.array(digits))

    def episode(
        self, length: int, asked: int | None, text: np.ndarray, rng: np.random.Generator
    ) -> tuple[np.ndarray, np.ndarray]:
        """About ``length`` tokens, and which of them are answers. ``asked`` questions, or
        one for each record (None)."""
        form = self.forms[rng.integers(len(self.forms))]
        filler = int(rng.choice(FILLERS))
        own = DIGITS + 2
        record = sum(map(len, form.record)) + own + filler
        question = sum(map(len, form.question)) + own
        rest = 0 if asked is None else asked * question
        each = record + (question if asked is None else 0)
        count = max(2, (length - rest) // each)
        keys, values = self._drawn(count, rng)
        between = _slices(text, count, filler, rng)
        told = np.hstack([_rows(form.record, keys, values), between])
        order = rng.permutation(count)[:asked]
        questions = _rows(form.question, keys[order], values[order])
        start = len(form.question[0]) + 2 + len(form.question[1])
        is_answer = np.zeros(questions.shape, bool)
        is_answer[:, start : start + DIGITS] = True
        ids = np.concatenate([told.ravel(), questions.ravel()])
        before = np.zeros(told.size, bool)
        return ids, np.concatenate([before, is_answer.ravel()])

    def _drawn(
        self, count: int, rng: np.random.Generator
    ) -> tuple[np.ndarray, np.ndarray]:
        """Distinct keys [count, 2] and values [count, DIGITS]."""
        most = len(self.words) ** 2
        distinct = np.unique(rng.integers(most, size=2 * count + 8))
        codes = rng.permutation(distinct)[:count]
        pairs = np.stack(np.divmod(codes, len(self.words)), 1)
        values = rng.integers(10, size=(count, DIGITS))
        return self.words[pairs], self.digits[values]


def _rows(
    form: tuple[list[int], ...], keys: np.ndarray, values: np.ndarray
) -> np.ndarray:
    before, between, behind = (np.tile(piece, (len(keys), 1)) for piece in form)
    parts = [before, keys, between, values, behind]
    return np.hstack(parts).astype(np.int64)


def _slices(
    text: np.ndarray, count: int, length: int, rng: np.random.Generator
) -> np.ndarray:
    """[count, length] tokens from random places of the text."""
    starts = rng.integers(len(text) - length, size=(count, 1))
    return text[starts + np.arange(length)].astype(np.int64)


@dataclass
class Batches(IterableDataset):
    """Batches [batch, length + 1] of ids, half of them text, and what each token
    counts: its sequence's share of the text's loss or of the answers' loss."""

    shape: Shape
    records: Records
    text: np.ndarray
    seed: int = 0

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        worker = get_worker_info()
        number = 0 if worker is None else worker.id
        rng = np.random.default_rng((self.seed, number))
        while True:
            yield self.batch(rng)

    def batch(self, rng: np.random.Generator) -> tuple[Tensor, Tensor]:
        half = self.shape.batch // 2
        length = self.shape.length + 1
        plain = _slices(self.text, half, length, rng)
        packed = [self._packed(length, rng) for _ in range(half)]
        asked = np.stack([ids for ids, _ in packed])
        answers = np.stack([is_answer for _, is_answer in packed])
        is_text = np.ones(plain.shape)
        of_text = is_text / is_text.sum()
        of_answers = answers / answers.sum()
        ids = np.concatenate([plain, asked])
        weights = np.concatenate([of_text, of_answers])
        return torch.from_numpy(ids), torch.from_numpy(weights).float()

    def _packed(
        self, length: int, rng: np.random.Generator
    ) -> tuple[np.ndarray, np.ndarray]:
        """Episodes of any length, short ones as likely as long ones, cut at the end."""
        ids: list[np.ndarray] = []
        answers: list[np.ndarray] = []
        tokens = 0
        widest = math.log(length / SHORTEST)
        while tokens < length:
            size = int(SHORTEST * math.exp(rng.uniform(0, widest)))
            own, is_answer = self.records.episode(size, None, self.text, rng)
            ids.append(own)
            answers.append(is_answer)
            tokens += len(own)
        return np.concatenate(ids)[:length], np.concatenate(answers)[:length]


# -- training --------------------------------------------------------------------------
@dataclass
class Progress:
    """How far a training is: of its steps, or of its seconds."""

    steps: int | None
    seconds: float
    step: int = 0
    began: float = dataclasses.field(default_factory=time.monotonic)

    @property
    def share(self) -> float:
        if self.steps is not None:
            return self.step / self.steps
        return (time.monotonic() - self.began) / self.seconds

    @property
    def rate(self) -> float:
        """Of the largest learning rate: a short rise, and a fall over the second
        half."""
        rise = (self.step + 1) / 100
        return max(0.0, min(1.0, rise, 2 * (1 - self.share)))


def train(
    model: Qwen3ForCausalLM, batches: Batches, progress: Progress, workers: int
) -> None:
    device = model.device
    on_gpu = device.type == "cuda"
    matrices = [weight for weight in model.parameters() if weight.dim() == 2]
    vectors = [weight for weight in model.parameters() if weight.dim() < 2]
    groups = [{"params": matrices}, {"params": vectors, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(
        groups, betas=(0.9, 0.95), weight_decay=0.1, fused=on_gpu
    )
    loader = DataLoader(
        batches, batch_size=None, num_workers=workers, pin_memory=on_gpu
    )
    for ids, weights in loader:
        if progress.share >= 1:
            break
        for group in optimizer.param_groups:
            group["lr"] = batches.shape.rate * progress.rate
        ids, weights = ids.to(device), weights.to(device)
        with torch.autocast(device.type, torch.bfloat16, on_gpu):
            logits = model(ids[:, :-1]).logits
        losses = F.cross_entropy(
            logits.flatten(0, 1).float(), ids[:, 1:].flatten(), reduction="none"
        )
        weighted = losses.view(len(ids), -1) * weights[:, 1:]
        weighted.sum().backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        if progress.step % 100 == 0:
            of_text, of_answers = weighted.sum(1).view(2, -1).sum(1).tolist()
            said = f"text {of_text:.3f}, answers {of_answers:.3f}"
            print(f"{progress.share:.0%}: step {progress.step}, {said}", flush=True)
        progress.step += 1


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


@torch.inference_mode()
def answered(
    model: Qwen3ForCausalLM, encoder: Tokenizer, asked: list[dict[str, str]]
) -> float:
    """The share of questions that the model answers."""
    device = model.device
    right = []
    for question in asked:
        ids = encoder.encode(question["prompt"] + question["answer"]).ids
        ids = torch.tensor([ids], device=device)
        said = model(ids[:, :-1]).logits[0, -DIGITS:].argmax(-1)
        right.append(torch.equal(said, ids[0, -DIGITS:]))
    return sum(right) / len(right)


@dataclass(frozen=True)
class Corpus:
    """Texts to train on, and texts that are kept back."""

    texts: list[str]
    kept_back: list[str]
    encoder: Tokenizer

    @classmethod
    def of(cls, shape: Shape) -> Corpus:
        texts = documents(places(), shape.corpus)
        count = len(texts) // 15
        others = texts[count:]
        encoder = tokenizer(others[::6], shape.vocab)
        return cls(others, texts[:count], encoder)

    def ids(self, texts: list[str]) -> np.ndarray:
        """Of all of them, each with the end of text behind it."""
        encoded = self.encoder.encode_batch([text + END for text in texts])
        return np.concatenate([np.array(one.ids, np.uint16) for one in encoded])


def write_exams(folder: Path, corpus: Corpus, asked: list[dict[str, str]]) -> None:
    """Text to calibrate on, text to predict, and questions."""
    half = len(corpus.kept_back) // 2
    rows = [{"text": text} for text in corpus.kept_back]
    write_lines(folder / "calibration.jsonl", rows[:half])
    write_lines(folder / "text.jsonl", rows[half:])
    write_lines(folder / "retrieval.jsonl", asked)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--seconds", type=float, default=200.0)
    parser.add_argument("--steps", type=int, help="In place of --seconds.")
    parser.add_argument("--workers", type=int, default=4)
    parser.add_argument("--questions", type=int, default=50)
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--compile", action="store_true")
    options = parser.parse_args()
    shape = TINY if options.tiny else Shape()
    began = time.monotonic()
    corpus = Corpus.of(shape)
    text = corpus.ids(corpus.texts)
    records = Records.of(corpus.encoder)
    print(f"{time.monotonic() - began:.0f} s: {len(text):,} tokens of text", flush=True)
    torch.manual_seed(0)
    torch.set_float32_matmul_precision("high")
    with torch.device("cuda" if torch.cuda.is_available() else "cpu"):
        model = shape.model()
    if options.compile:
        for layer in model.model.layers:
            layer.compile()
    progress = Progress(options.steps, options.seconds)
    train(model, Batches(shape, records, text), progress, options.workers)
    unseen = corpus.ids(corpus.kept_back)
    asked = questions(records, corpus.encoder, shape, unseen, options.questions)
    share = answered(model.eval(), corpus.encoder, asked)
    write(options.folder, model, corpus.encoder)
    write_exams(options.folder, corpus, asked)
    took = time.monotonic() - began
    print(f"{took:.0f} s: {progress.step} steps, retrieval {share:.2f}")


if __name__ == "__main__":
    main()
