"""vLLM's arguments of a request: helpful errors, and dataclasses that stay what they are."""

from __future__ import annotations

import copy
import dataclasses
import logging
import pickle
from enum import Enum

import pytest

from pagedjax import BeamSearchParams, SamplingParams
from pagedjax.engine.processes.engines import decoded_params, encoded_params
from pagedjax.options.params import NO_LIMIT
from pagedjax.options.vllm_names.request_arguments import BEAM_SEARCH, SAMPLING
from tests.refusals import refused

TEXT = "the cat and the other cat"


class OutputKind(Enum):
    FINAL_ONLY = 2


@pytest.mark.parametrize(
    ("cls", "arguments", "message"),
    [
        (SamplingParams, {"temprature": 1}, "^SamplingParams has no argument 'temprature'; did you mean 'temperature'"),
        (SamplingParams, {"guided_decoding": {"json": {}}}, "guided_decoding is {'json': {}}; use structured_outputs="),
        (SamplingParams, {"guided_json": {"a": 1}}, "guided_json is {'a': 1}; use structured_outputs="),
        (SamplingParams, {"guided_jsn": 1}, "no argument 'guided_jsn'; did you mean 'guided_json'"),
        (SamplingParams, {"logits_processors": [print]}, "logits_processors is .*; write a RowFeature"),
        (SamplingParams, {"use_beam_search": True}, "use_beam_search is True; use BeamSearchParams"),
        (SamplingParams, {"qwertyuiop": 1}, "SamplingParams has no argument 'qwertyuiop'; its arguments are allowed_"),
        (BeamSearchParams, {"beam_width": 2, "beam_with": 2}, "no argument 'beam_with'; did you mean 'beam_width'"),
        (BeamSearchParams, {"beam_width": 2, "temperature": 0.7}, "temperature is 0.7; scores are those of the model"),
        (BeamSearchParams, {"max_tokens": 3}, "missing 1 required positional argument: 'beam_width'"),
    ],
)  # fmt: skip
def test_an_unknown_argument_is_a_type_error_with_the_near_name_or_the_alternative(
    cls, arguments, message
):
    with pytest.raises(TypeError, match=message):
        cls(**arguments)


@pytest.mark.parametrize("rows", [SAMPLING, BEAM_SEARCH], ids=["sampling", "beams"])
def test_every_refused_argument_names_its_value(rows):
    cls = SamplingParams if rows is SAMPLING else BeamSearchParams
    needed = {} if rows is SAMPLING else {"beam_width": 2}
    for row in rows:
        for name in row.names if row.effect == "refused" else ():
            with pytest.raises(TypeError, match=f"^{name} is 7; "):
                cls(**needed, **{name: 7})
            assert cls(**needed, **{name: None}) == cls(**needed)


@pytest.mark.parametrize("rows", [SAMPLING, BEAM_SEARCH], ids=["sampling", "beams"])
def test_what_is_taken_under_its_own_name_is_a_field_and_nothing_else_is(rows):
    cls = SamplingParams if rows is SAMPLING else BeamSearchParams
    fields = {field.name for field in dataclasses.fields(cls)}
    assert {
        name for row in rows if row.effect == "taken" and row.becomes is None for name in row.names
    } <= fields
    assert {
        name for row in rows if row.effect != "taken" or row.becomes for name in row.names
    } & fields == set()


def test_what_changes_nothing_is_logged(caplog):
    with caplog.at_level(logging.INFO, "pagedjax.vllm_names"):
        params = SamplingParams(n=2, output_kind=OutputKind.FINAL_ONLY, skip_clone=True)
    assert params == SamplingParams(n=2)
    (logged,) = caplog.messages
    assert logged.startswith("accepted, and changes nothing: output_kind (outputs have one form")
    assert SamplingParams(skip_reading_prefix_cache=True) == SamplingParams(
        enable_prefix_caching=False
    )
    assert SamplingParams(skip_reading_prefix_cache=None) == SamplingParams()


def test_the_dataclasses_stay_what_they_are():
    params = SamplingParams(2, temperature=0.5, bad_words=["a"], bad_words_token_ids=[[1, 2]])
    assert params.n == 2
    assert dataclasses.replace(params, seed=3) == SamplingParams(
        n=2, temperature=0.5, bad_words="a", bad_words_token_ids=((1, 2),), seed=3
    )
    assert pickle.loads(pickle.dumps(params)) == copy.deepcopy(params) == params
    given_tokens = SamplingParams(trace_decode_token_ids=[1, 2])
    for request_params in (params, given_tokens):
        assert decoded_params(encoded_params(request_params)) == request_params
    assert hash(BeamSearchParams(2)) == hash(BeamSearchParams(beam_width=2))
    assert SamplingParams.__init__.__name__ == "__init__"
    with pytest.raises(TypeError, match="did you mean 'temperature'"):
        dataclasses.replace(params, temprature=1)
    with pytest.raises(dataclasses.FrozenInstanceError):
        params.n = 3  # type: ignore[misc]


@pytest.mark.parametrize("name", ["logprobs", "prompt_logprobs"])
@pytest.mark.parametrize("value", [-1, 21])
def test_the_whole_vocabulary_is_refused_with_the_remedy(name, value):
    with refused(f"{name} is {value}; .* from 0 to 20, .* end of a prompt with prompt_logprobs=0"):
        SamplingParams(**{name: value})


