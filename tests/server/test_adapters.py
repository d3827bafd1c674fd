"""LoRA adapters over HTTP, as clients of vLLM load and name them."""

from __future__ import annotations

import re
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx2 as httpx
import pytest

from kvlathe.base.errors import KvlatheError
from kvlathe.runtime.llm import LLM
from kvlathe.server.app import MAX_BODY
from kvlathe.server.run import Settings, load, named_adapter
from tests.support.adapter_cases import made_case
from tests.support.serving_cases import KEY, MODEL_NAME, Served, post, serving, until

HEADERS = {"Authorization": f"Bearer {KEY}"}
ASKED: dict[str, Any] = {"max_tokens": 12, "ignore_eos": True, "temperature": 0}


@pytest.fixture(scope="module")
def adapters() -> Path:
    return made_case("llama")


@pytest.fixture(scope="module")
def served(adapters: Path) -> Iterator[Served]:
    llm = LLM.load(adapters / "engine", threads=1, device="cpu", share_prefixes=True)
    llm.load_adapter("red", adapters / "red")
    with serving(llm, keys=[KEY], loads_adapters=True) as found:
        yield found


def asked(served: Served, path: str, **body: str) -> httpx.Response:
    return httpx.post(f"{served.url}/v1/{path}", json=body, headers=HEADERS, timeout=60)


def models(served: Served) -> dict[str, str | None]:
    said = httpx.get(f"{served.url}/v1/models", headers=HEADERS).json()["data"]
    return {one["id"]: one["parent"] for one in said}


def test_metrics_name_the_adapters_of_requests(served: Served) -> None:
    """An engine that sleeps runs none of them, so that the test can look."""
    served.llm.sleep()
    with ThreadPoolExecutor(1) as pool:
        answer = pool.submit(post, served, **ASKED, model="red", prompt=[5])
        until(lambda: served.engine.waiting == 1)
        said = httpx.get(f"{served.url}/metrics").text
        served.llm.wake_up()
        assert answer.result().status_code == 200
    [line] = re.findall(r"^kvlathe_lora_requests_info{(.*)} ", said, re.MULTILINE)
    assert dict(re.findall(r'(\w+)="([^"]*)"', line)) == {
        "model_name": MODEL_NAME,
        "max_lora": "1",
        "running_lora_adapters": "",
        "waiting_lora_adapters": "red",
    }


def test_the_model_of_a_request_chooses_the_adapter(
    served: Served, adapters: Path
) -> None:
    """Two that are loaded meanwhile, in steps with others; the answer says which."""
    assert models(served) == {MODEL_NAME: None, "red": MODEL_NAME}
    for name in ("green", "blue"):
        path = str(adapters / name)
        loaded = asked(served, "load_lora_adapter", lora_name=name, lora_path=path)
        assert loaded.status_code == 200 and f"'{name}' added" in loaded.text
    names = [MODEL_NAME, "red", "green", "blue"]
    assert list(models(served)) == names

    def answer(name: str) -> tuple[str, str]:
        asking: dict[str, Any] = {**ASKED, "model": name, "prompt": list(range(5, 40))}
        said = post(served, **asking).json()
        return said["model"], said["choices"][0]["text"]

    alone = [answer(name) for name in names]
    with ThreadPoolExecutor(4) as pool:
        assert list(pool.map(answer, names)) == alone
    assert [name for name, _ in alone] == names
    assert len({text for _, text in alone}) == len(names)


def test_an_unloaded_adapter_is_no_model_any_more(
    served: Served, adapters: Path
) -> None:
    path = str(adapters / "green")
    asked(served, "load_lora_adapter", lora_name="brief", lora_path=path)
    gone = asked(served, "unload_lora_adapter", lora_name="brief")
    assert gone.status_code == 200 and "'brief' removed" in gone.text
    refused = post(served, **ASKED, model="brief", prompt=[5])
    assert refused.status_code == 404 and "`red`" in refused.text
    again = asked(served, "unload_lora_adapter", lora_name="brief")
    assert again.status_code == 404


def test_adapters_are_refused_in_words(served: Served, adapters: Path) -> None:
    """A path that is none, names that are taken, prefixes, and a key that is missing."""
    path = str(adapters / "blue")
    for name, where, said in (
        ("no", str(adapters / "no"), "there is no folder"),
        ("red", path, "already"),
        (MODEL_NAME, path, "the model itself"),
        (" ", path, "needs a name"),
        ("long", "a" * 300, "File name too long"),
        ("long", "a" * 300 + "=1", "File name too long"),
    ):
        refused = asked(served, "load_lora_adapter", lora_name=name, lora_path=where)
        assert refused.status_code == 400 and said in refused.text
    refused = post(served, "prefixes", model="red", prompt=[5] * 40)
    assert refused.status_code == 400 and "without adapters" in refused.text
    url = f"{served.url}/v1/load_lora_adapter"
    body = {"lora_name": "sly", "lora_path": path}
    assert httpx.post(url, json=body).status_code == 401
    with pytest.raises(KvlatheError, match="Write --lora NAME=PATH"):
        named_adapter("only/a/path", MODEL_NAME)


def test_no_adapter_that_is_served_takes_the_name_of_the_model(adapters: Path) -> None:
    """That would be used by no request."""
    given = (), MAX_BODY, 1, None, None, None, None, 1, 1.0
    asking = f"poet={adapters / 'red'}"
    settings = Settings(
        "localhost", 0, "poet", *given, adapters=(asking,), device="cpu"
    )
    with pytest.raises(KvlatheError, match="the model itself has the name poet"):
        load(adapters / "engine", settings)


def test_a_sleeping_engine_keeps_its_adapters(served: Served, adapters: Path) -> None:
    served.llm.sleep()
    path = str(adapters / "blue")
    refused = asked(served, "load_lora_adapter", lora_name="new", lora_path=path)
    assert refused.status_code == 503 and "the engine sleeps" in refused.text
    refused = asked(served, "unload_lora_adapter", lora_name="red")
    assert refused.status_code == 503 and "the engine sleeps" in refused.text
    served.llm.wake_up()
    assert "red" in models(served)
    assert post(served, **ASKED, model="red", prompt=[5]).status_code == 200
