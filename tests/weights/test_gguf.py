"""GGUF files: the same model as the original directory, and an error for every damage."""

from __future__ import annotations

import math
import struct
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pagedjax.device.models.llama import rotation
from pagedjax.device.rope import attention_factor
from pagedjax.weights import open_checkpoint
from pagedjax.weights.gguf_file import read_gguf
from tests.refusals import refused
from tests.weights.tiny import tiny_gguf, tiny_llama, write_gguf


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return tiny_llama(tmp_path_factory.mktemp("tiny"), tied=False, qkv_bias=True, o_bias=True)


@pytest.fixture(scope="module")
def file(folder: Path) -> Path:
    return tiny_gguf(folder / "tiny.gguf", folder)


def test_names_shapes_and_values_equal_those_of_the_directory(folder, file):
    checkpoint = open_checkpoint(file)
    original = open_checkpoint(folder)
    assert set(checkpoint.tensors) == set(original.tensors)
    for name, tensor in checkpoint.tensors.items():
        assert tensor.name == name
        assert tensor.shape == original.tensors[name].shape
        np.testing.assert_array_equal(tensor.read(), original.tensors[name].read(), err_msg=name)
    assert checkpoint.config["attention_bias"]
    assert not checkpoint.config["tie_word_embeddings"]


def test_biases_of_only_q_k_v_are_recognised(tmp_path):
    folder = tiny_llama(tmp_path, qkv_bias=True)
    opened = open_checkpoint(tiny_gguf(tmp_path / "m.gguf", folder))
    assert (opened.config["attention_bias"], opened.config["qkv_bias"]) == (False, True)
    # the converter reorders it like the rows of its weight
    name = "model.layers.1.self_attn.k_proj.bias"
    np.testing.assert_array_equal(
        opened.tensors[name].read(), open_checkpoint(folder).tensors[name].read()
    )


def test_tied_embeddings_are_in_the_config_only(tmp_path):
    opened = open_checkpoint(tiny_gguf(tmp_path / "m.gguf", tiny_llama(tmp_path)))
    assert opened.config["tie_word_embeddings"]
    assert "lm_head.weight" not in opened.tensors


@pytest.mark.parametrize(
    ("kind", "step"), [("F16", 2**-10), ("BF16", 2**-7), ("Q8_0", 2**-6), ("Q4_1", 2**-3)]
)
def test_encodings_decode_to_the_right_values(tmp_path, kind, step):
    folder = tiny_llama(tmp_path, intermediate=128)
    checkpoint = open_checkpoint(tiny_gguf(tmp_path / "m.gguf", folder, matrices=kind))
    for name, original in open_checkpoint(folder).tensors.items():
        tensor = checkpoint.tensors[name]
        values = original.read()
        read = tensor.read()
        assert (read.dtype, read.shape) == (np.float32, values.shape)
        assert tensor.encoding == ("F32" if values.ndim == 1 else kind)
        assert np.abs(read - values).max() <= step * np.abs(values).max()


def test_header_and_values_equal_the_gguf_packages(tmp_path):
    from gguf import GGUFReader
    from gguf.quants import dequantize

    folder = tiny_llama(tmp_path, layers=1, intermediate=128)
    extra = {
        "test.numbers": [1, -2, 3],
        "test.halves": [0.5, 1.5],
        "test.words": ["a", "été"],
        "test.flag": True,
    }
    path = tiny_gguf(tmp_path / "m.gguf", folder, matrices="Q8_0", extra=extra)
    reader = GGUFReader(path)
    parsed = read_gguf(path)
    theirs = {
        name: field.contents()
        for name, field in reader.fields.items()
        if not name.startswith("GGUF.")
    }
    rounded = "llama.attention.layer_norm_rms_epsilon"
    assert theirs.pop(rounded) == np.float32(1e-05)
    assert parsed.metadata == theirs | {rounded: 1e-05}
    assert list(parsed.tensors) == [tensor.name for tensor in reader.tensors]
    for tensor in reader.tensors:
        np.testing.assert_array_equal(
            parsed.tensors[tensor.name].read(), dequantize(tensor.data, tensor.tensor_type)
        )


