"""Forms that cannot be compiled say what is wrong, before anything is queued; others are compiled
once.
"""

from __future__ import annotations

import time
from functools import partial

import pytest

from pagedjax import SamplingParams
from pagedjax.options.params import BeamSearchParams, StructuredOutputsParams
from pagedjax.text.structured import grammars as module
from pagedjax.text.structured import keywords
from pagedjax.text.structured.grammars import Grammars
from pagedjax.text.structured.matcher import MaskRow, masks
from pagedjax.text.tokenizer import NoTokenizer
from tests.refusals import refused
from tests.structured.schemas import SHUT, array, integer, opened, typed


def compiled(grammars, **fields):
    return grammars.compiled(StructuredOutputsParams(**fields))


def allows(grammars, text: str, **fields) -> bool:
    """Whether an answer may begin with a text."""
    tokens = grammars.tokenizer.encode(text)
    return compiled(grammars, **fields).matcher().allowed([], tokens) == len(tokens)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({}, "has nothing; give exactly one"),
        ({"regex": "a", "choice": ["a"]}, "has regex and choice; give exactly one"),
        ({"json_object": False}, "has nothing"),
        ({"regex": ""}, "regex is ''; it must be a text"),
        ({"grammar": 3}, "grammar is 3; it must be a text"),
        ({"choice": ["a", ""]}, "choice is .*none of them empty"),
        ({"json": 3}, "json is 3; it must be a JSON schema"),
        ({"json": {"a": {1}}}, "cannot be written as JSON"),
        (
            {"json_object": True, "disable_any_whitespace": 1},
            "disable_any_whitespace is 1; it must be True or False",
        ),
        (
            {"json_object": True, "disable_any_whitespace": True, "whitespace_pattern": " "},
            "give one of them",
        ),
    ],
)
def test_a_form_is_checked_when_it_is_written(fields, message):
    with refused(message):
        StructuredOutputsParams(**fields)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"json": "{"}, "is not JSON"),
        ({"json": "3"}, "a schema is an object, true or false"),
        ({"json": {"type": "strin"}}, "at #: Invalid type: strin"),
        (
            {"json": {"items": {"properties": {"a": {"format": "dat"}}}}},
            "at #/items/properties/a: Unknown format: dat",
        ),
        (
            {"json": {"properties": {"a": {"$ref": "#/x"}}}},
            "at #/properties/a: Pointer '/x' does not exist",
        ),
        ({"json": {"$ref": "https://example.org/schema"}}, "does not fetch resources"),
        (
            {"json": {"type": "integer", "minimum": 5, "maximum": 3}},
            r"minimum \(5\) is greater than maximum \(3\)",
        ),
        ({"json": False}, "it must be a JSON schema"),
        ({"json": "false"}, "false allows no answer"),
        (
            {"json": {"x-guidance": {"lenient": True}}},
            "x-guidance.*use the fields of structured_outputs",
        ),
        ({"regex": "("}, "unclosed group"),
        ({"regex": "(?=a)b"}, "look-around"),
        ({"regex": r"[^\s\S]"}, "regex"),
        ({"grammar": "start: UNKNOWN"}, "unknown name"),
        ({"grammar": "start: " + "(" * 5000}, "nested"),
        ({"regex": "a" * 20_000}, "has 20000 characters; the limit is 16384"),
        ({"choice": ["a" * 200_000]}, "has 200000 characters; the limit is 131072"),
    ],
)
def test_a_form_that_cannot_be_compiled_is_refused(grammars, fields, message):
    with refused(message):
        grammars.compiled(StructuredOutputsParams(**fields))


def test_a_schema_is_of_bounded_depth_and_size(grammars):
    def deep(levels: int) -> dict:
        schema = integer()
        for _ in range(levels):
            schema = array(schema)
        return schema

    assert compiled(grammars, json=deep(50))
    with refused("more than 100 levels deep at #/items"):
        compiled(grammars, json=deep(120))
    with refused("more than 20000 schemas"):
        compiled(grammars, json={"anyOf": [{}] * 20_001})


