"""Parameters from a trainer: a new model, and new values for a running model."""

from __future__ import annotations

import json
from dataclasses import replace

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from pagedjax import LLM, BeamSearchParams, SamplingParams, from_params, load_model
from pagedjax.engine import compilations
from pagedjax.weights import open_checkpoint
from pagedjax.weights.pretrained import read_model
from pagedjax.weights.tree import named
from tests.engine.runs import SMALL, greedy
from tests.refusals import refused
from tests.weights.tiny import tiny_llama

GREEDY = greedy(8)
PROMPT = list(range(3, 40))


@pytest.fixture(scope="module")
def config(tiny_folder) -> dict:
    return json.loads((tiny_folder / "config.json").read_text())


@pytest.fixture
def tree(tiny) -> dict:
    """The tiny model's parameters as plain nested dicts of numpy arrays."""
    return jax.tree.map(np.array, nnx.to_pure_dict(tiny.model.params))


@pytest.fixture(scope="module")
def llm(tiny) -> LLM:
    return LLM(tiny, **SMALL)


def ids(llm: LLM, prompt=PROMPT) -> tuple[int, ...]:
    return llm.generate([prompt], GREEDY)[0].outputs[0].token_ids


def scaled(tree, factor: float):
    """Other values, which give other tokens: the blocks are scaled."""
    return {**tree, "blocks": jax.tree.map(lambda x: x * np.float32(factor), tree["blocks"])}


# --- a new model ----------------------------------------------------------------------------------


def test_every_form_of_the_same_parameters_is_the_same_model(tiny, tiny_folder, config, tree, llm):
    model_config = tiny.model.config
    module = nnx.merge(tiny.model.graphdef, tiny.model.params)
    forms = {
        "module": module,
        "state": nnx.state(module),
        "only parameters": nnx.state(module, nnx.Param),
        "jax arrays": jax.tree.map(jnp.asarray, tree),
        "names": {**tree, "blocks": {str(i): block for i, block in tree["blocks"].items()}},
        "a list": {**tree, "blocks": list(tree["blocks"].values())},
    }
    for name, form in forms.items():
        model = from_params(form, config, tokenizer=tiny_folder)
        for key, x in named(model.model.params).items():
            chex.assert_trees_all_equal(
                x,
                named(tiny.model.params)[key],
                custom_message=f"{name}: {key}",
            )
    packed = replace(model_config, linear=model.model.config.linear)
    assert (model.model.config, model.model.dtype, model.eos_token_ids) == (packed, "float32", (2,))
    assert from_params(tree, model_config).model.config == packed
    assert from_params(tree, model_config, linear_impl="xla").model.config == model_config
    answers = LLM(model, **SMALL).generate("the cat", GREEDY)
    assert answers == llm.generate("the cat", GREEDY)


def test_llm_takes_params_and_config(tree, config, tiny_folder, tiny, llm):
    built = LLM(params=tree, config=config, tokenizer=tiny.tokenizer, **SMALL)
    assert built.generate("the cat", GREEDY) == llm.generate("the cat", GREEDY)
    for arguments in ({"params": tree}, {"model": tiny_folder, "params": tree, "config": config}):
        with refused(r"params come with config, .* and in place of model"):
            LLM(**arguments, **SMALL)
    for model, arguments in ((tiny_folder, {"config": config}), (tiny, {"tokenizer": tiny_folder})):
        with refused("config goes with params, and tokenizer with params or a name"):
            LLM(model, **arguments, **SMALL)


