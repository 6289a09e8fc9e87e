"""The family of docs/design/models.md in an engine, against a forward pass in numpy; and its
errors.
"""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import chex
import numpy as np
import pytest
from flax import nnx
from safetensors.numpy import save_file

from experiments.core.config import expand
from experiments.core.engines import simulated_llm
from experiments.run import check_models
from pagedjax import LLM, EngineConfig, Taps, from_params, load_model
from pagedjax.commands import cli
from pagedjax.device.models.decoder import DecoderConfig, LayerKind
from pagedjax.device.rope import Rope
from pagedjax.models import initial_factors, score
from pagedjax.weights import open_checkpoint
from pagedjax.weights.architectures import Family
from pagedjax.weights.convert import convert
from pagedjax.weights.families import own_family
from pagedjax.weights.pretrained import read_model
from pagedjax.weights.trained import whole
from tests.device.test_llama import chosen, plain_attention, softmax
from tests.engine.runs import greedy
from tests.refusals import refused
from tests.weights.tiny import tiny_gguf, tiny_llama, write_tokenizer

CONFIG = {
    "model_type": "parallel",
    "vocab_size": 320,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 256,
    "eos_token_id": 2,
}
SIZES: dict[str, Any] = {
    "max_num_seqs": 4,
    "max_num_batched_tokens": 16,
    "token_buckets": (16,),
    "block_size": 4,
    "num_blocks": 64,
    "progress": False,
}
LENGTH = {"dist": "fixed", "value": 8}
WORKLOAD = {"kind": "synthetic", "count": 2, "prompt": LENGTH, "output": LENGTH}
GREEDY = greedy(8, logprobs=0)
PROMPTS = [np.random.default_rng(i).integers(3, 320, n).tolist() for i, n in enumerate((5, 40, 1))]


@pytest.fixture(scope="module")
def name(documented_file) -> str:
    return f"{documented_file('models.md', 'own_family.py')}:FAMILY"


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """A random model of the family, as a folder."""
    path = tmp_path_factory.mktemp("own") / "parallel"
    rng = np.random.default_rng(0)
    path.mkdir()
    (path / "config.json").write_text(json.dumps(CONFIG))
    shapes = {
        "query": (64, 48),
        "key": (32, 48),
        "value": (32, 48),
        "out": (48, 64),
        "up": (80, 48),
        "down": (48, 80),
    }
    tensors = {
        "embed.weight": rng.normal(size=(320, 48)),
        "head.weight": rng.normal(size=(320, 48)) * 48**-0.5,
    }
    for i in range(CONFIG["num_hidden_layers"]):
        tensors |= {
            f"layers.{i}.{n}.weight": rng.normal(size=s) * s[1] ** -0.5 for n, s in shapes.items()
        }
        tensors |= {f"layers.{i}.norm_{n}.weight": 1 + 0.1 * rng.normal(size=48) for n in (1, 2)}
    tensors["norm.weight"] = 1 + 0.1 * rng.normal(size=48)
    save_file({key: x.astype(np.float32) for key, x in tensors.items()}, path / "model.safetensors")
    write_tokenizer(path, 320)
    return path


def plain_logprobs(folder: Path, tokens: list[int], *, parallel: bool = True) -> np.ndarray:
    """Log-probabilities [len(tokens), V] of the next token, in float64, without a cache."""
    w = {key: tensor.read().astype(np.float64) for key, tensor in open_tensors(folder).items()}
    x = w["embed.weight"][tokens]
    heads = {**CONFIG, "rope_theta": 10000.0, "rope_scaling": None}

    def norm(x: np.ndarray, weight: np.ndarray) -> np.ndarray:
        return x / np.sqrt((x**2).mean(-1, keepdims=True) + 1e-6) * weight

    def gelu(x: np.ndarray) -> np.ndarray:
        return 0.5 * x * (1 + np.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * x**3)))

    for i in range(CONFIG["num_hidden_layers"]):
        layer = {key.split(".")[2]: x for key, x in w.items() if key.startswith(f"layers.{i}.")}
        y = norm(x, layer["norm_1"])
        q, k, v = (y @ layer[part].T for part in ("query", "key", "value"))
        attended = plain_attention(q, k, v, heads, softmax)[0] @ layer["out"].T
        mlp_input = norm(x if parallel else x + attended, layer["norm_2"])
        x = x + attended + gelu(mlp_input @ layer["up"].T) @ layer["down"].T
    logits = norm(x, w["norm.weight"]) @ w["head.weight"].T
    logits -= logits.max(-1, keepdims=True)
    return logits - np.log(np.exp(logits).sum(-1, keepdims=True))


def open_tensors(folder: Path):
    from pagedjax.weights.huggingface import read_safetensors

    return read_safetensors(folder / "model.safetensors")


def answers(llm: LLM) -> list[tuple[int, ...]]:
    return [output.outputs[0].token_ids for output in llm.generate(PROMPTS, GREEDY, use_tqdm=False)]


