"""vLLM's arguments of an engine: what they become, what is logged, and what is refused."""

from __future__ import annotations

import logging
from dataclasses import fields

import pytest

from pagedjax import LLM, EngineConfig, SamplingParams
from pagedjax.options.config import MeshConfig
from pagedjax.options.vllm_names.engine_arguments import ARGUMENTS, TABLE, engine_arguments
from pagedjax.weights import locate
from tests.refusals import refused
from tests.weights.tiny import tiny_llama

SIZES = {"max_num_seqs": 2, "max_num_batched_tokens": 16, "token_buckets": (16,)}
GREEDY = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)


class Torch:
    """As `torch.bfloat16` shows itself."""

    def __repr__(self) -> str:
        return "torch.bfloat16"


TAKEN = [
    ({"dtype": "auto"}, {"dtype": None}),
    ({"dtype": "half"}, {"dtype": "float16"}),
    ({"dtype": "float"}, {"dtype": "float32"}),
    ({"dtype": Torch()}, {"dtype": "bfloat16"}),
    ({"kv_cache_dtype": "auto"}, {"kv_cache_dtype": None}),
    ({"kv_cache_dtype": "fp8"}, {"kv_cache_dtype": "float8_e4m3fn"}),
    ({"quantization": "int8"}, {"weight_dtype": "int8"}),
    ({"quantization": "int8_per_channel_weight_only"}, {"weight_dtype": "int8"}),
    ({"quantization": "gguf"}, {"weight_dtype": "stored"}),
    ({"quantization": "awq_marlin"}, {"weight_dtype": "stored"}),
    ({"tensor_parallel_size": 1}, {}),
    ({"tensor_parallel_size": 4}, {"mesh": {"tensor": 4}}),
    ({"tensor_parallel_size": 4, "enable_expert_parallel": True}, {"mesh": {"expert": 4}}),
    ({"enable_expert_parallel": True}, {}),
    ({"device_ids": [2, 3]}, {"devices": (2, 3)}),
    ({"gpu_memory_utilization": 0.9}, {"memory_fraction": 0.9}),
    ({"num_gpu_blocks_override": 100}, {"num_blocks": 100}),
    ({"swap_space": 2}, {"swap_space_gib": 2, "preemption": "swap"}),
    ({"swap_space": 0}, {"swap_space_gib": 0}),
    ({"enable_chunked_prefill": False}, {"chunked_prefill": False}),
    ({"scheduling_policy": "priority"}, {"policy": "priority"}),
    ({"disable_hybrid_kv_cache_manager": True}, {"free_window_blocks": False}),
    (
        {"prefix_cache_retention_interval": 512},
        {"prefix_checkpoints": {"interval": 512, "prompts": True, "junctions": True}},
    ),
    (
        {"prefix_cache_retention_interval": 0},
        {"prefix_checkpoints": {"interval": 0, "prompts": True, "junctions": True}},
    ),
    ({"prefix_cache_retention_interval": None}, {}),
    ({"async_scheduling": True}, {"lookahead": 1}),
    ({"async_scheduling": False}, {"lookahead": 0}),
    (
        {"async_scheduling": True, "speculative_config": {"method": "ngram"}},
        {"speculative": {"method": "ngram"}},
    ),
    ({"max_logprobs": 5}, {}),
    ({"seed": 3, "max_model_len": None, "block_size": 32}, {"seed": 3, "block_size": 32}),
]


@pytest.mark.parametrize(
    ("arguments", "expected"), TAKEN, ids=[str(arguments) for arguments, _ in TAKEN]
)
def test_an_argument_becomes_an_option(arguments, expected):
    assert engine_arguments(arguments).engine == expected


@pytest.mark.parametrize(
    "name",
    [
        "quantization",
        "num_gpu_blocks_override",
        "swap_space",
        "enable_chunked_prefill",
        "disable_hybrid_kv_cache_manager",
        "async_scheduling",
        "speculative_config",
        "seed",
    ],
)
def test_none_is_no_option(name):
    assert engine_arguments({name: None}).engine == {}


def test_options_of_the_hub_and_of_progress_are_of_loading():
    options = engine_arguments(
        {"revision": "main", "hf_token": None, "download_dir": "here", "use_tqdm_on_load": False}
    )
    assert options == ({}, {"revision": "main", "cache_dir": "here"}, False)
    assert engine_arguments({"hf_token": "t", "use_tqdm_on_load": True}) == (
        {},
        {"token": "t"},
        True,
    )


@pytest.mark.slow
def test_an_engine_takes_them(one_layer_folder, tmp_path):
    tokenizer_folder = tiny_llama(tmp_path / "other", layers=1, tied=False, seed=1)
    llm = LLM(
        model=str(one_layer_folder),
        tokenizer=str(tokenizer_folder),
        use_tqdm_on_load=False,
        tensor_parallel_size=2,
        swap_space=0.01,
        gpu_memory_utilization=0.25,
        num_gpu_blocks_override=16,
        enable_chunked_prefill=True,
        trust_remote_code=True,
        seed=7,
        **SIZES,
    )
    config = llm.engine.config
    assert (config.mesh, config.preemption) == (MeshConfig(tensor=2), "swap")
    assert (config.swap_space_gib, config.memory_fraction) == (0.01, 0.25)
    assert (config.num_blocks, config.seed) == (16, 7)
    # of one seed: one program
    direct = LLM(
        str(one_layer_folder),
        progress=False,
        mesh={"tensor": 2},
        seed=7,
        num_blocks=16,
        **SIZES,
    )
    assert llm.generate("the cat", GREEDY, use_tqdm=False) == direct.generate(
        "the cat", GREEDY, use_tqdm=False
    )
    assert llm.get_tokenizer() is llm.tokenizer
    assert llm.get_tokenizer().decode(llm.get_tokenizer().encode("the cat")) == "the cat"


