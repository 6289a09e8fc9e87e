"""The engine's configuration: strict, frozen, and helpful when a name is nearly right."""

from __future__ import annotations

import dataclasses
import math
import re
from typing import Any, get_args

import pytest

from pagedjax.host import policies
from pagedjax.host.kv_policies import ALL, View
from pagedjax.host.policies import POLICIES
from pagedjax.host.state import limits
from pagedjax.options import exclusions
from pagedjax.options.config import (
    EngineConfig,
    PolicyName,
    PrefixCheckpoints,
    Resolved,
    Speculative,
    from_dict,
    one_of,
)
from pagedjax.options.own_values import own_value
from pagedjax.routing import routers
from tests.refusals import refused

SIZES = ("block_size", "max_num_batched_tokens", "max_num_seqs", "max_model_len", "num_blocks")


def test_defaults_are_valid_and_leave_model_and_memory_sizes_open():
    config = EngineConfig()
    assert (config.max_model_len, config.num_blocks, config.dtype, config.attention_impl) == (
        None,
    ) * 4
    assert (config.block_size, config.max_num_batched_tokens, config.max_num_seqs) == (16, 2048, 64)


INVALID = [
    *((name, "an integer of at least 1", (0, 1.0, True, "16")) for name in SIZES),
    ("memory_fraction", "above 0 and at most 1", (0, 1.01, math.nan, "half", True)),
    ("swap_space_gib", "a number of GiB, at least 0", (-0.5, math.nan, math.inf, "4", True, None)),
    ("seed", "an integer in [0, 2**32)", (-1, 2**32, 1.0, True, None)),
    (
        "token_buckets",
        "ascending integers of at least 1",
        ((), (0, 2048), (2048, 16), (16, 16, 2048), (16.0, 2048), (True, 2048), "16"),
    ),
    *(
        (name, "True or False", (0, 1, None, "yes"))
        for name in ("enable_prefix_caching", "chunked_prefill", "mixed_steps")
    ),
]


@pytest.mark.parametrize(
    ("name", "rule", "value"),
    [(name, rule, value) for name, rule, values in INVALID for value in values],
)
def test_an_invalid_value_is_refused_with_the_rule(name, rule, value):
    with refused(f"^{re.escape(f'{name} is {value!r}; it must be {rule}')}$"):
        EngineConfig(**{name: value})


VALID = [
    *((name, 1) for name in SIZES),
    *(("memory_fraction", value) for value in (1, 1.0, 1e-3)),
    *(("swap_space_gib", value) for value in (0, 0.5, 4.0)),
    ("seed", 2**32 - 1),
    *((name, False) for name in ("enable_prefix_caching", "chunked_prefill", "mixed_steps")),
]


@pytest.mark.parametrize(("name", "value"), VALID)
def test_the_extremes_are_accepted(name, value):
    assert getattr(EngineConfig(**{name: value}), name) is value


@pytest.mark.parametrize(
    "name", ["block_size", "max_num_batched_tokens", "max_num_seqs", "memory_fraction"]
)
def test_none_is_refused_where_nothing_is_chosen_later(name):
    with refused(f"^{name} is None"):
        EngineConfig(**{name: None})


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("dtype", "float23", r"'float32', 'bfloat16', 'float16' \(did you mean 'float32'\?\)$"),
        ("policy", "fcsf", r"'fcfs'.*, or FILE\.py:NAME \(did you mean 'fcfs'\?\)$"),
        ("policy", None, "'fcfs'"),
        ("attention_impl", "refrence", r", or FILE\.py:NAME \(did you mean 'reference'\?\)$"),
        ("linear_impl", "gpu", r", or FILE\.py:NAME \(did you mean 'cpu'\?\)$"),
        ("state_impl", "palas_tpu", r"'xla', 'pallas_tpu' \(did you mean 'pallas_tpu'\?\)$"),
        ("kv_policy", "some", r"'full', 'streaming', 'quest', or FILE\.py:NAME$"),
        ("prefix_checkpoints", "lest", r"'every', 'last' \(did you mean 'last'\?\)$"),
        ("reservation", "pow3", r"'none', 'oracle', 'pow2', 'max' \(did you mean 'pow2'\?\)$"),
    ],
)
def test_an_unknown_choice_lists_the_choices_and_the_nearest(name, value, message):
    with refused(rf"^{name} is {value!r}; it must be one of .*{message}"):
        EngineConfig(**{name: value})


