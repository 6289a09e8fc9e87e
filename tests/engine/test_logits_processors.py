"""Logits processors: the watermark of docs/design/logits-processors.md, and the places where one
can be named.
"""

from __future__ import annotations

import runpy
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import chex
import jax.numpy as jnp
import numpy as np
import pytest

from experiments.core import config
from pagedjax import LLM, EngineConfig, SamplingParams
from pagedjax.commands.cli import parser
from pagedjax.device.row_features import find
from tests.engine.runs import answers, small_llm, token_ids
from tests.refusals import refused

SIZES = {"max_num_seqs": 4, "max_num_batched_tokens": 16, "num_blocks": 64}
PROMPTS = [[5, 6, 7], [9, 10, 11, 12], [20, 21]]
PLAIN = SamplingParams(temperature=1.0, seed=1, max_tokens=120, ignore_eos=True, logprobs=1)
GAMMA = 0.25
DELTA = 3.0
KEY = 7
MARKED = replace(PLAIN, extra_args={"watermark": (GAMMA, DELTA, KEY)})


@pytest.fixture(scope="module")
def file(documented_file) -> Path:
    return documented_file("logits-processors.md", "watermark.py")


@pytest.fixture(scope="module")
def llm(one_layer, file) -> LLM:
    return small_llm(one_layer, row_features=f"{file}:WATERMARK", **SIZES)


@pytest.mark.slow
def test_a_watermark_is_detected_where_it_was_asked_for_and_nothing_else_changes(
    one_layer, llm, file
):
    z_score = runpy.run_path(str(file))["z_score"]
    other_params = replace(PLAIN, seed=2), replace(PLAIN, temperature=0.0)
    plain = answers(small_llm(one_layer, **SIZES), PROMPTS, [PLAIN, *other_params])
    assert answers(llm, PROMPTS, [PLAIN, *other_params]) == plain, "the same bits"
    mixed = answers(llm, PROMPTS, [MARKED, *other_params])
    assert mixed[1:] == plain[1:], "the same bits beside a row with a mark"
    marked = mixed[0].token_ids
    assert marked != plain[0].token_ids
    assert z_score(PROMPTS[0], marked, GAMMA, KEY) > 6
    assert abs(z_score(PROMPTS[0], marked, GAMMA, KEY + 1)) < 4, "another key finds nothing"
    for prompt, branch in zip(PROMPTS[:2], plain[:2], strict=True):
        assert abs(z_score(prompt, branch.token_ids, GAMMA, KEY)) < 3.5


def test_numpy_and_jax_have_the_same_lists_of_the_wanted_size(file):
    green = runpy.run_path(str(file))["green"]
    before = np.arange(64)[:, None]
    tokens = np.arange(1000)[None]
    expected = green(before, tokens, np.float32(0.3), np.uint32(5))
    green_tokens = green(jnp.asarray(before), jnp.asarray(tokens), jnp.float32(0.3), jnp.uint32(5))
    chex.assert_trees_all_equal(np.asarray(green_tokens), expected)
    assert abs(expected.mean() - 0.3) < 0.005
    assert np.abs(expected.mean(1) - 0.3).max() < 0.08


@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [
        {"speculative": {"method": "ngram", "num_tokens": 3, "adaptive": False}},
        {"lookahead": 2},
        {"num_blocks": 20},
        {"mesh": {"tensor": 2}},
    ],
    ids=str,
)
def test_a_watermark_does_not_depend_on_how_steps_are_made(
    one_layer, one_layer_folder, llm, file, options
):
    params = [replace(request_params, max_tokens=60) for request_params in (MARKED, PLAIN, MARKED)]
    model = one_layer_folder if "mesh" in options else one_layer
    varied = small_llm(model, row_features=[find(f"{file}:WATERMARK")], **SIZES | options)
    assert token_ids(varied, PROMPTS, params) == token_ids(llm, PROMPTS, params)