@pytest.fixture(scope="module")
def llm(folder, name) -> LLM:
    return LLM(folder, model_family=name, **SIZES)


@pytest.mark.slow
def test_the_documented_family_is_a_plain_forward_pass(folder, llm):
    """Chunked prompts and decodes."""
    for prompt, output in zip(PROMPTS, llm.generate(PROMPTS, GREEDY, use_tqdm=False), strict=True):
        branch = output.outputs[0]
        tokens = [*prompt, *branch.token_ids][:-1]
        rows = plain_logprobs(folder, tokens)[len(prompt) - 1 :]
        sequential = plain_logprobs(folder, tokens, parallel=False)[len(prompt) - 1 :]
        assert tuple(rows.argmax(-1).tolist()) == branch.token_ids
        logprobs = chosen(branch.token_ids, branch.logprobs)
        chex.assert_trees_all_close(logprobs, rows.max(-1).astype(np.float32), atol=1e-4)
        assert np.abs(rows - sequential).max() > 0.1, (
            "layers in turn hardly differ: the comparison is blind"
        )


def test_the_engine_names_the_family_and_says_it_when_it_runs_on_a_loaded_model(folder, name, llm):
    assert llm.engine.config.model_family == name
    assert LLM(load_model(folder, model_family=name), **SIZES).engine.config.model_family == name
    message = f"model_family is {name!r}, and the loaded model's is None; leave it out"
    with refused(re.escape(message)):
        LLM(
            from_params(whole(llm.model.model), llm.model.model.config),
            model_family=name,
            **SIZES,
        )


def test_parameters_in_memory_and_converted_folders_are_the_same_model(folder, name, llm, tmp_path):
    expected = answers(llm)
    params = whole(llm.model.model)
    in_memory = LLM(params=params, config=CONFIG, model_family=name, **SIZES)
    assert answers(in_memory) == expected
    in_memory.update_params({**params, "norm": {"weight": -params["norm"]["weight"]}})
    assert answers(in_memory) != expected
    in_memory.update_params(params)
    assert answers(in_memory) == expected
    convert(folder, tmp_path / "orbax", "orbax", model_family=name)
    assert answers(LLM(tmp_path / "orbax", model_family=name, **SIZES)) == expected
    convert(tmp_path / "orbax", tmp_path / "again", "safetensors", model_family=name)
    chex.assert_trees_all_equal(
        *[
            {key: tensor.read() for key, tensor in open_tensors(path).items()}
            for path in (folder, tmp_path / "again")
        ]
    )


@pytest.mark.slow
def test_taps_and_scores_of_the_family(folder, name, llm):
    """The layers' outputs before and after, and a trainer's log-probabilities with the engine's
    module.
    """
    loaded = load_model(folder, model_family=name, linear_impl="xla").model
    module = nnx.merge(loaded.graphdef, loaded.params)
    tokens = PROMPTS[1]
    rows = plain_logprobs(folder, tokens)[np.arange(len(tokens) - 1), tokens[1:]]
    chex.assert_trees_all_close(
        score(module, np.array([tokens]))[0, 1:], np.float32(rows), atol=1e-4
    )
    params = replace(GREEDY, taps=Taps(hidden_states=(0, 2)))
    (tapped,) = llm.generate([tokens], params, use_tqdm=False)
    assert tapped.outputs[0].token_ids == answers(llm)[1]
    assert tapped.outputs[0].taps is not None
    chex.assert_shape(tapped.outputs[0].taps.hidden_states[2], (len(tokens) + 7, 48))


def test_the_command_converts_and_a_simulation_reads_the_shape(folder, name, tmp_path, capsys):
    target = tmp_path / "orbax"
    assert (
        cli.main(["convert", str(folder), str(target), "--to", "orbax", "--model-family", name])
        == 0
    )
    assert cli.main(["convert", str(folder), str(tmp_path / "no"), "--to", "orbax"]) == 2
    assert "a family of your own is given as model_family" in capsys.readouterr().err
    simulate = {"chip": "a10g"}
    engine = {"model_family": name, "num_blocks": 64, "max_model_len": 128}
    raw = {
        "name": "own",
        "model": str(target),
        "workload": WORKLOAD,
        "sampling": {"ignore_eos": True},
    }
    (point,) = expand({**raw, "simulate": simulate, "engine": engine}, tmp_path)
    check_models([point.experiment], download=False)
    assert simulated_llm(point.experiment).engine.config.model_family == name


@pytest.mark.slow
def test_a_mesh_gives_the_same_tokens(folder, name, llm):
    assert answers(LLM(folder, model_family=name, mesh={"tensor": 2}, **SIZES)) == answers(llm)


def test_a_folder_without_its_family_is_refused_with_the_remedy(folder):
    with refused(r"config.json: model_type is 'parallel'; supported: llama.* as model_family"):
        LLM(folder, **SIZES)