HOSTILE = [
    {"regex": r"(\p{L}{1,1000}){1,1000}"},
    {"regex": "(.*a.{200}){20}"},
    {"regex": "((a{1,100}){1,100}){1,100}"},
    {"json": {"anyOf": [opened((), **{f"a{i}": {}, f"b{i}": {}}) for i in range(500)]}},
    {
        "json": {
            "properties": {
                f"p{i}": {"pattern": f"(a|b){{1,200}}[a-z]{{5,{i + 6}}}"} for i in range(1000)
            }
        }
    },
    {"grammar": 'start: a\na: a a | "x" | ""'},
]


@pytest.mark.parametrize("fields", HOSTILE, ids=[str(fields)[:40] for fields in HOSTILE])
def test_a_hostile_form_costs_a_bounded_time(grammars, fields):
    """The bounds are counts of the parser; this test only sees that they work, on a machine of any
    speed.
    """
    started = time.process_time()
    compiled(grammars, **fields).matcher().after([]).compute_bitmask()
    assert time.process_time() - started < 10


def test_a_grammar_is_compiled_once_and_the_oldest_is_forgotten(grammars, monkeypatch):
    monkeypatch.setattr(module, "MAX_KEPT", 2)
    first = compiled(grammars, regex="first")
    compiled(grammars, regex="second")
    assert compiled(grammars, regex="first") is first
    compiled(grammars, regex="third")
    compiled(grammars, regex="fourth")
    assert compiled(grammars, regex="first") is not first


def test_forms_are_equal_if_they_say_the_same():
    schema = array(integer())
    assert StructuredOutputsParams(json=schema) == StructuredOutputsParams(json=dict(schema))
    assert StructuredOutputsParams(choice=["a", "b"]) == StructuredOutputsParams(choice=("a", "b"))


def test_a_pydantic_model_is_a_schema(grammars):
    from pydantic import BaseModel

    class Point(BaseModel):
        x: int
        label: str | None = None

    assert allows(grammars, '{"x": 3, "label": null}', json=Point)


def test_white_space_is_bounded_and_can_be_forbidden(grammars):
    allowed = partial(allows, grammars, json=typed("array"))
    assert allowed("[1," + " " * 16 + "2]")
    assert not allowed("[1," + " " * 17 + "2]")
    assert allowed("[1,2]", disable_any_whitespace=True)
    assert not allowed("[1, 2]", disable_any_whitespace=True)
    assert allowed("[1,  2]", whitespace_pattern="  ")
    assert not allowed("[1, 2]", whitespace_pattern="  ")


def test_objects_can_be_closed(grammars):
    allowed = partial(allows, grammars, json=opened((), a=opened((), b={})))
    assert allowed('{"a": {"c": 1}}')
    assert not allowed('{"a": {"c": 1}}', disable_additional_properties=True)
    assert allowed('{"a": {"b": 1}}', disable_additional_properties=True)


def test_what_does_not_go_together_is_refused():
    form = StructuredOutputsParams(regex="a+")
    for fields, message in (
        ({"min_tokens": 2}, "min_tokens is 2; it must be 0 with structured_outputs"),
        ({"ignore_eos": True}, "ignore_eos is True; it must be False with structured_outputs"),
        ({"bad_words": "x"}, "bad_words is .*; it must be empty with structured_outputs"),
        (
            {"allowed_token_ids": [3]},
            "allowed_token_ids is .*; it must be None with structured_outputs",
        ),
    ):
        with refused(message):
            SamplingParams(structured_outputs=form, **fields)
    with refused("structured_outputs is 'a'; it must be None or a StructuredOutputsParams"):
        SamplingParams(structured_outputs="a")  # type: ignore
    with pytest.raises(TypeError):
        BeamSearchParams(beam_width=2, structured_outputs=form)  # type: ignore


def test_a_model_needs_a_tokenizer_and_an_end(tiny):
    form = StructuredOutputsParams(regex="a+")
    with refused("this model has no tokenizer"):
        Grammars(NoTokenizer(), 320, (2,)).compiled(form)
    with refused("this model has none"):
        Grammars(tiny.tokenizer, 320, ()).compiled(form)


