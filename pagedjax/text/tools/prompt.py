"""Tools, calls and results -> messages for a chat template."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from pagedjax.text.messages import for_template
from pagedjax.text.surrogates import check_whole
from pagedjax.text.tools.definitions import MAX_LEVELS, Tool, too_deep
from pagedjax.text.tools.formats import Dialect

# The system text for a chat template that does not know tools. It ends with the form of a call.
DEFAULT_PROMPT = """You can call functions. Each line between <tools> and </tools> describes one of them as JSON:
<tools>
{tools}
</tools>
To call a function, end the answer with its name and its arguments as JSON, in this form:
{form}
Several calls follow each other, one in each such form.
The results come in the next message, between <tool_response> and </tool_response>.
If no function helps, answer in plain text."""

Messages = list[dict[str, Any]]


def conversation(
    messages: Sequence[Mapping[str, Any]], tools: Sequence[Tool], dialect: Dialect
) -> Messages:
    """The messages as a chat template takes them: arguments of calls are objects, and content is
    never missing.

    For a template that knows no tools, calls and results become text, and the tools become a part
    of the system text.

    Raises:
        ValueError: a call or a result cannot be read; the message names its place.
    """
    plain = [_message(f"messages.{i}", message) for i, message in enumerate(messages)]
    plain = for_template(plain)
    if dialect.native:
        return plain
    plain = _as_text(plain, dialect)
    return _with_system_text(plain, system_text(tools, dialect)) if tools else plain


def system_text(tools: Sequence[Tool], dialect: Dialect) -> str:
    """The default system text."""
    lines = "\n".join(json.dumps(tool.shown(), ensure_ascii=False) for tool in tools)
    form = dialect.format.text_of([("NAME", "{...}")])
    return DEFAULT_PROMPT.format(tools=lines, form=form)


def _message(place: str, message: Any) -> dict[str, Any]:
    if not isinstance(message, Mapping):
        return message  # the tokenizer says what is wrong
    if message.get("role") == "tool" and not isinstance(message.get("tool_call_id"), str):
        raise ValueError(
            f"{place} has the role 'tool' and no tool_call_id; "
            "give the id of the call that it answers"
        )
    if message.get("role") == "function" or message.get("function_call") is not None:
        raise ValueError(
            f"{place} is of the older API of functions; "
            "write tool_calls in place of function_call, and the role 'tool' for results"
        )
    calls = message.get("tool_calls")
    if calls is None or message.get("role") != "assistant":
        return dict(message)
    if not isinstance(calls, Sequence) or isinstance(calls, (str, bytes)):
        raise ValueError(f"{place}.tool_calls is {calls!r:.80}; it must be a list of calls")
    read_calls = [_call(f"{place}.tool_calls.{i}", call) for i, call in enumerate(calls)]
    fields = {name: value for name, value in message.items() if name != "tool_calls"}
    fields["content"] = message.get("content")
    return {**fields, "tool_calls": read_calls} if read_calls else fields


def _call(place: str, call: Any) -> dict[str, Any]:
    """A call with its arguments as an object. OpenAI's clients send the arguments as JSON text."""
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        raise ValueError(
            f"{place} is {call!r:.80}; "
            "a call has an id, the type 'function', and a function with a name"
        )
    arguments = function.get("arguments")
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments) if arguments.strip() else {}
        except (ValueError, RecursionError) as error:
            raise ValueError(f"{place}.function.arguments is no JSON: {error}") from None
    if not isinstance(arguments, Mapping):
        raise ValueError(
            f"{place}.function.arguments is {arguments!r:.80}; it must be a JSON object, as text"
        )
    check_whole(f"{place}.function.arguments", dict(arguments))
    if too_deep(arguments):
        raise ValueError(
            f"{place}.function.arguments has more than {MAX_LEVELS} levels; make it flatter"
        )
    # other fields of the call are left out, because they would appear in prompts
    call_id = {"id": call["id"]} if call.get("id") is not None else {}
    return {
        **call_id,
        "type": "function",
        "function": {"name": function["name"], "arguments": dict(arguments)},
    }


def _as_text(messages: Messages, dialect: Dialect) -> Messages:
    """Returns messages in which calls are text of the assistant, and results of the user.

    Results that follow each other are one message.
    """
    plain: Messages = []
    follows_result = False
    for message in messages:
        role = message.get("role") if isinstance(message, Mapping) else None
        if role == "tool":
            text = f"<tool_response>\n{message['content']}\n</tool_response>"
            if follows_result:
                plain[-1] = {**plain[-1], "content": f"{plain[-1]['content']}\n{text}"}
            else:
                plain.append({"role": "user", "content": text})
            follows_result = True
            continue
        follows_result = False
        if role == "assistant" and message.get("tool_calls"):
            functions = [call["function"] for call in message["tool_calls"]]
            calls = [
                (function["name"], json.dumps(function["arguments"], ensure_ascii=False))
                for function in functions
            ]
            parts = (message["content"], dialect.format.text_of(calls))
            text = "\n".join(part for part in parts if part)
            message = {"role": "assistant", "content": text}
        plain.append(message)
    return plain


def _with_system_text(messages: Messages, text: str) -> Messages:
    """The messages with `text` behind the conversation's system text, or as its system text."""
    first = messages[0] if messages and isinstance(messages[0], Mapping) else {}
    if first.get("role") != "system":
        return [{"role": "system", "content": text}, *messages]
    return [{**first, "content": f"{first.get('content', '')}\n\n{text}".strip()}, *messages[1:]]
