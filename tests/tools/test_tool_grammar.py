"""The grammar of tools: answers that it allows, by the tokens of tiny tokenizers with and without
marks.
"""

from __future__ import annotations

import pytest

from pagedjax.options.params import SamplingParams, StructuredOutputsParams
from pagedjax.text.structured.grammars import Grammars
from pagedjax.text.tokenizer import Tokenizer
from pagedjax.text.tools.use import tool_use
from pagedjax.weights.locate import open_checkpoint
from pagedjax.weights.tokenizer_files import load_tokenizer

MARKS = ("<tool_call>", "</tool_call>", "<think>", "</think>")


def tool(name: str, **properties) -> dict:
    schema = {
        "type": "object",
        "properties": properties,
        "required": list(properties),
        "additionalProperties": False,
    }
    return {"type": "function", "function": {"name": name, "parameters": schema}}


TOOLS = [
    tool("f", a={"type": "integer"}),
    tool("ff", b={"$ref": "#/$defs/x"}),
    {"type": "function", "function": {"name": "g"}},
]
TOOLS[1]["function"]["parameters"]["$defs"] = {"x": {"enum": ["x::=y", "z"]}}
F = ("f", '{"a": 1}')
FF = ("ff", '{"b": "x::=y"}')
G = ("g", "{}")
WRONG = [
    ("f", '{"a": "s"}'),
    ("f", "{}"),
    ("ff", '{"b": "y"}'),
    ("h", "{}"),
    ("g", '{"a": 1}'),
    ("f", '{"a": 1, "b": 2}'),
]


@pytest.fixture(scope="module", params=["bytes", "marks"])
def tokenizer(request, tiny_folder) -> Tokenizer:
    """The second one has tokens for the marks, as Qwen's."""
    from tokenizers import AddedToken

    built = load_tokenizer(open_checkpoint(tiny_folder))
    if request.param == "marks":
        built.backend.add_tokens(
            [AddedToken(mark, normalized=False, special=False) for mark in MARKS]
        )
        built.backend.add_special_tokens(
            [AddedToken(mark, normalized=False) for mark in ("[TOOL_CALLS]", "[ARGS]")]
        )
    return built


def accepts(
    tokenizer: Tokenizer,
    text: str,
    params=None,
    template: str = "tools <tool_call> arguments",
    **options,
) -> str:
    """ "complete", "prefix", or the text before the token that is refused."""
    with_template = Tokenizer(tokenizer.backend, (2,), {}, template)
    use = tool_use(with_template, options.pop("tools", TOOLS), **options)
    params, _ = use.with_grammar(params or SamplingParams(), with_template)
    matcher = use.compiled_grammar(
        Grammars(with_template, with_template.vocab_size, (2,)), params
    ).start.deep_copy()
    ids = with_template.encode(text)
    count = matcher.validate_tokens(ids)
    if count < len(ids):
        return with_template.decode(ids[:count], skip_special_tokens=False)
    matcher.consume_tokens(ids)
    return "complete" if matcher.is_accepting() else "prefix"


TEMPLATES = {
    "hermes": "tools <tool_call> arguments",
    "llama": 'tools tool_call "parameters": ',
    "mistral": "tools [TOOL_CALLS][",
    "spaced": "tools [TOOL_CALLS] [",
    "args": "tools [TOOL_CALLS] [ARGS]",
}


@pytest.mark.parametrize("template", TEMPLATES.values(), ids=TEMPLATES)
def test_an_answer_is_text_or_valid_calls(tokenizer, template):
    use = tool_use(Tokenizer(tokenizer.backend, (2,), {}, template))
    written = use.dialect.format.written
    for text in ("", "Hello", "a <tool_c\n[b] ü", "x {}"):
        assert accepts(tokenizer, text, template=template) == "complete"
    for calls in ([F], [FF], [G], [F, FF], [G, G, F]):
        text = written(calls)
        assert accepts(tokenizer, text, template=template) == "complete"
        assert accepts(tokenizer, text, template=template, choice="required") == "complete"
        accepted = accepts(tokenizer, text, template=template, parallel=False)
        assert accepted == "complete" if len(calls) == 1 else len(accepted) < len(text)
        if use.dialect.format.trigger:
            assert accepts(tokenizer, "Well.\n" + text, template=template) == "complete"
            assert accepts(tokenizer, "Well.\n" + text, template=template, choice="required") == ""
    for call in WRONG:
        assert accepts(tokenizer, written([call]), template=template) not in ("complete", "prefix")
        assert accepts(tokenizer, written([F, call]), template=template) not in (
            "complete",
            "prefix",
        )
    assert accepts(tokenizer, "Hello", template=template, choice="required") == ""