def test_the_hub_gets_the_revision(monkeypatch, tmp_path):
    downloads = []

    def download(name, **options):
        downloads.append((name, options))
        raise OSError("no network")

    monkeypatch.setattr("huggingface_hub.snapshot_download", download)
    with pytest.raises(FileNotFoundError, match="no network"):
        LLM("org/name", revision="v2", hf_token="t", download_dir=str(tmp_path), progress=False)
    options = {
        "revision": "v2",
        "token": "t",
        "cache_dir": str(tmp_path),
        "allow_patterns": list(locate.HUB_FILES),
    }
    assert downloads == [("org/name", options)]


def test_what_changes_nothing_is_logged_once_at_info(caplog):
    with caplog.at_level(logging.DEBUG, "pagedjax.vllm_names"):
        arguments = engine_arguments(
            {
                "enforce_eager": True,
                "disable_log_stats": False,
                "block_size": 8,
                "hf_token": "secret",
            }
        )
    assert (arguments.engine, arguments.hub) == ({"block_size": 8}, {"token": "secret"})
    (logged,) = [record for record in caplog.records if record.levelno == logging.INFO]
    assert (
        "changes nothing: enforce_eager (XLA compiles every program; see `compilation`); disable"
        in logged.message
    )
    debug = [record.message for record in caplog.records if record.levelno == logging.DEBUG]
    assert debug == ["block_size is taken as block_size", "hf_token is taken as hf_token"]
    assert "secret" not in caplog.text


@pytest.mark.parametrize(("value", "level"), [("auto", "WARNING"), ("vllm", "INFO")])
def test_what_a_user_may_expect_otherwise_is_a_warning(caplog, value, level):
    with caplog.at_level(logging.INFO, "pagedjax.vllm_names"):
        engine_arguments({"generation_config": value})
    assert [record.levelname for record in caplog.records] == [level]


REFUSED = [row for row in TABLE if row.effect == "refused"]
ON = {"logprobs_mode": "raw_logits", "load_format": "dummy", "device": "cuda"}


@pytest.mark.parametrize("name", [name for row in REFUSED for name in row.names])
def test_what_cannot_be_done_is_one_sentence_with_the_value_and_the_alternative(name):
    row = ARGUMENTS[name]
    value = ON.get(name, 2)
    for off in (None, False, 0, "", {}, *row.asks_nothing):
        assert engine_arguments({name: off}).engine == {}
    with refused(f"^{name} is ") as error:
        engine_arguments({name: value})
    assert str(error.value) == f"{name} is {value!r}; {row.text}"
    assert not row.text.endswith(".")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            {"quantization": "bitsandbytes"},
            "quantization is 'bitsandbytes'; use one of 'gguf', 'awq', .* 'int8' to round weights",
        ),
        (
            {"max_logprobs": -1},
            "max_logprobs is -1; a step ranks the 20 most likely tokens at most.*; give at most 20",
        ),
        ({"async_scheduling": "yes"}, "async_scheduling is 'yes'; it must be True or False"),
        ({"kv_cache_dtype": "fp8_e5m2"}, "kv_cache_dtype is 'fp8_e5m2'; it must be one of"),
        ({"tensor_parallel_size": 0}, "mesh.tensor is 0; it must be an integer of at least 1"),
        ({"gpu_memory_utilization": 1.5}, "memory_fraction is 1.5; it must be above 0"),
        (
            {"gpu_memory_utilization": 0.5, "memory_fraction": 0.5},
            "gpu_memory_utilization is vLLM's name of memory_fr",
        ),
        ({"revision": "main"}, "revision is of a model from the hub, and this one is loaded"),
        ({"tokenizer": "folder"}, "a loaded model has its own"),
        (
            {"pipeline_parallel_size": 2},
            "pipeline_parallel_size is 2; there are no stages of a pipeline; use tensor_p",
        ),
        (
            {"tensor_paralel_size": 2},
            "unknown key 'tensor_paralel_size'; did you mean 'tensor_parallel_size'?",
        ),
        ({"qwertyuiop": 16}, "unknown key 'qwertyuiop'; known keys are block_size"),
    ],
)
def test_an_engine_refuses_with_the_remedy(tiny, arguments, message):
    with refused(message.replace("?", r"\?")):
        LLM(tiny, progress=False, **arguments)


def test_options_of_this_project_are_not_hidden():
    """A name that is an option here means the option."""
    options = {field.name for field in fields(EngineConfig)}
    assert {name for name in options & set(ARGUMENTS) if ARGUMENTS[name].effect != "taken"} == set()