def test_prefix_checkpoints_are_a_name_or_fields():
    def read(value: Any) -> PrefixCheckpoints | str | None:
        return EngineConfig(block_size=16, prefix_checkpoints=value).prefix_checkpoints

    assert read(None) is read("every") is None
    last = PrefixCheckpoints(prompts=True, texts=True)
    assert read("last") == read({"prompts": True, "texts": True}) == read(last) == last
    assert read({"interval": 32}) == PrefixCheckpoints(interval=32)


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (3, "prefix_checkpoints is 3; it must be 'every', 'last', or a mapping such as"),
        ({"every": 3}, "unknown key prefix_checkpoints.'every'"),
        ({"interval": -16}, "prefix_checkpoints.interval is -16; it must be an integer of at le"),
        ({"interval": 40}, "interval is 40 tokens, and block_size is 16; .* such as 48"),
        ({"texts": 1}, "prefix_checkpoints.texts is 1; it must be True or False"),
        ({"interval": 0}, "keeps nothing, .*give an interval, or one of prompts, texts and j"),
    ],
)
def test_prefix_checkpoints_that_cannot_be_are_refused(value, message):
    with refused(message):
        EngineConfig(block_size=16, prefix_checkpoints=value)


def test_models_whose_layers_see_everything_have_no_checkpoints_to_choose():
    config = Resolved(**RESOLVED, prefix_checkpoints="last")  # type: ignore[arg-type]
    assert limits(config).prefix_checkpoints is None
    assert limits(config, 0, (ALL, ALL)).prefix_checkpoints is None
    assert limits(config, 0, (ALL, View(2))).prefix_checkpoints == config.prefix_checkpoints


def test_token_buckets_below_the_budget_are_refused():
    with refused("the largest of token_buckets is 64, below max_num_batched_tokens 65; add it"):
        EngineConfig(token_buckets=(16, 64), max_num_batched_tokens=65)
    config = EngineConfig(token_buckets=[16, 64], max_num_batched_tokens=64)  # type: ignore[arg-type]
    assert config.token_buckets == (16, 64)


RESOLVED = {
    "max_model_len": 64,
    "num_blocks": 8,
    "dtype": "float32",
    "weight_dtype": "float32",
    "kv_cache_dtype": "float32",
    "attention_impl": "xla",
    "state_impl": "xla",
    "token_buckets": (2048,),
}


@pytest.mark.parametrize("name", RESOLVED)
def test_a_resolved_config_has_no_none(name):
    assert getattr(Resolved(**RESOLVED), name) == RESOLVED[name]  # type: ignore[arg-type]
    with refused(f"^{name} is not resolved$"):
        Resolved(**{**RESOLVED, name: None})  # type: ignore[arg-type]


DRAFT = {"method": "draft", "model": "small"}
REJECTION = {"method": "ngram", "rule": "rejection"}
TOGETHER = [  # of each exclusion: options that have both, and the beginning of the error
    (
        {"lookahead": 1, "speculative": {"method": "ngram"}},
        "lookahead is 1 and speculative is 'ngram': a draft follows known tokens",
    ),
    (
        {"decode_span": 4, "speculative": {"method": "ngram"}},
        "decode_span is 4 and speculative is 'ngram': a draft follows known tokens",
    ),
    (
        {"late_stops": True, "speculative": {"method": "ngram"}},
        "late_stops is True and speculative is 'ngram': a draft follows known tokens",
    ),
    (
        {"decode_span": 4, "kv_policy": "streaming"},
        "decode_span is 4 and kv_policy is 'streaming', whose rows of attention",
    ),
    (
        {"decode_span": 4, "batch_invariant": True},
        "decode_span is 4 and batch_invariant is True: a span is another program",
    ),
    (
        {"batch_invariant": True, "speculative": REJECTION},
        "batch_invariant is True and speculative.rule is 'rejection', with which",
    ),
    (
        {"kv_policy": "streaming", "mixed_steps": False},
        "kv_policy is 'streaming', and reservation is 'none', chunked_prefill True and "
        "mixed_steps False: these baselines keep every block",
    ),
    (
        {"kv_policy": {"name": "quest"}, "speculative": DRAFT},
        "kv_policy is 'quest' and speculative.method is 'draft', whose model reads",
    ),
    (
        {"enable_lora": True, "speculative": DRAFT},
        "enable_lora is True and speculative.method is 'draft', whose model has no adapters",
    ),
    (
        {"enable_lora": True, "devices": [1]},
        "enable_lora is True, mesh None and devices (1,): adapters are on the first device",
    ),
    (
        {"reservation": "pow2"},
        "reservation is 'pow2', which shares no blocks, but enable_prefix_caching is True",
    ),
    (
        {"compilation": "background", "speculative": {"method": "suffix"}},
        "compilation is 'background' and speculative is 'suffix', whose number of drafts",
    ),
    (
        {"speculative": {"method": "suffix", "rule": "rejection"}},
        "speculative.rule is 'rejection' and speculative.method is 'suffix', which learns",
    ),
    (
        {"speculative": {"method": "ngram", "model": "small"}},
        "speculative.model is 'small', and the drafter 'ngram' has no model; leave it out",
    ),
    (
        {"speculative": {"method": "eagle", "model": "head", "weight_dtype": "stored"}},
        "speculative.weight_dtype is 'stored', and the drafter 'eagle' has no checkpoint of a mod",
    ),
]


