"""Chat templates: which one a folder has, and that one which cannot run is refused."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from kvlathe.base.chat_template import (
    SETTINGS_FILE,
    TEMPLATE_FILE,
    chat_templates,
    check,
    read_template,
    sandbox,
)
from kvlathe.base.errors import KvlatheError

MARKED = """{% for m in messages %}
{% generation %}
{{ m.content }}
{% endgeneration %}
{% endfor %}"""


@pytest.mark.parametrize("content", [None, b"{% for %}", b"\xff"])
def test_a_file_that_is_no_template_is_refused(
    tmp_path: Path, content: bytes | None
) -> None:
    if content is not None:
        (tmp_path / "chat.jinja").write_bytes(content)
    with pytest.raises(KvlatheError, match="is no chat template"):
        read_template(tmp_path / "chat.jinja")


def test_words_marked_for_training_are_words() -> None:
    messages = [{"content": "one"}, {"content": "two"}]
    text = sandbox().from_string(MARKED).render(messages=messages)
    assert text.split() == ["one", "two"]


@pytest.mark.parametrize(
    ("template", "reason"),
    [
        ("{% for %}", "line 1"),
        ("a\n{{ x | no_such_filter }}", "line 2: No filter named"),
        ("{% if a %}" * 200 + "{% endif %}" * 200, "cannot run"),
        ("{{ " + "(" * 9999 + ")" * 9999 + " }}", "cannot run"),
    ],
)
@pytest.mark.parametrize("file", [TEMPLATE_FILE, SETTINGS_FILE])
def test_a_template_that_cannot_run_is_refused(
    tmp_path: Path, file: str, template: str, reason: str
) -> None:
    settings = json.dumps({"chat_template": template})
    text = template if file == TEMPLATE_FILE else settings
    (tmp_path / file).write_text(text)
    with pytest.raises(KvlatheError, match=reason):
        check(tmp_path)


@pytest.mark.parametrize(
    "template", [5, {"a": 1}, [{"name": "default", "template": 5}], True]
)
def test_a_template_that_is_not_text_is_refused(
    tmp_path: Path, template: object
) -> None:
    (tmp_path / SETTINGS_FILE).write_text(json.dumps({"chat_template": template}))
    with pytest.raises(KvlatheError, match="it is not text"):
        check(tmp_path)


@pytest.mark.parametrize("template", [None, [], [5], [{"name": "tool_use"}]])
def test_a_folder_may_have_no_template(tmp_path: Path, template: object) -> None:
    (tmp_path / SETTINGS_FILE).write_text(json.dumps({"chat_template": template}))
    check(tmp_path)
    assert chat_templates(tmp_path) == {}


def test_a_template_file_that_is_not_utf8_is_refused(tmp_path: Path) -> None:
    (tmp_path / TEMPLATE_FILE).write_bytes(b"\xff")
    with pytest.raises(KvlatheError, match="cannot be read"):
        check(tmp_path)
