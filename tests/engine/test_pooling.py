"""Pooled hidden states against a plain numpy forward pass, and beside requests that generate."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import chex
import numpy as np
import pytest

from pagedjax import LLM, BeamSearchParams, PoolingParams, SamplingParams
from pagedjax.engine import state as engine_state
from pagedjax.host import scheduler
from pagedjax.host.replay import verify
from pagedjax.host.types import Finished
from pagedjax.text.tokenizer import NoTokenizer
from tests.device.test_llama import plain_hidden
from tests.engine.runs import check_idle, greedy, sampled, small_llm, steps
from tests.refusals import refused

SIZES = {
    "max_num_seqs": 4,
    "max_num_batched_tokens": 32,
    "block_size": 4,
    "num_blocks": 128,
}
PROMPTS = [
    np.random.default_rng(i).integers(3, 320, n).tolist()
    for i, n in enumerate((5, 100, 1, 33, 32, 17))
]
KINDS = ("LAST", "MEAN", "CLS")
LOGPROBS = greedy(12, logprobs=3)
pytestmark = pytest.mark.filterwarnings("ignore:this model was not made for embeddings")


def make(model: Any, **config: Any) -> LLM:
    return small_llm(model, **SIZES | config)


def assert_pooled(
    vector: Any,
    states: np.ndarray,
    kind: str,
    dimensions: int | None = None,
    normalize: bool = True,
    atol: float = 2e-5,
) -> None:
    parts = {"LAST": states[-1], "MEAN": states.mean(0), "CLS": states[0], "ALL": states}
    expected = parts[kind][..., :dimensions]
    if normalize:
        expected = expected / np.linalg.norm(expected, axis=-1, keepdims=True)
    chex.assert_trees_all_close(
        np.asarray(vector, np.float32),
        expected.astype(np.float32),
        atol=atol if normalize else 2e-4,
    )


@pytest.fixture(scope="module")
def llm(one_layer):
    yield (llm := make(one_layer))
    scheduler.check(llm.engine.scheduler_state)
    check_idle(llm.engine)
    assert not llm.engine._state.readers


@pytest.fixture(scope="module")
def hidden(one_layer_folder) -> list[np.ndarray]:
    """[tokens, H] of each prompt."""
    return [plain_hidden(one_layer_folder, np.array(prompt)) for prompt in PROMPTS]


def embeddings(llm: LLM, prompts: Sequence[Any], params: Any = None) -> list[np.ndarray]:
    return [np.array(output.outputs.embedding) for output in llm.embed(prompts, params)]


def pooling(kind: str, **options: Any) -> PoolingParams:
    task = {"task": "token_embed"} if kind == "ALL" else {"task": "embed", "pooling_type": kind}
    return PoolingParams(**task, **options)


# --- the vectors ----------------------------------------------------------------------------------


@pytest.mark.default_cases("LAST-True")
@pytest.mark.parametrize("caching", [True, False])
@pytest.mark.parametrize("kind", KINDS)
def test_embeddings_are_those_of_a_forward_pass_without_a_cache(one_layer, hidden, kind, caching):
    """Prompts of several lengths, one of them of more tokens than a step; and again, with what the
    cache holds now.
    """
    llm = make(one_layer, enable_prefix_caching=caching)
    for repeated in (False, True):
        outputs = llm.embed(PROMPTS, PoolingParams(pooling_type=kind))
        for output, states, prompt in zip(outputs, hidden, PROMPTS, strict=True):
            assert_pooled(output.outputs.embedding, states, kind)
            assert output.prompt_token_ids == tuple(prompt)
            shared = (len(prompt) - 1) // 4 * 4 if repeated and caching and kind == "LAST" else 0
            assert output.num_cached_tokens == shared


@pytest.mark.parametrize("kind", [*KINDS, "ALL"])
@pytest.mark.parametrize("normalize", ["normalize", "use_activation"])
def test_dimensions_are_cut_before_vectors_are_normalised(llm, hidden, kind, normalize):
    """`use_activation` is vLLM's newer name of `normalize`."""
    for on, dimensions in ((True, 10), (False, 10), (True, None)):
        params = pooling(kind, dimensions=dimensions, **{normalize: on})
        outputs = llm.encode(PROMPTS, params)
        for output, states in zip(outputs, hidden, strict=True):
            chex.assert_type(output.outputs.data, np.float32)
            assert_pooled(output.outputs.data, states, kind, dimensions, on)


