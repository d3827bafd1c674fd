"""Clients that leave, steps that raise, queues that are full, and tenants."""

from __future__ import annotations

import json
import time

import numpy as np
import numpy.typing as npt
import openai
import pytest

from kvlathe.runtime.sessions.protocols import StepPlan
from tests.support.runtime_cases import text
from tests.support.serving_cases import (
    KEY,
    MODEL_NAME,
    PROMPT,
    Served,
    alone,
    post,
    raw_request,
    replaced,
)

pytestmark = pytest.mark.usefixtures("nothing_is_left")


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_leaves_takes_its_pages_with_it(
    served: Served, client: openai.OpenAI, stream: bool
) -> None:
    gone = raw_request(served, prompt=PROMPT, max_tokens=2000, stream=stream, n=2)
    until = time.monotonic() + 30
    while not served.llm.engine.scheduler.running and time.monotonic() < until:
        time.sleep(0.01)
    if stream:
        assert b"200 OK" in gone.recv(100)
    assert served.llm.pool.bytes_in_use
    other = client.completions.create(
        model=MODEL_NAME, prompt=PROMPT, max_tokens=30, temperature=0, stream=True
    )
    gone.close()
    assert (
        "".join(chunk.choices[0].text for chunk in other)
        == alone(PROMPT, max_new_tokens=30).text
    )
    assert served.idle(20)  # 2000 tokens would take longer


def test_a_client_that_leaves_the_queue_is_not_served(served: Served) -> None:
    """A stream has said nothing yet while it waits: its client's leaving must be
    noticed all the same."""
    kept = served.llm.limits
    replaced(served.llm, max_batch_size=1)
    runs = raw_request(served, prompt=PROMPT, max_tokens=1500, stream=True)
    assert b"200 OK" in runs.recv(100)
    waits = [
        raw_request(served, prompt=PROMPT, max_tokens=4, stream=stream)
        for stream in (True, False)
    ]
    until = time.monotonic() + 30
    while served.engine.open < 3 and time.monotonic() < until:
        time.sleep(0.01)
    assert served.engine.open == 3
    for gone in waits:
        gone.close()
    while served.engine.open > 1 and time.monotonic() < until:
        time.sleep(0.01)
    assert served.engine.open == served.engine.running == 1
    runs.close()
    assert served.idle(20)
    served.llm.engine.scheduler.limits = kept


def test_a_step_that_raises_fails_the_guilty_alone(
    served: Served, client: openai.OpenAI, caplog: pytest.LogCaptureFixture
) -> None:
    run = served.llm.session.run

    def breaking(step: StepPlan) -> npt.NDArray[np.float32]:
        if 8191 in step.input_ids:
            raise RuntimeError("secret detail")
        return run(step)

    served.llm.session.run = breaking
    try:
        good = raw_request(
            served, prompt=PROMPT, max_tokens=20, temperature=0, ignore_eos=False
        )
        found = post(served, prompt=[8191, 5])
        assert (
            "secret detail" in caplog.text
        )  # for who runs the server, not for who asks
        assert (
            found.status_code == 500
            and "secret" not in found.text
            and found.json()["error"]["code"] == "engine_error"
        )
        with pytest.raises(openai.APIError, match="engine failed"):
            list(
                client.completions.create(
                    model=MODEL_NAME, prompt=[8191, 5], stream=True
                )
            )
        answer = b""
        while b'"usage"' not in answer:
            answer += good.recv(4096)
        assert (
            json.loads(answer.split(b"\r\n\r\n")[1])["choices"][0]["text"]
            == alone(PROMPT, max_new_tokens=20).text
        )
        good.close()
    finally:
        served.llm.session.run = run


def test_a_full_queue_is_429_with_retry_after(served: Served) -> None:
    kept, served.engine.max_waiting = served.engine.max_waiting, 2
    busy = raw_request(
        served, prompt=[list(text(20, i)) for i in range(10)], max_tokens=700
    )
    until = time.monotonic() + 30
    while served.engine.open < 10 and time.monotonic() < until:
        time.sleep(0.01)
    found = post(served, prompt="a")
    assert found.status_code == 429 and int(found.headers["retry-after"]) >= 1
    assert found.json()["error"]["code"] == "queue_full"
    busy.close()
    served.engine.max_waiting = kept


def test_tenants_keys_are_their_own(served: Served) -> None:
    assert post(served, key="sk-other", prompt="a", max_tokens=1).status_code == 200
    seen = []
    submit = served.engine.submit
    served.engine.submit = lambda *a, **k: seen.append(a[4]) or submit(*a, **k)
    for key in (KEY, "sk-other"):
        post(served, key=key, prompt="a", max_tokens=1)
    served.engine.submit = submit
    assert seen == [KEY, "sk-other"]