FACTORS = [1.0, 1.0, 2.0, 4.0, 8.0, 8.0, 8.0, 8.0]
LINEAR = {"llama.rope.scaling.type": "linear", "llama.rope.scaling.factor": 4.0}
LINEAR_SCALING = {"rope_type": "linear", "factor": 4.0}
YARN = {
    "llama.rope.scaling.type": "yarn",
    "llama.rope.scaling.factor": 2.0,
    "llama.rope.scaling.original_context_length": 256,
}
YARN_IN_FULL = YARN | {
    "llama.rope.scaling.yarn_attn_factor": 1.25,
    "llama.rope.scaling.yarn_beta_fast": 16.0,
    "llama.rope.scaling.yarn_beta_slow": 2.0,
}


@pytest.mark.parametrize(
    ("extra", "factors", "scaling"),
    [
        ({}, FACTORS, {"rope_type": "freqs", "factors": FACTORS}),
        (LINEAR, None, LINEAR_SCALING),
        ({"llama.rope.scale_linear": 2.0}, None, {"rope_type": "linear", "factor": 2.0}),
        (
            YARN,
            None,
            {"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": 256},
        ),
        (
            YARN_IN_FULL,
            None,
            {"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": 256}
            | {"attention_factor": 1.25, "beta_fast": 16.0, "beta_slow": 2.0},
        ),
        (
            YARN | {"llama.rope.scaling.attn_factor": 1.0},  # as llama.cpp writes it into any file
            None,
            {"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": 256},
        ),
        (
            YARN | {"llama.rope.scaling.yarn_log_multiplier": 1.0},
            None,
            {"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": 256}
            | {"mscale": 1.0, "mscale_all_dim": 1.0},
        ),
        (LINEAR | {"llama.rope.scaling.attn_factor": 1.0}, None, LINEAR_SCALING),
    ],
)
def test_rope_scaling_in_its_forms(tmp_path, extra, factors, scaling):
    path = tiny_gguf(tmp_path / "m.gguf", tiny_llama(tmp_path), freq_factors=factors, extra=extra)
    opened = open_checkpoint(path)
    assert opened.config["rope_scaling"] == scaling
    assert not any("rope" in name for name in opened.tensors)


@pytest.mark.parametrize(
    ("extra", "temperature"),
    [
        ({}, 0.1 * math.log(2) + 1),
        ({"attn_factor": 1.5}, 1.5 * (0.1 * math.log(2) + 1)),
        ({"yarn_log_multiplier": 0.5}, (0.1 * math.log(2) + 1) / (0.05 * math.log(2) + 1)),
        (
            {"yarn_log_multiplier": 0.5, "attn_factor": 2.0},
            2 * (0.1 * math.log(2) + 1) / (0.05 * math.log(2) + 1),
        ),
        ({"yarn_attn_factor": 1.25, "attn_factor": 2.0}, 2.5),
    ],
)
def test_the_temperature_of_yarn_is_that_of_llama_cpp(tmp_path, extra, temperature):
    """The formula of its src/llama-context.cpp, on the factor 2."""
    entries = YARN | {f"llama.rope.scaling.{name}": value for name, value in extra.items()}
    opened = open_checkpoint(tiny_gguf(tmp_path / "m.gguf", tiny_llama(tmp_path), extra=entries))
    rope = rotation(opened.config)
    assert attention_factor(rope.entries) == pytest.approx(temperature, rel=1e-6)


@pytest.mark.parametrize(
    ("extra", "factors", "message"),
    [
        (
            LINEAR | {"llama.rope.scaling.attn_factor": 1.5},
            None,
            r"rope.scaling.attn_factor is 1.5, and the type of scaling is 'linear'; it is read",
        ),
        (LINEAR, FACTORS, r"both rope_freqs.weight and .*type = 'linear'"),
        ({"llama.rope.scaling.type": "longrope"}, None, "type is 'longrope'"),
    ],
)
def test_rope_scaling_that_is_not_known_is_refused(tmp_path, extra, factors, message):
    path = tiny_gguf(tmp_path / "m.gguf", tiny_llama(tmp_path), freq_factors=factors, extra=extra)
    with refused(message):
        open_checkpoint(path)


def test_keys_that_older_files_lack_have_defaults(tmp_path):
    folder = tiny_llama(tmp_path, kv_heads=4)
    drop = (
        *("llama.attention.head_count_kv", "llama.rope.freq_base", "llama.attention.key_length"),
        *("llama.attention.value_length", "llama.rope.dimension_count"),
    )
    config = open_checkpoint(tiny_gguf(tmp_path / "m.gguf", folder, drop=drop)).config
    assert (config["num_key_value_heads"], config["rope_theta"], config["head_dim"]) == (
        4,
        10000.0,
        16,
    )