def test_a_score_is_the_cosine_of_two_embeddings(llm):
    a, b, c = embeddings(llm, PROMPTS[:3])
    scores = llm.score(PROMPTS[0], [PROMPTS[1], PROMPTS[2], PROMPTS[0]])
    chex.assert_trees_all_close(
        [score.outputs.score for score in scores], [float(a @ b), float(a @ c), 1.0], atol=1e-6
    )
    assert [score.request_id for score in scores] == ["0", "1", "2"]
    assert scores[0].prompt_token_ids == (*PROMPTS[0], *PROMPTS[1])
    pairs = llm.score(["the cat", "the rain"], ["the cat", "a house"])
    assert pairs[0].outputs.score == pytest.approx(1.0)
    assert pairs[1].outputs.score < 1
    with refused("text_1 has 2 texts and text_2 3; give one, or one for each"):
        llm.score(["a", "b"], ["a", "b", "c"])


@pytest.mark.slow
def test_bfloat16_states_are_pooled_in_float32(one_layer_folder, hidden):
    llm = make(one_layer_folder, dtype="bfloat16", attention_impl="xla", linear_impl="xla")
    for kind in KINDS:
        (vector,) = embeddings(llm, [PROMPTS[3]], pooling(kind))
        assert_pooled(vector, hidden[3], kind, atol=0.02)


def results_of(llm: LLM, kinds: Sequence[str], params: SamplingParams = LOGPROBS) -> dict[str, Any]:
    """Two requests generate, and prompts are pooled beside them -> by id, what each got."""
    for i in (0, 1):
        llm.engine.add(f"g{i}", PROMPTS[i], params)
    for i, kind in enumerate(kinds):
        llm.engine.add(f"p{i}", PROMPTS[i], pooling(kind))
    results = list(steps(llm.engine))
    assert sampled(results).keys() == {"g0", "g1"}
    by_id: dict[str, Any] = {}
    for result in results:
        by_id |= dict(result.pooled)
        for entry in result.logprobs:
            by_id.setdefault(entry.request_id, []).append(entry[3:])
    return by_id


# --- beside requests that generate ----------------------------------------------------------------


@pytest.mark.default_cases("{}", "{'lookahead': 0}")
@pytest.mark.parametrize(
    "config", [{}, {"lookahead": 0}, {"num_blocks": 40}, {"linear_impl": "xla"}], ids=str
)
def test_rows_beside_embeddings_have_the_bits_that_they_have_beside_other_rows(one_layer, config):
    """Beside pooled prompts that use the same programs, and beside those that use the programs with
    states.
    """
    llm = make(one_layer, enable_prefix_caching=False, **config)
    alone = results_of(llm, ())
    for kinds in (("LAST",) * 4, ("MEAN", "ALL", "CLS", "LAST")):
        mixed = results_of(llm, kinds)
        assert {name: mixed[name] for name in alone} == alone
        assert len(mixed) == len(alone) + len(kinds)


def test_embeddings_are_the_same_whatever_is_beside_them(llm, hidden):
    llm.reset_prefix_cache()
    kinds = ("LAST", "MEAN", "CLS", "ALL")
    mixed = results_of(llm, kinds)
    for i, kind in enumerate(kinds):
        assert_pooled(mixed[f"p{i}"], hidden[i], kind)


