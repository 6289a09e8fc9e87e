"""Batch-invariant engines: a request's tokens and log-probabilities have the same bits in any
company, in any engine.

As vLLM tests its own: some requests ("needles") are computed alone, and again among random other
requests ("mates").
"""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from typing import Any

import chex
import jax
import numpy as np
import pytest
from hypothesis import example
from hypothesis import strategies as st

from pagedjax import LLM, SamplingParams, from_params
from pagedjax.weights.architectures import FAMILIES, normalised
from tests import drawn
from tests.device.test_linear_impl import random_params
from tests.device.test_model_families import BODY, CASES, GPT2
from tests.engine.runs import greedy, steps
from tests.refusals import refused

pytestmark = pytest.mark.optimised  # bits are compared

VOCAB = 320
DRAW = {"temperature": 1.0, "top_p": 0.9, "top_k": 50, "seed": 3}
PENALISED = {"temperature": 0.7, "seed": 5, "repetition_penalty": 1.2, "presence_penalty": 0.3}
OPTIONS = (
    {"temperature": 0.0, "logprobs": 3},
    {**DRAW, "logprobs": 2},
    {**PENALISED, "logprobs": 1},
)
LENGTHS = (1, 5, 23, 90)
NEEDLES = [
    (
        np.random.default_rng(n).integers(3, VOCAB, n).tolist(),
        SamplingParams(**{"logprobs": 0, **options}, max_tokens=8),
    )
    for n in LENGTHS
    for options in OPTIONS
]
# log-probabilities of prompts have programs of their own
OF_PROMPTS = [
    (prompt, replace(params, prompt_logprobs=2) if i % len(OPTIONS) == 2 else params)
    for i, (prompt, params) in enumerate(NEEDLES)
]
COMMON = {"batch_invariant": True, "progress": False, "max_model_len": 128}
LARGE: dict[str, Any] = {
    "max_num_batched_tokens": 64,
    "token_buckets": (64,),
    "max_num_seqs": 16,
    "num_blocks": 200,
}
FEW: dict[str, Any] = {
    "max_num_batched_tokens": 8,
    "token_buckets": (8,),
    "max_num_seqs": 5,
    "block_size": 4,
    "num_blocks": 50,
}
# One bucket each, so that few programs are compiled. "preemption" has the shapes of "small chunks
# and blocks", and so its program: the blocks are those of few tokens.
ENGINES: dict[str, dict[str, Any]] = {
    "large steps": LARGE,
    "small chunks and blocks": FEW,
    "preemption": FEW | {"enable_prefix_caching": False},
    "speculation": {
        "max_num_batched_tokens": 48,
        "token_buckets": (48,),
        "speculative": {"method": "ngram", "num_tokens": 3},
        "num_blocks": 200,
    },
}

# drafts have two more programs
WITHOUT_DRAFTS = [name for name in ENGINES if name != "speculation"]


def answer(out: Any) -> tuple[Any, Any]:
    """All numbers of a result: tokens with log-probabilities, and those of the prompt."""
    (branch,) = out.outputs

    def bits(places: Any) -> list[Any]:
        return [
            None if place is None else {token: p.logprob for token, p in place.items()}
            for place in places or ()
        ]

    return (list(branch.token_ids), bits(branch.logprobs)), bits(out.prompt_logprobs)


def answers(llm: LLM, prompts: list[list[int]], params: list[SamplingParams]) -> list[Any]:
    return [answer(out) for out in llm.generate(prompts, params)]


def among_mates(llm: LLM, seed: int, mates: int, needles: Any = NEEDLES) -> list[Any]:
    """The needles' answers, in a random order among random requests."""
    rng = np.random.default_rng(seed)
    jobs = list(needles)
    for _ in range(mates):
        prompt = rng.integers(3, VOCAB, rng.integers(1, 90)).tolist()
        options = {"temperature": float(rng.choice([0.0, 1.0])), "seed": int(rng.integers(99))}
        jobs.append((prompt, SamplingParams(**options, max_tokens=12)))
    order = rng.permutation(len(jobs))
    shuffled = answers(llm, [jobs[i][0] for i in order], [jobs[i][1] for i in order])
    by_job = dict(zip(order.tolist(), shuffled, strict=True))
    return [by_job[i] for i in range(len(needles))]