def test_a_named_tool_is_called_once(tokenizer):
    choice = {"type": "function", "function": {"name": "g"}}
    written = tool_use(tokenizer).dialect.format.written
    assert accepts(tokenizer, written([G]), choice=choice) == "complete"
    for calls in ([F], [G, G]):
        assert accepts(tokenizer, written(calls), choice=choice) not in ("complete", "prefix")


def test_a_template_for_single_calls_gets_one(tokenizer):
    template = TEMPLATES["llama"] + " only supports single tool-calls"
    written = tool_use(Tokenizer(tokenizer.backend, (2,), {}, template)).dialect.format.written
    assert accepts(tokenizer, written([F]), template=template) == "complete"
    assert accepts(tokenizer, written([F, F]), template=template) == written([F])


def test_nothing_follows_a_call_but_calls(tokenizer):
    text = tool_use(tokenizer).dialect.format.written([F])
    assert accepts(tokenizer, text + " and") == text


def test_text_may_have_other_marks(tokenizer):
    text = "<think>Hm.\n</think>\n"
    written = tool_use(tokenizer).dialect.format.written
    assert accepts(tokenizer, text) == "complete"
    assert accepts(tokenizer, text + written([F, G])) == "complete"
    assert accepts(tokenizer, text + "No <b>.") == "complete"


def test_an_answer_that_is_no_call_may_have_a_schema(tokenizer):
    form = StructuredOutputsParams(
        json={"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"]}
    )
    params = SamplingParams(structured_outputs=form)
    written = tool_use(tokenizer).dialect.format.written
    assert accepts(tokenizer, '{"n": 3}', params) == "complete"
    assert accepts(tokenizer, written([F, FF]), params) == "complete"
    assert accepts(tokenizer, "Hello", params) == ""
    assert accepts(tokenizer, '{"n": "', params) == '{"n": '
    json_object = SamplingParams(structured_outputs=StructuredOutputsParams(json_object=True))
    assert accepts(tokenizer, '{"x": [1]}', json_object) == "complete"
    assert accepts(tokenizer, "[1]", json_object) == ""
    for text in ("{", "[" * 10**5):
        with pytest.raises(ValueError, match=r"structured_outputs\.json is not JSON"):
            accepts(
                tokenizer, "", SamplingParams(structured_outputs=StructuredOutputsParams(json=text))
            )
    with pytest.raises(ValueError, match="structured_outputs go with tools as JSON alone"):
        accepts(
            tokenizer, "", SamplingParams(structured_outputs=StructuredOutputsParams(choice=("a",)))
        )
    with pytest.raises(ValueError, match="response_format does not go with tools for this model"):
        accepts(tokenizer, "", params, TEMPLATES["llama"])


def test_a_schema_that_is_not_supported_names_the_tool(tokenizer):
    wrong = [tool("fine"), tool("bad", a={"type": "array", "uniqueItems": True})]
    with pytest.raises(
        ValueError,
        match=r"'bad' has the keyword 'uniqueItems' at #/properties/a/uniqueItems.*strict: false",
    ):
        accepts(tokenizer, "", tools=wrong)
    wrong[1]["function"]["strict"] = False
    use = tool_use(tokenizer, wrong)
    assert use.with_grammar(SamplingParams(), tokenizer)[1] == ("bad#/properties/a/uniqueItems",)
    with pytest.raises(ValueError, match=r"the schema of 'odd' cannot be used at #/properties/a"):
        accepts(
            tokenizer,
            "",
            tools=[tool("fine"), tool("odd", a={"type": "string", "pattern": "(?=a)"})],
        )


def test_parameters_that_a_tool_does_not_name_are_never_given(tokenizer):
    written = tool_use(tokenizer).dialect.format.written
    named = {"type": "object", "properties": {"a": {"type": "integer"}}}
    for schema, allowed in (
        (named, False),
        ({**named, "additionalProperties": True}, True),
        ({"type": "object"}, True),
    ):
        tools = [{"type": "function", "function": {"name": "f", "parameters": schema}}]
        accepted = accepts(tokenizer, written([("f", '{"a": 1, "b": 2}')]), tools=tools)
        assert (accepted == "complete") == allowed
