"""Programs of strangers end: in time, within memory, and with their parent."""

from __future__ import annotations

import contextlib
import os
import resource
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvlathe.base import limited
from kvlathe.base.chat_template import (
    MOST_CHARACTERS,
    environment,
    read_template,
    sandbox,
)
from kvlathe.base.errors import KvlatheError
from kvlathe.base.limited import MOST_IDLE, Limited, LimitError
from tests.support.nightly import rest_nightly

BOMBS = {
    "a power": "{{ 9**(9**9) }}",
    "a long text": "{{ 'a' * 10**9 * 4 }}",
    "loops": "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
    "much text": "{% for i in range(99999) %}{{ 'a' * 99999 }}{% endfor %}",
}
TURNS = [{"role": "user", "content": "x"}]
LIMITED = {
    name: Limited("kvlathe.base.chat_template", name, seconds=0.5)
    for name in ("syntax_fault", "rendered")
}
CHATML = "{% for m in messages %}<{{ m.role }}>{{ m.content | tojson }}\n{% endfor %}"


@pytest.mark.parametrize("name", rest_nightly(BOMBS, "a power"))
def test_a_template_that_never_ends_is_refused_in_words(name: str) -> None:
    """At a build, which only compiles it, and at a request."""
    began = time.monotonic()
    check = Limited("kvlathe.base.chat_template", "syntax_fault", seconds=1.0)
    with contextlib.suppress(LimitError):
        check(BOMBS[name])  # jinja2 folds constants
    render = Limited("kvlathe.base.chat_template", "rendered", seconds=1.0)
    with pytest.raises(LimitError):
        render(BOMBS[name], {"messages": []})
    assert time.monotonic() - began < 30
    assert render("{{ 1 + 1 }}", {}) == "2"  # the next one is none the worse


def test_words_of_a_program_are_cut() -> None:
    long = "{{ raise_exception('x' * 10**7) }}"
    with pytest.raises(LimitError) as refusal:
        sandbox().from_string(long).render()
    assert str(refusal.value) == "x" * 1000


VALUES = (
    *("9", "10**9", "'a'", "'a' * 10**8", "[0] * 10**7", "range(99999)", "messages"),
    *(
        "messages[0].content",
        "nobody",
        "self",
        "loop",
        "''.__class__",
        "namespace(a=1)",
    ),
    *("lipsum(n=9999)", "dict(a=1)", "cycler(1, 2)", "'%0999999999d' % 1", "none"),
    *("'{:>999999999}'.format(1)", "strftime_now('%c' * 99999)", "1 / 0", "9**9**9"),
    *("raise_exception('x' * 10**8)", "messages.__init__.__globals__", "'a' ~ m(1)"),
)
FILTERS = (
    *("center(10**8)", "indent(10**7)", "join", "tojson", "list", "sort", "string"),
    *("replace('', 'a' * 9999)", "length", "wordwrap(1)", "pprint", "xmlattr", "sum"),
    *("map('upper') | list", "unique | list", "attr('__class__')", "batch(2) | list"),
    *("urlize", "tojson(indent=10**9)", "format(1)", "reverse", "groupby(0)", "int"),
)
BLOCKS = (
    *(
        "{{{{ {0} }}}}",
        "{{% for i in {0} %}}{1}{{% endfor %}}",
        "{{% set x = {0} %}}{1}",
    ),
    *("{{% if {0} %}}{1}{{% endif %}}", "{{% filter upper %}}{1}{{% endfilter %}}"),
    "{{% macro m(n) %}}{{{{ m(n) }}}}{1}{{% endmacro %}}{{{{ m({0}) }}}}",
    "{{% for i in {0} recursive %}}{{{{ loop({0}) }}}}{1}{{% endfor %}}",
    "{{% block b %}}{{{{ self.b() }}}}{{% endblock %}}",
    *("{{% include {0} %}}", "{{% import {0} as y %}}", "{{% extends {0} %}}", "{1}}}"),
)


@st.composite
def hostile(draw: st.DrawFn, depth: int = 3) -> str:
    """A template that may take any time, memory and text, or be none."""
    value = draw(st.sampled_from(VALUES))
    for _ in range(draw(st.integers(0, 2))):
        how = draw(st.sampled_from([*"+*~%/", "**", "in", "|", "|"]))
        over = draw(st.sampled_from(FILTERS if how == "|" else VALUES))
        value = f"({value} {how} {over})"
    inner = draw(hostile(depth - 1)) if depth else "a"
    return draw(st.sampled_from(BLOCKS)).format(value, inner) + inner * draw(
        st.integers(0, 1)
    )


