"""Adapters in an engine: rows of many in one step, against models that have them merged; and their
slots.
"""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pagedjax import LLM, BeamSearchParams, LoRARequest, SamplingParams
from pagedjax.engine import compilations
from pagedjax.host.types import Sampled
from pagedjax.models import initial_factors
from pagedjax.weights.adapter_files import adapter_of
from tests.weights.tiny import tiny_llama
from tests.weights.tiny_adapters import merged, random_factors, tiny_adapter

SIZES: dict[str, Any] = {
    **{
        "progress": False,
        "block_size": 8,
        "num_blocks": 120,
        "max_model_len": 64,
        "max_num_seqs": 8,
    },
    **{"max_num_batched_tokens": 32, "token_buckets": (32,)},
}
LORA: dict[str, Any] = {"enable_lora": True, "max_loras": 3, "max_lora_rank": 8}
RANKS = {"one": 4, "two": 8, "three": 3}
PROMPTS = [
    list(range(5 + i, 5 + i + length)) for i, length in enumerate((3, 17, 9, 30, 5, 12, 1, 20))
]
PARAMS = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True, logprobs=2)


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    return tiny_llama(tmp_path_factory.mktemp("adapters") / "model", intermediate=104, tied=False)


@pytest.fixture(scope="module")
def folders(model) -> dict[str, Path]:
    names = enumerate(RANKS.items())
    return {
        name: tiny_adapter(model.parent / name, model, rank, seed=i) for i, (name, rank) in names
    }


@pytest.fixture(scope="module")
def llm(model) -> LLM:
    return LLM(model, **SIZES, **LORA)


@pytest.fixture(scope="module")
def alone(model) -> dict[str | None, LLM]:
    """By adapter, a model that has it merged; None: the model."""
    factors = {
        name: random_factors(model, rank, seed=i) for i, (name, rank) in enumerate(RANKS.items())
    }
    merged_models = {
        name: LLM(merged(model.parent / f"{name}-merged", model, factors[name], 0.5 / 1), **SIZES)
        for name in RANKS
    }
    return {None: LLM(model, **SIZES), **merged_models}


def answers(outputs: Any) -> tuple[list[list[int]], list[list[float]]]:
    """Tokens, and their log-probabilities."""
    branches = [branch for output in outputs for branch in output.outputs]
    tokens = [list(branch.token_ids) for branch in branches]
    return tokens, [
        [p[t].logprob for p, t in zip(branch.logprobs, branch.token_ids, strict=True)]
        for branch in branches
    ]


def assert_same(outputs: Any, expected: Any) -> None:
    tokens, logprobs = answers(outputs)
    expected_tokens, expected_logprobs = answers(expected)
    assert tokens == expected_tokens
    chex.assert_trees_all_close(np.array(logprobs), np.array(expected_logprobs), rtol=0, atol=1e-4)


def requests(folders: dict[str, Path], names: list[str | None]) -> list[LoRARequest | None]:
    return [name and LoRARequest(name, 1, folders[name]) for name in names]


def one_by_one(
    alone: dict[str | None, LLM], names: Sequence[str | None], params: Any = PARAMS
) -> list[Any]:
    pairs = zip(names, PROMPTS, strict=False)
    return [alone[name].generate([prompt], params, use_tqdm=False)[0] for name, prompt in pairs]


NAMES = [None, "two", "one", "three", "one", None, "two", "three"]
ENGINES: dict[str, dict[str, Any]] = {
    "cpu": {"linear_impl": "cpu"},
    "xla": {"linear_impl": "xla"},
    "reference": {"linear_impl": "reference"},
    "lookahead": {"lookahead": 1},
    "drafts": {"speculative": {"method": "ngram", "num_tokens": 3}},
    "preemption": {"num_blocks": 20, "enable_prefix_caching": False},
}


@pytest.mark.default_cases("cpu")
@pytest.mark.parametrize("name", ENGINES)
def test_rows_of_many_adapters_are_as_in_models_that_have_them_merged(name, model, folders, alone):
    llm = LLM(model, **SIZES | ENGINES[name], **LORA)
    outputs = llm.generate(PROMPTS, PARAMS, lora_request=requests(folders, NAMES), use_tqdm=False)
    assert_same(outputs, one_by_one(alone, NAMES))
    reversed_outputs = llm.generate(
        PROMPTS, PARAMS, lora_request=requests(folders, NAMES[::-1]), use_tqdm=False
    )
    assert_same(reversed_outputs, one_by_one(alone, NAMES[::-1]))
    unadapted = answers(one_by_one(alone, [None] * len(NAMES)))[1]
    assert [
        abs(a[0] - b[0]) > 0.01 for a, b in zip(answers(outputs)[1], unadapted, strict=True)
    ] == list(map(bool, NAMES))


