"""Adapters in an engine: rows of many in one step, against models that have them merged; and their
slots.
"""

from __future__ import annotations

import shutil
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
from pagedjax.models import initial_factors
from pagedjax.weights.adapter_files import adapter_of, read_adapter
from tests.engine.runs import greedy, logprobs_of, sampled, steps, token_ids
from tests.refusals import refused
from tests.weights.tiny import tiny_llama
from tests.weights.tiny_adapters import merged, random_factors, tiny_adapter

SIZES: dict[str, Any] = {
    "progress": False,
    "block_size": 8,
    "num_blocks": 120,
    "max_model_len": 64,
    "max_num_seqs": 8,
    "max_num_batched_tokens": 32,
    "token_buckets": (32,),
}
LORA: dict[str, Any] = {"enable_lora": True, "max_loras": 3, "max_lora_rank": 8}
RANKS = {"one": 4, "two": 8, "three": 3}
PROMPTS = [
    list(range(5 + i, 5 + i + length)) for i, length in enumerate((3, 17, 9, 30, 5, 12, 1, 20))
]
INVARIANT = {"batch_invariant": True, "enable_prefix_caching": False}
PARAMS = greedy(6, logprobs=2)


def lora_llm(model: Path, **config: Any) -> LLM:
    return LLM(model, **SIZES | LORA | config)


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    return tiny_llama(tmp_path_factory.mktemp("adapters") / "model", intermediate=104, tied=False)


@pytest.fixture(scope="module")
def folders(model) -> dict[str, Path]:
    return {
        name: tiny_adapter(model.parent / name, model, rank, seed=i)
        for i, (name, rank) in enumerate(RANKS.items())
    }


@pytest.fixture(scope="module")
def llm(model) -> LLM:
    return lora_llm(model)


@pytest.fixture(scope="module")
def alone(model) -> dict[str | None, LLM]:
    """By adapter, a model that has it merged; None: the model."""
    llms: dict[str | None, LLM] = {None: LLM(model, **SIZES)}
    for i, (name, rank) in enumerate(RANKS.items()):
        factors = random_factors(model, rank, seed=i)
        llms[name] = LLM(merged(model.parent / f"{name}-merged", model, factors, 0.5), **SIZES)
    return llms


def numbers(outputs: Any) -> tuple[list[tuple[int, ...]], list[np.ndarray]]:
    """Tokens, and their log-probabilities."""
    branches = [branch for output in outputs for branch in output.outputs]
    return [branch.token_ids for branch in branches], [logprobs_of(branch) for branch in branches]


def requests(folders: dict[str, Path], names: list[str | None]) -> list[LoRARequest | None]:
    return [name and LoRARequest(name, 1, folders[name]) for name in names]


def numbers_of(llm: LLM, request: Any, count: int = 1, params: SamplingParams = PARAMS) -> Any:
    """Of the first prompts, with one adapter or an adapter for each."""
    return numbers(llm.generate(PROMPTS[:count], params, lora_request=request))


def merged_numbers(alone, names: list[str | None], params: SamplingParams = PARAMS) -> Any:
    """Of the first prompts, each by the model that has its adapter merged."""
    pairs = zip(names, PROMPTS, strict=False)
    return numbers(alone[name].generate([prompt], params)[0] for name, prompt in pairs)


def check(llm: LLM, request: Any, alone, *names: str | None) -> None:
    """The first prompts have the answers of models that have the adapters merged."""
    tokens, logprobs = numbers_of(llm, request, len(names))
    expected_tokens, expected_logprobs = merged_numbers(alone, names)
    assert tokens == expected_tokens
    chex.assert_trees_all_close(logprobs, expected_logprobs, rtol=0, atol=1e-4)


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
    llm = lora_llm(model, **ENGINES[name])
    for names in (NAMES, NAMES[::-1]):
        check(llm, requests(folders, names), alone, *names)
    adapted = numbers_of(llm, requests(folders, NAMES), len(NAMES))[1]
    unadapted = merged_numbers(alone, [None] * len(NAMES))[1]
    differences = [abs(a[0] - b[0]) for a, b in zip(adapted, unadapted, strict=True)]
    assert [difference > 0.01 for difference in differences] == list(map(bool, NAMES))


