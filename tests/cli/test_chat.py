"""``kvlathe chat`` in a terminal."""

from __future__ import annotations

import dataclasses
import os
import pty
import re
import select
import subprocess
import sys
import time
from pathlib import Path

import pytest

from kvlathe.cli import chat
from kvlathe.cli.common import write
from kvlathe.runtime.llm import LLM
from kvlathe.runtime.text.sampling_params import SamplingParams
from tests.support.runtime_cases import built_folder, llm
from tests.support.serving_cases import CHATML, replaced, with_template


class Terminal:
    """A command in a terminal of its own."""

    def __init__(self, *words: str) -> None:
        self._own, its = pty.openpty()
        self.process = subprocess.Popen(
            [sys.executable, "-m", "kvlathe", *words],
            stdin=its,
            stdout=its,
            stderr=its,
            start_new_session=True,
            preexec_fn=lambda: os.close(os.open(os.ttyname(its), os.O_RDWR)),
        )
        os.close(its)
        self.seen = ""

    def type(self, text: str) -> None:
        os.write(self._own, text.encode())

    def interrupt(self) -> None:
        """Ctrl-C until there is a new prompt: readline loses one that comes just before
        it waits."""
        until = time.monotonic() + 60
        self.seen = ""
        while "> " not in self.seen:
            assert time.monotonic() < until, self.seen
            self.type("\x03")
            if select.select([self._own], [], [], 2)[0]:
                time.sleep(0.2)
                self.seen += os.read(self._own, 4096).decode("utf-8", "replace")
        self.seen = ""

    def expect(self, pattern: str, seconds: float = 120) -> str:
        """The text that came up to a match of ``pattern``, once it has come."""
        until = time.monotonic() + seconds
        while not (found := re.search(pattern, self.seen)):
            assert time.monotonic() < until, f"no {pattern!r} in {self.seen[-2000:]!r}"
            if select.select([self._own], [], [], 0.2)[0]:
                self.seen += os.read(self._own, 4096).decode("utf-8", "replace")
        said, self.seen = self.seen[: found.end()], self.seen[found.end() :]
        return said


def test_a_conversation_in_a_terminal(tmp_path: Path) -> None:
    template = tmp_path / "chat.jinja"
    template.write_text(CHATML)
    (tmp_path / "engine").mkdir()
    engine = built_folder(tmp_path / "engine")
    words = ("chat", str(engine), "--chat-template", str(template), "--seed", "1")
    words += ("--speculative", "ngram", "--num-speculative-tokens", "4")
    terminal = Terminal(*words, "--max-new-tokens", "3000", "--temperature", "1.5")
    terminal.expect("/reset begins anew")
    terminal.expect("> ")
    terminal.type("Count.\n")
    terminal.expect(r"\n.{5}")  # the answer begins
    terminal.type("\x03")
    terminal.expect(r"\[(ended by Ctrl-C|.* tokens/s)")
    terminal.expect("> ")
    terminal.interrupt()  # on an empty line it ends nothing
    terminal.type("/help\n")
    terminal.expect("/reset begins anew")
    terminal.type("/reset\n")
    terminal.expect("a new conversation")
    terminal.type("x" * 3000 + "\n/reset\n")
    terminal.expect("a new conversation", 300)
    terminal.type("/quit\n")
    assert terminal.process.wait(60) == 0


def test_each_answer_says_its_speed_and_the_caches_bytes(tmp_path: Path) -> None:
    template = tmp_path / "chat.jinja"
    template.write_text(CHATML)
    (tmp_path / "engine").mkdir()
    engine = built_folder(tmp_path / "engine")
    options = ["--chat-template", str(template), "--max-new-tokens", "8", "--seed", "1"]
    done = subprocess.run(
        [sys.executable, "-m", "kvlathe", "chat", str(engine), *options],
        input="Who?\nAnd then?\n/quit\nnever read\n",
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    said = re.findall(r"\[(\d+) tokens/s; cache (.+) for (\d+) tokens", done.stderr)
    counts = [int(tokens) for _, _, tokens in said]
    assert len(counts) == 2 and counts[1] > counts[0] > 8
    assert "uncompressed: " in done.stderr


def test_at_the_end_of_the_engines_room_there_is_a_remedy(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """An answer that ends there says so, and so does a question that is too long."""
    lines = iter(["Count.", "And then?", "/reset", "Who?", None])
    monkeypatch.setattr(chat, "ask", lambda: next(lines))
    small = replaced(llm("torch", "split"), max_seq_len=96, max_input_len=96)
    params = SamplingParams(max_new_tokens=300, ignore_eos=True)
    chat.talk(chat.Conversation(with_template(small), params, None))
    said = capsys.readouterr().err.splitlines()
    assert len(said) == 4 and said[0].endswith(f"; {chat.FULL}]")
    assert said[1] == f"[{chat.FULL}]" and said[3].endswith(f"; {chat.FULL}]")


def test_a_terminal_does_not_obey_what_a_model_writes(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    write("a\x1b]0;title\x07\n\tb")
    assert capsys.readouterr().out == "a\\x1b]0;title\\x07\n\tb"


def test_an_engine_without_a_template_continues_texts(tmp_path: Path) -> None:
    """It says so in one line, and each text is continued as ``generate`` does."""
    engine = built_folder(tmp_path)
    options = ["--temperature", "0", "--max-new-tokens", "8"]
    words = [sys.executable, "-m", "kvlathe"]
    done = subprocess.run(
        [*words, "chat", str(engine), *options, "--system", "Be brief."],
        input="def main():\nimport\n",
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    assert done.stderr.count(f"{chat.CONTINUES}; --system is not used") == 1
    params = SamplingParams(max_new_tokens=8, temperature=0)
    with LLM.load(engine) as alone:
        answers = alone.generate(["def main():", "import"], params)
    for answer in answers:
        assert answer.text in done.stdout


def test_a_text_that_is_continued_ends_after_some_tokens(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    lines = iter(["def main():", None])
    monkeypatch.setattr(chat, "ask", lambda: next(lines))
    monkeypatch.setattr(chat, "CONTINUED_TOKENS", 5)
    params = SamplingParams(max_new_tokens=300, temperature=0, ignore_eos=True)
    engine = llm("torch", "split")
    chat.talk(chat.Conversation(engine, params, None))
    short = dataclasses.replace(params, max_new_tokens=5)
    wanted = engine.generate(["def main():"], short)[0].text
    assert capsys.readouterr().out == f"{wanted}\n"