def test_without_a_tokenizer_inputs_and_outputs_are_token_ids(tree, config, llm):
    bare = LLM(params=tree, config=config, **SMALL)
    (out,) = bare.generate([PROMPT], SamplingParams(temperature=0, max_tokens=8, logprobs=1))
    assert out.outputs[0].token_ids == ids(llm)[: len(out.outputs[0].token_ids)]
    assert out.outputs[0].text == ""
    assert {x.decoded_token for entry in out.outputs[0].logprobs for x in entry.values()} == {""}
    assert (
        bare.generate([PROMPT], BeamSearchParams(beam_width=2, max_tokens=3))[0]
        .outputs[0]
        .token_ids
    )
    remedy = r"give token ids, or name a tokenizer in from_params\(\.\.\., tokenizer=folder\)"
    with refused(f"no tokenizer for the text 'the cat'; {remedy}"):
        bare.generate("the cat", GREEDY)
    with refused(f"no tokenizer for a conversation; {remedy}"):
        bare.chat([{"role": "user", "content": "hi"}], GREEDY)
    with refused(f"a stream is text; {remedy}"):
        next(bare.stream(PROMPT, GREEDY))
    with refused(r"stop is \('x',\), but this model has no tokenizer"):
        bare.generate([PROMPT], SamplingParams(stop="x"))
    assert not bare.engine.has_work


def test_tokenizers_come_from_folders_and_from_models(tree, config, tiny_folder, tmp_path):
    (tmp_path / "tokenizer.json").write_bytes((tiny_folder / "tokenizer.json").read_bytes())
    assert from_params(tree, config, tokenizer=tmp_path).tokenizer.encode("the cat")
    assert from_params(tree, config, tokenizer="smollm2-135m").tokenizer.vocab_size == 49152
    with pytest.raises(FileNotFoundError, match=r"has no tokenizer\.json"):
        from_params(tree, config, tokenizer=tiny_folder.parent)
    with pytest.raises(FileNotFoundError, match=r"there is no model '.*nowhere/at/all'"):
        from_params(tree, config, tokenizer="nowhere/at/all")


def test_given_arrays_may_be_donated_or_overwritten(tree, config):
    inputs = jax.tree.map(jnp.asarray, tree)
    arrays = from_params(inputs, config).model.params
    for leaf in jax.tree.leaves(inputs):
        leaf.delete()
    written = from_params(tree, config).model.params
    embedding = np.array(tree["embed"])
    tree["embed"][:] = 0
    for params in (arrays, written):
        chex.assert_trees_all_equal(params["embed"][...], embedding)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_dtypes_are_kept_or_cast(tree, config, tiny_folder, dtype):
    expected = named(read_model(open_checkpoint(tiny_folder), dtype).params)
    cast = jax.tree.map(lambda x: x.astype(dtype), {**tree, "angles": ()})
    for model in (from_params(tree, config, dtype=dtype), from_params(cast, config)):
        assert model.model.dtype == dtype
        for name, x in named(model.model.params).items():
            chex.assert_trees_all_equal(x, expected[name], custom_message=name)
    with refused(f"the parameters are of {dtype} and float32; set the dtype"):
        from_params({**cast, "embed": tree["embed"]}, config)
    with refused("dtype is 'int8'; it must be one of None, 'float32'"):
        from_params(tree, config, dtype="int8")


def test_a_tied_model_has_no_head(tmp_path):
    folder = tiny_llama(tmp_path, qkv_bias=True, layers=1)
    loaded = load_model(folder)
    config = json.loads((folder / "config.json").read_text())
    assert ids(LLM(params=loaded.model.params, config=config, **SMALL)) == ids(LLM(loaded, **SMALL))
    with refused(r"differences: 1\n  missing: head\.weight \(320, 64\)$"):
        from_params(loaded.model.params, {**config, "tie_word_embeddings": False})


