"""Text that any machine has, and a tokenizer trained on it."""

from __future__ import annotations

import hashlib
import sysconfig
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

END = "<|end|>"
PLACES = ("/usr/share/doc", "/usr/share/common-licenses")
SUFFIXES = ("", ".py", ".md", ".rst", ".txt")
MOST_BYTES = 1 << 16  # of a document


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


@dataclass(frozen=True)
class Corpus:
    """Texts to train on, and texts that are kept back."""

    texts: list[str]
    kept_back: list[str]
    encoder: Tokenizer

    @classmethod
    def of(cls, most: int, vocab: int, folder: Path | None = None) -> Corpus:
        """Up to ``most`` bytes; with the tokenizer of a folder, where one is given."""
        texts = documents(places(), most)
        count = len(texts) // 15
        others = texts[count:]
        if folder is not None:
            encoder = Tokenizer.from_file(str(folder / "tokenizer.json"))
        else:
            encoder = tokenizer(others[::6], vocab)
        return cls(others, texts[:count], encoder)

    def ids(self, texts: list[str]) -> np.ndarray:
        """Token ids of all texts, each with the end of text behind it."""
        encoded = self.encoder.encode_batch([text + END for text in texts])
        return np.concatenate([np.array(one.ids, np.uint16) for one in encoded])