def test_another_model_than_the_familys_is_refused(name, tmp_path):
    llama = tiny_llama(tmp_path / "llama")
    with refused("model_type is 'llama', and the given model_family reads 'parallel'; give"):
        LLM(llama, model_family=name, **SIZES)
    with refused("is a GGUF file, which has its own names, and model_family is given; give a"):
        open_checkpoint(tiny_gguf(tmp_path / "tiny.gguf", llama), family=own_family(name))


def test_a_wrong_name_is_refused(name):
    with refused(r"model_family is 'llama'; it must be module:NAME or folder/file.py:NAME"):
        EngineConfig(model_family="llama")
    with refused(r"model_family is 'no.py:X', but there is no file no.py; write module:NAME"):
        own_family("no.py:X")
    with refused(r"Parallel in .*own_family.py is no Family; those in it: \['FAMILY'\]"):
        own_family(name.replace("FAMILY", "Parallel"))


def test_a_layer_that_is_no_block_is_refused():
    sizes = {
        "vocab_size": 8,
        "hidden": 4,
        "intermediate": 4,
        "heads": 1,
        "kv_heads": 1,
        "head_dim": 4,
        "max_len": 8,
    }
    with refused(r"block is 'Parallel'; it must be a class that inherits from Block, or None"):
        DecoderConfig(
            **sizes, tied=True, eps=1e-6, kinds=(LayerKind(),), ropes=(Rope(1e4),), block="Parallel"
        )


def family_with(name: str, **fields: Any) -> Family:
    """The documented family with other functions."""
    family = own_family(name)
    assert family is not None
    return family._replace(**fields)


def open_model(folder: Path, family: Family):
    return read_model(open_checkpoint(folder, family=family), "float32")


def test_a_table_that_does_not_fit_the_decoder_is_refused_with_each_difference(folder, name):
    documented = family_with(name)

    def narrower(config: dict[str, Any]) -> DecoderConfig:
        return documented.from_hf({**config, "intermediate_size": 40})

    def wide(config: DecoderConfig):
        return documented.param_table(replace(config, intermediate=80))

    with refused(r"shape of blocks\.0\.mlp\.up\.weight: \(80, 48\) in the table, \(40, 48\) in"):
        open_model(folder, family_with(name, from_hf=narrower, param_table=wide))

    def shorter(config: DecoderConfig):
        return documented.param_table(config)[:-1]

    with refused(r"param_table of the family 'parallel' .*1\n  missing: head\.weight"):
        open_model(folder, family_with(name, param_table=shorter))

    def misnamed(config: DecoderConfig):
        *table, head = documented.param_table(config)
        return (*table, head._replace(path=("crown", "weight")))

    with refused(r"(?s)missing: head\.weight.*not in the decoder: crown\.weight \(320, 48\)"):
        open_model(folder, family_with(name, param_table=misnamed))


def test_what_a_familys_from_hf_does_wrong_is_said(folder, name):
    with refused(r"from_hf of the family 'parallel' reads 'eps', which the config does not"):
        open_model(folder, family_with(name, from_hf=lambda config: config["eps"]))
    with refused(r"from_hf of the family 'parallel' returns dict; it must return a"):
        open_model(folder, family_with(name, from_hf=dict))


def test_a_family_is_named_by_a_text_and_reads_a_config(name, folder):
    with refused(r"model_family is .*Path.*; it must be a text, module:NAME or folder"):
        own_family(Path("mine.py"))  # type: ignore[arg-type]
    config = family_with(name).from_hf({**CONFIG, "norm_eps": 1e-6, "rope_theta": 1e4})
    with refused(r"config is a DecoderConfig, which no family reads; leave model_family out"):
        from_params({}, config, model_family=name)


def test_a_draft_model_of_ones_own_family_is_refused_with_the_reason(folder, name):
    drafts = {"method": "draft", "model": str(folder), "num_tokens": 2}
    with refused(r"a draft model is of a built-in family, also beside a model_family"):
        LLM(str(folder), model_family=name, speculative=drafts, **SIZES)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        (
            {"norm": "layernorm"},
            r"norm is 'layernorm'; it must be one of 'rms', 'rms_plus_one', 'layer'",
        ),
        ({"activation": "relu"}, r"activation is 'relu'; it must be one of "),
        (
            {"kinds": (LayerKind(rope=3),)},
            r"kinds\[0\] has rope 3, and ropes has 1; give a number from 0 to 0",
        ),
        (
            {"kinds": (LayerKind(sparse=True),)},
            r"kinds\[0\] is sparse, and experts is None; give the layer's experts",
        ),
    ],
)
def test_a_decoder_config_that_means_nothing_is_refused(name, fields, message):
    config = family_with(name).from_hf({**CONFIG, "norm_eps": 1e-6, "rope_theta": 1e4})
    with refused(message):
        replace(config, **fields)


def test_adapters_of_a_family_without_llamas_matrices_are_refused(name):
    config = family_with(name).from_hf({**CONFIG, "norm_eps": 1e-6, "rope_theta": 1e4})
    with refused(r"gated MLP, and mlp\.\w+ of this model has 1 part, and a Llama's has 2"):
        initial_factors(config)
