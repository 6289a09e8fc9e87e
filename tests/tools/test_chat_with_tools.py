"""`LLM.chat` with tools: whatever a model says, its calls are valid."""

from __future__ import annotations

import json

import jsonschema
import pytest

from pagedjax import LLM, BeamSearchParams, SamplingParams
from tests.engine.runs import small_llm
from tests.refusals import refused
from tests.structured.schemas import SMALL as SCHEMA
from tests.tools.functions import added_tokens, function
from tests.weights.tiny import tiny_llama

MESSAGES = [{"role": "user", "content": "the cat"}]
TOOLS = [function("f", description="Does it.", parameters=SCHEMA), function("g")]


def check_calls(llm: LLM, seeds: int) -> list:
    """Ask for one call each -> the outputs, whose calls are valid."""
    params = [SamplingParams(max_tokens=200, seed=i) for i in range(seeds)]
    options = {"tools": TOOLS, "tool_choice": "required", "parallel_tool_calls": False}
    outputs = llm.chat([MESSAGES] * seeds, params, **options)
    for output in outputs:
        (branch,) = output.outputs
        assert branch.finish_reason == "stop"
        (call,) = branch.tool_calls
        schema = SCHEMA if call.name == "f" else {"maxProperties": 0}
        jsonschema.validate(json.loads(call.arguments), schema)
    return outputs


def test_calls_obey_their_schemas(tiny_tools):
    for output in check_calls(tiny_tools, 6):
        (branch,) = output.outputs
        (call,) = branch.tool_calls
        text = f'{{"name": "{call.name}", "arguments": {call.arguments}}}'
        assert branch.text == f"<tool_call>\n{text}\n</tool_call>"


@pytest.mark.parametrize(
    "marks",
    ["<tool_call> arguments", "[TOOL_CALLS] [", "[TOOL_CALLS] [ARGS]"],
    ids=["hermes", "mistral", "args"],
)
def test_calls_may_be_written_with_tokens_of_the_vocabulary(tmp_path, marks):
    """Special ones too, which texts do not show otherwise."""
    from tokenizers import Tokenizer

    folder = tiny_llama(tmp_path / "m", tied=False)
    file = str(folder / "tokenizer.json")
    config = folder / "tokenizer_config.json"
    backend = Tokenizer.from_file(file)
    backend.add_tokens(added_tokens("<tool_call>", "</tool_call>", "<think>"))
    backend.add_special_tokens(added_tokens("[TOOL_CALLS]", "[ARGS]"))
    backend.save(file)
    template = f"{{# {marks} #}}{{{{ (tools or []) | length }}}} tools{{{{ messages[0].content }}}}"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"chat_template": template}))
    llm = small_llm(folder, token_buckets=(8, 64))  # the sizes of `tiny_llm`
    for output in check_calls(llm, 4):
        assert output.prompt == "2 toolsthe cat"
        (branch,) = output.outputs
        assert marks.split()[0] in branch.text
        assert backend.token_to_id(marks.split()[0]) in branch.token_ids
    (free,) = llm.chat(MESSAGES, SamplingParams(max_tokens=20, seed=1), tools=TOOLS)
    assert free.outputs[0].text


def test_without_tools_nothing_changes(tiny_tools):
    params = SamplingParams(max_tokens=8, temperature=0.0)
    (plain,) = tiny_tools.chat(MESSAGES, params)
    (none,) = tiny_tools.chat(MESSAGES, params, tools=TOOLS, tool_choice="none")
    assert plain.outputs[0].tool_calls == none.outputs[0].tool_calls == ()
    assert plain.prompt_token_ids == none.prompt_token_ids
    assert plain.outputs == none.outputs


def test_a_beam_search_has_no_tools(tiny_tools):
    with refused("tools do not go with a beam search"):
        tiny_tools.chat(MESSAGES, BeamSearchParams(2), tools=TOOLS)
