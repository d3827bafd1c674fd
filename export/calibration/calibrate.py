"""Calibrate: run tokens through the original model, layer by layer, and sum up every
lane's q, k, v and output.

One layer's weights are in memory at a time (on a GPU also those of the next, which is
read meanwhile), and one sequence of one layer's activations beside the hidden states of
all. Sums are float64 wherever they are computed. Text is spread over the positions that
are served, so that the statistics know all of RoPE's angles; random tokens start at 0,
as in the paper they come from (docs/basis.md has both).
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from kvlathe.base.console import working
from kvlathe.base.errors import KvlatheError
from kvlathe.export.calibration import entropy
from kvlathe.export.calibration.effective_ranks import Entropies
from kvlathe.export.calibration.stats import ARRAYS, Array, Moments, Stats, check_finite
from kvlathe.export.model import memory
from kvlathe.export.model.checkpoint import Checkpoint
from kvlathe.export.model.device import ahead
from kvlathe.export.model.layer_runner import Captured, LayerRunner, beside, embed
from kvlathe.export.model.plain_attention import PlainAttention
from kvlathe.export.model.spec import DecoderSpec
from kvlathe.tasks import tasks

RANDOM = "random"
TOKENS = {"random": 8192, "text": 16384}
"""Fewest tokens of either source, and the default: papers FDC (random tokens) and ZACK
(coherent text)."""
RANDOM_LENGTH = 2048
SMALLER = (
    "end other programs, raise the container's limit, or ask for fewer tokens "
    "(--calibration-tokens)"
)
GOLDEN = (5**0.5 - 1) / 2
TEXT_LENGTH = (400, 2048)
"""Tokens of a piece of text: shorter documents are passed over, longer ones are cut."""


def calibrate(
    checkpoint: Checkpoint,
    source: str | Path = RANDOM,
    tokens: int | None = None,
    seed: int = 0,
    with_entropies: bool = True,
) -> Stats:
    """Statistics of the model on ``tokens`` tokens of ``source``: "random", or a .jsonl
    file of texts. ``with_entropies``: as in calibrate_on.

    Raises KvlatheError for too few tokens, an unreadable file, or activations that are
    NaN or infinite.
    """
    random = str(source) == RANDOM
    tokens = TOKENS["random" if random else "text"] if tokens is None else tokens
    _check_tokens(tokens, random)
    length = _length(checkpoint, RANDOM_LENGTH)
    if random:
        _require_memory(checkpoint, tokens, length)  # the ids alone may not fit
        sequences = random_sequences(checkpoint.spec.vocab_size, tokens, seed, length)
    else:
        sequences = text_sequences(checkpoint, Path(source), tokens)
    described = {
        "source": RANDOM if random else Path(source).name,
        "sequences": len(sequences),
        "seed": seed,
        "max_seq_len": checkpoint.spec.max_seq_len,
        "tokens": sum(map(len, sequences)),
    }
    return calibrate_on(
        checkpoint, sequences, seed, described, not random, with_entropies
    )


def _check_tokens(tokens: int, random: bool) -> None:
    least = TOKENS["random" if random else "text"]
    if tokens < least:
        kind = "random tokens" if random else "tokens of text"
        raise KvlatheError(
            f"{tokens} {kind} are too few to calibrate on",
            f"statistics of fewer than {least} are unstable",
            f"ask for {least}",
        )


def _require_memory(checkpoint: Checkpoint, tokens: int, longest: int) -> None:
    need = memory.of_calibration(checkpoint.spec, tokens, longest)
    need.require(checkpoint.device, SMALLER)


def _length(checkpoint: Checkpoint, longest: int) -> int:
    return min(longest, checkpoint.spec.max_seq_len)


def random_sequences(
    vocabulary: int, tokens: int, seed: int, length: int
) -> list[Tensor]:
    """Sequences of ``length`` ids drawn uniformly, ``tokens`` in all (the last may be
    shorter)."""
    draw = torch.Generator().manual_seed(seed)
    return list(torch.randint(vocabulary, (tokens,), generator=draw).split(length))


def text_sequences(checkpoint: Checkpoint, path: Path, tokens: int) -> list[Tensor]:
    """Pieces of the file's documents, ``tokens`` in all: every document's first piece,
    then every second piece, and so on.
    """
    encoder = tasks.FolderEncoder(checkpoint.path)
    longest = _length(checkpoint, TEXT_LENGTH[1])
    shortest = min(TEXT_LENGTH[0], longest)
    documents: list[Sequence[Tensor]] = []  # each in pieces
    for ids in tasks.encode_documents(encoder, tasks.read_texts(path)):
        if ids:
            documents.append(torch.tensor(ids).split(longest))
    pieces = itertools.chain.from_iterable(itertools.zip_longest(*documents))
    usable = [piece for piece in pieces if piece is not None and len(piece) >= shortest]
    count = sum(map(len, usable))
    if count < tokens:
        raise KvlatheError(
            f"{path} has {count} usable tokens of the {tokens} that calibration needs",
            f"documents below {shortest} tokens are not used",
            "give more text",
        )
    return list(_first(usable, tokens))


def _first(pieces: Sequence[Tensor], tokens: int) -> Iterator[Tensor]:
    for piece in pieces:
        if tokens <= 0:
            return
        yield piece[:tokens]
        tokens -= len(piece)


# -- the run ---------------------------------------------------------------------------
def calibrate_on(
    checkpoint: Checkpoint,
    sequences: Sequence[Tensor],
    seed: int,
    source: Mapping[str, object],
    spread: bool = True,
    with_entropies: bool = True,
) -> Stats:
    """Statistics on these sequences of token ids; even and odd ones are the halves.
    ``spread``: over the positions that are served, else all from position 0.
    ``with_entropies``: of every sequence, else of none. They take longer than all else
    together, and few methods read them.
    """
    spec = checkpoint.spec
    lengths = [len(ids) for ids in sequences]
    _require_memory(checkpoint, sum(lengths), max(lengths))
    starts = [0] * len(lengths)
    if spread:
        starts = _starts(lengths, spec.max_seq_len, seed)
    positions = []
    for start, length in zip(starts, lengths, strict=True):
        positions.append(torch.arange(start, start + length, device=checkpoint.device))
    halves = (Moments.zeros(spec.shape), Moments.zeros(spec.shape))
    entropies = Entropies.empty(spec.shape, len(sequences) if with_entropies else 0)
    grams = _observe_all(checkpoint, sequences, positions, halves, entropies)
    even, odd = halves
    for half in halves:
        check_finite({name: getattr(half, name) for name in ARRAYS})
    check_finite(entropies.arrays())
    return Stats(
        shape=spec.shape,
        rope=spec.rope is not None,
        scale=np.array([spec.scale(layer) for layer in range(spec.layers)]),
        wv_gram=np.stack([gram.wv for gram in grams]),
        wo_gram=_of_readers(spec, [gram.wo for gram in grams]),
        halves=(_counted(even, sum(lengths[::2])), _counted(odd, sum(lengths[1::2]))),
        entropies=entropies,
        model_digest=checkpoint.digest,
        source=dict(source),
    )


def _observe_all(
    checkpoint: Checkpoint,
    sequences: Sequence[Tensor],
    positions: Sequence[Tensor],
    halves: tuple[Moments, Moments],
    entropies: Entropies,
) -> list[Grams]:
    """Run every sequence through every layer. Fills ``halves`` and ``entropies``, and
    returns each layer's Gram matrices."""
    spec = checkpoint.spec
    device = checkpoint.device
    places = zip(sequences, positions, strict=True)
    hidden = [embed(checkpoint, ids, at) for ids, at in places]
    given = [
        beside(checkpoint, ids, x) for ids, x in zip(sequences, hidden, strict=True)
    ]
    runners = ahead(lambda i: LayerRunner(checkpoint, i), range(spec.layers), device)
    lengths = [len(ids) for ids in sequences]
    grams: list[Grams] = []
    with working("calibrating", sum(lengths), "tokens") as advance:
        for layer, runner in enumerate(runners):
            own = _grams(spec, runner)
            grams.append(own)
            attended = runner.attention
            caches = spec.shape.source(layer) == layer
            for i, before in enumerate(hidden):
                captured = runner(before, positions[i], None, given[i])
                advance(lengths[i] / spec.layers)
                hidden[i] = captured.hidden
                if not spec.attends(layer):
                    continue
                sums = halves[i % 2]
                _accumulate_reader(spec, sums, layer, before, captured, own, attended)
                if caches:
                    _accumulate(sums, layer, before, captured)
                if entropies.texts and caches:
                    entropy.observe(
                        entropies, i, layer, before, *_heads(captured), attended
                    )
    return grams


