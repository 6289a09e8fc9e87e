"""Answers through the engine's masks and sampler have the form that was asked for, whatever the
engine does besides.
"""

from __future__ import annotations

import json
from collections import Counter
from typing import Any

import jsonschema
import pytest
import regex

from pagedjax import LLM, SamplingParams, StructuredOutputsParams
from pagedjax.host.types import Preempted, StepResult, Verified
from pagedjax.text.structured import grammars
from tests.engine.runs import answers, small_llm
from tests.refusals import refused
from tests.structured.schemas import CASES

# as of tiny_llm
# A random model answers at random: a pattern or a format of many characters would end by its
# length.
SCHEMAS = [case for case in CASES if "format" not in json.dumps(case.schema)]
SLOW = ("swapped", "lookahead")  # the others: exhaustive
KINDS: dict[str, dict[str, Any]] = {
    "plain": {},
    "without prefix caching": {"enable_prefix_caching": False},
    "recomputed": {"num_blocks": 9},  # as in test_prefix_caching.py
    "swapped": {"num_blocks": 40, "block_size": 4, "preemption": "swap", "swap_space_gib": 0.01},
    "speculation": {"speculative": {"method": "ngram", "num_tokens": 4, "ngram_min": 1}},
    "speculation, recomputed": {
        "num_blocks": 48,
        "block_size": 4,
        "speculative": {"method": "ngram", "num_tokens": 3, "ngram_min": 1},
    },
    "lookahead": {"lookahead": 1},
}


def form_params(schema: Any, **options: Any) -> SamplingParams:
    form = StructuredOutputsParams(json=schema, whitespace_pattern=" ")
    return SamplingParams(
        structured_outputs=form, **{"max_tokens": 60, "temperature": 1.0, **options}
    )


def validates(schema: Any, text: str) -> bool:
    schema = json.loads(schema) if isinstance(schema, str) else schema
    return jsonschema.Draft202012Validator(schema).is_valid(json.loads(text))


def reasons_of_answers(llm: LLM, cases, seeds: int) -> Counter[str]:
    """How many answers ended in which way. Every one that ended by itself has its form."""
    cases = [(case, seed) for seed in range(seeds) for case in cases]
    params = [form_params(case.schema, seed=seed) for case, seed in cases]
    prompts = [[5, 6, 7, 8, 9, 10 + i % 50] for i in range(len(cases))]
    outputs = answers(llm, prompts, params)
    for (case, _), answer in zip(cases, outputs, strict=True):
        if answer.finish_reason == "stop":
            assert validates(case.schema, answer.text), (case.name, answer.text)
    reasons = Counter(answer.finish_reason for answer in outputs)
    assert set(reasons) <= {"stop", "length"}
    return reasons


def watch(llm: LLM) -> list[StepResult]:
    """The results of all steps from now on, as they come."""
    results: list[StepResult] = []
    step = llm.engine.step

    def watched():
        results.append(step())
        return results[-1]

    llm.engine.step = watched  # type: ignore
    return results


@pytest.mark.slow
@pytest.mark.parametrize(
    "kind",
    [kind if kind in SLOW else pytest.param(kind, marks=pytest.mark.exhaustive) for kind in KINDS],
)
def test_answers_have_their_form(tiny, kind):
    """More than 200 schemas, in each kind of engine."""
    llm = small_llm(tiny, **KINDS[kind])
    results = watch(llm)
    assert reasons_of_answers(llm, SCHEMAS, 1)["stop"] >= 100
    kinds = {type(event) for result in results if result for event in result.events}
    assert (Preempted in kinds) == ("num_blocks" in KINDS[kind])
    assert (Verified in kinds) == kind.startswith("speculation")


FORMS = [
    StructuredOutputsParams(regex="(the|then|there) (cat|house)[0-9]{0,3}"),
    StructuredOutputsParams(choice=["yes", "no", "perhaps"]),
    StructuredOutputsParams(
        json={"type": "array", "items": {"enum": ["red", "green"]}, "maxItems": 3}
    ),
    StructuredOutputsParams(grammar='start: "(" start ")" | "x"'),
]


def mixed(number: int = 12) -> list[SamplingParams]:
    """Requests with and without a form, greedy and drawn."""
    forms = [None, *FORMS]
    kinds = [
        {"temperature": 0.0},
        {"temperature": 1.0},
        {"temperature": 1.0, "top_p": 0.9, "logprobs": 2},
    ]
    return [
        SamplingParams(max_tokens=24, seed=i, structured_outputs=forms[i % 5], **kinds[i % 3])
        for i in range(number)
    ]


PROMPTS = [[5 + i, 6, 7, 8, 9] for i in range(12)]


def texts(llm: LLM) -> list[tuple[Any, ...]]:
    return [
        (answer.token_ids, answer.text, answer.finish_reason)
        for answer in answers(llm, PROMPTS, mixed())
    ]


@pytest.fixture(scope="module")
def expected(tiny):
    return texts(small_llm(tiny))


@pytest.mark.default_cases("recomputed")
@pytest.mark.parametrize(
    "kind", ["recomputed", "speculation", "lookahead", "without prefix caching", "swapped"]
)
def test_tokens_are_the_same_in_every_engine(tiny, expected, kind):
    """Nothing is compiled after the start."""
    llm = small_llm(tiny, compilation="eager", **KINDS[kind])
    results = watch(llm)
    assert texts(llm) == expected
    assert sum(result.compilations for result in results) == 0


