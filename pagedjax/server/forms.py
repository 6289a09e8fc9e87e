"""Forms of answers: `response_format`, `structured_outputs` and tools -> sampling parameters and
grammars.

Compiling takes up to a second, so these functions run in a request's thread.
"""

from __future__ import annotations

import dataclasses
import difflib
from collections.abc import Sequence
from typing import Any
from urllib.parse import quote

from pagedjax.llm import LLM
from pagedjax.params import SamplingParams, StructuredOutputsParams
from pagedjax.server.schema import GenerationBody, ResponseFormat
from pagedjax.structured.matcher import Grammar
from pagedjax.tools.use import ToolUse

HEADER = "X-Ignored-Keywords"
MAX_HEADER = 2000  # characters
FIELDS = [field.name for field in dataclasses.fields(StructuredOutputsParams)]
SCHEMA = "response_format.json_schema.schema"  # instead of the engine's name, in errors


def asked(body: GenerationBody) -> StructuredOutputsParams | None:
    """The form that a request asks for.

    Raises:
        ValueError: two forms, or one that is wrong.
    """
    wanted, given = body.response_format, body.structured_outputs
    if given is None:
        return None if wanted is None else _of_response_format(wanted)
    if wanted is not None and wanted.type != "text":
        raise ValueError(
            "response_format and structured_outputs both give the answer's form; leave one of them "
            "out"
        )
    if unknown := [name for name in given if name not in FIELDS]:
        near = difflib.get_close_matches(unknown[0][:40], FIELDS, n=1)
        hint = f"; did you mean {near[0]!r}?" if near else f"; there are {', '.join(FIELDS)}"
        raise ValueError(f"structured_outputs has the unknown field {unknown[0]!r:.80}{hint}")
    return StructuredOutputsParams(
        **{name: value for name, value in given.items() if value is not None}
    )


def _of_response_format(wanted: ResponseFormat) -> StructuredOutputsParams | None:
    if wanted.type != "json_schema":
        if wanted.json_schema is not None:
            raise ValueError(
                f"response_format has a json_schema and the type {wanted.type!r}; set it to "
                "'json_schema'"
            )
        return None if wanted.type == "text" else StructuredOutputsParams(json_object=True)
    if wanted.json_schema is None or wanted.json_schema.schema_ is None:
        raise ValueError(
            'response_format needs a json_schema: {"name": ..., "schema": {...}} with this type'
        )
    return StructuredOutputsParams(
        json=wanted.json_schema.schema_, ignore_unsupported=wanted.json_schema.strict is False
    )


def with_tools(
    llm: LLM, params: Any, use: ToolUse, body: GenerationBody
) -> tuple[Any, tuple[str, ...]]:
    """The parameters with the grammar of tools, and the keywords of schemas that it ignores."""
    try:
        return use.applied(params, llm.tokenizer)
    except ValueError as error:
        raise _renamed(error, body) from error


def grammar(llm: LLM, params: Any, use: ToolUse | None, body: GenerationBody) -> Grammar | None:
    """The compiled grammar of a request; None if its answer is free.

    Raises:
        ValueError: it cannot be compiled; names the field of the request.
    """
    if not isinstance(params, SamplingParams) or params.structured_outputs is None:
        return None
    if use is not None and use.tools:
        return use.compiled(llm.session.grammars, params)
    try:
        return llm.session.grammars.compiled(params.structured_outputs)
    except ValueError as error:
        raise _renamed(error, body) from error


def _renamed(error: ValueError, body: GenerationBody) -> ValueError:
    """The error with the field's name of this request."""
    if body.structured_outputs is not None or body.response_format is None:
        return error
    message = str(error).replace("structured_outputs.json_object", "response_format")
    message = message.replace(
        "ignore_unsupported (strict: false in response_format)", "strict: false beside the schema"
    )
    message = message.replace("structured_outputs.json", SCHEMA)
    return ValueError(message.replace("structured_outputs", "response_format"))


def headers(ignored: Sequence[str]) -> dict[str, str]:
    """The response header that lists ignored keywords, as JSON pointers with percent signs where
    HTTP needs them."""
    if not ignored:
        return {}
    return {HEADER: ", ".join(quote(place, safe="#/$~-_.") for place in ignored)[:MAX_HEADER]}
