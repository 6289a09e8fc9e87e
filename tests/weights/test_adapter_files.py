"""Files of adapters: both forms, scaling, and what is refused."""

from __future__ import annotations

import chex
import numpy as np
import pytest

from pagedjax.weights.adapter_files import (
    adapter_of,
    adapter_parts,
    initial_factors,
    read_adapter,
    write_adapter,
)
from pagedjax.weights.architectures import FAMILIES, normalised
from tests.device.test_model_families import GPT2
from tests.refusals import refused
from tests.weights.tiny_adapters import random_factors, tiny_adapter


@pytest.fixture(scope="module")
def config(tiny):
    return tiny.model.config


def test_both_forms_are_the_same_adapter(tiny_folder, tmp_path, config):
    factors = random_factors(tiny_folder, 4)
    from_safetensors, from_orbax = (
        read_adapter(write_adapter(tmp_path / to, factors, {"lora_alpha": 8}, to), config, to)
        for to in ("safetensors", "orbax")
    )
    assert from_safetensors.content_hash == from_orbax.content_hash
    assert from_safetensors.rank == from_orbax.rank == 4
    chex.assert_trees_all_equal(dict(from_safetensors.parts), dict(from_orbax.parts))
    a, b = factors["model.layers.1.self_attn.o_proj"]
    (factor_pair,) = (
        pair
        for place, pair in from_safetensors.parts.items()
        if (place.layer, place.matrix) == (1, "attn.out")
    )
    chex.assert_trees_all_close(factor_pair[1] @ factor_pair[0], 8 / 4 * b @ a, rtol=1e-5)


@pytest.mark.parametrize(
    ("options", "scale"),
    [
        ({"lora_alpha": 6}, 6 / 4),
        ({"lora_alpha": 6, "use_rslora": True}, 6 / 2),
        ({"lora_alpha": 6, "alpha_pattern": {"o_proj": 10}}, 10 / 4),
        ({"lora_alpha": 6, "alpha_pattern": {"q_proj": 10}}, 6 / 4),
        # of several patterns that fit, the first one counts
        ({"alpha_pattern": {"self_attn.o_proj": 10, "o_proj": 2}}, 10 / 4),
    ],
)
def test_options_scale_as_pefts(tiny_folder, tmp_path, config, options, scale):
    adapter = read_adapter(tiny_adapter(tmp_path / "a", tiny_folder, 4, **options), config, "a")
    a, b = random_factors(tiny_folder, 4)["model.layers.0.self_attn.o_proj"]
    (factor_pair,) = (
        pair
        for place, pair in adapter.parts.items()
        if (place.layer, place.matrix) == (0, "attn.out")
    )
    chex.assert_trees_all_close(
        factor_pair[1] @ factor_pair[0], (scale * b @ a).astype(np.float32), rtol=1e-5, atol=1e-6
    )


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"peft_type": "IA3"}, "peft_type is 'IA3'; 'LORA' is supported"),
        (
            {"use_dora": True},
            "use_dora is True, which is not supported; train the adapter without it",
        ),
        (
            {"modules_to_save": ["lm_head"]},
            r"modules_to_save is \['lm_head'\], which is not supported",
        ),
        (
            {"bias": "all"},
            "bias is 'all', and adapters here have factors alone; train with bias='none'",
        ),
        ({"lora_alpha": "many"}, "lora_alpha is 'many'; it must be a number"),
        ({"alpha_pattern": [1]}, r"alpha_pattern is \[1\]; it must be an object"),
    ],
)
def test_options_that_are_not_supported_are_refused(
    tiny_folder, tmp_path, config, options, message
):
    with refused(message):
        read_adapter(tiny_adapter(tmp_path / "a", tiny_folder, **options), config, "a")


def test_modules_and_shapes_of_another_model_are_refused(tiny_folder, tmp_path, config):
    (module, (a, b)), *_ = random_factors(tiny_folder, 4).items()
    for factors in ({"model.layers.0.self_attn.w_proj": (a, b)}, {module: (a[:, :-1], b)}):
        with refused(r"adapter 'a' .*does not fit the model; modules may be"):
            read_adapter(write_adapter(tmp_path / "a", factors, {}), config, "a")
    with pytest.raises(
        FileNotFoundError,
        match=r"has no adapter_config.json; it must be the folder of a LoRA adapter",
    ):
        read_adapter(tmp_path / "nowhere", config, "a")


def test_factors_to_start_from_change_nothing(config):
    factors = initial_factors(config, 3, modules=("q_proj", "down_proj"), seed=5)
    assert {name.rpartition(".")[2] for name in factors} == {"q_proj", "down_proj"}
    assert len(factors) == 2 * config.layers
    chex.assert_trees_all_equal(
        factors, initial_factors(config, 3, modules=("down_proj", "q_proj"), seed=5)
    )
    assert len(initial_factors(config, modules="q_proj")) == config.layers
    for name, (a, b) in initial_factors(config, 3).items():
        chex.assert_shape([a, b.T], [(3, None), (3, None)])
        assert not b.any(), name
        assert 0.7 < a.std() * a.shape[1] ** 0.5 < 1.3, name
    assert (
        factors["model.layers.0.self_attn.q_proj"][0]
        != initial_factors(config, 3)["model.layers.0.self_attn.q_proj"][0]
    ).any()