def _starts(lengths: Sequence[int], max_seq_len: int, seed: int) -> list[int]:
    """The position at which each sequence begins. Sequences of every length up to
    ``max_seq_len`` are served and all start at 0, so position t is met in proportion to
    1 - t / max_seq_len. Multiples of the golden ratio spread evenly in either half too.
    """
    start = float(np.random.default_rng(seed).random())
    starts = []
    for i, length in enumerate(lengths):
        even = (start + i * GOLDEN) % 1
        share = 1 - (1 - even) ** 0.5
        starts.append(int(share * (max_seq_len - length + 1)))
    return starts


def _counted(moments: Moments, tokens: int) -> Moments:
    return Moments(tokens, **{name: getattr(moments, name) for name in ARRAYS})


class Grams(NamedTuple):
    """Gram matrices of one layer's weights: ``wv`` W_V^T W_V [H, d, d]; ``wo`` W_O
    W_O^T summed over each lane's query heads [H, d, d]; ``wo_each`` that of every query
    head [Hq, d, d]."""

    wv: Array
    wo: Array
    wo_each: Tensor


def _grams(spec: DecoderSpec, runner: LayerRunner) -> Grams:
    own, d = spec.heads(runner.layer), spec.head_dim
    whole = np.zeros((2, spec.kv_heads, d, d))
    if not spec.attends(runner.layer):
        return Grams(whole[0], whole[1], torch.zeros(0))
    by_head = runner.w_o.unflatten(0, (spec.query_heads, -1)).double()  # [Hq, d, D]
    wo_each = by_head @ by_head.mT
    wo = wo_each.unflatten(0, (own.kv_heads, -1)).sum(1)
    _add(whole[1], wo.cpu().numpy())
    w_v = runner.w_v
    if w_v is not None:
        by_lane = w_v.unflatten(1, (own.kv_heads, -1)).transpose(0, 1).double()
        _add(whole[0], (by_lane.mT @ by_lane).cpu().numpy())  # of [H, D, d]
    return Grams(whole[0], whole[1], wo_each.float())


