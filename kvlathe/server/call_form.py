"""The form in which a chat template takes earlier calls. Most write arguments from data;
some (DeepSeek's, Phi's) join them to a text, and some write the calls of a message only
where its content is null. Nothing in a template says so: a trial with each form does."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from kvlathe.base.errors import KvlatheError
from kvlathe.server.fields import Json
from kvlathe.server.messages import Message

NAME, KEY, VALUE = "kvlathe_tool", "kvlathe_key", "kvlathe_value"
"""Words of the trial's call, which no template has."""
TRIAL_ID = "call00000"
"""Nine letters and digits: Mistral's templates take no other ids."""
TRIAL = (
    Message(role="user", content="?"),
    Message.model_validate(
        {
            "role": "assistant",
            "content": "",
            "tool_calls": [
                {
                    "id": TRIAL_ID,
                    "type": "function",
                    "function": {"name": NAME, "arguments": {KEY: VALUE}},
                }
            ],
        }
    ),
    Message.model_validate(
        {"role": "tool", "content": "!", "tool_call_id": TRIAL_ID, "name": NAME}
    ),
)


@dataclass(frozen=True, slots=True)
class CallForm:
    """``as_text``: arguments are JSON texts. ``without_content``: the content of a
    message that calls is null."""

    as_text: bool = False
    without_content: bool = False

    def turns(self, messages: Sequence[Message]) -> list[Json]:
        """The messages as the template takes them."""
        turns: list[Json] = []
        for message in messages:
            turn = message.for_template(self.as_text)
            if self.without_content and message.tool_calls:
                if turn["content"]:  # it would hide the calls
                    turns.append({"role": turn["role"], "content": turn["content"]})
                turn["content"] = None
            turns.append(turn)
        return turns


FORMS = (CallForm(), CallForm(True), CallForm(False, True), CallForm(True, True))


def form_of(render: Callable[[list[Json]], str]) -> CallForm | None:
    """The first form in which a template writes a call as it is: its arguments neither
    as Python nor as a text in a text. The common one where it writes none; None where it
    refuses all. ``render`` may raise KvlatheError."""
    wrote = False
    for form in FORMS:
        try:
            said = render(form.turns(TRIAL))
        except KvlatheError:
            continue
        wrote = True
        wrong = (f"'{KEY}'", f'\\"{KEY}')
        if all(word in said for word in (NAME, KEY, VALUE)) and not any(
            word in said for word in wrong
        ):
            return form
    return FORMS[0] if wrote else None
