"""The list of popular models is whole, and its shares count what runs."""

from __future__ import annotations

from benchmarks.popular import SAID, Popular, grouped, popular, reads, shares


def test_the_list_is_sorted_and_says_every_format_by_name() -> None:
    models = popular()
    downloads = [model.downloads for model in models]
    assert downloads == sorted(downloads, reverse=True) and min(downloads) > 0
    assert len({model.name.lower() for model in models}) == len(models) > 150
    assert {model.format for model in models} <= set(SAID)


def test_shares_weigh_models_alike_and_by_downloads() -> None:
    runs = Popular(300, "a", "llama", "awq")
    models = [runs, *[Popular(1, "b", "bloom", "16 bit")] * 99]
    first, hundred, _ = shares(models)
    assert first == ["the first 50", "2% (86%)", "100% (100%)", "2% (86%)"]
    assert hundred[1] == "1% (75%)"
    assert grouped(models, lambda x: x.model_type) == [
        ["llama", "1", "0.0"],
        ["bloom", "99", "0.0"],
    ]


def test_formats_are_read_as_checkpoints_are() -> None:
    refused = {form for form in SAID if not reads(form)}
    assert refused == {"mlx", "fp8 and fp4"}
    assert not Popular(1, "a", "llama", "mxfp4").is_read