def test_what_a_request_says_is_checked_and_a_bug_in_read_refuses_it_alone(llm):
    for value, message in (
        ((1.5, 2.0, 7), "watermark is .* gamma must be between 0 and 1"),
        ((0.5, 2.0, -7), r"key is -7; it must fit uint32 of shape \[\]"),
        (
            3,
            r"row feature 'watermark' cannot read {'watermark': 3} \(TypeError: .*\); give what its `read` expects",
        ),
    ):
        wrong = replace(PLAIN, extra_args={"watermark": value})
        with refused(f"request '[0-9]+': {message}"):
            llm.generate(PROMPTS, [PLAIN, wrong, PLAIN])
        assert not llm.engine.has_work


# --- names ----------------------------------------------------------------------------------------


def test_names_and_values_are_given_together_or_under_vllms_name(one_layer, file):
    value = find(f"{file}:WATERMARK")
    make = partial(small_llm, one_layer, **SIZES)

    def names(**options) -> list[str]:
        chain = make(**options).engine.runtime.chain.features
        return [feature.name for feature in chain if feature.name in ("watermark", "other")]

    for option in (
        {"row_features": value},
        {"logits_processors": [value]},
        {"logits_processors": f"{file}:WATERMARK"},
    ):
        assert names(**option) == ["watermark"]
    features = (value._replace(name="other"), f"{file}:WATERMARK")
    assert names(row_features=features) == ["watermark", "other"]
    assert make(row_features=features).engine.config.row_features == (f"{file}:WATERMARK",)
    assert names(logits_processors=None) == []
    for option, message in (
        (
            {"row_features": value, "logits_processors": value},
            "logits_processors is vLLM's name of row_features, and both are given",
        ),
        (
            {"logits_processors": [int]},
            "row_features has <class 'int'>; write a RowFeature, or give folder/file.py",
        ),
        (
            {"row_features": (value, f"{file}:WATERMARK")},
            "row_features use the name 'watermark' twice",
        ),
        (
            {"row_features": "none.py:A"},
            "row_features is 'none.py:A', but there is no file none.py; write module:NAME, or folder/file.py:N",
        ),
        (
            {"row_features": "json:dumps"},
            "row_features is 'json:dumps', but dumps in json is no RowFeature; those in it: none",
        ),
        (
            {"row_features": "watermark"},
            r"row_features is \('watermark',\); it must be a list, and each item module:NAME or folder/file",
        ),
    ):
        with refused(message):
            make(**option)


def test_the_command_line_and_yaml_name_processors(tmp_path, file):
    args = parser().parse_args(["serve", "--row-features", "a.py:A,b:B"])
    assert args.row_features == ("a.py:A", "b:B")
    assert EngineConfig(row_features=["a.py:A"]).row_features == ("a.py:A",)  # type: ignore[arg-type]
    code = file.read_text("utf-8")

    def point(text: str = code, name: str = "watermark.py", **sections: Any) -> config.Point:
        (tmp_path / name).write_text(text, "utf-8")
        engine = {"row_features": [f"{name}:WATERMARK"]}
        sampling = {"extra_args": {"watermark": [0.25, 2.0, 7]}}
        raw = {"name": "unit", "workload": WORKLOAD, "engine": engine, "sampling": sampling}
        (expanded,) = config.expand(raw | sections, tmp_path)
        return expanded

    first = point()
    assert first.experiment.engine.row_features == (f"{tmp_path.resolve()}/watermark.py:WATERMARK",)
    assert first.experiment.sampling.extra_args == {"watermark": (0.25, 2.0, 7)}
    assert point(name="moved.py").key == first.key, "the content counts, and not the place"
    assert point(f"{code}\n").key != first.key
    empty = [point(engine=engine, sampling={}) for engine in ({"row_features": []}, {})]
    assert empty[0].key == empty[1].key
    with refused(r"engine.row_features is 'none.py:A', but there is no file none.py"):
        point(engine={"row_features": ["none.py:A"]})
    with refused(r"sampling\.taps: an experiment keeps no arrays"):
        point(sampling={"taps": {"hidden_states": [0]}})


WORKLOAD = {
    "kind": "synthetic",
    "count": 1,
    "prompt": {"dist": "fixed", "value": 8},
    "output": {"dist": "fixed", "value": 4},
}
