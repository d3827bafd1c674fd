"""Calibrate: run tokens through the original model, layer by layer, and sum up every lane's q, k, v and output.

One layer's weights are in memory at a time, and one sequence of one layer's activations beside the hidden states of
all. Text is spread over the positions that are served, so that the statistics know all of RoPE's angles; random tokens
start at 0, as in the paper they come from (docs/basis.md has both).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from kvlathe import tasks
from kvlathe.console import progress
from kvlathe.errors import KvlatheError
from kvlathe.export.checkpoint import Checkpoint
from kvlathe.export.decoder import Captured, LayerRunner, embed
from kvlathe.export.entropy import Entropies
from kvlathe.export.stats import ARRAYS, Array, Moments, Stats, check_finite

RANDOM = "random"
TOKENS = {"random": 8192, "text": 16384}
"""Fewest tokens of either source, and the default: papers FDC (random tokens) and ZACK (coherent text)."""
RANDOM_LENGTH = 2048
GOLDEN = (5**0.5 - 1) / 2
TEXT_LENGTH = (400, 2048)
"""Tokens of a piece of text: shorter documents are passed over, longer ones are cut."""


def calibrate(checkpoint: Checkpoint, source: str | Path = RANDOM, tokens: int | None = None, seed: int = 0) -> Stats:
    """Statistics of the model on ``tokens`` tokens of ``source``: "random", or a .jsonl file of texts.

    Raises KvlatheError for too few tokens, an unreadable file, or activations that are NaN or infinite.
    """
    random = str(source) == RANDOM
    tokens = TOKENS["random" if random else "text"] if tokens is None else tokens
    _check_tokens(tokens, random)
    sequences = (
        random_sequences(checkpoint.spec.vocab_size, tokens, seed, _length(checkpoint, RANDOM_LENGTH))
        if random
        else text_sequences(checkpoint, Path(source), tokens)
    )
    described = {"source": RANDOM if random else Path(source).name, "sequences": len(sequences), "seed": seed}
    described["max_seq_len"] = checkpoint.spec.max_seq_len
    described |= {"tokens": sum(map(len, sequences))}
    return calibrate_on(checkpoint, sequences, seed, described, spread=not random)


def _check_tokens(tokens: int, random: bool) -> None:
    least = TOKENS["random" if random else "text"]
    if tokens < least:
        kind = "random tokens" if random else "tokens of text"
        raise KvlatheError(
            f"{tokens} {kind} are too few to calibrate on",
            f"statistics of fewer than {least} are unstable",
            f"ask for {least}",
        )


def _length(checkpoint: Checkpoint, longest: int) -> int:
    return min(longest, checkpoint.spec.max_seq_len)


def random_sequences(vocabulary: int, tokens: int, seed: int, length: int) -> list[Tensor]:
    """Sequences of ``length`` ids drawn uniformly, ``tokens`` in all (the last may be shorter)."""
    ids = torch.randint(vocabulary, (tokens,), generator=torch.Generator().manual_seed(seed))
    return list(ids.split(length))


def text_sequences(checkpoint: Checkpoint, path: Path, tokens: int) -> list[Tensor]:
    """Pieces of the file's documents, ``tokens`` in all: every document's first piece, then every second piece, and so
    on.
    """
    encoder = tasks.FolderEncoder(checkpoint.path)
    longest = _length(checkpoint, TEXT_LENGTH[1])
    documents = [torch.tensor(ids) for ids in tasks.encode_documents(encoder, tasks.read_texts(path)) if ids]
    pieces = [(i, n, piece) for n, ids in enumerate(documents) for i, piece in enumerate(ids.split(longest))]
    usable = [p for _, _, p in sorted(pieces, key=lambda x: x[:2]) if len(p) >= min(TEXT_LENGTH[0], longest)]
    found = sum(map(len, usable))
    if found < tokens:
        raise KvlatheError(
            f"{path} has {found} usable tokens of the {tokens} that calibration needs",
            f"documents below {min(TEXT_LENGTH[0], longest)} tokens are not used",
            "give more text",
        )
    return list(_first(usable, tokens))


def _first(pieces: Sequence[Tensor], tokens: int) -> Iterator[Tensor]:
    for piece in pieces:
        if tokens <= 0:
            return
        yield piece[:tokens]
        tokens -= len(piece)


# -- the run -----------------------------------------------------------------------------------------------------------
def calibrate_on(
    checkpoint: Checkpoint, sequences: Sequence[Tensor], seed: int, source: Mapping[str, object], spread: bool = True
) -> Stats:
    """Statistics on these sequences of token ids; even and odd ones are the halves. ``spread``: over the positions that
    are served, else all from position 0.
    """
    spec, lengths = checkpoint.spec, [len(ids) for ids in sequences]
    positions = _positions(lengths, spec.max_seq_len, seed) if spread else [torch.arange(n) for n in lengths]
    hidden = [embed(checkpoint, ids, at) for ids, at in zip(sequences, positions, strict=True)]
    halves, entropies = [Moments.zeros(spec.shape) for _ in range(2)], Entropies.empty(spec.shape, len(sequences))
    steps = ((layer, i) for layer in range(spec.layers) for i in range(len(sequences)))
    runner, grams = None, [_grams(checkpoint, layer) for layer in range(spec.layers)]
    for layer, i in progress(steps, "calibrating", spec.layers * len(sequences)):
        if i == 0:
            runner = LayerRunner(checkpoint, layer)
        assert runner is not None
        captured = runner(hidden[i], positions[i])
        _accumulate(halves[i % 2], layer, hidden[i], captured, grams[layer][2], spec.scale(layer))
        entropies.observe(i, layer, hidden[i].numpy(), *_heads(captured), spec.scale(layer))
        hidden[i] = captured.hidden
    counted = [sum(len(ids) for ids in sequences[i::2]) for i in range(2)]
    for half in halves:
        check_finite({name: getattr(half, name) for name in ARRAYS})
    check_finite(entropies.arrays())
    return Stats(
        shape=spec.shape,
        rope=spec.rope is not None,
        scale=np.array([spec.scale(layer) for layer in range(spec.layers)]),
        wv_gram=np.stack([gram[0] for gram in grams]),
        wo_gram=np.stack([gram[1] for gram in grams]),
        halves=(_counted(halves[0], counted[0]), _counted(halves[1], counted[1])),
        entropies=entropies,
        model_digest=checkpoint.digest,
        source=dict(source),
    )


def _positions(lengths: Sequence[int], max_seq_len: int, seed: int) -> list[Tensor]:
    """Where each sequence lies. Sequences of every length up to ``max_seq_len`` are served and all start at 0, so
    position t is met in proportion to 1 - t / max_seq_len. Multiples of the golden ratio spread evenly in either half
    too.
    """
    start = float(np.random.default_rng(seed).random())
    shares = [1 - (1 - (start + i * GOLDEN) % 1) ** 0.5 for i in range(len(lengths))]
    return [torch.arange(n) + int(share * (max_seq_len - n + 1)) for n, share in zip(lengths, shares, strict=True)]


def _counted(moments: Moments, tokens: int) -> Moments:
    return Moments(tokens, **{name: getattr(moments, name) for name in ARRAYS})


def _grams(checkpoint: Checkpoint, layer: int) -> tuple[Array, Array, Tensor]:
    """W_V^T W_V [H, d, d]; W_O W_O^T summed over each lane's query heads [H, d, d], and of every query head [Hq, d,
    d].
    """
    spec = checkpoint.spec
    wv = checkpoint.weight(f"layers.{layer}.v.weight").unflatten(1, (spec.kv_heads, -1)).transpose(0, 1).double()
    wo = checkpoint.weight(f"layers.{layer}.o.weight").unflatten(0, (spec.query_heads, -1)).double()
    each = wo @ wo.mT
    return (wv.mT @ wv).numpy(), each.unflatten(0, (spec.kv_heads, -1)).sum(1).numpy(), each.float()


def _accumulate(sums: Moments, layer: int, hidden: Tensor, seen: Captured, wo_gram: Tensor, scale: float) -> None:
    """Add one sequence: q [T, Hq, d], k and v [T, H, d] of ``seen``; ``wo_gram`` [Hq, d, d]."""
    q, k, v = (x.transpose(0, 1) for x in seen[1:])
    lanes = k.shape[0]
    group = q.shape[0] // lanes
    o = _attended(q, k, v, scale)
    values = v.repeat_interleave(group, 0)
    norms = ((values @ wo_gram) * values).sum(-1, keepdim=True)  # [Hq, T, 1] |v_j W_O|^2
    mean_norm = _attended(q, k, norms.expand_as(values), scale)[..., 0]
    spread = (mean_norm - ((o @ wo_gram) * o).sum(-1)).double().sum(-1)
    for name, x in (("q", q), ("k", k), ("v", v), ("o", o)):
        x = x.double()
        outer, total = (y.unflatten(0, (lanes, -1)).sum(1).numpy() for y in (x.mT @ x, x.sum(1)))
        getattr(sums, 2 * name)[layer] += outer
        getattr(sums, name)[layer] += total
    sums.spread[layer] += spread.unflatten(0, (lanes, group)).sum(1).numpy()
    sums.hidden[layer] += float(hidden.double().square().sum())
    for name, x in (("k_max", k), ("v_max", v)):
        largest = getattr(sums, name)
        largest[layer] = np.maximum(largest[layer], x.abs().amax(1).double().numpy())


def _heads(seen: Captured) -> tuple[Array, Array]:
    """q [Hq, T, d] and k [H, T, d]."""
    q, k = (x.transpose(0, 1).double().numpy() for x in (seen.q, seen.k))
    return q, k


def _attended(q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
    """Causal attention of q [Hq, T, d] over k [H, T, d] and v [H or Hq, T, d] -> [Hq, T, d]."""
    k, v = (x.repeat_interleave(q.shape[0] // x.shape[0], 0) for x in (k, v))
    return F.scaled_dot_product_attention(q[None], k[None], v[None], is_causal=True, scale=scale)[0]