def test_a_request_without_a_form_is_what_it_is_alone(tiny):
    """Bit for bit: its log-probabilities too. One size of steps, because XLA's sums may depend on
    the padding.
    """
    llm = small_llm(tiny, enable_prefix_caching=False)
    plain = SamplingParams(temperature=1.0, seed=5, max_tokens=24, logprobs=3, prompt_logprobs=1)
    (alone,) = llm.generate([PROMPTS[0]], plain)
    together, *_ = llm.generate(PROMPTS, [plain, *mixed(11)])
    assert together.outputs == alone.outputs
    assert together.prompt_logprobs == alone.prompt_logprobs


@pytest.mark.slow
def test_a_text_that_must_come_takes_fewer_steps(tiny):
    form = StructuredOutputsParams(
        regex="a long text of which every letter must come, and a digit: [0-9]"
    )
    params = SamplingParams(temperature=1.0, seed=0, max_tokens=80, structured_outputs=form)
    outputs = []
    for kind in ("plain", "speculation"):
        llm = small_llm(tiny, **KINDS[kind])
        results = watch(llm)
        (answer,) = answers(llm, [PROMPTS[0]], params)
        assert regex.fullmatch(form.regex or "", answer.text)
        outputs.append((answer.token_ids, len(results)))
    (tokens, plain_steps), (tokens_with_drafts, steps) = outputs
    assert tokens == tokens_with_drafts
    assert steps < 0.4 * plain_steps


def test_each_branch_has_its_own_place_in_the_grammar(tiny_llm):
    colours = {"enum": ["red", "green", "blue"]}
    schema = {"type": "array", "items": colours, "minItems": 3, "maxItems": 6}
    for options in ({"n": 5}, {"n": 2, "best_of": 5}):
        params = form_params(schema, seed=3, temperature=2.0, **options)
        (output,) = tiny_llm.generate([PROMPTS[0]], params)
        assert len(output.outputs) == options["n"]
        for branch in output.outputs:
            assert branch.finish_reason != "stop" or validates(schema, branch.text)
        assert len({branch.text for branch in output.outputs}) > 1


def test_options_that_go_with_a_form(tiny_llm):
    form = StructuredOutputsParams(regex="[ab]{4}c[0-9]{2}")
    (token,) = tiny_llm.tokenizer.encode("b")
    options: tuple[dict[str, Any], ...] = (
        {"logit_bias": {token: 100.0}, "temperature": 0.0},
        {"stop": "c", "temperature": 1.0},
        {"top_k": 1, "temperature": 1.0, "repetition_penalty": 1.5},
        {"max_tokens": 3},
    )
    params = [
        SamplingParams(**{"max_tokens": 20, **row_options}, structured_outputs=form, seed=1)
        for row_options in options
    ]
    biased, stopped, penalised, cut = answers(tiny_llm, PROMPTS[:4], params)
    assert biased.text.startswith("bbbbc")
    assert regex.fullmatch("[ab]{4}", stopped.text)
    assert stopped.stop_reason == "c"
    assert regex.fullmatch(form.regex or "", penalised.text)
    assert cut.finish_reason == "length"
    assert regex.fullmatch("[ab]{3}", cut.text)


def test_a_parser_that_gives_up_ends_its_request_and_no_other(tiny_llm, monkeypatch, caplog):
    """The answer does not end as if it was complete."""
    monkeypatch.setattr(grammars, "LIMITS", {"step_lexer_fuel": 400})
    hostile = StructuredOutputsParams(regex="(.*[ax].{30}){5}")
    choice = StructuredOutputsParams(choice=["yes", "no"])
    params = [
        SamplingParams(structured_outputs=hostile, max_tokens=200, seed=0),
        SamplingParams(structured_outputs=choice, max_tokens=20),
        SamplingParams(max_tokens=20, temperature=0.0),
    ]
    failed, chosen, plain = answers(tiny_llm, PROMPTS[:3], params)
    assert failed.finish_reason == "abort"
    assert "its structured output failed" in caplog.text
    assert chosen.text in ("yes", "no")
    assert plain.finish_reason in ("length", "stop")
    assert not tiny_llm.engine.has_work


def test_the_engine_alone_wants_a_compiled_grammar(tiny_llm):
    params = SamplingParams(structured_outputs=FORMS[0])
    with refused("give both to the engine"):
        tiny_llm.engine.add("a", [5, 6], params)
    assert not tiny_llm.engine.has_work


def test_a_token_that_a_form_did_not_allow_is_not_shown(tiny_llm):
    """This grammar names the end token in its middle, where no answer may end: the request fails
    there.
    """
    form = StructuredOutputsParams(grammar='start: "a" <|im_end|> "b"')
    params = SamplingParams(temperature=0.0, max_tokens=8, structured_outputs=form)
    (output,) = tiny_llm.generate("x", params)
    assert (output.outputs[0].text, output.outputs[0].finish_reason) == ("a", "abort")
    assert list(tiny_llm.stream("x", params)) == ["a"]
