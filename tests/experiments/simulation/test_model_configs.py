"""Shapes of named models against what their makers publish."""

from __future__ import annotations

import pytest

from experiments.simulation import model_configs
from experiments.simulation.cost import MODELS, SHAPES, Simulate, named_shape, shape_of
from pagedjax.device.models.mixers.gated_delta import GatedDelta
from pagedjax.device.models.mixers.mamba2 import Mamba2
from pagedjax.weights.architectures import FAMILIES

# (billions of parameters, of which a token uses, bytes that a token keeps in 16 bits): the first two
# are those of
#   gpt-oss: OpenAI's model card (arXiv 2508.10925), table 1, where the embedding is not active
#   Qwen3-Next: its card on huggingface.co ("80B in total and 3B activated", 79B without embedding)
#   DeepSeek-V3: arXiv 2412.19437; its bytes: arXiv 2505.09343, table 1
#   Kimi K2: its card on huggingface.co ("1T", "32B"); layers and heads: arXiv 2507.20534, table 2
#   GLM-4.5: arXiv 2508.06471, table 1
#   Granite 4 H: the cards on huggingface.co ("3B", "7B, 1B active", "32B, 9B active")
#   LFM2: its card on huggingface.co ("1.17B"); Qwen3.5: its card ("0.8B", of which vision is a part)
#   Gemma 3: arXiv 2503.19786, table 1: 302M of the embedding and 698M of the rest
#   Gemma 4: its card on huggingface.co ("30.7B")
PUBLISHED = {
    "gpt-oss-20b": (20.91, 3.61, 24 * 2 * 8 * 64 * 2),
    "gpt-oss-120b": (116.83, 5.13, 36 * 2 * 8 * 64 * 2),
    "qwen3-next-80b-a3b": (80, 3, 12 * 2 * 2 * 256 * 2),
    "deepseek-v3": (671, 37, 70_272),
    "kimi-k2": (1000, 32, 70_272),
    "glm-4.5": (355, 32, 92 * 2 * 8 * 128 * 2),
    "glm-4.5-air": (106, 12, 46 * 2 * 8 * 128 * 2),
    "granite-4-h-micro": (3, 3, 4 * 2 * 8 * 64 * 2),
    "granite-4-h-tiny": (7, 1, 4 * 2 * 4 * 128 * 2),
    "granite-4-h-small": (32, 9, 4 * 2 * 8 * 128 * 2),
    "lfm2-1.2b": (1.17, 1.17, 6 * 2 * 8 * 64 * 2),
    "qwen3.5-0.8b": (0.8, 1, 6 * 2 * 2 * 256 * 2),
    "gemma-3-1b": (1.0, 1.0, 26 * 2 * 256 * 2),
    "gemma-4-31b": (30.7, 30.7, 50 * 2 * 16 * 256 * 2 + 10 * 2 * 4 * 512 * 2),
}


@pytest.mark.parametrize("name", model_configs.CONFIGS)
def test_named_models_have_the_published_sizes(name):
    total, active, token_bytes = PUBLISHED[name]
    shape = named_shape(name)
    billions = shape.total_bytes / shape.weight_bytes / 1e9
    used = shape.products(1, 1) / 2 / 1e9
    # a number with two digits or more says a hundredth, one with one digit the half of one
    assert billions == pytest.approx(total, rel=0.03 if total >= 10 else 0.07)
    precise = isinstance(active, float)
    assert used == pytest.approx(active, abs=0.01 if precise else 0.9, rel=0.001 if precise else 0)
    assert shape.token_bytes == token_bytes


def test_published_totals_with_more_digits_hold():
    """Sums of the sizes of all tensors, as huggingface.co shows them beside each model."""
    billions = {"gpt-oss-20b": 20.9, "gpt-oss-120b": 116.8, "kimi-k2": 1026, "deepseek-v3": 671.0}
    billions |= {"granite-4-h-micro": 3.19, "granite-4-h-tiny": 6.94, "granite-4-h-small": 32.2}
    for name, size in billions.items():
        shape = named_shape(name)
        assert shape.total_bytes / shape.weight_bytes / 1e9 == pytest.approx(size, rel=0.001), name


def test_named_models_have_their_layers():
    counts = {
        name: [
            (len(kind.layers), kind.window, type(kind.mixer)) for kind in named_shape(name).kinds
        ]
        for name in model_configs.CONFIGS
    }
    none = type(None)
    assert counts["gpt-oss-20b"] == [(12, 128, none), (12, None, none)]
    assert counts["qwen3-next-80b-a3b"] == [(36, None, GatedDelta), (12, None, none)]
    assert counts["granite-4-h-small"] == [(36, None, Mamba2), (4, None, none)]
    assert counts["gemma-3-1b"] == [(22, 512, none), (4, None, none)]
    assert counts["gemma-4-31b"] == [(50, 1024, none), (10, None, none)]
    assert counts["glm-4.5"] == []
    (latents,) = named_shape("kimi-k2").kinds
    assert (len(latents.layers), latents.latent.row) == (61, 576)
    assert named_shape("gpt-oss-120b").kinds[0].layers[:3] == (0, 2, 4)
    assert named_shape("granite-4-h-tiny").kinds[1].layers == (5, 15, 25, 35)


def test_models_are_named_once():
    assert len(set(MODELS)) == len(SHAPES) + len(model_configs.CONFIGS) == len(MODELS)
    with pytest.raises(ValueError, match=r"model is 'gpt-oss'; it must be one of .*'gpt-oss-20b'"):
        Simulate(chip="h200", model="gpt-oss")


def test_a_config_without_a_needed_field_is_refused():
    config = {**model_configs.DEEPSEEK_V3}
    del config["vocab_size"]
    with pytest.raises(ValueError, match=r"vocab_size is None; it must be an integer of at least"):
        shape_of(config)


@pytest.mark.parametrize(
    ("name", "key"),
    [
        ("gpt-oss-20b", "sliding_window"),
        ("deepseek-v3", "kv_lora_rank"),
        ("glm-4.5-air", "first_k_dense_replace"),
        ("granite-4-h-small", "mamba_d_conv"),
    ],
)
def test_a_field_that_is_left_out_has_the_default_of_the_engines_family(name, key):
    config = dict(model_configs.CONFIGS[name])
    del config[key]
    default = FAMILIES[config["model_type"]].architecture.defaults[key]
    assert shape_of(config) == shape_of({**config, key: default}) == named_shape(name)
