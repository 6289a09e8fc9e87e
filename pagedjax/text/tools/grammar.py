"""Tools -> the grammar of an answer, as Lark text for llguidance.

An answer is plain text, or text and then calls. A call has the name of a tool, and arguments that
obey its schema.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Sequence
from typing import Any

from pagedjax.options.params import StructuredOutputsParams
from pagedjax.text.structured import keywords, vocabulary
from pagedjax.text.structured.grammars import MAX_TEXT, WHITE_SPACE, schema_of
from pagedjax.text.tokenizer import Tokenizer
from pagedjax.text.tools.definitions import Tool
from pagedjax.text.tools.formats import CallFormat

# A schema with one of these keywords may have further properties
OPEN_KEYWORDS = {"additionalProperties", "patternProperties", "allOf", "anyOf", "oneOf", "$ref"}
# The rules by which the engine compiles other schemas
JSON_RULES = {"whitespace_pattern": WHITE_SPACE, "lenient": False}


def lark(
    tools: Sequence[Tool],
    form: CallFormat,
    tokenizer: Tokenizer,
    *,
    required: bool,
    parallel: bool,
    answer: Any,
) -> tuple[str, tuple[str, ...]]:
    """Returns the grammar, and the keywords of schemas that it ignores, each as the tool's name and
    a place.

    Args:
        required: whether an answer must be a call, without text. Else it may be text alone.
        parallel: whether several calls may follow each other.
        answer: the JSON schema of an answer that is no call; None is any text.

    Raises:
        ValueError: a keyword that is not supported, schemas that are too long, or a combination
            whose parts look alike.
    """
    marks = vocabulary.marks(tokenizer)

    def literal(text: str) -> str:
        return _literal(text, marks)

    ignored: list[str] = []
    rules = []
    for i, tool in enumerate(tools):
        schema, places = arguments_schema(tool)
        ignored += [f"{tool.name}{place}" for place in places]
        head = literal(f"{form.before}{tool.name}{form.after}")
        rules += [
            f"call_{i}: {head} args_{i} {literal(form.close)}",
            f"args_{i}: {_inline(schema)}",
        ]
    further_calls = f"({literal(form.between)} call)*" if parallel else ""
    rules += [
        f"calls: call {further_calls} {literal(form.end)}",
        "call: " + " | ".join(f"call_{i}" for i in range(len(tools))),
    ]
    if required:
        rules = [f"start: {literal(form.begin)} calls", *rules]
    elif answer is not None:
        if not form.trigger:
            raise ValueError(
                "response_format does not go with tools for this model, whose calls are bare JSON "
                "too; leave one of them out, or set tool_choice to 'required' or 'none'"
            )
        rules = [
            f"start: answer | {literal(form.begin)} calls",
            f"answer: {_inline(answer)}",
            *rules,
        ]
    else:
        rules = [*_text_or_calls(form, marks, tokenizer.special_ids), *rules]
    text = "\n".join(rules) + "\n"
    limit = MAX_TEXT["grammar"]
    if len(text) > limit:
        raise ValueError(
            f"tools have schemas of {len(text)} characters in all; the limit is {limit}; "
            "make them shorter"
        )
    return text, tuple(ignored)


def arguments_schema(tool: Tool) -> tuple[Any, tuple[str, ...]]:
    """Returns the schema of a tool's arguments, and the places of the keywords that are ignored.

    Parameters that a tool does not name are never given, unless its schema says more about them: a
    function would refuse them.
    """
    subject = f"tools: the schema of {tool.name!r}"
    schema, ignored = keywords.checked(
        tool.parameters, subject, option="strict: false for the tool", ignore=not tool.strict
    )
    if "properties" in schema and not OPEN_KEYWORDS & schema.keys():
        schema = {**schema, "additionalProperties": False}
    return schema, ignored


def answer_schema(form: StructuredOutputsParams | None) -> tuple[Any, tuple[str, ...]]:
    """Returns the JSON schema of an answer that is no call, and the keywords that are ignored.

    The schema is None for plain text.

    Raises:
        ValueError: another form than JSON, or a schema that is wrong.
    """
    if form is None:
        return None, ()
    if form.json_object:
        return {"type": "object"}, ()
    if form.json is None:
        raise ValueError(
            "structured_outputs go with tools as JSON alone (json, json_object); "
            "leave one of them out"
        )
    return schema_of(form)


def _text_or_calls(form: CallFormat, marks: dict[str, int], special: Collection[int]) -> list[str]:
    """The rules of an answer that is text, or text and then calls.

    Text may have the tokens that look like marks and are no part of calls, as `<think>`. A text and
    the trigger that ends it are one lazy lexeme, because a lexer never goes back to end a greedy
    lexeme earlier.
    """
    call_text = form.begin + form.before + form.after + form.close + form.between + form.end
    other_marks = [i for mark, i in marks.items() if mark not in call_text and i not in special]
    to_last_mark = f"(TEXT? <[{','.join(map(str, other_marks))}]>)* " if other_marks else ""
    if not form.trigger:  # a text does not begin with "{", because a call does
        return [f"start: {to_last_mark}TEXT? | calls", r"TEXT: /[^{\s](?s:.*)/"]
    trigger = re.escape(form.trigger)
    text = f"TEXT: /(?s:.+)/ & ~/(?s:.*){trigger}(?s:.*)/"
    begin_rest = _literal(form.begin.removeprefix(form.trigger), marks)
    plain = f"{to_last_mark}TEXT?"
    if form.trigger in marks:
        return [f"start: {plain} | {plain} <[{marks[form.trigger]}]> {begin_rest} calls", text]
    return [
        f"start: {plain} | {to_last_mark}head {begin_rest} calls",
        text,
        f"head[lazy]: /(?s:.*){trigger}/",
    ]


def _inline(schema: Any) -> str:
    """A JSON schema in a rule."""
    if isinstance(schema, dict):
        schema = {**schema, "x-guidance": JSON_RULES}
    return "%json " + json.dumps(schema)


def _literal(text: str, marks: dict[str, int]) -> str:
    """A text in a rule, its marks as tokens."""
    marks_in_text = [re.escape(mark) for mark in marks if mark and mark in text]
    parts = re.split(f"({'|'.join(marks_in_text)})", text) if marks_in_text else [text]
    return " ".join(
        f"<[{marks[part]}]>" if part in marks else json.dumps(part) for part in parts if part
    )
