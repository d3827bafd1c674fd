"""The tokenizer of a GGUF file as a checkpoint's files: tokenizer.json,
tokenizer_config.json, the chat template and the ids that end a text.

Two kinds are read: byte-level BPE (tokenizer.ggml.model is gpt2), which splits text as
tokenizer.ggml.pre says, and sentencepiece's BPE (llama). Both encode as llama.cpp does.
transformers' own reading splits digits of SmolLM's and others' as GPT-2 does, whatever
the file says.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

from tokenizers import (
    AddedToken,
    Regex,
    Tokenizer,
    decoders,
    normalizers,
    pre_tokenizers,
    processors,
)
from tokenizers.models import BPE

from kvlathe.base.errors import KvlatheError
from kvlathe.base.panics import refuse_fault
from kvlathe.base.tokenizer_files import GENERATION
from kvlathe.export.gguf.config import architecture_of
from kvlathe.export.gguf.file import GgufFile

NORMAL, UNKNOWN, CONTROL, USER_DEFINED = 1, 2, 3, 4
"""Kinds of tokens."""
SPACE = "\u2581"
"""Sentencepiece's."""

MOST_PIECE = 1024
"""Characters of a piece. Each place where one may be cut is looked at."""
REMEDY = "download the file again"

Item = TypeVar("Item")

LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
QWEN2 = LLAMA3.replace(r"\p{N}{1,3}", r"\p{N}")
UPPER, LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
TEKKEN = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{UPPER}*{LOWER}+|[^\r\n\p{{L}}\p{{N}}]?{UPPER}+{LOWER}*"
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
ENDINGS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
GPT4O = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{UPPER}*{LOWER}+{ENDINGS}"
    rf"|[^\r\n\p{{L}}\p{{N}}]?{UPPER}+{LOWER}*{ENDINGS}"
    r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


@dataclass(frozen=True)
class Split:
    """The cut of text before it is merged: by ``pattern``, or as GPT-2 does, after
    ``digits`` apart where that is set. ``whole``: what is a token as a whole is not
    merged. ``begins``: texts begin with bos_token, unless the file says."""

    pattern: str = ""
    digits: bool = False
    whole: bool = False
    begins: bool = False

    @property
    def steps(self) -> pre_tokenizers.PreTokenizer:
        if self.pattern:
            cut = pre_tokenizers.Split(Regex(self.pattern), "isolated")
            last = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
            return pre_tokenizers.Sequence([cut, last])
        own = pre_tokenizers.ByteLevel(add_prefix_space=False)
        if not self.digits:
            return own
        return pre_tokenizers.Sequence([pre_tokenizers.Digits(True), own])


GPT2_DIGITS = Split(digits=True)
OF_LLAMA3 = Split(LLAMA3, whole=True, begins=True)
SPLITS = {
    **dict.fromkeys(("gpt-2", "mpt", "olmo"), Split()),
    **dict.fromkeys(("smollm", "refact", "starcoder", "command-r"), GPT2_DIGITS),
    **dict.fromkeys(("llama-bpe", "llama3", "llama-v3"), OF_LLAMA3),
    **dict.fromkeys(("dbrx", "smaug-bpe"), Split(LLAMA3)),
    **dict.fromkeys(("qwen2", "deepseek-r1-qwen"), Split(QWEN2)),
    "tekken": Split(TEKKEN, whole=True, begins=True),
    "gpt-4o": Split(GPT4O),
}
"""By tokenizer.ggml.pre."""

ENDS = (
    *("<|im_end|>", "<|eot_id|>", "<|end|>", "<end_of_turn>", "<|end_of_text|>"),
    *("<|endoftext|>", "<|eom_id|>", "<|END_OF_TURN_TOKEN|>"),
)
"""Control tokens that end an answer in any model, beside those that a file names."""
KEEPS_SPACES = ("<unk>", "<s>", "<|endoftext|>")
"""Special tokens of Phi-3 that leave the spaces after them alone."""