def test_other_results_have_the_adapter_too(llm, folders, alone):
    """Log-probabilities of the prompt, branches, beams and hidden states."""
    (request,) = requests(folders, ["three"])
    prompt = PROMPTS[3]

    def results(model: LLM, adapter: LoRARequest | None) -> dict[str, Any]:
        def branches(params: Any) -> Any:
            (output,) = model.generate([prompt], params, lora_request=adapter)
            return output, [branch.token_ids for branch in output.outputs]

        (output, _) = branches(
            SamplingParams(temperature=0, max_tokens=2, logprobs=0, prompt_logprobs=1)
        )
        places = zip(output.prompt_logprobs[1:], prompt[1:], strict=True)
        (vector,) = model.embed([prompt], lora_request=adapter)
        (score,) = model.score([prompt], [PROMPTS[1]], lora_request=adapter)
        return {
            "numbers": np.array(
                [
                    *[place[token].logprob for place, token in places],
                    *vector.outputs.embedding,
                    score.outputs.score,
                ]
            ),
            "branches": branches(SamplingParams(n=3, seed=1, max_tokens=5, logprobs=0))[1],
            "beams": branches(BeamSearchParams(beam_width=2, max_tokens=4))[1],
            "text": "".join(model.stream(prompt, greedy(6, logprobs=0), lora_request=adapter)),
        }

    adapted = results(llm, request)
    expected = results(alone["three"], None)
    chex.assert_trees_all_close(adapted.pop("numbers"), expected.pop("numbers"), rtol=0, atol=1e-4)
    assert adapted == expected
    assert adapted["text"] != "".join(llm.stream(prompt, greedy(6, logprobs=0)))


@pytest.mark.slow
@pytest.mark.default_cases("bfloat16")
@pytest.mark.parametrize("dtype", ["bfloat16", "int8"])
def test_other_dtypes(dtype, model, folders, alone):
    """int8: of the model's matrices alone; the adapter is exact."""
    options = {"weight_dtype": "int8"} if dtype == "int8" else {"dtype": dtype}
    llm = lora_llm(model, **options)
    params = replace(PARAMS, max_tokens=1)
    logprobs = numbers_of(llm, requests(folders, NAMES[:4]), 4, params)[1]
    chex.assert_trees_all_close(
        logprobs, merged_numbers(alone, NAMES[:4], params)[1], rtol=0, atol=0.15
    )


# --- slots ----------------------------------------------------------------------------------------


def slots_of(llm: LLM) -> dict[str, int]:
    return {name: adapter.slot for name, adapter in llm.engine.adapters.items()}


def test_an_adapter_that_no_request_needs_gives_way_to_a_later_one(model, folders, alone):
    llm = lora_llm(model, max_loras=2)
    for names in (["one", "two"], ["one"], ["three", None], ["two", "three"]):
        check(llm, requests(folders, names), alone, *names)
    assert set(slots_of(llm)) == {"two", "three"}


def test_an_adapter_of_an_unfinished_request_gives_no_way(model, folders):
    engine = lora_llm(model, max_loras=2).engine
    config = engine.model.config
    one, two, three = (read_adapter(folder, config, name) for name, folder in folders.items())
    engine.load_adapter(one, keep=False)
    engine.add("a", PROMPTS[0], greedy(3), adapter="one")
    engine.load_adapter(two, keep=False)
    engine.load_adapter(three, keep=False)
    assert set(engine.adapters) == {"one", "three"}, "'one' is older"
    engine.cancel("a")


def test_a_kept_adapter_stays_until_it_is_unloaded(model, folders, alone):
    llm = lora_llm(model, max_loras=2)
    llm.load_adapter("mine", folders["one"])
    llm.load_adapter("other", folders["three"])
    with refused(
        r"'two' has no slot: max_loras is 2, and 2 adapters are loaded \(mine, other\); unload"
    ):
        numbers_of(llm, requests(folders, ["two"]))
    check(llm, LoRARequest("mine"), alone, "one")
    llm.unload_adapter("mine")
    with refused("adapter 'mine' is not loaded; loaded are 'other'; load it first"):
        numbers_of(llm, LoRARequest("mine"))
    check(llm, requests(folders, ["two"]), alone, "two")


