"""Forms of answers: from `response_format`, `structured_outputs` and tools to grammars.

Compiling takes up to a second, so these functions run in a request's thread.
"""

from __future__ import annotations

import dataclasses
import difflib
from collections.abc import Sequence
from typing import Any
from urllib.parse import quote

from pagedjax.llm import LLM
from pagedjax.options.params import SamplingParams, StructuredOutputsParams
from pagedjax.server.schema import GenerationBody, ResponseFormat
from pagedjax.text.structured.matcher import Grammar
from pagedjax.text.tools.use import ToolUse

HEADER = "X-Ignored-Keywords"
MAX_HEADER = 2000  # characters
FIELDS = [field.name for field in dataclasses.fields(StructuredOutputsParams)]
SCHEMA = "response_format.json_schema.schema"  # instead of the engine's name, in errors


def structured_outputs(body: GenerationBody) -> StructuredOutputsParams | None:
    """The form that a request asks for; None if its answer is free.

    Raises:
        ValueError: two forms, or one that is wrong.
    """
    response_format = body.response_format
    fields = body.structured_outputs
    if fields is None:
        return None if response_format is None else _structured_outputs_of(response_format)
    if response_format is not None and response_format.type != "text":
        raise ValueError(
            "response_format and structured_outputs both give the answer's form; leave one of them "
            "out"
        )
    for name in fields:
        if name not in FIELDS:
            similar = difflib.get_close_matches(name[:40], FIELDS, n=1)
            hint = f"did you mean {similar[0]!r}?" if similar else f"there are {', '.join(FIELDS)}"
            raise ValueError(f"structured_outputs has the unknown field {name!r:.80}; {hint}")
    options = {name: value for name, value in fields.items() if value is not None}
    return StructuredOutputsParams(**options)


def _structured_outputs_of(form: ResponseFormat) -> StructuredOutputsParams | None:
    schema = form.json_schema
    if form.type != "json_schema":
        if schema is not None:
            raise ValueError(
                f"response_format has a json_schema and the type {form.type!r}; set it to "
                "'json_schema'"
            )
        return None if form.type == "text" else StructuredOutputsParams(json_object=True)
    if schema is None or schema.schema_ is None:
        raise ValueError(
            'response_format needs a json_schema: {"name": ..., "schema": {...}} with this type'
        )
    return StructuredOutputsParams(json=schema.schema_, ignore_unsupported=schema.strict is False)


def with_tools(
    llm: LLM, params: Any, use: ToolUse, body: GenerationBody
) -> tuple[Any, tuple[str, ...]]:
    """The parameters with the grammar of tools, and the keywords of schemas that it ignores."""
    try:
        return use.with_grammar(params, llm.tokenizer)
    except ValueError as error:
        raise _with_field_names(error, body) from error


def grammar(llm: LLM, params: Any, use: ToolUse | None, body: GenerationBody) -> Grammar | None:
    """The compiled grammar of a request; None if its answer is free.

    Raises:
        ValueError: it cannot be compiled; names the field of the request.
    """
    if not isinstance(params, SamplingParams) or params.structured_outputs is None:
        return None
    if use is not None and use.tools:
        return use.compiled_grammar(llm.session.grammars, params)
    try:
        return llm.session.grammars.compiled(params.structured_outputs)
    except ValueError as error:
        raise _with_field_names(error, body) from error


def _with_field_names(error: ValueError, body: GenerationBody) -> ValueError:
    """The error with the names of this request's fields."""
    if body.structured_outputs is not None or body.response_format is None:
        return error
    message = str(error).replace("structured_outputs.json_object", "response_format")
    message = message.replace(
        "ignore_unsupported (strict: false in response_format)", "strict: false beside the schema"
    )
    message = message.replace("structured_outputs.json", SCHEMA)
    return ValueError(message.replace("structured_outputs", "response_format"))


def headers(ignored: Sequence[str]) -> dict[str, str]:
    """The response header that lists ignored keywords.

    They are JSON pointers, with percent signs where HTTP needs them.
    """
    if not ignored:
        return {}
    text = ", ".join(quote(pointer, safe="#/$~-_.") for pointer in ignored)
    return {HEADER: text[:MAX_HEADER]}
