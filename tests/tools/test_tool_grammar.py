"""The grammar of tools: answers that it allows, by the tokens of tiny tokenizers with and without
marks.
"""

from __future__ import annotations

from functools import partial

import pytest

from pagedjax.options.params import SamplingParams, StructuredOutputsParams
from pagedjax.text.structured.grammars import Grammars
from pagedjax.text.tokenizer import Tokenizer
from pagedjax.text.tools.use import tool_use
from pagedjax.weights.locate import open_checkpoint
from pagedjax.weights.tokenizer_files import load_tokenizer
from tests.refusals import refused
from tests.structured.schemas import integer, opened, shut, typed
from tests.tools.functions import added_tokens, function

MARKS = ("<tool_call>", "</tool_call>", "<think>", "</think>")


TOOLS = [
    function("f", parameters=shut(a=integer())),
    function(
        "ff", parameters={**shut(b={"$ref": "#/$defs/x"}), "$defs": {"x": {"enum": ["x::=y", "z"]}}}
    ),
    function("g"),
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
    built = load_tokenizer(open_checkpoint(tiny_folder))
    if request.param == "marks":
        built.backend.add_tokens(added_tokens(*MARKS))
        built.backend.add_special_tokens(added_tokens("[TOOL_CALLS]", "[ARGS]"))
    return built


def accepts(
    tokenizer: Tokenizer,
    text: str,
    params=None,
    template: str = "tools <tool_call> arguments",
    tools: list = TOOLS,
    **options,
) -> str:
    """ "complete", "prefix", or the text before the token that is refused."""
    with_template = Tokenizer(tokenizer.backend, (2,), {}, template)
    use = tool_use(with_template, tools, **options)
    params, _ = use.with_grammar(params or SamplingParams(), with_template)
    grammars = Grammars(with_template, with_template.vocab_size, (2,))
    matcher = use.compiled_grammar(grammars, params).start.deep_copy()
    ids = with_template.encode(text)
    count = matcher.validate_tokens(ids)
    if count < len(ids):
        return with_template.decode(ids[:count], skip_special_tokens=False)
    matcher.consume_tokens(ids)
    return "complete" if matcher.is_accepting() else "prefix"


ACCEPTED = ("complete", "prefix")


TEMPLATES = {
    "hermes": "tools <tool_call> arguments",
    "llama": 'tools tool_call "parameters": ',
    "mistral": "tools [TOOL_CALLS][",
    "spaced": "tools [TOOL_CALLS] [",
    "args": "tools [TOOL_CALLS] [ARGS]",
}


@pytest.mark.parametrize("template", TEMPLATES.values(), ids=TEMPLATES)
def test_an_answer_is_text_or_valid_calls(tokenizer, template):
    form = tool_use(Tokenizer(tokenizer.backend, (2,), {}, template)).dialect.format
    accepted = partial(accepts, tokenizer, template=template)
    for text in ("", "Hello", "a <tool_c\n[b] ü", "x {}"):
        assert accepted(text) == "complete"
    for calls in ([F], [FF], [G], [F, FF], [G, G, F]):
        text = form.text_of(calls)
        assert accepted(text) == accepted(text, choice="required") == "complete"
        single = accepted(text, parallel=False)
        assert single == "complete" if len(calls) == 1 else len(single) < len(text)
        if form.trigger:
            assert accepted("Well.\n" + text) == "complete"
            assert accepted("Well.\n" + text, choice="required") == ""
    for call in WRONG:
        assert accepted(form.text_of([call])) not in ACCEPTED
        assert accepted(form.text_of([F, call])) not in ACCEPTED
    assert accepted("Hello", choice="required") == ""


def test_a_named_tool_is_called_once(tokenizer):
    choice = function("g")
    written = tool_use(tokenizer).dialect.format.text_of
    assert accepts(tokenizer, written([G]), choice=choice) == "complete"
    for calls in ([F], [G, G]):
        assert accepts(tokenizer, written(calls), choice=choice) not in ACCEPTED


def test_a_template_for_single_calls_gets_one(tokenizer):
    template = TEMPLATES["llama"] + " only supports single tool-calls"
    written = tool_use(Tokenizer(tokenizer.backend, (2,), {}, template)).dialect.format.text_of
    assert accepts(tokenizer, written([F]), template=template) == "complete"
    assert accepts(tokenizer, written([F, F]), template=template) == written([F])


def test_nothing_follows_a_call_but_calls(tokenizer):
    text = tool_use(tokenizer).dialect.format.text_of([F])
    assert accepts(tokenizer, text + " and") == text


def test_text_may_have_other_marks(tokenizer):
    text = "<think>Hm.\n</think>\n"
    written = tool_use(tokenizer).dialect.format.text_of
    assert accepts(tokenizer, text) == "complete"
    assert accepts(tokenizer, text + written([F, G])) == "complete"
    assert accepts(tokenizer, text + "No <b>.") == "complete"


def test_an_answer_that_is_no_call_may_have_a_schema(tokenizer):
    def form(**fields) -> SamplingParams:
        return SamplingParams(structured_outputs=StructuredOutputsParams(**fields))

    params = form(json=opened(["n"], n=integer()))
    written = tool_use(tokenizer).dialect.format.text_of
    assert accepts(tokenizer, '{"n": 3}', params) == "complete"
    assert accepts(tokenizer, written([F, FF]), params) == "complete"
    assert accepts(tokenizer, "Hello", params) == ""
    assert accepts(tokenizer, '{"n": "', params) == '{"n": '
    assert accepts(tokenizer, '{"x": [1]}', form(json_object=True)) == "complete"
    assert accepts(tokenizer, "[1]", form(json_object=True)) == ""
    for text in ("{", "[" * 10**5):
        with refused(r"structured_outputs\.json is not JSON"):
            accepts(tokenizer, "", form(json=text))
    with refused("structured_outputs go with tools as JSON alone"):
        accepts(tokenizer, "", form(choice=("a",)))
    with refused("response_format does not go with tools for this model"):
        accepts(tokenizer, "", params, TEMPLATES["llama"])


def test_a_schema_that_is_not_supported_names_the_tool(tokenizer):
    unique = shut(a=typed("array", uniqueItems=True))
    message = r"'bad' has the keyword 'uniqueItems' at #/properties/a/uniqueItems.*strict: false"
    with refused(message):
        accepts(tokenizer, "", tools=[function("fine"), function("bad", parameters=unique)])
    use = tool_use(tokenizer, [function("bad", parameters=unique, strict=False)])
    assert use.with_grammar(SamplingParams(), tokenizer)[1] == ("bad#/properties/a/uniqueItems",)
    odd = function("odd", parameters=shut(a=typed("string", pattern="(?=a)")))
    with refused(r"the schema of 'odd' cannot be used at #/properties/a"):
        accepts(tokenizer, "", tools=[function("fine"), odd])


def test_parameters_that_a_tool_does_not_name_are_never_given(tokenizer):
    written = tool_use(tokenizer).dialect.format.text_of
    named = typed("object", properties={"a": integer()})
    for schema, allowed in (
        (named, False),
        ({**named, "additionalProperties": True}, True),
        (typed("object"), True),
    ):
        text = written([("f", '{"a": 1, "b": 2}')])
        accepted = accepts(tokenizer, text, tools=[function(parameters=schema)])
        assert (accepted == "complete") == allowed