def alone(llm: LLM, needles: Any = NEEDLES) -> list[Any]:
    return [answers(llm, [prompt], [params])[0] for prompt, params in needles]


def model_of(name: str, dtype: str = "float32", layers: int | None = None, **options: Any) -> Any:
    kind, fields = CASES[name]
    hf = {**(GPT2 if kind == "gpt2" else BODY), **fields, "model_type": kind}
    if layers is not None:
        hf["num_hidden_layers"] = layers
    config = FAMILIES[kind].from_hf(normalised(hf, name))
    return from_params(
        jax.tree.map(lambda x: x.astype(dtype), random_params(config)), config, **options
    )


@pytest.fixture(scope="module")
def engines() -> dict[str, LLM]:
    model = model_of("Qwen3", layers=1)
    return {name: LLM(model, **COMMON, **ENGINES[name]) for name in WITHOUT_DRAFTS}


@pytest.fixture(scope="module")
def expected(engines) -> list[Any]:
    return alone(engines["large steps"])


@drawn.examples(1, 8)
def test_a_request_has_the_same_bits_in_any_company_and_any_engine(engines, expected, number):
    @example(name="large steps", seed=0, mates=20)
    @example(name="small chunks and blocks", seed=1, mates=12)
    @example(name="preemption", seed=2, mates=16)
    def holds(name: str, seed: int, mates: int) -> None:
        chex.assert_trees_all_equal(among_mates(engines[name], seed, mates), expected)

    names = st.sampled_from(WITHOUT_DRAFTS)
    drawn.check(number, holds, name=names, seed=st.integers(0, 2**16), mates=st.integers(0, 24))


def test_given_tokens_have_the_bits_of_those_that_are_sampled(engines, expected):
    """And those that are sampled beside them keep theirs."""
    fixed = [
        (prompt, replace(params, trace_decode_token_ids=tuple(tokens)))
        for (prompt, params), ((tokens, _), _) in zip(NEEDLES, expected, strict=True)
    ]
    prompts, params = zip(*NEEDLES, *fixed, strict=True)
    outputs = answers(engines["large steps"], list(prompts), list(params))
    chex.assert_trees_all_equal(outputs, [*expected, *expected])


def test_the_engines_differ_in_what_they_do(engines, expected):
    """Else the test above would compare too little: blocks run out, prefixes are found."""
    engine = engines["preemption"].engine
    prompt, params = NEEDLES[9]
    for i in range(12):
        engine.add(f"p{i}", prompt[: 40 + i], SamplingParams(max_tokens=40, ignore_eos=True))
    assert any(result.plan.preempted for result in steps(engine))
    engine = engines["small chunks and blocks"].engine
    for name in ("first", "second"):
        engine.add(name, prompt, params)
        cached = sum(sum(result.plan.cached) for result in steps(engine))
    assert cached > 0, "the second request finds the blocks of the first"


