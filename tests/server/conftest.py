"""The server that most of its tests share."""

from __future__ import annotations

from collections.abc import Iterator

import openai
import pytest

from tests.support.runtime_cases import llm
from tests.support.serving_cases import KEY, Served, serving, with_template


@pytest.fixture(scope="session")
def served() -> Iterator[Served]:
    """Read only but for what a test puts back."""
    engine = with_template(llm("torch", "split"))
    with serving(engine, keys=[KEY, "sk-other"], max_body=1 << 16) as found:
        yield found


@pytest.fixture
def nothing_is_left(served: Served) -> Iterator[None]:
    yield
    assert served.idle()


@pytest.fixture(scope="session")
def client(served: Served) -> openai.OpenAI:
    return openai.OpenAI(
        base_url=f"{served.url}/v1", api_key=KEY, max_retries=0, timeout=60
    )