def test_without_max_tokens_a_request_ends_at_max_model_len(tiny_llm):
    assert tiny_llm.engine.config.max_model_len == 512
    params = SamplingParams(temperature=0, max_tokens=None, ignore_eos=True)  # type: ignore[arg-type]
    assert params.max_tokens == NO_LIMIT
    (out,) = tiny_llm.generate([[5] * 479], params, use_tqdm=False)
    assert (len(out.outputs[0].token_ids), out.outputs[0].finish_reason) == (33, "length")


def test_the_last_tokens_of_a_prompt_are_kept(tiny_llm):
    ids = tiny_llm.tokenizer.encode(TEXT)
    options = {"temperature": 0, "max_tokens": 5, "ignore_eos": True}
    cut = SamplingParams(**options, truncate_prompt_tokens=4)
    (out,) = tiny_llm.generate(TEXT, cut, use_tqdm=False)
    assert (out.prompt, out.prompt_token_ids) == (TEXT, tuple(ids[-4:]))
    plain = SamplingParams(**options)
    assert out.outputs == tiny_llm.generate([ids[-4:]], plain, use_tqdm=False)[0].outputs
    assert "".join(tiny_llm.stream(TEXT, cut)) == out.outputs[0].text
    all_but_one = SamplingParams(**options, truncate_prompt_tokens=-1)
    (out,) = tiny_llm.generate([[5] * 10 + [7] * 600], all_but_one, use_tqdm=False)
    assert out.prompt_token_ids == (7,) * 511
    assert len(out.outputs[0].token_ids) == 1
    long = SamplingParams(**options, truncate_prompt_tokens=1000)
    assert tiny_llm.generate(TEXT, long, use_tqdm=False)[0].prompt_token_ids == tuple(ids)
    for value in (0, -2, 1.5, True):
        with refused(f"truncate_prompt_tokens is {value}; it must be None, an integer of at"):
            SamplingParams(truncate_prompt_tokens=value)


def test_prompts_may_be_mappings(tiny_llm):
    ids = tiny_llm.tokenizer.encode(TEXT)
    greedy = SamplingParams(temperature=0, max_tokens=5, ignore_eos=True)
    (expected,) = tiny_llm.generate(TEXT, greedy, use_tqdm=False)
    prompts = [
        {"prompt": TEXT},
        {"prompt_token_ids": ids},
        {"prompt": "a label", "prompt_token_ids": ids},
        TEXT,
        ids,
    ]
    outputs = tiny_llm.generate(prompts, greedy, use_tqdm=False, priority=None)
    assert [out.outputs for out in outputs] == [expected.outputs] * 5
    assert [out.prompt for out in outputs] == [TEXT, None, "a label", TEXT, None]
    assert (
        tiny_llm.generate({"prompt": TEXT, "multi_modal_data": None}, greedy, use_tqdm=False)[
            0
        ].prompt
        == TEXT
    )
    assert "".join(tiny_llm.stream({"prompt_token_ids": ids}, greedy)) == expected.outputs[0].text


def test_a_beam_search_has_vllms_form(tiny_llm):
    params = BeamSearchParams(beam_width=3, max_tokens=6)
    prompts = [{"prompt": TEXT}, {"prompt_token_ids": [5, 6]}]
    expected_outputs = tiny_llm.generate(prompts, params, use_tqdm=False)
    outputs = tiny_llm.beam_search(prompts, params)
    for output, expected in zip(outputs, expected_outputs, strict=True):
        assert len(output.sequences) == 3
        for sequence, branch in zip(output.sequences, expected.outputs, strict=True):
            ended = branch.finish_reason == "stop"
            assert sequence.tokens == [
                *expected.prompt_token_ids,
                *branch.token_ids[: -1 if ended else None],
            ]
            assert sequence.text == tiny_llm.tokenizer.decode(sequence.tokens)
            assert (sequence.cum_logprob, sequence.finish_reason) == (
                branch.cumulative_logprob,
                branch.finish_reason,
            )
    with refused(r"params is SamplingParams\(.*; it must be BeamSearchParams"):
        tiny_llm.beam_search(prompts, SamplingParams())  # type: ignore[arg-type]


def test_a_beams_stop_token_is_shown_on_request(tiny_llm):
    first = tiny_llm.generate(
        [[5, 6]], BeamSearchParams(1, max_tokens=4, ignore_eos=True), use_tqdm=False
    )[0]
    stop = first.outputs[0].token_ids[2]
    for included in (False, True):
        params = BeamSearchParams(
            1,
            max_tokens=4,
            ignore_eos=True,
            stop_token_ids=(stop,),
            include_stop_str_in_output=included,
        )
        ((sequence,),) = [output.sequences for output in tiny_llm.beam_search([[5, 6]], params)]
        assert sequence.finish_reason == "stop"
        assert sequence.tokens == [5, 6, *first.outputs[0].token_ids[: 3 if included else 2]]


@pytest.mark.slow
def test_a_profile_is_written(tiny_llm, tmp_path):
    tiny_llm.start_profile(tmp_path)
    tiny_llm.generate([[5]], SamplingParams(max_tokens=2), use_tqdm=False)
    tiny_llm.stop_profile()
    assert list(tmp_path.rglob("*.xplane.pb"))