def test_other_results_have_the_adapter_too(llm, folders, alone):
    """Log-probabilities of the prompt, branches, beams and hidden states."""
    request = requests(folders, ["three"])[0]
    prompt = PROMPTS[3]
    options = {"use_tqdm": False}
    params = SamplingParams(temperature=0, max_tokens=2, prompt_logprobs=1)
    output, expected = (
        model.generate([prompt], params, **adapter, **options)[0]
        for model, adapter in pair(llm, alone, request)
    )
    chosen = [
        [p[t].logprob for p, t in zip(out.prompt_logprobs[1:], prompt[1:], strict=True)]
        for out in (output, expected)
    ]
    chex.assert_trees_all_close(*map(np.array, chosen), rtol=0, atol=1e-4)
    for params in (
        SamplingParams(n=3, seed=1, max_tokens=5),
        BeamSearchParams(beam_width=2, max_tokens=4),
    ):
        outputs = [
            model.generate([prompt], params, **adapter, **options)[0]
            for model, adapter in pair(llm, alone, request)
        ]
        assert (
            len({tuple(tuple(branch.token_ids) for branch in out.outputs) for out in outputs}) == 1
        )
    vectors = [
        model.embed([prompt], **adapter, **options)[0].outputs.embedding
        for model, adapter in pair(llm, alone, request)
    ]
    chex.assert_trees_all_close(*map(np.array, vectors), rtol=0, atol=1e-5)
    scores = [
        model.score([prompt], [PROMPTS[1]], **adapter, **options)[0].outputs.score
        for model, adapter in pair(llm, alone, request)
    ]
    chex.assert_trees_all_close(*scores, rtol=0, atol=1e-5)
    params = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
    streams = [
        "".join(model.stream(prompt, params, **adapter))
        for model, adapter in pair(llm, alone, request)
    ]
    assert streams[0] == streams[1] != "".join(llm.stream(prompt, params))


def pair(
    llm: LLM, alone: dict[str | None, LLM], request: LoRARequest
) -> list[tuple[LLM, dict[str, Any]]]:
    return [(llm, {"lora_request": request}), (alone[request.lora_name], {})]


@pytest.mark.default_cases("bfloat16")
@pytest.mark.parametrize("dtype", ["bfloat16", "int8"])
def test_other_dtypes(dtype, model, folders, alone):
    """int8: of the model's matrices alone; the adapter is exact."""
    options = {"weight_dtype": "int8"} if dtype == "int8" else {"dtype": dtype}
    llm = LLM(model, **SIZES, **LORA, **options)
    params = replace(PARAMS, max_tokens=1)
    names = NAMES[:4]
    outputs = llm.generate(
        PROMPTS[:4], params, lora_request=requests(folders, names), use_tqdm=False
    )
    expected = one_by_one(alone, names, params)
    firsts = [np.array(answers(outputs)[1]) for outputs in (outputs, expected)]
    chex.assert_trees_all_close(*firsts, rtol=0, atol=0.15)


# --- slots ----------------------------------------------------------------------------------------


def slots_of(llm: LLM) -> dict[str, int]:
    return {name: adapter.slot for name, adapter in llm.engine.adapters.items()}


def test_an_adapter_that_no_request_needs_gives_way_to_a_later_one(model, folders, alone):
    llm = LLM(model, **SIZES, **LORA | {"max_loras": 2})
    for names in (["one", "two"], ["one"], ["three", None], ["two", "three"]):
        outputs = llm.generate(
            PROMPTS[: len(names)], PARAMS, lora_request=requests(folders, names), use_tqdm=False
        )
        assert_same(outputs, one_by_one(alone, names))
    assert set(slots_of(llm)) == {"two", "three"}