def tokenizer_files(file: GgufFile) -> dict[str, object]:
    """Name -> what stands in it: text, or an object for JSON. Raises KvlatheError for a
    tokenizer of another kind, and one that is damaged."""
    if "tokenizer.ggml.model" not in file.metadata:
        return {}
    fact = f"the tokenizer in {file.path.name} cannot be read"
    try:
        own = _Vocabulary.of(file)
        tokenizer = own.byte_level() if own.kind == "gpt2" else own.sentencepiece()
        settings = own.settings()
    except (KeyError, IndexError, TypeError, ValueError) as error:
        said = " ".join(str(error).split())
        reason = f"it is damaged ({type(error).__name__}: {said:.200})"
        raise KvlatheError(fact, reason, REMEDY) from error
    except BaseException as error:
        refuse_fault(error, fact, REMEDY)
        raise
    files: dict[str, object] = {
        "tokenizer.json": tokenizer.to_str(pretty=False),
        "tokenizer_config.json": settings,
    }
    if own.ends:
        files[GENERATION] = {"eos_token_id": own.ends}
    template = file.metadata.get("tokenizer.chat_template")
    if isinstance(template, str):
        files["chat_template.jinja"] = template
    return files


@dataclass(frozen=True)
class _Vocabulary:
    """``tokens`` and their ``kinds`` by id; ``given``: the metadata's keys after
    tokenizer.ggml."""

    file: GgufFile
    given: Mapping[str, object]
    tokens: Sequence[str]
    kinds: Sequence[int]

    @staticmethod
    def of(file: GgufFile) -> _Vocabulary:
        start = "tokenizer.ggml."
        given = {
            name.removeprefix(start): value
            for name, value in file.metadata.items()
            if name.startswith(start)
        }
        tokens = _listed(given["tokens"], str)
        kinds = _listed(given.get("token_type", [NORMAL] * len(tokens)), int)
        if len(kinds) != len(tokens):
            raise ValueError(f"{len(tokens)} tokens, {len(kinds)} kinds of them")
        if given["model"] not in ("gpt2", "llama"):
            raise KvlatheError(
                f"{file.path.name} has a tokenizer of the kind {given['model']!r}",
                "gpt2 and llama are read",
                "give the checkpoint that the file was made of",
            )
        return _Vocabulary(file, given, tokens, kinds)

    @property
    def kind(self) -> str:
        return str(self.given["model"])

    @property
    def ends(self) -> list[int]:
        """Ids that end a text, the file's own first."""
        keys = ("eos", "eot", "eom")
        named = [i for i in map(self._id, keys) if i is not None]
        if not named:
            return []
        known = [
            i
            for i, (token, kind) in enumerate(zip(self.tokens, self.kinds, strict=True))
            if kind in (CONTROL, USER_DEFINED) and token in ENDS
        ]
        return list(dict.fromkeys([*named, *known]))

    def _id(self, name: str) -> int | None:
        """The special token ``name``, where the file has one."""
        found = self.given.get(f"{name}_token_id")
        if found is None:
            return None
        if not isinstance(found, int) or not 0 <= found < len(self.tokens):
            raise ValueError(f"{name}_token_id is {found!r}")
        return found

    def settings(self) -> dict[str, object]:
        """tokenizer_config.json."""
        keys = {"bos": "bos", "eos": "eos", "unk": "unknown", "pad": "padding"}
        named: dict[str, object] = {
            f"{own}_token": self.tokens[i]
            for own, name in keys.items()
            if (i := self._id(name)) is not None
        }
        return named | {"tokenizer_class": "PreTrainedTokenizerFast"}

    def byte_level(self) -> Tokenizer:
        name = self.given.get("pre")
        if not isinstance(name, str) or name not in SPLITS:
            raise KvlatheError(
                f"{self.file.path.name} splits text in the way {name!r}",
                f"those that are read are {', '.join(sorted(SPLITS))}",
                "give the checkpoint that the file was made of",
            )
        split = SPLITS[name]
        tokenizer = Tokenizer(
            BPE(
                {token: i for i, token in enumerate(self.tokens)},
                _pairs(self.given["merges"]),
                ignore_merges=split.whole,
            )
        )
        tokenizer.pre_tokenizer = split.steps
        tokenizer.decoder = decoders.ByteLevel()
        return self._finished(tokenizer, split.begins)

    def sentencepiece(self) -> Tokenizer:
        unknown = self.tokens[self._id("unknown") or 0]
        tokenizer = Tokenizer(
            BPE(
                {token: i for i, token in enumerate(self.tokens)},
                self._merges(),
                unk_token=unknown,
                fuse_unk=True,
                byte_fallback=True,
            )
        )
        spaces = normalizers.Replace(" ", SPACE)
        steps: list[decoders.Decoder] = [
            decoders.Replace(SPACE, " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
        ]
        tokenizer.normalizer = spaces
        if self.given.get("add_space_prefix", True):
            prefix = normalizers.Prepend(SPACE)
            tokenizer.normalizer = normalizers.Sequence([prefix, spaces])
            steps.append(decoders.Strip(" ", 1, 0))
        tokenizer.decoder = decoders.Sequence(steps)
        return self._finished(tokenizer, begins=True)

    def _merges(self) -> list[tuple[str, str]]:
        """Pairs of pieces that are one, the best first: a file has scores of pieces in
        their place."""
        if "merges" in self.given:
            return _pairs(self.given["merges"])
        in_order = architecture_of(self.file).tokens_in_order
        places = [-float(i) for i in range(len(self.tokens))]
        scores = places if in_order else _listed(self.given["scores"], float)
        pieces = {
            token: i
            for i, (token, kind) in enumerate(zip(self.tokens, self.kinds, strict=True))
            if kind == NORMAL
        }
        if longest := next((x for x in pieces if len(x) > MOST_PIECE), ""):
            raise ValueError(f"a piece has {len(longest):,} characters")
        found: list[tuple[float, int, int, int, str, str]] = []
        for piece, i in pieces.items():
            for cut in range(1, len(piece)):
                left, right = piece[:cut], piece[cut:]
                if left in pieces and right in pieces:
                    sizes = -len(left), -len(right)
                    found.append((-scores[i], *sizes, pieces[left], left, right))
        return [(left, right) for *_, left, right in sorted(found)]

    def _finished(self, tokenizer: Tokenizer, begins: bool) -> Tokenizer:
        """With special tokens, and what texts begin and end with."""
        tokenizer.add_special_tokens(
            [
                AddedToken(
                    token, normalized=False, special=True, rstrip=self._eats(token)
                )
                for token, kind in zip(self.tokens, self.kinds, strict=True)
                if kind in (CONTROL, UNKNOWN)
            ]
        )
        tokenizer.add_tokens(
            [
                AddedToken(token, normalized=False, special=False)
                for token, kind in zip(self.tokens, self.kinds, strict=True)
                if kind == USER_DEFINED
            ]
        )
        pieces: list[str] = ["$A"]
        for key, default, place in (("bos", begins, 0), ("eos", False, 2)):
            i = self._id(key)
            if i is not None and self.given.get(f"add_{key}_token", default):
                pieces.insert(place, self.tokens[i])
        if len(pieces) > 1:
            special = [(x, tokenizer.token_to_id(x)) for x in pieces if x != "$A"]
            tokenizer.post_processor = processors.TemplateProcessing(
                single=pieces, special_tokens=special
            )
        return tokenizer

    def _eats(self, token: str) -> bool:
        """Whether a special token takes the spaces after it: Phi-3's do."""
        return (
            self.file.architecture == "phi3"
            and self.kind == "llama"
            and token not in KEEPS_SPACES
        )


def _listed(value: object, kind: type[Item]) -> list[Item]:
    """``value``, a list of things of one kind."""
    if not isinstance(value, list):
        raise TypeError(f"{value!r:.40} is no list")
    items: list[Item] = []
    for one in value:
        if not isinstance(one, kind):
            raise TypeError(f"{one!r:.40} is no {kind.__name__}")
        items.append(one)
    return items


def _pairs(merges: object) -> list[tuple[str, str]]:
    """Two pieces each, with a space between them. None begins with one."""
    parts = (merge.partition(" ") for merge in _listed(merges, str))
    return [(left, right) for left, _, right in parts]
