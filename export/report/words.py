"""Words of report.html that a reader may not know: each links to its meaning, which
stands at the page's foot."""

from __future__ import annotations

from markupsafe import Markup, escape

FIELD: dict[str, str] = {
    "KL": "The Kullback-Leibler divergence of the next token's chances: from the "
    "uncompressed model to this engine, in nats, the mean over tokens. 0 is no change.",
    "same next token": "The share of places at which both give the highest chance to "
    "the same token.",
    "perplexity": "The exponential of the mean loss a token. x1.01 is 1 % above that of "
    "the uncompressed model.",
    "exercise": "A question that the uncompressed model answers only from far back in "
    "its prompt. It is kept where this engine answers it, too.",
    "scale": "The step and the offset of a group of codes, in 16 bit each: what makes "
    "numbers of them.",
}
"""Words of the field."""
OURS: dict[str, str] = {
    "page": "Some tokens of every lane of a bucket, in all layers, as one contiguous "
    "range of bytes.",
    "bucket": "The lanes whose tokens lie in the same pages.",
    "lane": "One KV head of one layer, and what of it is cached.",
    "rank": "Cached dimensions of a lane's K or V.",
    "seal": "Quantize a full page. The newest tokens wait for that in a page that is "
    "not sealed.",
}
"""Words of kvlathe, with the meaning that docs/glossary.md gives them."""
WORDS = {**FIELD, **OURS}


def anchor(word: str) -> str:
    """The id of a word's meaning on the page."""
    return f"word-{word.lower().replace(' ', '-')}"


def linked(text: str, word: str = "") -> Markup:
    """``text`` as a link to the meaning of ``word``, which also shows under a pointer."""
    word = word or text
    return Markup('<a class="word" href="#{}" title="{}">{}</a>').format(
        anchor(word), WORDS[word], escape(text)
    )