def test_end_of_turn_and_of_message_end_the_text_too(tmp_path):
    extra = {"tokenizer.ggml.eot_token_id": 0, "tokenizer.ggml.eom_token_id": 7}
    opened = open_checkpoint(tiny_gguf(tmp_path / "m.gguf", tiny_llama(tmp_path), extra=extra))
    assert opened.config["eos_token_id"] == 2
    assert opened.eos_token_ids == (0, 2, 7)


@pytest.mark.parametrize(
    ("extra", "drop", "message"),
    [
        ({"llama.expert_count": 8}, (), "mixture of 8 experts"),
        (
            {"llama.attention.value_length": 8},
            (),
            "value_length is 8; it must equal the head size, 16",
        ),
        (
            {"llama.rope.dimension_count": 8},
            (),
            "dimension_count is 8; it must equal the head size, 16",
        ),
        (
            {"llama.attention.head_count_kv": [2, 4]},
            (),
            r"head_count_kv differs between layers \(\[2, 4\]\)",
        ),
        ({}, ("llama.block_count",), "the metadata lacks llama.block_count"),
        (
            {"llama.embedding_length": "x"},
            ("llama.attention.key_length",),
            "value of the wrong type",
        ),
        ({"general.alignment": 12}, (), "general.alignment is 12; it must be a power of two"),
    ],
)
def test_files_that_are_not_supported_are_refused(tmp_path, extra, drop, message):
    path = tiny_gguf(tmp_path / "m.gguf", tiny_llama(tmp_path), extra=extra, drop=drop)
    with refused(f"m.gguf.*{message}"):
        open_checkpoint(path)


def test_equal_numbers_for_each_layer_are_one_number(tmp_path):
    extra = {"llama.attention.head_count_kv": [2, 2], "llama.feed_forward_length": [96, 96]}
    config = open_checkpoint(
        tiny_gguf(tmp_path / "m.gguf", tiny_llama(tmp_path), extra=extra)
    ).config
    assert (config["num_key_value_heads"], config["intermediate_size"]) == (2, 96)


def test_other_architectures_are_refused_with_the_supported_ones(tmp_path):
    from gguf import GGUFWriter

    write_gguf(GGUFWriter(tmp_path / "m.gguf", "qwen35"))
    with refused(r"general\.architecture is 'qwen35'; supported: llama"):
        open_checkpoint(tmp_path / "m.gguf")


def test_encodings_that_cannot_be_decoded_name_tensor_and_type(tmp_path):
    from gguf import GGUFWriter

    writer = GGUFWriter(tmp_path / "m.gguf", "llama")
    writer.add_tensor("numbers", np.arange(8, dtype=np.int32))
    writer.add_tensor("wide", np.arange(3, dtype=np.float64))
    write_gguf(writer)
    tensors = read_gguf(tmp_path / "m.gguf").tensors
    np.testing.assert_array_equal(tensors["wide"].read(), [0, 1, 2])
    with refused(r"m\.gguf: tensor numbers is stored as I32, which cannot be dequantised"):
        tensors["numbers"].read()


# --- damage ---------------------------------------------------------------------------------------


def rewrite(tmp_path: Path, data: bytes) -> Path:
    path = tmp_path / "damaged.gguf"
    path.write_bytes(data)
    return path


@pytest.mark.parametrize(
    "size", [0, 3, 23, 24, 40, 200, 3000, 6000, 7500, 9000, 12000, 200_000, -1, -5000]
)
def test_truncated_files_name_the_file_and_the_sizes(file, tmp_path, size):
    content = file.read_bytes()
    size_left = size if size >= 0 else len(content) + size
    with refused(rf"damaged\.gguf.*(the file has {size_left}|it has {size_left} bytes)"):
        open_checkpoint(rewrite(tmp_path, content[:size_left]))


def test_truncated_data_names_the_tensor(file, tmp_path):
    content = file.read_bytes()
    message = r"is truncated: tensor \S+ \(.*\) \(F32\) takes bytes \d+ to \d+, the file has \d+; fetch it again"
    with refused(message):
        open_checkpoint(rewrite(tmp_path, content[:-2000]))


def test_data_that_is_missing_after_opening_is_named(file, tmp_path):
    path = rewrite(tmp_path, file.read_bytes())
    tensor = open_checkpoint(path).tensors["lm_head.weight"]
    path.write_bytes(file.read_bytes()[:20_000])
    with refused(r"is truncated: tensor output\.weight has \d+ of its \d+ bytes"):
        tensor.read()


