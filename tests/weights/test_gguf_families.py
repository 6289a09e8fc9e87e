"""GGUF files of every architecture that llama.cpp stores: the model of the directory that they were
made from. And every encoding of tensors.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pagedjax.weights import open_checkpoint
from pagedjax.weights.convert import convert
from pagedjax.weights.families import config_of, family_of
from pagedjax.weights.gguf_file import read_gguf
from pagedjax.weights.load import check_table
from tests.refusals import refused
from tests.weights.gguf_files import family_gguf, tiny_family
from tests.weights.tiny import write_gguf

GEMMA = {"head_dim": 32, "sliding_window": 16, "query_pre_attn_scalar": 32}
GEMMA3 = GEMMA | {"num_hidden_layers": 7, "rope_theta": 1e6}
ORIGINAL = {"original_max_position_embeddings": 64}
PHI = ORIGINAL | {
    "num_key_value_heads": 4,
    "partial_rotary_factor": 0.75,
    "sliding_window": None,
}
LONGROPE = {
    "rope_type": "longrope",
    "short_factor": [1.0, 1.0, 1.25, 1.5, 2.0, 2.0],
    "long_factor": [1.0, 1.5, 4.0, 8.0, 16.0, 32.0],
    "attention_factor": 1.1547005,  # sqrt(1 + ln 4 / ln 64): 64 positions became 256
}
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "Llama": ("llama", {"rope_theta": 500000.0}),
    "Qwen2": ("qwen2", {"rope_theta": 1e6}),
    "Qwen2, tied": ("qwen2", {"rope_theta": 1e6, "tie_word_embeddings": True}),
    # transformers' loader of GGUF files does not read the size of a Qwen3's heads
    "Qwen3": ("qwen3", {"rope_theta": 1e6, "head_dim": 128, "tie_word_embeddings": True}),
    "Qwen3, stretched": (
        "qwen3",
        {"head_dim": 128, "rope_scaling": {"rope_type": "linear", "factor": 2.0}},
    ),
    "Qwen2, YaRN": (
        "qwen2",
        {"rope_theta": 1e6, "rope_scaling": {"rope_type": "yarn", "factor": 4.0} | ORIGINAL},
    ),
    "Gemma 2": (
        "gemma2",
        GEMMA | {"attn_logit_softcapping": 20.0, "final_logit_softcapping": 10.0},
    ),
    "Gemma 2, 27B": (
        "gemma2",
        GEMMA
        | {"num_hidden_layers": 46, "query_pre_attn_scalar": 16}
        | {"attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0},
    ),
    "Gemma 3": ("gemma3_text", GEMMA3),
    "Gemma 3, stretched where it sees all, with a cap": (
        "gemma3_text",
        GEMMA3
        | {"rope_scaling": {"rope_type": "linear", "factor": 8.0}, "final_logit_softcapping": 30.0},
    ),
    "Phi 3": ("phi3", PHI | {"sliding_window": 24, "partial_rotary_factor": 1.0}),
    "Phi 4 mini": ("phi3", PHI | {"tie_word_embeddings": True, "rope_scaling": LONGROPE}),
    "Gemma 3, 27B": (
        "gemma3_text",
        GEMMA3 | {"num_hidden_layers": 62, "query_pre_attn_scalar": 16},
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_the_model_is_that_of_the_directory(tmp_path, name):
    model_type, settings = CASES[name]
    folder = tiny_family(tmp_path / "folder", model_type, **settings)
    original = open_checkpoint(folder)
    opened = open_checkpoint(family_gguf(tmp_path / "model.gguf", folder))
    shape = config_of(family_of(opened), opened.config, "GGUF")
    assert shape == config_of(family_of(original), original.config, "directory")
    assert opened.eos_token_ids == original.eos_token_ids
    check_table(opened, family_of(opened).param_table(shape))
    assert opened.tensors.keys() == original.tensors.keys()
    for tensor_name, tensor in original.tensors.items():
        values = opened.tensors[tensor_name].read()
        # llama.cpp adds one to the norms of a Gemma, which rounds
        rounding = 2**-23 if "norm" in tensor_name else 0
        np.testing.assert_allclose(
            values, tensor.read(), rtol=0, atol=rounding, err_msg=tensor_name
        )


@pytest.mark.oracle
@pytest.mark.parametrize("name", [name for name in CASES if "27B" not in name])  # many layers
def test_tensors_are_those_of_transformers_gguf_loader(tmp_path, name):
    from tests.goldens.make_greedy import compare_with_transformers

    model_type, settings = CASES[name]
    folder = tiny_family(tmp_path / "folder", model_type, **settings)
    opened = open_checkpoint(family_gguf(tmp_path / "model.gguf", folder, matrices="Q8_0"))
    assert compare_with_transformers(opened) == len(opened.tensors)


@pytest.mark.oracle
@pytest.mark.parametrize(
    "name", ["Qwen2", "Qwen2, YaRN", "Qwen3, stretched", "Gemma 3", "Gemma 2", "Phi 4 mini"]
)
def test_a_converted_file_is_a_folder_that_transformers_reads(tmp_path, name):
    """What transformers says of the folder that `convert` makes of the file is what it says of the
    one that the file was made from.
    """
    import torch
    from transformers import AutoModelForCausalLM

    model_type, settings = CASES[name]
    folder = tiny_family(tmp_path / "folder", model_type, **settings)
    file = family_gguf(tmp_path / "model.gguf", folder)
    tokens = torch.arange(3, 43)[None]
    logits = []
    for path in (folder, convert(file, tmp_path / "converted", "safetensors")):
        model = AutoModelForCausalLM.from_pretrained(
            path, dtype=torch.float32, attn_implementation="eager"
        )
        with torch.no_grad():
            logits.append(model(tokens).logits.numpy())
    np.testing.assert_allclose(logits[1], logits[0], atol=1e-5)


# --- layers of a Gemma ----------------------------------------------------------------------------


def windows(path: Path) -> list[bool]:
    return [kind == "sliding_attention" for kind in open_checkpoint(path).config["layer_types"]]


@pytest.fixture(scope="module")
def gemma(tmp_path_factory) -> Path:
    return tiny_family(tmp_path_factory.mktemp("gemma") / "folder", "gemma3_text", **GEMMA3)


@pytest.mark.parametrize(
    ("pattern", "expected"),
    [
        (None, [True] * 5 + [False, True]),
        (3, [True, True, False] * 2 + [True]),
        (1, [False] * 7),
        (0, [True] * 7),
        (
            [True, False, True, True, True, True, False],
            [True, False, True, True, True, True, False],
        ),
    ],
    ids=["no key", "a period", "no windows", "windows only", "each layer"],
)
def test_layers_with_windows_are_a_period_or_a_list(gemma, tmp_path, pattern, expected):
    extra = {} if pattern is None else {"attention.sliding_window_pattern": pattern}
    assert windows(family_gguf(tmp_path / "m.gguf", gemma, extra=extra)) == expected


def test_a_list_of_layers_with_another_length_is_refused(gemma, tmp_path):
    extra = {"attention.sliding_window_pattern": [True, False]}
    path = family_gguf(tmp_path / "m.gguf", gemma, extra=extra)
    with refused(r"m\.gguf: gemma3\.attention\.sliding_window_pattern has 2 entries for 7 layers"):
        open_checkpoint(path)


def test_a_gemma_without_a_window_sees_all_in_every_layer(gemma, tmp_path):
    path = family_gguf(tmp_path / "m.gguf", gemma, drop=("attention.sliding_window",))
    assert windows(path) == [False] * 7


def test_the_rotation_of_layers_with_windows_may_be_in_the_file(gemma, tmp_path):
    plain = open_checkpoint(family_gguf(tmp_path / "plain.gguf", gemma))
    extra = {"rope.freq_base_swa": 5000.0}
    named = open_checkpoint(family_gguf(tmp_path / "named.gguf", gemma, extra=extra))
    bases = [opened.config["rope_local_base_freq"] for opened in (plain, named)]
    assert bases == [10000.0, 5000.0]


def test_more_layers_than_tensors_are_damage(gemma, tmp_path):
    path = family_gguf(tmp_path / "m.gguf", gemma, extra={"block_count": 2**31})
    with refused(r"gemma3\.block_count is 2147483648, but the file has \d+ tensors; .* damaged"):
        open_checkpoint(path)


def test_the_end_of_a_turn_is_known_by_its_text(tmp_path, gemma):
    """The tokenizer of the file names token 0 as the end of a text, and its template ends turns
    with <|im_end|>, which is token 2.
    """
    folder = tiny_family(tmp_path / "folder", "qwen2", eos_token_id=0)
    opened = open_checkpoint(family_gguf(tmp_path / "m.gguf", folder))
    assert opened.config["eos_token_id"] == 0
    assert opened.eos_token_ids == (0, 2)


# --- encodings ------------------------------------------------------------------------------------

ENCODINGS = (
    *("F32", "F16", "BF16", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0"),
    *("Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K", "IQ4_NL", "IQ4_XS"),
)


@pytest.mark.parametrize("encoding", ENCODINGS)
@pytest.mark.parametrize("shape", [(3, 256), (2, 5, 256), (700, 512)], ids=str)
def test_values_of_every_encoding_are_those_of_the_gguf_package(tmp_path, encoding, shape):
    from gguf import GGUFWriter
    from gguf.constants import GGMLQuantizationType
    from gguf.quants import dequantize, quant_shape_to_byte_shape

    kind = GGMLQuantizationType[encoding]
    byte_shape = quant_shape_to_byte_shape(shape, kind)
    raw = np.random.default_rng(0).integers(0, 256, byte_shape, np.uint8)
    raw[..., 1::2] &= 0b10111111  # every two bytes are a float16 or bfloat16 that is a number
    writer = GGUFWriter(tmp_path / "m.gguf", "llama")
    writer.add_tensor("values", raw, raw_dtype=kind)
    write_gguf(writer)
    values = read_gguf(tmp_path / "m.gguf").tensors["values"].read()
    expected = dequantize(raw, kind)
    assert values.dtype == np.float32
    assert np.isfinite(expected).all()
    assert len(np.unique(expected)) > 30
    np.testing.assert_array_equal(values, expected)