@pytest.mark.slow
def test_drafts_change_no_bit(expected):
    llm = LLM(model_of("Qwen3", layers=1), **COMMON, **ENGINES["speculation"])
    for seed in range(3):
        chex.assert_trees_all_equal(among_mates(llm, seed, 12), expected)
    llm.engine.add("repeats", [7, 8, 9] * 8, greedy(16))
    assert any(sum(result.plan.drafts) for result in steps(llm.engine))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "dtype", "options", "engine"),
    [
        pytest.param("Gemma 2, caps that bind", "float32", {}, {}, marks=pytest.mark.exhaustive),
        ("Gemma 3", "float32", {}, {"kv_cache_dtype": "float8_e4m3fn"}),
        pytest.param("GPT-2", "float32", {}, {}, marks=pytest.mark.exhaustive),
        pytest.param("Mixtral", "float32", {}, {}, marks=pytest.mark.exhaustive),
        ("Qwen3-MoE", "float32", {"weight_dtype": "int8"}, {}),
        ("GPT-OSS", "float32", {}, {}),
        pytest.param("Llama 3", "bfloat16", {}, {}, marks=pytest.mark.exhaustive),
        (
            "Mistral",
            "float32",
            {},
            {"preemption": "swap", "lookahead": 1, "enable_prefix_caching": True},
        ),
    ],
)
def test_every_family_and_dtype(name, dtype, options, engine):
    """And log-probabilities of prompts."""
    model = model_of(name, dtype, **options)
    first = LLM(model, **COMMON, **LARGE | engine)
    expected = alone(first, OF_PROMPTS)
    chex.assert_trees_all_equal(among_mates(first, 0, 20, OF_PROMPTS), expected)
    for variant in ("small chunks and blocks", "preemption"):
        llm = LLM(model, **COMMON, **ENGINES[variant] | engine)
        chex.assert_trees_all_equal(among_mates(llm, 1, 12, OF_PROMPTS), expected)


ONE_THREAD = """
import json, os, sys
os.sched_setaffinity(0, {sorted(os.sched_getaffinity(0))[0]} if sys.argv[1] == "one" else os.sched_getaffinity(0))
from pagedjax import LLM
from tests.engine.test_batch_invariance import COMMON, ENGINES, among_mates, model_of
print(json.dumps(among_mates(LLM(model_of("Qwen3"), **COMMON, **ENGINES["large steps"]), 7, 12)))
"""


@pytest.mark.slow
@pytest.mark.skipif(
    sys.platform != "linux", reason="the number of processors is set as Linux does it"
)
def test_the_number_of_threads_changes_no_bit():
    outputs = []
    for processors in ("one", "all"):
        command = [sys.executable, "-c", ONE_THREAD, processors]
        process = subprocess.run(command, capture_output=True, text=True, timeout=600, check=True)
        outputs.append(json.loads(process.stdout.splitlines()[-1]))
    chex.assert_trees_all_equal(*outputs)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"attention_impl": "xla"},
            "attention_impl 'xla' has no batch-invariant form; those that have one: 'cpu'",
        ),
        ({"linear_impl": "xla"}, "linear_impl 'xla', whose sums depend on the shapes of a step"),
        ({"mesh": {"tensor": 2}}, "on one CPU without a mesh"),
        ({"batch_invariant": 1}, "batch_invariant is 1; it must be True or False"),
    ],
)
def test_what_cannot_be_batch_invariant_is_refused(tiny, options, message):
    with refused(message):
        LLM(
            tiny,
            **COMMON | {"max_model_len": 64, "num_blocks": 40, "compilation": "lazy"} | options,
        )


@pytest.mark.parametrize(
    ("name", "fields", "message"),
    [
        ("Llama 3", {"hidden_size": 72, "head_dim": 16}, "hidden size of the model is 72: "),
        ("Qwen3", {"head_dim": 24}, "norms of heads of 24 numbers, whose bits are fixed for "),
        ("Gemma 2, caps that bind", {"vocab_size": 330}, "cap of logits and a vocabulary of 330: "),
    ],
)
def test_other_sizes_are_refused(name, fields, message):
    """The compiler may round the last numbers of such a row in another way, by the number of rows."""
    kind, of_family = CASES[name]
    hf = BODY | of_family | fields | {"model_type": kind}
    config = FAMILIES[kind].from_hf(normalised(hf, name))
    with refused(rf"{message}.*set batch_invariant=False"):
        LLM(from_params(random_params(config), config), **COMMON | {"num_blocks": 40})