def test_a_kept_adapter_stays_until_it_is_unloaded(model, folders, alone):
    llm = LLM(model, **SIZES, **LORA | {"max_loras": 2})
    llm.load_adapter("mine", folders["one"])
    llm.load_adapter("other", folders["three"])
    with pytest.raises(
        ValueError,
        match=r"'two' has no slot: max_loras is 2, and 2 adapters are loaded \(mine, other\); unload",
    ):
        llm.generate([PROMPTS[0]], PARAMS, lora_request=requests(folders, ["two"]), use_tqdm=False)
    request = LoRARequest("mine")
    assert_same(
        llm.generate([PROMPTS[0]], PARAMS, lora_request=request, use_tqdm=False),
        one_by_one(alone, ["one"]),
    )
    llm.unload_adapter("mine")
    with pytest.raises(
        ValueError, match="adapter 'mine' is not loaded; loaded are 'other'; load it first"
    ):
        llm.generate([PROMPTS[0]], PARAMS, lora_request=request, use_tqdm=False)
    outputs = llm.generate(
        [PROMPTS[0]], PARAMS, lora_request=requests(folders, ["two"]), use_tqdm=False
    )
    assert_same(outputs, one_by_one(alone, ["two"]))


def test_a_request_keeps_its_adapter_while_another_one_takes_its_name(model, folders, alone):
    """And while it is unloaded. Nothing is compiled."""
    llm = LLM(model, **SIZES, **LORA | {"max_loras": 2})
    llm.load_adapter("mine", folders["one"])
    engine = llm.engine
    params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
    expected = [
        alone[name].generate([PROMPTS[1]], params, use_tqdm=False)[0] for name in ("one", "two")
    ]
    engine.add("a", PROMPTS[1], params, adapter="mine")
    tokens: dict[str, list[int]] = {"a": [], "b": []}
    step(engine, tokens), step(engine, tokens)
    before = compilations.compilations()
    llm.load_adapter("mine", folders["two"])
    assert slots_of(llm) == {"mine": 2}
    engine.add("b", PROMPTS[1], params, adapter="mine")
    with pytest.raises(
        ValueError,
        match=r"no slot: .* \(mine\), and 1 that were replaced or unloaded serve unfinished",
    ):
        llm.load_adapter("other", folders["three"])
    step(engine, tokens)
    llm.unload_adapter("mine")
    while engine.has_work:
        step(engine, tokens)
    assert compilations.compilations() == before
    assert [tokens["a"], tokens["b"]] == [list(output.outputs[0].token_ids) for output in expected]
    llm.load_adapter("other", folders["three"])
    assert slots_of(llm) == {"other": 1}


def step(engine: Any, tokens: dict[str, list[int]]) -> None:
    for event in engine.step().events:
        if isinstance(event, Sampled):
            for name, token in zip(event.request_ids, event.token_ids, strict=True):
                tokens[name].append(token)


def test_arrays_are_taken_in_place_of_a_folder(model, folders, alone):
    llm = LLM(model, **SIZES, **LORA | {"max_loras": 2})
    arrays = jax.tree.map(jnp.asarray, random_factors(model, RANKS["two"], seed=1))
    llm.load_adapter("mine", arrays, {"lora_alpha": RANKS["two"] / 2})
    assert_same(
        llm.generate(PROMPTS[:1], PARAMS, lora_request=LoRARequest("mine"), use_tqdm=False),
        one_by_one(alone, ["two"]),
    )
    content_hash = llm.engine.adapters["mine"].content_hash
    llm.load_adapter("folder", folders["two"])
    assert llm.engine.adapters["folder"].content_hash == content_hash, (
        "the same content shares blocks"
    )
    llm.load_adapter("mine", initial_factors(llm.model.model.config, 2))
    assert_same(
        llm.generate(PROMPTS[:1], PARAMS, lora_request=LoRARequest("mine"), use_tqdm=False),
        one_by_one(alone, [None]),
    )
    before = slots_of(llm)
    for source, options, message in (
        (
            folders["one"],
            {"lora_alpha": 3},
            "options is {'lora_alpha': 3}, and a folder has its own in adapter_config",
        ),
        (
            list(arrays.items()),
            None,
            "source is list; it must be the folder of an adapter, or a mapping of arrays",
        ),
        (arrays, {"use_dora": True}, "adapter 'mine': use_dora is True, which is not supported"),
        (
            {"lm_head": arrays["model.layers.0.self_attn.q_proj"]},
            None,
            "adapter 'mine' does not fit the model",
        ),
        (
            initial_factors(llm.model.model.config, 9),
            None,
            "adapter 'mine' has rank 9, and max_lora_rank is 8; set max",
        ),
    ):
        with pytest.raises(ValueError, match=message):
            llm.load_adapter("mine", source, options)
    with pytest.raises(ValueError, match="lora_name is ''; it must be a text"):
        llm.load_adapter("", arrays)
    assert slots_of(llm) == before
    with pytest.raises(ValueError, match="enable_lora"):
        alone[None].load_adapter("mine", arrays)