def test_a_request_keeps_its_adapter_while_another_one_takes_its_name(model, folders, alone):
    """And while it is unloaded. Nothing is compiled."""
    llm = lora_llm(model, max_loras=2)
    llm.load_adapter("mine", folders["one"])
    engine = llm.engine
    params = greedy(12, logprobs=0)
    expected = [list(token_ids(alone[name], [PROMPTS[1]], params)[0]) for name in ("one", "two")]
    engine.add("a", PROMPTS[1], params, adapter="mine")
    results = [engine.step(), engine.step()]
    before = compilations.compilations()
    llm.load_adapter("mine", folders["two"])
    assert slots_of(llm) == {"mine": 2}
    engine.add("b", PROMPTS[1], params, adapter="mine")
    with refused("no slot: .* \\(mine\\), and 1 that were replaced or unloaded serve unfinished"):
        llm.load_adapter("other", folders["three"])
    results.append(engine.step())
    llm.unload_adapter("mine")
    results += steps(engine)
    assert compilations.compilations() == before
    assert sampled(results) == dict(zip("ab", expected, strict=True))
    llm.load_adapter("other", folders["three"])
    assert slots_of(llm) == {"other": 1}


def test_arrays_are_taken_in_place_of_a_folder(model, folders, alone):
    llm = lora_llm(model, max_loras=2)
    arrays = jax.tree.map(jnp.asarray, random_factors(model, RANKS["two"], seed=1))
    llm.load_adapter("mine", arrays, {"lora_alpha": RANKS["two"] / 2})
    check(llm, LoRARequest("mine"), alone, "two")
    llm.load_adapter("folder", folders["two"])
    first, second = (adapter.content_hash for adapter in llm.engine.adapters.values())
    assert first == second, "the same content shares blocks"
    config = llm.model.model.config
    llm.load_adapter("mine", initial_factors(config, 2))
    check(llm, LoRARequest("mine"), alone, None)
    before = slots_of(llm)
    for name, source, options, message in (
        (
            "mine",
            folders["one"],
            {"lora_alpha": 3},
            "options is {'lora_alpha': 3}, and a folder has its own in adapter_config",
        ),
        (
            "mine",
            list(arrays.items()),
            None,
            "source is list; it must be the folder of an adapter, or a mapping of arrays",
        ),
        ("", arrays, None, "lora_name is ''; it must be a text"),
    ):
        with refused(message):
            llm.load_adapter(name, source, options)
    assert slots_of(llm) == before
    with refused("enable_lora"):
        alone[None].load_adapter("mine", arrays)


def test_the_prefix_cache_is_salted_with_an_adapters_content(model, folders):
    """Another adapter under an old name finds nothing; the same content under another name does."""
    llm = lora_llm(model)

    def cached(name: str | None) -> int:
        request = LoRARequest(name) if name else None
        (output,) = llm.generate([PROMPTS[3]], PARAMS, lora_request=request)
        return output.num_cached_tokens

    llm.load_adapter("mine", folders["one"])
    assert [cached(None), cached(None), cached("mine"), cached("mine")] == [0, 24, 0, 24]
    llm.load_adapter("mine", folders["two"])
    assert [cached("mine"), cached("mine"), cached(None)] == [0, 24, 24]
    llm.load_adapter("again", folders["one"])
    assert cached("again") == 24


def test_a_folder_is_read_again_if_a_request_says_so(model, folders, alone, tmp_path):
    llm = lora_llm(model)
    folder = tmp_path / "mine"
    request = LoRARequest("mine", 1, folder)
    shutil.copytree(folders["one"], folder)
    check(llm, request, alone, "one")
    shutil.copytree(folders["two"], folder, dirs_exist_ok=True)
    check(llm, request, alone, "one")
    check(llm, replace(request, load_inplace=True), alone, "two")
    check(llm, LoRARequest("mine", 1, folders["three"]), alone, "three")  # another folder