def test_without_the_library_the_error_names_the_extra(tiny, monkeypatch):
    import sys

    monkeypatch.setitem(sys.modules, "llguidance", None)
    with refused(r"pip install 'pagedjax\[structured\]'"):
        Grammars(tiny.tokenizer, 320, (2,)).compiled(StructuredOutputsParams(regex="a+"))


def test_a_refused_form_queues_nothing(tiny_llm):
    good, bad = (
        SamplingParams(structured_outputs=StructuredOutputsParams(regex=text))
        for text in ("a+", "(")
    )
    with refused("unclosed group"):
        tiny_llm.generate(["a", "b"], [good, bad])
    assert not tiny_llm.engine.has_work


@pytest.mark.parametrize(
    ("pattern", "error"),
    [
        (
            r"\s{0,3}",
            r"whitespace_pattern is '.*s\{0,3\}', which allows texts .* no white space of JSON",
        ),
        (".{0,2}", "which allows texts that begin with"),
        ("( |a)?", "which allows texts that begin with 'a'"),
        ("(", r"whitespace_pattern is '\(': .*cannot be read"),
    ],
)
def test_white_space_is_that_of_json(grammars, pattern, error):
    with refused(error):
        compiled(grammars, json=typed("object"), whitespace_pattern=pattern)
    for allowed in (r"[ ]?", r"\n?", "(\n|\t){0,2}", r"[\x20\x0A\x0D\x09]{0,3}", ""):
        compiled(grammars, json=integer(), whitespace_pattern=allowed or None)


def objects(patterns: dict, additional: dict | None = None, **properties) -> dict:
    closed = SHUT if additional is None else additional
    return typed("object", properties=properties, patternProperties=patterns, **closed)


NUMBER = integer()


@pytest.mark.parametrize(
    "schema",
    [
        objects({"^n$": NUMBER}, n=NUMBER),
        objects({"^[nm]$": NUMBER}, n=NUMBER, m=NUMBER, o={}),
        objects({"^n$": NUMBER, "^m$": NUMBER}, n=NUMBER, m=NUMBER),
        objects({"^(n|m)$": NUMBER}, n=NUMBER, m=NUMBER),
        objects({"^(?:n|m)$": NUMBER}, n=NUMBER, m=NUMBER),
        objects({"^n$|^m$": NUMBER}, n=NUMBER, m=NUMBER),
        objects({"^[n|]$": NUMBER}, **{"n": NUMBER, "|": NUMBER}),
        array(objects({r"^a\.b$": NUMBER}, **{"a.b": NUMBER})),
    ],
)
def test_patterns_of_known_keys_alone_are_refused(grammars, schema):
    with refused(r"'patternProperties' at .* match keys of properties alone: the keys"):
        compiled(grammars, json=schema)


@pytest.mark.parametrize(
    "schema",
    [
        objects({"^n": NUMBER}, n=NUMBER),
        objects({"n": NUMBER}, n=NUMBER),
        objects({"^n$": NUMBER}, {}, n=NUMBER),
        objects({"^n$": NUMBER}, m=NUMBER),
        objects({"^(n|m)$": NUMBER}, n=NUMBER),
        objects({"^n$|m": NUMBER}, n=NUMBER, m=NUMBER),
        objects({"^[a-n]$": NUMBER}, n=NUMBER),
    ],
)
def test_patterns_of_other_keys_too_are_compiled(grammars, schema):
    compiled(grammars, json=schema)


def test_the_library_still_needs_the_guard_for_patterns_of_known_keys(grammars, monkeypatch):
    """If this fails, llguidance refuses the comma, and `_names_all_keys` is not needed any more."""
    monkeypatch.setattr(keywords, "_names_all_keys", lambda schema: False)
    schema = objects({"^n$": NUMBER}, n=NUMBER)
    matcher = compiled(grammars, json=schema, disable_any_whitespace=True).matcher()
    output = grammars.tokenizer.encode('{"n":5,')
    assert matcher.allowed([], output) == len(output)
    masks([MaskRow(matcher, output, [], 0, grammars.eos_token_ids)], 1)
    assert matcher.error is not None