@pytest.mark.nightly
@settings(max_examples=100, deadline=None)
@given(template=hostile())
def test_hostile_templates_end_in_time_in_words_or_in_a_prompt(template: str) -> None:
    for function, values in (("syntax_fault", []), ("rendered", [{"messages": TURNS}])):
        began = time.monotonic()
        try:
            found = LIMITED[function](template, *values)
            assert len(str(found)) <= MOST_CHARACTERS
        except LimitError as refusal:
            assert 0 < len(str(refusal)) <= 1000
        assert time.monotonic() - began < 10  # a child begins meanwhile


def test_text_is_that_of_the_sandbox_whoever_asks() -> None:
    turns = [{"role": "user", "content": "ä\u2028<'\"😀"}] * 3
    expected = environment().from_string(CHATML).render(messages=turns)
    found: list[str] = []

    def ask() -> None:
        found.append(sandbox().from_string(CHATML).render(messages=turns))

    threads = [threading.Thread(target=ask) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [expected] * 8


def test_words_that_a_template_raises_are_said() -> None:
    with pytest.raises(LimitError, match="roles must alternate"):
        template = sandbox().from_string(
            "{{ raise_exception('roles must alternate') }}"
        )
        template.render()


def test_a_template_that_is_none_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "template"
    path.write_text("{% if %}")
    with pytest.raises(KvlatheError, match="line 1"):
        read_template(path)


def test_a_child_that_was_killed_is_replaced() -> None:
    root = Limited("math", "sqrt", seconds=10)
    assert root(9.0) == 3
    (child,) = root._idle
    child.kill()
    child.wait()
    assert root(16.0) == 4
    with pytest.raises(LimitError, match=r"domain|nonnegative"):
        root(-1.0)


def test_calls_that_take_long_hold_up_no_other() -> None:
    """Short ones of many threads share a few children; long ones have their own, which
    end once nobody needs them."""
    sleep = Limited("time", "sleep", seconds=20)
    sleep(0.0)
    slow = [threading.Thread(target=sleep, args=(3.0,)) for _ in range(4)]
    for thread in slow:
        thread.start()
    time.sleep(0.5)
    began = time.monotonic()
    sleep(0.0)
    assert time.monotonic() - began < 2
    for thread in slow:
        thread.join()
    assert len(sleep._idle) == sleep._children == MOST_IDLE
    sleep.close()
    assert sleep._children == 0


def test_more_calls_than_children_wait_and_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two children are asked in turns, by six threads that have no patience."""
    monkeypatch.setattr(limited, "MOST_CHILDREN", 2)
    sleep, most, done = Limited("time", "sleep", seconds=20), [0], list[object]()
    started = sleep._started

    def counted() -> limited.Child:
        most.append(sleep._children)
        return started()

    monkeypatch.setattr(sleep, "_started", counted)
    threads = [
        threading.Thread(target=lambda: done.append(sleep(0.2))) for _ in range(6)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert done == [None] * 6 and max(most) == 2
    sleep.close()


def test_children_of_calls_that_run_while_it_is_closed_end_with_their_calls() -> None:
    sleep = Limited("time", "sleep", seconds=20)
    sleep(0.0)
    (child,) = sleep._idle
    slow = threading.Thread(target=sleep, args=(0.5,))
    slow.start()
    while sleep._idle:
        time.sleep(0.01)
    sleep.close()
    assert child.poll() is None
    slow.join()
    assert not sleep._idle and sleep._children == 0 and child.poll() is not None


def test_a_child_ends_with_its_parent() -> None:
    program = (
        "from kvlathe.base.limited import Limited; root = Limited('math', 'sqrt', 10.0);"
        "print(root(4.0), root._idle[0].pid, flush=True); import os; os._exit(0)"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=60
    )
    answer, child = done.stdout.split()
    assert answer == "2.0"
    for _ in range(200):
        alive = subprocess.run(["kill", "-0", child], capture_output=True)
        if alive.returncode:
            return
        time.sleep(0.05)
    pytest.fail("the child is still there")


def test_a_child_answers_where_more_files_are_open_than_select_takes() -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = min(hard, 2048)
    if wanted < 1100:
        pytest.skip(f"this process may open {hard} files")
    resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
    held = [os.open(os.devnull, os.O_RDONLY) for _ in range(1040)]
    try:
        assert Limited("math", "sqrt", seconds=10)(25.0) == 5
    finally:
        for file in held:
            os.close(file)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