def test_the_prefix_cache_is_salted_with_an_adapters_content(model, folders):
    """Another adapter under an old name finds nothing; the same content under another name does."""
    llm = LLM(model, **SIZES, **LORA)

    def cached(name: str | None) -> int:
        request = LoRARequest(name) if name else None
        (output,) = llm.generate([PROMPTS[3]], PARAMS, lora_request=request, use_tqdm=False)
        return output.num_cached_tokens

    llm.load_adapter("mine", folders["one"])
    assert [cached(None), cached(None), cached("mine"), cached("mine")] == [0, 24, 0, 24]
    llm.load_adapter("mine", folders["two"])
    assert [cached("mine"), cached("mine"), cached(None)] == [0, 24, 24]
    llm.load_adapter("again", folders["one"])
    assert cached("again") == 24


def test_a_folder_is_read_again_if_a_request_says_so(model, folders, alone, tmp_path):
    llm = LLM(model, **SIZES, **LORA)
    shutil.copytree(folders["one"], tmp_path / "mine")
    request = LoRARequest("mine", 1, tmp_path / "mine")
    options: dict[str, Any] = {"use_tqdm": False}
    assert_same(
        llm.generate([PROMPTS[0]], PARAMS, lora_request=request, **options),
        one_by_one(alone, ["one"]),
    )
    shutil.copytree(folders["two"], tmp_path / "mine", dirs_exist_ok=True)
    assert_same(
        llm.generate([PROMPTS[0]], PARAMS, lora_request=request, **options),
        one_by_one(alone, ["one"]),
    )
    request = replace(request, load_inplace=True)
    assert_same(
        llm.generate([PROMPTS[0]], PARAMS, lora_request=request, **options),
        one_by_one(alone, ["two"]),
    )
    request = LoRARequest("mine", 1, folders["three"])  # another folder
    assert_same(
        llm.generate([PROMPTS[0]], PARAMS, lora_request=request, **options),
        one_by_one(alone, ["three"]),
    )


# --- bits -----------------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_batch_invariant_engine_stays_so(model, folders):
    """The bits of a request do not depend on those beside it, nor on the slot of its adapter."""
    options = SIZES | {"batch_invariant": True, "enable_prefix_caching": False}
    every = LLM(model, **options, **LORA).generate(
        PROMPTS, PARAMS, lora_request=requests(folders, NAMES), use_tqdm=False
    )
    small = LLM(model, **options, **LORA | {"max_loras": 2})
    for name, prompt, expected in reversed(list(zip(NAMES, PROMPTS, every, strict=True))):
        outputs = small.generate(
            [prompt], PARAMS, lora_request=requests(folders, [name])[0], use_tqdm=False
        )
        chex.assert_trees_all_equal(answers(outputs), answers([expected]))


def test_rows_without_an_adapter_have_the_bits_of_an_engine_without_adapters(model, folders):
    options = SIZES | {"batch_invariant": True, "enable_prefix_caching": False}
    names = [None, "two", None, "three"]
    outputs = LLM(model, **options, **LORA).generate(
        PROMPTS[:4], PARAMS, lora_request=requests(folders, names), use_tqdm=False
    )
    plain = LLM(model, **options).generate(PROMPTS[:4], PARAMS, use_tqdm=False)
    chex.assert_trees_all_equal(answers(outputs[0:3:2]), answers(plain[0:3:2]))