def _of_readers(spec: DecoderSpec, wo: Sequence[Array]) -> Array:
    """[L, H, d, d]: W_O W_O^T of each layer, summed over all layers that read a cache,
    where it is stored."""
    sums = np.zeros((len(wo), *wo[0].shape))
    for layer, own in enumerate(wo):
        sums[spec.shape.source(layer)] += own
    return sums


def _accumulate(sums: Moments, layer: int, hidden: Tensor, captured: Captured) -> None:
    """Add what one sequence caches: ``hidden`` [T, D] is what the layer read."""
    for name, by_token in (("k", captured.k), ("v", captured.v)):
        heads = by_token.transpose(0, 1)  # [H, T, d]
        _add_vectors(sums, name, layer, heads, len(heads), 1.0)
        here = heads.abs().amax(1).double().cpu().numpy()
        largest = getattr(sums, f"{name}_max")[layer][tuple(map(slice, here.shape))]
        np.maximum(largest, here, out=largest)
    sizes = hidden.double().square().sum(-1)  # [T]
    sums.hidden[layer] += len(sizes) * float(sizes.median())


def _accumulate_reader(
    spec: DecoderSpec,
    sums: Moments,
    layer: int,
    hidden: Tensor,
    captured: Captured,
    grams: Grams,
    attended: PlainAttention,
) -> None:
    """Add what one sequence makes of a cache. ``spread`` is the mean |v W_O|^2 that a token
    attends to, less |o W_O|^2 of what it gets: the variance of what it averages over."""
    # [Hq, T, d], k and v [H, T, d]
    q, k, v, o = (heads.transpose(0, 1) for heads in captured[1:])
    lanes, wo_gram = k.shape[0], grams.wo_each
    source = spec.shape.source(layer)
    share = 1 / spec.shape.readers(source)
    values = v.repeat_interleave(q.shape[0] // lanes, 0)  # [Hq, T, d]
    norms = ((values @ wo_gram) * values).sum(
        -1, keepdim=True
    )  # |v_j W_O|^2, [Hq, T, 1]
    mean_norm = attended(q, k, norms.expand_as(values))[..., 0]  # [Hq, T]
    norm_of_mean = ((o @ wo_gram) * o).sum(-1)  # |o W_O|^2, [Hq, T]
    spread = (mean_norm - norm_of_mean).double().sum(-1)  # [Hq]
    _add_vectors(sums, "q", source, q, lanes, 1.0)
    _add_vectors(sums, "o", source, o, lanes, share)
    _add(sums.spread[source], share * _by_lane(spread, lanes))


def _add_vectors(
    sums: Moments, name: str, layer: int, heads: Tensor, lanes: int, share: float
) -> None:
    """Add ``share`` of the sums of vectors and of their outer products, heads [n, T, d]
    of so many ``lanes``."""
    vectors = heads.double()
    outer = vectors.mT @ vectors  # [heads, d, d]
    _add(getattr(sums, 2 * name)[layer], share * _by_lane(outer, lanes))
    _add(getattr(sums, name)[layer], share * _by_lane(vectors.sum(1), lanes))


def _add(total: Array, here: Array) -> None:
    """Add what a layer has, which may have fewer heads or dims than others."""
    total[tuple(map(slice, here.shape))] += here


def _by_lane(per_head: Tensor, lanes: int) -> Array:
    """[heads, ...] summed over the heads of each lane: [lanes, ...]."""
    return per_head.unflatten(0, (lanes, -1)).sum(1).cpu().numpy()


def _heads(captured: Captured) -> tuple[Tensor, Tensor]:
    """q [Hq, T, d] and k [H, T, d], float64."""
    return captured.q.transpose(0, 1).double(), captured.k.transpose(0, 1).double()