@pytest.mark.parametrize("rank", [0, True, 2.0])
def test_a_rank_to_start_from_is_checked(config, rank):
    with refused(f"rank is {rank!r}; it must be an integer of at least 1, such as 8"):
        initial_factors(config, rank)


def test_kinds_to_start_from_are_checked(config):
    with refused(r"modules has 'c_attn', 'lm_head'; this model has q_proj,.*: use some of them"):
        initial_factors(config, modules=("q_proj", "c_attn", "lm_head"))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            lambda a, b: {"layers.0.self_attn.q_proj": (a, b)},
            r"names such as model\.layers\.0\..*\n  layers.*: no such matrix",
        ),
        (
            lambda a, b: {"model.layers.0.self_attn.q_proj": (a[:, :-1], b)},
            r"q_proj: A \(4, 63\) and B .*, and \[r, 64\] and",
        ),
        (
            lambda a, b: {"model.layers.0.self_attn.q_proj": (a[:0], b[:, :0])},
            r"q_proj: A \(0, 64\) and B .*, and \[r, 64\]",
        ),
        (
            lambda a, b: {"model.layers.0.self_attn.q_proj": a},
            "q_proj: ndarray, and a pair of arrays fits, A .r, in. and B",
        ),
        (
            lambda a, b: {"model.layers.0.self_attn.q_proj": ("a", "b")},
            "q_proj: tuple, and a pair of arrays fits",
        ),
        (lambda a, b: {}, "it has no factors"),
    ],
)
def test_arrays_that_do_not_fit_are_refused(config, change, message):
    arrays = change(*initial_factors(config, 4)["model.layers.0.self_attn.q_proj"])
    with refused(rf"(?s)^adapter of arrays does not fit the model; modules may be .*{message}"):
        adapter_parts(arrays, config)


def test_options_of_arrays_are_those_of_a_folder(config):
    factors = initial_factors(config, 4)
    with refused("adapter 'x': use_dora is True, which is not supported; train the adapter"):
        adapter_of(factors, {"use_dora": True}, config, "x")


# Patterns, and whether they match by the rule of PEFT: `(.*\.)?(PATTERN)$` from the start of the
# whole name.
PATTERNS = {
    "transformer.h.0.attn.c_attn": {
        "c_attn": True,
        "attn.c_attn": True,
        "h.0.attn.c_attn": True,
        "transformer.h.0.attn.c_attn": True,
        "^transformer.h.0.attn.c_attn": True,
        r".*\.0\..*": True,
        "^h.0.attn.c_attn": False,
        "h.1.attn.c_attn": False,
        "attn": False,
        "tn.c_attn": False,
    },
    "model.layers.0.self_attn.o_proj": {
        "o_proj": True,
        "model.layers.0.self_attn.o_proj": True,
        "^model.layers.0.self_attn.o_proj": True,
        "^layers.0.self_attn.o_proj": False,
        "model.layers.1.self_attn.o_proj": False,
    },
}


@pytest.mark.parametrize("module", PATTERNS)
def test_patterns_are_matched_with_whole_names_as_by_peft(tiny_folder, tmp_path, config, module):
    if module.startswith("transformer."):
        config = FAMILIES["gpt2"].from_hf(normalised({**GPT2, "model_type": "gpt2"}, "gpt2"))
        a, b = initial_factors(config, 4)["h.0.attn.c_attn"]
    else:
        a, b = random_factors(tiny_folder, 4)[module]
    factors = {module: (a, np.ones_like(b))}
    for pattern, matches in PATTERNS[module].items():
        options = {"lora_alpha": 8, "alpha_pattern": {"nothing": 3, pattern: 64}}
        alpha = 64 if matches else 8
        written = read_adapter(write_adapter(tmp_path / "a", factors, options), config, "a")
        for parts in (written.parts, adapter_parts(factors, config, options)):
            (_, scaled), *_ = parts.values()
            chex.assert_trees_all_equal(scaled, np.full_like(scaled, alpha / 4))


def test_factors_with_and_without_a_prefix_are_given_once():
    config = FAMILIES["gpt2"].from_hf(normalised({**GPT2, "model_type": "gpt2"}, "gpt2"))
    factors = initial_factors(config, 4, modules="c_attn")
    twice = {**factors, "transformer.h.0.attn.c_attn": factors["h.0.attn.c_attn"]}
    with refused(r"attn\.c_attn: its factors are given twice, with and without a prefix"):
        adapter_parts(twice, config)
    prefixed = {f"transformer.{name}": pair for name, pair in factors.items()}
    chex.assert_trees_all_equal(adapter_parts(prefixed, config), adapter_parts(factors, config))