@pytest.mark.parametrize(
    ("exclusion", "case"),
    list(zip([*exclusions.ENGINE, *exclusions.SPECULATIVE], TOGETHER, strict=True)),
    ids=lambda value: "-".join(value.options) if isinstance(value, exclusions.Exclusion) else "",
)
def test_options_that_exclude_each_other_are_refused_and_each_alone_is_not(exclusion, case):
    options, message = case
    with refused(f"^{re.escape(message)}") as error:
        EngineConfig(**options)
    *_, remedy = str(error.value).split("; ")
    assert remedy.startswith(("set ", "use ", "leave "))
    fields = {field.partition(".")[0] for field in exclusion.options}
    assert fields & set(options)
    for name in options if len(options) > 1 else ():
        EngineConfig(**{name: options[name]})


def test_every_policy_name_of_the_config_exists():
    assert set(get_args(PolicyName)) == set(POLICIES)


def test_no_near_name_gives_no_suggestion():
    with refused(r"^x is 'zzz'; it must be one of 'a', 'b'$"):
        one_of("x", "zzz", ("a", "b"))


def test_a_mapping_becomes_a_config():
    assert from_dict(EngineConfig, {"block_size": 32, "dtype": "bfloat16"}) == EngineConfig(
        block_size=32, dtype="bfloat16"
    )
    assert from_dict(EngineConfig, {}) == EngineConfig()


def test_an_unknown_key_suggests_the_nearest_name():
    with refused(r"^unknown key 'blocksize'; did you mean 'block_size'\?$"):
        from_dict(EngineConfig, {"blocksize": 16})


def test_an_unknown_key_without_a_near_name_lists_all_keys():
    with refused(r"^unknown key engine\.'qqq'; known keys are block_size, .*seed$"):
        from_dict(EngineConfig, {"qqq": 1}, where="engine.")


def test_a_config_is_frozen_hashable_and_checked_when_replaced():
    config = EngineConfig()
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.block_size = 8  # type: ignore[misc]
    assert hash(config) == hash(EngineConfig())
    with refused("num_blocks is 0"):
        dataclasses.replace(config, num_blocks=0)


def test_speculative_options_have_vllms_names_too():
    theirs = {"method": "draft_model", "model": "small", "num_speculative_tokens": 5}
    assert EngineConfig(speculative=theirs).speculative == Speculative(
        method="draft", model="small", num_tokens=5
    )  # type: ignore[arg-type]
    theirs = {
        "method": "ngram",
        "num_speculative_tokens": 2,
        "prompt_lookup_max": 5,
        "prompt_lookup_min": 2,
    }
    assert EngineConfig(speculative=theirs).speculative == Speculative(
        num_tokens=2, ngram_max=5, ngram_min=2
    )  # type: ignore[arg-type]
    with refused("which gives one field under two names"):
        EngineConfig(speculative={"num_tokens": 2, "num_speculative_tokens": 3})  # type: ignore[arg-type]
    with refused(r"speculative\.method is \['ngram'\]; it must be one of"):
        EngineConfig(speculative={"method": ["ngram"]})  # type: ignore[arg-type]


def test_a_shared_file_of_ones_own_is_run_again_only_after_it_has_changed(tmp_path):
    file = tmp_path / "mine.py"
    file.write_text("FIRST = []\nSECOND = [FIRST]\n")

    def read(name: str) -> list:
        return own_value("linear_impl", f"{file}:{name}", list, (), shared=True)

    first = read("FIRST")
    assert read("SECOND")[0] is first
    assert read("FIRST") is first
    file.write_text("FIRST = ['other']\n")
    assert read("FIRST") == ["other"]


@pytest.mark.parametrize(
    ("find", "function", "text"),
    [
        (
            policies.find,
            "order",
            "from pagedjax.policies import FCFS as BASE\n"
            "def function(waiting, running, cached): return waiting\n",
        ),
        (
            routers.find,
            "choose",
            "from pagedjax.routing import ROUTERS\nBASE = ROUTERS['round_robin']\n"
            "def function(state, request): return state.replicas[0]\n",
        ),
    ],
    ids=["policy", "router"],
)
def test_no_engine_sees_what_another_one_left_in_a_file_of_ones_own(tmp_path, find, function, text):
    file = tmp_path / "mine.py"
    file.write_text(f"{text}CALLS = []\nMINE = BASE._replace(name='mine', {function}=function)\n")
    first, second = (find(f"{file}:MINE") for _ in range(2))
    getattr(first, function).__globals__["CALLS"].append("of the first engine")
    assert getattr(second, function).__globals__["CALLS"] == []