# --- bits -----------------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_batch_invariant_engine_stays_so(model, folders):
    """The bits of a request do not depend on those beside it, nor on the slot of its adapter."""
    together = lora_llm(model, **INVARIANT).generate(
        PROMPTS, PARAMS, lora_request=requests(folders, NAMES)
    )
    small = lora_llm(model, max_loras=2, **INVARIANT)
    for name, prompt, expected in reversed(list(zip(NAMES, PROMPTS, together, strict=True))):
        outputs = small.generate([prompt], PARAMS, lora_request=requests(folders, [name])[0])
        chex.assert_trees_all_equal(numbers(outputs), numbers([expected]))


@pytest.mark.slow
def test_rows_without_an_adapter_have_the_bits_of_an_engine_without_adapters(model, folders):
    names = [None, "two", None, "three"]
    outputs = lora_llm(model, **INVARIANT).generate(
        PROMPTS[:4], PARAMS, lora_request=requests(folders, names)
    )
    plain = LLM(model, **SIZES, **INVARIANT).generate(PROMPTS[:4], PARAMS)
    chex.assert_trees_all_equal(numbers(outputs[0:3:2]), numbers(plain[0:3:2]))


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
    ],
)
def test_options_that_adapters_exclude_are_refused(model, options, message):
    with refused(message):
        LLM(model, **SIZES | options)


def test_products_that_add_none_of_low_rank_are_refused(model, tmp_path):
    file = tmp_path / "own.py"
    file.write_text(
        "from pallas_kernels.linear import IMPLS\nMINE = IMPLS['xla']._replace(name='mine', low_rank=False)\n"
    )
    with refused(
        r"own.py:MINE' adds no products of low rank; use one of 'reference', 'xla', 'cpu'"
    ):
        lora_llm(model, linear_impl=f"{file}:MINE")


def test_adapters_that_cannot_be_served_are_refused(llm, model, folders, alone, tmp_path):
    first_request, second_request = requests(folders, ["one", "two"])
    small = lora_llm(model, max_loras=1)
    large = LoRARequest("large", 1, tiny_adapter(tmp_path / "large", model, 9))
    other_folder = LoRARequest("one", 1, folders["two"])
    for engine, request, message in (
        (llm, large, "adapter 'large' has rank 9, and max_lora_rank is 8; set max_lora_rank=9"),
        (
            alone[None],
            LoRARequest("one"),
            "adapter 'one' is wanted, and this engine has none; set enable_lora=True",
        ),
        (llm, LoRARequest("none"), "adapter 'none' is not loaded"),
        (llm, [LoRARequest("one")], "1 lora_request for 2 prompts"),
        (llm, "one", "lora_request is 'one'; it must be a LoRARequest"),
        (llm, [first_request, other_folder], "lora_request 'one' has the folders"),
        (
            small,
            [first_request, second_request],
            "2 adapters in one call, and max_loras is 1; raise it",
        ),
    ):
        before = slots_of(engine)
        with refused(message):
            engine.generate(PROMPTS[:2], PARAMS, lora_request=request)
        assert slots_of(engine) == before
        assert not engine.engine.has_work
    with pytest.raises(FileNotFoundError, match=r"nowhere has no adapter_config\.json"):
        numbers_of(llm, LoRARequest("none", 1, tmp_path / "nowhere"))
    with refused("2 lora_request for 1 prompts"):
        next(llm.stream(PROMPTS[0], lora_request=[first_request, second_request]))  # type: ignore[arg-type]
    with refused("1 lora_request for 2 prompts"):
        llm.score(PROMPTS[0], PROMPTS[1], lora_request=[first_request])
    for fields, message in (
        ({"lora_name": ""}, "lora_name is ''; it must be a text"),
        (
            {"lora_name": "a", "lora_int_id": 0},
            "lora_int_id is 0; it must be an integer of at least 1",
        ),
        ({"lora_name": "a", "lora_path": 3}, "lora_path is 3; it must be a folder"),
    ):
        with refused(message):
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
    with refused(message):
        adapter_of(initial_factors(config, 2), options, config, "mine")


def test_factors_that_are_not_finite_are_refused(tiny):
    config = tiny.model.config
    factors = initial_factors(config, 2)
    module, (a, b) = next(iter(factors.items()))
    with refused(r"a factor of .* is not finite; train it again"):
        adapter_of({module: (a, b + np.nan)}, {}, config, "mine")