@pytest.mark.slow
@pytest.mark.parametrize(
    "config",
    [
        {"lookahead": 0},
        pytest.param({"lookahead": 3}, marks=pytest.mark.exhaustive),
        pytest.param({"num_blocks": 30, "max_num_seqs": 6}, marks=pytest.mark.exhaustive),
        {"num_blocks": 30, "preemption": "swap", "swap_space_gib": 0.01},
        {"speculative": {"method": "ngram", "num_tokens": 3, "adaptive": False}},
        {"chunked_prefill": False, "max_num_batched_tokens": 128},
        {"mixed_steps": False},
        {"mesh": {"tensor": 2}},
    ],
    ids=str,
)
def test_vectors_are_the_same_in_every_mode_of_the_engine(
    one_layer, one_layer_folder, hidden, config, tmp_path
):
    """Few blocks preempt prompts in the middle, which are then computed again or come back from the
    host.
    """
    llm = make(one_layer_folder if "mesh" in config else one_layer, **config)
    llm.engine.record(tmp_path / "run.jsonl")
    kinds = ("MEAN", "ALL", "LAST", "MEAN", "LAST", "CLS")
    results = results_of(llm, kinds, greedy(20))
    for i, kind in enumerate(kinds):
        assert_pooled(results[f"p{i}"], hidden[i], kind)
    llm.engine.record(None)
    assert verify(tmp_path / "run.jsonl").identical


def test_a_beam_search_and_an_embedding_share_steps(llm):
    params = BeamSearchParams(beam_width=2, max_tokens=5)
    alone = llm.generate(PROMPTS[0], params)
    llm.engine.add("e", PROMPTS[3], pooling("MEAN"))
    mixed = llm.generate(PROMPTS[0], params)
    tokens, expected = ([beam.token_ids for beam in output.outputs] for output in (*mixed, *alone))
    assert tokens == expected
    assert not llm.engine.has_work


def test_a_failed_step_computes_an_embedding_again(one_layer, hidden, monkeypatch):
    llm = make(one_layer, lookahead=0)
    llm.engine.add("p", PROMPTS[1], pooling("MEAN"))
    llm.engine.step()
    with monkeypatch.context() as patched:
        patched.setattr(engine_state, "send", None)
        with pytest.raises(TypeError):
            llm.engine.step()
    ((name, vector),) = [pooled for result in steps(llm.engine) for pooled in result.pooled]
    assert name == "p"
    assert_pooled(vector, hidden[1], "MEAN")


def test_a_cancelled_embedding_leaves_nothing_behind(llm):
    llm.engine.add("p", PROMPTS[1], pooling("MEAN"))
    llm.engine.step()
    assert llm.engine.cancel("p") == (Finished(llm.engine.scheduler_state.step, "p", "abort", 0),)
    assert not llm.engine.has_work
    assert not llm.engine._state.readers


def test_only_the_last_tokens_state_shares_cached_blocks(llm):
    """Others need every token computed, and leave nothing in the cache: log-probabilities of
    prompts do the same.
    """
    params = SamplingParams(temperature=0, max_tokens=1)
    for kind, shared in (("MEAN", 0), ("CLS", 0), ("LAST", 96)):
        llm.reset_prefix_cache()
        embeddings(llm, [PROMPTS[1]], pooling(kind))
        assert llm.generate(PROMPTS[1], params)[0].num_cached_tokens == shared
        (output,) = llm.embed(PROMPTS[1], pooling(kind))
        assert output.num_cached_tokens == shared
    for options in ({"cache_salt": "other"}, {"enable_prefix_caching": False}):
        (output,) = llm.embed(PROMPTS[1], PoolingParams(**options))
        assert output.num_cached_tokens == 0


# --- compilation ----------------------------------------------------------------------------------


def test_the_last_tokens_state_compiles_nothing_and_others_compile_once(one_layer):
    llm = make(one_layer)
    programs = llm.engine.runtime.side_programs
    llm.generate(PROMPTS, SamplingParams(max_tokens=3))
    embeddings(llm, PROMPTS)
    assert not programs
    embeddings(llm, PROMPTS, PoolingParams(pooling_type="MEAN"))
    (shapes_made,) = map(dict, programs.values())
    assert {shape.tokens for shape in shapes_made} == {32}
    embeddings(llm, PROMPTS, PoolingParams(pooling_type="MEAN"))
    assert list(map(dict, programs.values())) == [shapes_made]
    llm.engine.add("p", PROMPTS[0], PoolingParams())
    assert llm.engine.step().compilations == 0