def test_one_error_lists_every_difference(tree, config):
    del tree["norm"]
    tree["embed"] = tree["embed"].T
    tree["head"]["weight"] = tree["head"]["weight"].astype(np.int8)
    tree["blocks"][1]["attn"]["out"]["weight"] = jax.ShapeDtypeStruct((64, 64), np.float32)
    tree["blocks"][0]["mlp"]["down"]["weight"] = deleted = jnp.asarray(
        tree["blocks"][0]["mlp"]["down"]["weight"]
    )
    tree["step"] = 7
    deleted.delete()
    with refused(r"^the given parameters do not fit its configuration; diff") as caught:
        from_params(tree, config)
    assert sorted(str(caught.value).split("\n  ")[1:]) == [
        "dtype of head.weight: expected a floating point type, found int8",
        "missing: norm.weight (64,)",
        "shape of embed: expected (320, 64), found (64, 320)",
        "unexpected: step ()",
        "values of blocks.0.mlp.down.weight: deleted (donated to a function?)",
        "values of blocks.1.attn.out.weight: none, only a shape",
    ]


@pytest.mark.parametrize("params", [{}, [], 5, "weights", {"a": "b"}])
def test_values_that_are_not_parameters_are_refused(config, params):
    with refused(r"missing: embed \(320, 64\)"):
        from_params(params, config)


def test_a_wrong_config_is_refused(tree, config):
    with refused("config: model_type is 'mamba'; supported"):
        from_params(tree, {**config, "model_type": "mamba"})


# --- new values for a running model ---------------------------------------------------------------


def test_new_values_are_used_and_nothing_is_compiled(tiny, tree):
    llm = LLM(tiny, **SMALL)
    before = ids(llm)
    changed = scaled(tree, 1.5)
    ids(llm, PROMPT[::-1])
    compiled = compilations.compilations()
    for form in (changed, jax.tree.map(lambda x: jax.device_put(x), changed)):
        llm.update_params(form)
        after = ids(llm)
        assert after != before
    assert compilations.compilations() == compiled
    expected = LLM(from_params(changed, tiny.model.config), **SMALL)
    assert after == ids(expected)
    assert ids(LLM(tiny, **SMALL)) == before, "the loaded model is another's as well"
    assert ids(LLM(llm.model, **SMALL)) == after
    llm.update_params(tiny.model.params)
    assert ids(llm) == before


def test_new_values_clear_the_prefix_cache_and_drop_steps_sent_ahead(tiny, tree):
    llm = LLM(tiny, **SMALL | {"lookahead": 2})
    llm.generate([PROMPT], GREEDY)
    (warm,) = llm.generate([PROMPT], GREEDY)
    assert warm.num_cached_tokens == 32
    llm.update_params(scaled(tree, 1.5))
    (cold,) = llm.generate([PROMPT], GREEDY)
    assert cold.num_cached_tokens == 0
    assert cold.outputs[0].token_ids == ids(
        LLM(from_params(scaled(tree, 1.5), tiny.model.config), **SMALL)
    )


def test_arrays_may_be_donated_or_overwritten_after_an_update(tiny, tree):
    llm = LLM(tiny, **SMALL)
    inputs = jax.tree.map(jnp.asarray, scaled(tree, 1.5))
    llm.update_params(inputs)
    for leaf in jax.tree.leaves(inputs):
        leaf.delete()
    after = ids(llm)
    llm.update_params(changed := scaled(tree, 1.5))
    changed["embed"][:] = 0
    assert ids(llm) == after


def test_an_update_is_refused_while_requests_are_unfinished(llm, tree):
    before = ids(llm)
    stream = llm.stream(PROMPT, greedy(30))
    next(stream)
    with refused(r"1 sequences are unfinished; finish or cancel them"):
        llm.update_params(scaled(tree, 1.5))
    stream.close()
    assert ids(llm) == before


def test_parameters_that_do_not_fit_change_nothing(llm, tree):
    before = ids(llm)
    params = llm.engine.model.params
    del tree["norm"]
    tree["embed"] = tree["embed"].astype(np.float16)
    message = (
        r"(?s)^the given parameters do not fit the model in use; differences: 2"
        r".*dtype of embed: expected float32, found float16"
    )
    with refused(message):
        llm.update_params(tree)
    assert llm.engine.model.params is params
    assert ids(llm) == before
