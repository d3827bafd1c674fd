"""An OpenAI client that asks ``kvlathe serve``. It takes pip install openai.

kvlathe serve ENGINE --port 8000
python examples/openai_client.py http://127.0.0.1:8000
"""

from __future__ import annotations

import sys

from openai import OpenAI


def main(address: str) -> None:
    client = OpenAI(base_url=f"{address}/v1", api_key="none")
    model = client.models.list().data[0].id
    print("model:", model)

    answer = client.completions.create(
        model=model, prompt="def main():", max_tokens=16, temperature=0
    )
    print(repr(answer.choices[0].text))

    chunks = client.completions.create(
        model=model, prompt="import os", max_tokens=16, temperature=0, stream=True
    )
    for chunk in chunks:
        print(chunk.choices[0].text, end="", flush=True)
    print()


if __name__ == "__main__":
    main(*sys.argv[1:])