# --- what is refused ------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_prompt_may_have_as_many_tokens_as_the_model(one_layer, llm):
    embeddings(llm, [[7] * 508])
    short = make(one_layer, max_model_len=40)
    (vector,) = embeddings(short, [PROMPTS[1][:40]])
    chex.assert_shape(vector, (64,))
    with refused("prompt of 41 tokens, but max_model_len is 40; shorten the prompt to 40"):
        embeddings(short, [PROMPTS[1][:41]])
    truncated = embeddings(short, [PROMPTS[1]], PoolingParams(truncate_prompt_tokens=-1))
    chex.assert_trees_all_close(truncated, embeddings(short, [PROMPTS[1][-40:]]), atol=1e-6)
    truncated = embeddings(short, [PROMPTS[1]], PoolingParams(truncate_prompt_tokens=3))
    chex.assert_trees_all_close(truncated, embeddings(short, [PROMPTS[1][-3:]]), atol=1e-6)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"dimensions": 0}, "dimensions is 0; it must be None, an integer of at least 1"),
        ({"dimensions": 1.5}, "dimensions is 1.5"),
        ({"dimensions": True}, "dimensions is True"),
        (
            {"truncate_prompt_tokens": -2},
            r"truncate_prompt_tokens is -2; .* at least 1, or -1 for the model's",
        ),
        ({"normalize": "yes"}, "normalize is 'yes'; it must be None, True or False"),
        ({"normalize": True, "use_activation": False}, "mean the same, and they differ"),
        ({"pooling_type": "last"}, "pooling_type is 'last'; it must be 'LAST', 'MEAN' or 'CLS'"),
        (
            {"task": "classify"},
            "task is 'classify'; it must be 'embed' or 'token_embed': models here have no head",
        ),
        (
            {"softmax": True},
            "softmax is True, but models here have no head for classes or rewards; leave it out",
        ),
        ({"returned_token_ids": [1]}, r"returned_token_ids is \[1\], but models here have no head"),
        ({"cache_salt": ""}, "cache_salt is ''"),
        ({"enable_prefix_caching": 1}, "enable_prefix_caching is 1; it must be True or False"),
    ],
)
def test_parameters_out_of_their_range_are_named(options, message):
    with refused(message):
        PoolingParams(**options)


def test_calls_that_cannot_be_served_say_why(llm):
    for prompts, params, message in (
        (
            "a",
            PoolingParams(dimensions=65),
            "dimensions is 65, but the model's hidden states have 64 numbers",
        ),
        (["a", ""], None, "the prompt is empty"),
        ([[]], None, "the prompt is empty"),
        ([], None, "there are no prompts"),
        ("a", SamplingParams(), r"pooling_params is SamplingParams.*; it must be PoolingParams"),
        ("a", [PoolingParams()] * 2, "2 PoolingParams for 1 prompts"),
        ("a", pooling("ALL"), "task is 'token_embed', but this method's is 'embed'"),
        ([[320]], None, "has token id 320"),
    ):
        with refused(message):
            llm.embed(prompts, params)
    with refused("pooling_task is 'score'; it must be 'embed' or 'token_embed'"):
        llm.encode("a", pooling_task="score")
    with refused("sampling_params is PoolingParams"):
        llm.generate("a", PoolingParams())
    with refused("has max_tokens 0 and branches"):
        llm.engine.add("a", [5], PoolingParams(), forks=["b"])


def test_a_model_without_a_tokenizer_takes_token_ids(one_layer, hidden):
    llm = make(replace(one_layer, tokenizer=NoTokenizer()))
    assert_pooled(*embeddings(llm, [PROMPTS[0]]), hidden[0], "LAST")
    with refused("this model has no tokenizer for the text 'abc'"):
        llm.embed("abc")


@pytest.mark.filterwarnings("default")
def test_a_model_that_was_not_made_for_embeddings_says_so_once(one_layer):
    llm = make(one_layer, compilation="lazy")
    with pytest.warns(UserWarning, match="this model was not made for embeddings") as caught:
        llm.embed("abc")
    assert caught[0].filename == __file__
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        llm.embed("abc")
        llm.score("abc", "d")