@pytest.mark.parametrize(
    ("at", "value", "message"),
    [
        (0, b"GGML", r"begins with b'GGML', not b'GGUF'"),
        (4, struct.pack("<I", 1), r"GGUF version 1; versions \(2, 3\) are supported"),
        (4, struct.pack(">I", 3), "big-endian"),
        (16, struct.pack("<Q", 2**60), "damaged"),
        (
            24,
            struct.pack("<Q", 2**63),
            r"key 0 of \d+ needs 9223372036854775808 bytes at offset 32",
        ),
        (32, b"\xff\xfe\xfd\xfc", "key 0 of .* is not valid UTF-8"),
        (24 + 8 + len("general.architecture"), struct.pack("<I", 77), "value type 77"),
    ],
)
def test_damaged_headers_are_named(file, tmp_path, at, value, message):
    data = bytearray(file.read_bytes())
    data[at : at + len(value)] = value
    with refused(message):
        open_checkpoint(rewrite(tmp_path, bytes(data)))


@settings(max_examples=150)
@given(st.lists(st.tuples(st.integers(0, 10_000), st.integers(0, 255)), min_size=1, max_size=4))
def test_any_damage_raises_our_own_error(file, tmp_path_factory, changes):
    data = bytearray(file.read_bytes()[:10_000])
    for at, value in changes:
        data[at % len(data)] = value
    path = tmp_path_factory.mktemp("fuzz") / "damaged.gguf"
    with path.open("wb") as out:
        out.write(bytes(data))
        out.write(file.read_bytes()[10_000:])
    try:
        opened = open_checkpoint(path)
        for tensor in opened.tensors.values():
            tensor.read()
    except ValueError as error:
        assert str(path) in str(error)  # noqa: PT017  # no error is allowed too


@pytest.fixture
def parts(folder: Path, tmp_path: Path) -> list[Path]:
    tiny_gguf(tmp_path / "tiny.gguf", folder, tensors_in_a_part=8)
    paths = sorted(tmp_path.glob("*.gguf"))
    assert len(paths) > 2
    return paths


def test_a_model_in_parts_is_the_model_in_one_file(file, parts):
    single = open_checkpoint(file)
    for part in (parts[0], parts[1], parts[-1]):
        opened = open_checkpoint(part)
        assert opened.config == single.config
        assert opened.tensors.keys() == single.tensors.keys()
        for name, tensor in opened.tensors.items():
            np.testing.assert_array_equal(tensor.read(), single.tensors[name].read(), err_msg=name)


def test_parts_that_are_no_whole_model_are_named(parts, folder, tmp_path):
    count = len(parts)
    content = parts[1].read_bytes()
    parts[1].unlink()
    for part, number in ((parts[0], 1), (parts[2], 3)):
        with pytest.raises(
            FileNotFoundError,
            match=rf"is part {number} of {count}, and {parts[1].name} is not beside",
        ):
            open_checkpoint(part)
    parts[1].write_bytes(parts[2].read_bytes())
    with refused(rf"says that it is part 2 \(from 0\) of {count}, and its name says 2 of"):
        open_checkpoint(parts[0])
    parts[1].write_bytes(content)
    renamed = parts[0].rename(tmp_path / "model.gguf")
    with refused(rf"is part 1 of {count}, .* call it NAME-00001-of-{count:05}.gguf"):
        open_checkpoint(renamed)


def test_a_part_with_a_damaged_number_is_named(folder, tmp_path):
    for damage in (
        {"split.count": "4"},
        {"split.count": 4, "split.no": 9},
        {"split.count": 4, "split.no": "x"},
    ):
        file = tiny_gguf(tmp_path / "tiny-00001-of-00004.gguf", folder, extra=damage)
        with refused(r"is damaged: split\.no is .* and split\.count .*; fetch it again"):
            open_checkpoint(file)


def test_tensors_of_parts_are_counted(parts):
    raw = bytearray(parts[0].read_bytes())
    key = b"split.tensors.count"
    value = raw.index(key) + len(key) + 4  # behind the type of the value
    struct.pack_into("<I", raw, value, 99)
    parts[0].write_bytes(raw)
    with refused(r"parts of .* have \d+ tensors of 99; fetch them again"):
        open_checkpoint(parts[-1])
