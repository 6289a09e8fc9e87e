"""Every supported keyword of JSON Schema: a grammar accepts what a validator accepts, and nothing
else.
"""

from __future__ import annotations

import json

import jsonschema
import pytest

from pagedjax.options.params import StructuredOutputsParams
from pagedjax.text.structured import keywords
from tests.refusals import refused
from tests.structured.schemas import CASES


def accepts(grammars, grammar, value) -> bool:
    """Whether the text of a value is a whole answer."""
    parser = grammar.matcher().after([])
    tokens = grammars.tokenizer.encode(json.dumps(value, ensure_ascii=False))
    return parser.try_consume_tokens(tokens) == len(tokens) and parser.is_accepting()


@pytest.mark.parametrize("case", CASES, ids=[case.name for case in CASES])
def test_a_grammar_accepts_what_a_validator_accepts(grammars, case):
    schema = json.loads(case.schema) if isinstance(case.schema, str) else case.schema
    validator = jsonschema.Draft202012Validator(schema)
    # optional for a validator, and needs more libraries
    checks_format = "format" in json.dumps(case.schema)
    if not checks_format:
        assert [validator.is_valid(value) for value in case.good] == [True] * len(case.good)
        assert [validator.is_valid(value) for value in case.bad] == [False] * len(case.bad)
    grammar = grammars.compiled(StructuredOutputsParams(json=case.schema))
    assert [value for value in case.good if not accepts(grammars, grammar, value)] == []
    assert [value for value in case.bad if accepts(grammars, grammar, value)] == []


def test_there_are_many_schemas_and_they_use_every_supported_keyword():
    used = {
        name for case in CASES for _, schema in keywords.subschemas(case.schema) for name in schema
    }
    assert len({case.name for case in CASES}) == len(CASES) >= 300
    # the old name of `items` behind a tuple
    assert keywords.SUPPORTED - {"additionalItems"} <= used


@pytest.mark.parametrize("name", sorted(keywords.UNSUPPORTED))
def test_an_unsupported_keyword_is_refused_with_its_place(grammars, name):
    schema = {"type": "object", "properties": {"a/b": {"type": "array", "items": {name: {}}}}}
    with refused(rf"keyword '{name.replace('$', '.')}' at #/properties/a~1b/items/"):
        grammars.compiled(StructuredOutputsParams(json=schema))
    grammar = grammars.compiled(StructuredOutputsParams(json=schema, ignore_unsupported=True))
    assert grammar.ignored == (f"#/properties/a~1b/items/{name}",)
    assert accepts(grammars, grammar, {"a/b": [1, "x"]})


def test_an_unknown_keyword_is_refused_with_the_near_one(grammars):
    with refused(r"'minlength' at #/minlength.*did you mean 'minLength'"):
        grammars.compiled(StructuredOutputsParams(json={"type": "string", "minlength": 3}))


@pytest.mark.parametrize(
    "name", ["MinLength", "minLenght", "maxitems", "requird", "patern", "enums", "uniqueitems"]
)
def test_nearly_a_keyword_is_a_mistake(name):
    assert [place for place, _ in keywords.unsupported({"type": "string", name: 1})] == [
        f"#/{name}"
    ]


@pytest.mark.parametrize(
    "name", ["readonly", "Title", "version", "x-order", "_format", "$license", "isAutoIncrement"]
)
def test_names_of_others_constrain_nothing(grammars, name):
    grammar = grammars.compiled(StructuredOutputsParams(json={"type": "integer", name: 1}))
    assert accepts(grammars, grammar, 3)
    assert grammar.ignored == ()


def test_keys_that_may_repeat_are_not_counted(grammars):
    """{"a": 1, "a": 2} has one property, and the parser would count two."""
    with refused(r"minProperties.*may repeat"):
        grammars.compiled(StructuredOutputsParams(json={"type": "object", "minProperties": 2}))
