"""Tools, calls and results in a prompt: as the chat template writes them, or as text in the default
form.
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from pagedjax.text.tokenizer import Tokenizer
from pagedjax.text.tools.formats import (
    HERMES,
    LLAMA,
    MISTRAL,
    MISTRAL_ARGS,
    MISTRAL_SPACED,
    Dialect,
    dialect,
)
from pagedjax.text.tools.prompt import DEFAULT_PROMPT, conversation, system_text
from pagedjax.text.tools.use import tool_use
from tests.refusals import refused
from tests.tools.functions import call, function

TOOL = function("add", description="Adds.", parameters={"type": "object"})


ADD = call('{"a": 1, "b": 2}', "add")
CHAT = [
    {"role": "user", "content": "1 + 2?"},
    {"role": "assistant", "content": None, "tool_calls": [ADD, {**ADD, "id": "c2"}]},
    {"role": "tool", "tool_call_id": "c1", "content": "3"},
    {"role": "tool", "tool_call_id": "c2", "content": "three"},
]
KNOWS = "{% for t in tools or [] %}{{ t | tojson }}{% endfor %}|{% for m in messages %}{{ m.role }}={{ m.content }}" \
    "{% for c in m.tool_calls or [] %}<tool_call>{{ c.function.arguments.a }}{% endfor %};{% endfor %}"  # fmt: skip


@pytest.mark.parametrize(
    ("template", "expected"),
    [
        (None, Dialect(HERMES, False)),
        ("{{ messages }}", Dialect(HERMES, False)),
        ("{{ tools }} <tool_call> arguments", Dialect(HERMES, True)),
        # calls in another form
        ("{{ tools }} <tool_call>\\n<function= arguments", Dialect(HERMES, False)),
        ("{{ tools }} ...", Dialect(HERMES, False)),
        ("{{ tools }} [TOOL_CALLS] [", Dialect(MISTRAL_SPACED, True)),
        ("{{ tools }} [TOOL_CALLS][", Dialect(MISTRAL, True)),
        ("{{ tools }} [TOOL_CALLS] [ARGS]", Dialect(MISTRAL_ARGS, True)),
        (
            """{{ tools }} '{"name": "' + tool_call.name + '", ' '"parameters": '""",
            Dialect(LLAMA, True),
        ),
    ],
)
def test_the_format_is_found_in_the_chat_template(template, expected):
    assert dialect(template) == expected


def test_a_template_may_take_one_call_in_a_message():
    template = "{{ tools }} tool_call '\"parameters\": ' This model only supports single tool-calls at once!"
    assert (
        dialect(template).format
        == dialect(template, "llama3_json").format
        == replace(LLAMA, single=True)
    )


def test_an_operator_may_name_the_format():
    assert dialect("{{ tools }} ...", "hermes") == Dialect(HERMES, True)
    assert dialect("{{ messages }}", "llama3_json") == Dialect(LLAMA, False)
    assert dialect("{{ tools }} [TOOL_CALLS] [", "mistral").format is MISTRAL_SPACED
    with refused("tool_call_parser is 'x'; it must be one of hermes, llama3_json, mistral"):
        dialect(None, "x")


def test_a_template_that_knows_tools_gets_them(tiny):
    tokenizer = Tokenizer(tiny.tokenizer.backend, (2,), {}, KNOWS)
    use = tool_use(tokenizer, [TOOL])
    text = tokenizer.decode(use.tokens(tokenizer, CHAT))
    assert json.loads(text.split("|")[0]) == TOOL
    assert text.split("|")[1] == "user=1 + 2?;assistant=<tool_call>1<tool_call>1;tool=3;tool=three;"
    none = tool_use(tokenizer, [TOOL], "none")
    assert tokenizer.decode(none.tokens(tokenizer, CHAT)).startswith("|user=")


def test_without_such_a_template_they_become_text():
    use = tool_use(Tokenizer(None, (2,), {}, "{{ messages }}"), [TOOL])  # type: ignore[arg-type]
    messages = conversation(CHAT, use.tools, use.dialect)
    assert [message["role"] for message in messages] == ["system", "user", "assistant", "user"]
    assert messages[0]["content"] == system_text(use.tools, use.dialect)
    assert json.dumps(TOOL) in messages[0]["content"].splitlines()
    assert (
        '<tool_call>\n{"name": "NAME", "arguments": {...}}\n</tool_call>' in messages[0]["content"]
    )
    call = '<tool_call>\n{"name": "add", "arguments": {"a": 1, "b": 2}}\n</tool_call>'
    assert messages[2] == {"role": "assistant", "content": f"{call}\n{call}"}
    results = "<tool_response>\n3\n</tool_response>\n<tool_response>\nthree\n</tool_response>"
    assert messages[3] == {"role": "user", "content": results}


def test_the_documents_show_the_system_text():
    page = (Path(__file__).parents[2] / "docs" / "design" / "tools.md").read_text(encoding="utf-8")
    assert [line for line in DEFAULT_PROMPT.splitlines() if line not in page] == [
        "{tools}",
        "{form}",
    ]


def test_the_system_text_stays_first():
    use = tool_use(Tokenizer(None, (2,), {}, None), [TOOL])  # type: ignore[arg-type]
    messages = conversation(
        [{"role": "system", "content": "Be kind."}, *CHAT], use.tools, use.dialect
    )
    assert messages[0]["content"].startswith("Be kind.\n\nYou can call functions.")
    assert len([message for message in messages if message["role"] == "system"]) == 1
    without = conversation(CHAT[:1], (), use.dialect)
    assert without == CHAT[:1]


@pytest.mark.parametrize("native", [False, True])
@pytest.mark.parametrize(
    ("message", "error"),
    [
        ({"role": "tool", "content": "3"}, "messages.0 has the role 'tool' and no tool_call_id"),
        (
            {"role": "function", "name": "f", "content": "3"},
            "messages.0 is of the older API of functions; write",
        ),
        (
            {"role": "assistant", "function_call": {"name": "f"}},
            "messages.0 is of the older API of functions",
        ),
        ({"role": "assistant", "tool_calls": 3}, "messages.0.tool_calls is 3; it must be a list"),
        ({"role": "assistant", "tool_calls": [3]}, "messages.0.tool_calls.0 is 3; a call has"),
        (
            {"role": "assistant", "tool_calls": [{"function": {}}]},
            "messages.0.tool_calls.0 is {'function': {}}",
        ),
        ("{a}", "messages.0.tool_calls.1.function.arguments is no JSON: "),
        ("[" * 10**5, "messages.0.tool_calls.1.function.arguments is no JSON: "),
        (
            '{"a":' * 400 + "1" + "}" * 400,
            "messages.0.tool_calls.1.function.arguments has more than 300 levels",
        ),
        ("[]", r"messages.0.tool_calls.1.function.arguments is \[\]; it must be a JSON object"),
        (3, "messages.0.tool_calls.1.function.arguments is 3; it must be a JSON object"),
    ],
)
def test_a_wrong_message_is_named_by_its_place(native, message, error):
    if not isinstance(message, dict):
        message = {"role": "assistant", "tool_calls": [ADD, call(message)]}
    with refused(error):
        conversation([message], (), Dialect(HERMES, native))


def calls_in_a_prompt(*calls: dict) -> dict:
    message = {"role": "assistant", "tool_calls": list(calls)}
    return conversation([message], (), Dialect(HERMES, True))[0]


def test_other_fields_of_calls_stay_out_of_prompts():
    extended = {**call("{}"), "index": 0}
    extended["function"]["parsed_arguments"] = {"x": 1}
    assert calls_in_a_prompt(extended)["tool_calls"] == [call({})]


def test_arguments_may_be_an_object_or_empty():
    for arguments, expected in (({"a": 1}, {"a": 1}), ("", {}), (" {} ", {})):
        message = calls_in_a_prompt(call(arguments))
        assert message["tool_calls"][0]["function"]["arguments"] == expected
        assert message["content"] == ""
