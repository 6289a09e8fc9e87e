"""`LLM.chat` with tools: whatever a model says, its calls are valid."""

from __future__ import annotations

import json

import jsonschema
import pytest

from pagedjax import BeamSearchParams, SamplingParams

MESSAGES = [{"role": "user", "content": "the cat"}]
SCHEMA = {
    "type": "object",
    "properties": {"n": {"type": "integer", "minimum": 0, "maximum": 99}, "kind": {"enum": ["a", "b"]}},
    "required": ["n", "kind"],
    "additionalProperties": False,
}
TOOLS = [
    {"type": "function", "function": {"name": "f", "description": "Does it.", "parameters": SCHEMA}},
    {"type": "function", "function": {"name": "g"}},
]


def test_calls_obey_their_schemas(tiny_tools):
    params = [SamplingParams(max_tokens=200, seed=i) for i in range(6)]
    chats = [MESSAGES] * 6
    outputs = tiny_tools.chat(
        chats, params, tools=TOOLS, tool_choice="required", parallel_tool_calls=False, use_tqdm=False
    )
    for output in outputs:
        (one,) = output.outputs
        assert one.finish_reason == "stop"
        (call,) = one.tool_calls
        assert one.text == f'<tool_call>\n{{"name": "{call.name}", "arguments": {call.arguments}}}\n</tool_call>'
        jsonschema.validate(json.loads(call.arguments), SCHEMA if call.name == "f" else {"maxProperties": 0})


def test_without_tools_nothing_changes(tiny_tools):
    params = SamplingParams(max_tokens=8, temperature=0.0)
    (plain,) = tiny_tools.chat(MESSAGES, params, use_tqdm=False)
    (none,) = tiny_tools.chat(MESSAGES, params, tools=TOOLS, tool_choice="none", use_tqdm=False)
    assert plain.outputs[0].tool_calls == none.outputs[0].tool_calls == ()
    assert plain.prompt_token_ids == none.prompt_token_ids
    assert plain.outputs == none.outputs


def test_a_beam_search_has_no_tools(tiny_tools):
    with pytest.raises(ValueError, match="tools do not go with a beam search"):
        tiny_tools.chat(MESSAGES, BeamSearchParams(2), tools=TOOLS, use_tqdm=False)
