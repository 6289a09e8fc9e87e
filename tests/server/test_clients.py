"""Public clients from PyPI, unmodified: a load generator, an evaluation harness, and two libraries
for agents.

The first two depend on torch, so they are in a separate environment, whose programs must be on the
PATH:

    python -m venv .venvclients && .venvclients/bin/pip install guidellm 'lm-eval[api]' litellm langchain-openai
    PATH=$PATH:$PWD/.venvclients/bin python -m pytest -m clients
"""

from __future__ import annotations

import json
import os
import shlex
import shutil
import subprocess
from pathlib import Path

import pytest
import yaml

from pagedjax import SamplingParams

pytestmark = pytest.mark.clients
OFFLINE = {
    "HF_HUB_OFFLINE": "1",
    "HF_DATASETS_OFFLINE": "1",
    "TRANSFORMERS_OFFLINE": "1",
    "NO_COLOR": "1",
    "LITELLM_LOCAL_MODEL_COST_MAP": "True",
}


def program(name: str) -> str:
    path = shutil.which(name)
    if path is None:
        pytest.skip(f"{name} is not on the PATH")
    return path


def run(*words: str, cwd: Path) -> str:
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"} | OFFLINE
    child = subprocess.run(
        words, cwd=cwd, env=environment, capture_output=True, text=True, timeout=300
    )
    assert child.returncode == 0, child.stdout[-3000:] + child.stderr[-3000:]
    return child.stdout


def test_an_evaluation_harness_gets_the_scores_of_the_library(
    served, reference, tiny_folder, tmp_path
):
    """Sums of log-probabilities of continuations. `local-completions` reads them with echo."""
    questions = [
        {
            "context": "the cat and",
            "choices": [" the other cat", " the rain on the window"],
            "gold": 0,
        },
        {
            "context": "she sells sea",
            "choices": [" shells", " cats", " hears the rain and then"],
            "gold": 0,
        },
        {"context": "he then hears", "choices": [" the house", " rain"], "gold": 1},
    ]
    (tmp_path / "data.json").write_text("\n".join(map(json.dumps, questions)), encoding="utf-8")
    task = {
        "task": "cats",
        "dataset_path": "json",
        "dataset_kwargs": {"data_files": {"test": str(tmp_path / "data.json")}},
        "test_split": "test",
        "output_type": "multiple_choice",
        "doc_to_text": "{{context}}",
        "doc_to_choice": "{{choices}}",
        "doc_to_target": "{{gold}}",
        "target_delimiter": "",
        "metric_list": [{"metric": "acc"}],
    }
    (tmp_path / "cats.yaml").write_text(yaml.safe_dump(task), encoding="utf-8")
    endpoint = f"base_url={served.url}/v1/completions,model=tiny,tokenizer={tiny_folder},num_concurrent=2,max_length=512"
    model = f"--model local-completions --model_args {endpoint}"
    options = f"--include_path {tmp_path} --tasks cats --log_samples --output_path {tmp_path}/out"
    run(program("lm_eval"), *shlex.split(f"{model} {options}"), cwd=tmp_path)
    (file,) = (tmp_path / "out").rglob("samples_cats*.jsonl")
    samples = [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]
    assert len(samples) == len(questions)
    for sample in samples:
        doc = sample["doc"]
        logprobs = [float(response[0][0]) for response in sample["resps"]]
        scores = [score(reference, doc["context"], choice) for choice in doc["choices"]]
        assert logprobs == pytest.approx(scores, abs=1e-3)


def score(llm, context: str, continuation: str) -> float:
    """The log-probability of the continuation's tokens after the context."""
    tokens = llm.tokenizer.encode(context + continuation)
    start = len(llm.tokenizer.encode(context))
    params = SamplingParams(temperature=0.0, max_tokens=1, prompt_logprobs=0)
    (output,) = llm.generate(tokens, params)
    positions = zip(tokens[start:], output.prompt_logprobs[start:], strict=True)
    return sum(position[token].logprob for token, position in positions)


@pytest.mark.parametrize("route", ["/v1/completions", "/v1/chat/completions"])
def test_a_load_generator_completes_its_requests(served, tiny_folder, tmp_path, route):
    options = {
        "backend": f"kind=openai_http,target={served.url},model=tiny,request_format={route}",
        "profile": "kind=concurrent,streams=4",
        "constraint": "kind=max_requests,count=24",
        "tokenizer": f"kind=hf_auto,model={tiny_folder}",
        "data": "kind=synthetic_text,prompt_tokens=20,output_tokens=8",
        "output": f"kind=json,path={tmp_path / 'report.json'}",
    }
    words = [word for name, value in options.items() for word in (f"--{name}", value)]
    run(program("guidellm"), "run", *words, "--disable-console-interactive", cwd=tmp_path)
    (benchmark,) = json.loads((tmp_path / "report.json").read_text(encoding="utf-8"))["benchmarks"]
    totals = benchmark["metrics"]["request_totals"]
    assert (totals["successful"], totals["errored"]) == (24, 0)


AGENTS = """
import sys
from typing import Literal
from pydantic import BaseModel, Field

class Turn(BaseModel):
    "Turns round."
    side: Literal["left", "right"]
    times: int = Field(ge=0, le=9)

where = {"base_url": sys.argv[1] + "/v1", "api_key": "none"}
if sys.argv[2] == "langchain_openai":
    from langchain_openai import ChatOpenAI

    llm = ChatOpenAI(model="tiny", max_tokens=300, seed=1, **where)
    for method in ("json_schema", "function_calling"):
        assert isinstance(llm.with_structured_output(Turn, method=method).invoke("the cat"), Turn), method
    answer = llm.bind_tools([Turn], tool_choice="any", parallel_tool_calls=False).invoke("the cat")
    (call,) = answer.tool_calls
    Turn.model_validate(call["args"])
    chunks = list(llm.bind_tools([Turn], tool_choice="Turn").stream("the cat"))
    whole = chunks[0]
    for chunk in chunks[1:]:
        whole += chunk
    Turn.model_validate(whole.tool_calls[0]["args"])
else:
    import litellm

    options = {"model": "hosted_vllm/tiny", "api_base": where["base_url"], "api_key": "none"}
    options |= {"max_tokens": 300, "seed": 1}
    messages = [{"role": "user", "content": "the cat"}]
    found = litellm.completion(messages=messages, response_format=Turn, **options)
    Turn.model_validate_json(found.choices[0].message.content)
    tool = {"type": "function", "function": {"name": "turn", "parameters": Turn.model_json_schema()}}
    for stream in (False, True):
        found = litellm.completion(messages=messages, tools=[tool], tool_choice="required", stream=stream, **options)
        found = litellm.stream_chunk_builder(list(found)) if stream else found
        Turn.model_validate_json(found.choices[0].message.tool_calls[0].function.arguments)
"""


@pytest.mark.parametrize("library", ["langchain_openai", "litellm"])
def test_libraries_for_agents_get_models_and_calls(tool_server, tmp_path, library):
    python = Path(program("litellm")).parent / "python"
    (tmp_path / "agent.py").write_text(AGENTS, encoding="utf-8")
    run(str(python), "agent.py", tool_server.url, library, cwd=tmp_path)