# --- what is refused ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"enable_lora": 1}, "enable_lora is 1; it must be True or False"),
        (
            {"enable_lora": True, "max_loras": 0},
            "max_loras is 0; it must be an integer of at least 1",
        ),
        (
            {"enable_lora": True, "max_lora_rank": True},
            "max_lora_rank is True; it must be an integer of at least 1",
        ),
        (
            {"enable_lora": True, "mesh": {"tensor": 2}},
            "adapters are on the first device alone; leave mesh and devices",
        ),
        (
            {"enable_lora": True, "speculative": {"method": "draft", "model": "smollm2-135m"}},
            "speculative.method is 'draft', whose model has no adapters; use the method 'ngram'",
        ),
    ],
)
def test_options_that_adapters_exclude_are_refused(model, options, message):
    with pytest.raises(ValueError, match=message):
        LLM(model, **SIZES | options)


def test_products_that_add_none_of_low_rank_are_refused(model, tmp_path):
    file = tmp_path / "own.py"
    file.write_text(
        "from pallas_kernels.linear import IMPLS\nMINE = IMPLS['xla']._replace(name='mine', low_rank=False)\n"
    )
    with pytest.raises(
        ValueError,
        match=r"own.py:MINE' adds no products of low rank; use one of 'reference', 'xla', 'cpu'",
    ):
        LLM(model, **SIZES, **LORA, linear_impl=f"{file}:MINE")


def test_adapters_that_cannot_be_served_are_refused(llm, model, folders, alone, tmp_path):
    def refused(message: str, request: Any, engine: LLM = llm) -> None:
        before = slots_of(engine)
        with pytest.raises((ValueError, FileNotFoundError), match=message):
            engine.generate([PROMPTS[0], PROMPTS[1]], PARAMS, lora_request=request, use_tqdm=False)
        assert slots_of(engine) == before
        assert not engine.engine.has_work

    large = tiny_adapter(tmp_path / "large", model, 9)
    refused(
        "adapter 'large' has rank 9, and max_lora_rank is 8; set max_lora_rank=9",
        LoRARequest("large", 1, large),
    )
    refused(
        "adapter 'one' is wanted, and this engine has none; set enable_lora=True",
        LoRARequest("one"),
        alone[None],
    )
    refused("adapter 'none' is not loaded", LoRARequest("none"))
    refused("nowhere has no adapter_config.json", LoRARequest("none", 1, tmp_path / "nowhere"))
    refused("1 lora_request for 2 prompts", [LoRARequest("one")])
    refused("lora_request is 'one'; it must be a LoRARequest", "one")
    with pytest.raises(ValueError, match="2 lora_request for 1 prompts"):
        next(llm.stream(PROMPTS[0], lora_request=requests(folders, ["one", "two"])))  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="1 lora_request for 2 prompts"):
        llm.score(PROMPTS[0], PROMPTS[1], lora_request=requests(folders, ["one"]), use_tqdm=False)
    paths = [LoRARequest("one", 1, folders["one"]), LoRARequest("one", 1, folders["two"])]
    refused("lora_request 'one' has the folders", paths)
    small = LLM(model, **SIZES, **LORA | {"max_loras": 1})
    refused(
        "2 adapters in one call, and max_loras is 1; raise it",
        requests(folders, ["one", "two"]),
        small,
    )
    for fields, message in (
        ({"lora_name": ""}, "lora_name is ''; it must be a text"),
        (
            {"lora_name": "a", "lora_int_id": 0},
            "lora_int_id is 0; it must be an integer of at least 1",
        ),
        ({"lora_name": "a", "lora_path": 3}, "lora_path is 3; it must be a folder"),
    ):
        with pytest.raises(ValueError, match=message):
            LoRARequest(**fields)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"lora_aplha": 64},
            r"'lora_aplha'; it must be one of 'lora_alpha', .*did you mean 'lora_alpha'",
        ),
        ({"use_rslora": "no"}, r"use_rslora is 'no'; it must be true or false"),
        (16, r"options is 16; it must be a mapping, such as"),
        ({"alpha_pattern": {"(": 3}}, r"alpha_pattern has '\(', which is no regular expression"),
    ],
)
def test_options_of_arrays_that_mean_nothing_are_refused(tiny, options, message):
    config = tiny.model.config
    with pytest.raises(ValueError, match=message):
        adapter_of(initial_factors(config, 2), options, config, "mine")


def test_factors_that_are_not_finite_are_refused(tiny):
    config = tiny.model.config
    factors = initial_factors(config, 2)
    module, (a, b) = next(iter(factors.items()))
    with pytest.raises(ValueError, match=r"a factor of .* is not finite; train it again"):
        adapter_of({module: (a, b + np.nan)}, {}, config, "mine")
