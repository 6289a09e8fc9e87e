"""Pooled hidden states against a plain numpy forward pass, and beside requests that generate."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Any

import chex
import numpy as np
import pytest

from pagedjax import LLM, BeamSearchParams, PoolingParams, SamplingParams
from pagedjax.engine import step as step_module
from pagedjax.host import scheduler
from pagedjax.host.replay import verify
from pagedjax.host.types import Finished, Sampled
from tests.device.test_llama import plain_hidden
from tests.weights.tiny import tiny_llama

SIZES = {
    "max_num_seqs": 4,
    "max_num_batched_tokens": 32,
    "token_buckets": (32,),
    "block_size": 4,
    "num_blocks": 128,
}
PROMPTS = [
    np.random.default_rng(i).integers(3, 320, n).tolist()
    for i, n in enumerate((5, 100, 1, 33, 32, 17))
]
KINDS = ("LAST", "MEAN", "CLS")
LOGPROBS = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True, logprobs=3)
pytestmark = pytest.mark.filterwarnings("ignore:this model was not made for embeddings")


def make(model: Any, **config: Any) -> LLM:
    return LLM(model, progress=False, **SIZES | config)


@pytest.fixture(scope="module")
def llm(one_layer):
    yield (llm := make(one_layer))
    scheduler.check(llm.engine.scheduler_state)
    assert not llm.engine.has_work
    assert llm.engine.scheduler_state.pool.num_free == llm.engine.config.num_blocks
    assert not llm.engine._state.readers


@pytest.fixture(scope="module")
def hidden(one_layer_folder) -> list[np.ndarray]:
    """[tokens, H] of each prompt."""
    return [plain_hidden(one_layer_folder, np.array(prompt)) for prompt in PROMPTS]


def pooled_states(
    states: np.ndarray, kind: str, dimensions: int | None = None, normalize: bool = True
) -> np.ndarray:
    vector = {"LAST": states[-1], "MEAN": states.mean(0), "CLS": states[0], "ALL": states}[kind][
        ..., :dimensions
    ]
    return vector / np.linalg.norm(vector, axis=-1, keepdims=True) if normalize else vector


def embeddings(llm: LLM, prompts: Sequence[Any], params: Any = None) -> list[np.ndarray]:
    return [
        np.array(output.outputs.embedding, np.float32)
        for output in llm.embed(prompts, params, use_tqdm=False)
    ]


# --- the vectors ----------------------------------------------------------------------------------


@pytest.mark.default_cases("LAST-True", "CLS-False")
@pytest.mark.parametrize("caching", [True, False])
@pytest.mark.parametrize("kind", KINDS)
def test_embeddings_are_those_of_a_forward_pass_without_a_cache(one_layer, hidden, kind, caching):
    """Prompts of several lengths, one of them of more tokens than a step; and again, with what the
    cache holds now.
    """
    llm = make(one_layer, enable_prefix_caching=caching)
    for repeated in (False, True):
        outputs = llm.embed(PROMPTS, PoolingParams(pooling_type=kind), use_tqdm=False)
        for output, states, prompt in zip(outputs, hidden, PROMPTS, strict=True):
            vector = np.array(output.outputs.embedding, np.float32)
            chex.assert_shape(vector, (64,))
            chex.assert_trees_all_close(
                vector, pooled_states(states, kind).astype(np.float32), atol=2e-5
            )
            assert output.prompt_token_ids == tuple(prompt)
            shared = (len(prompt) - 1) // 4 * 4 if repeated and caching and kind == "LAST" else 0
            assert output.num_cached_tokens == shared


def test_token_embeddings_are_the_states_of_all_tokens(llm, hidden):
    for normalize in (True, False):
        params = PoolingParams(normalize=normalize)
        outputs = llm.encode(PROMPTS, params, use_tqdm=False)
        for output, states in zip(outputs, hidden, strict=True):
            data = output.outputs.data
            chex.assert_shape(data, states.shape)
            chex.assert_type(data, np.float32)
            expected = pooled_states(states, "ALL", normalize=normalize).astype(np.float32)
            chex.assert_trees_all_close(data, expected, atol=2e-5 if normalize else 2e-4)


@pytest.mark.parametrize("kind", [*KINDS, "ALL"])
@pytest.mark.parametrize("normalize", [True, False])
def test_dimensions_are_cut_before_vectors_are_normalised(llm, hidden, kind, normalize):
    task = {"task": "token_embed"} if kind == "ALL" else {"task": "embed", "pooling_type": kind}
    params = PoolingParams(dimensions=10, normalize=normalize, **task)
    (output,) = llm.encode(PROMPTS[1], params, use_tqdm=False)
    expected = pooled_states(hidden[1], kind, 10, normalize).astype(np.float32)
    chex.assert_trees_all_close(output.outputs.data, expected, atol=2e-5 if normalize else 2e-4)


def test_vllms_newer_name_of_normalize_means_the_same(llm):
    old, new = (
        embeddings(llm, PROMPTS[:1], PoolingParams(**{name: False}))
        for name in ("normalize", "use_activation")
    )
    chex.assert_trees_all_equal(old, new)
    assert abs(np.linalg.norm(old[0]) - 1) > 1e-3


def test_a_score_is_the_cosine_of_two_embeddings(llm):
    a, b, c = embeddings(llm, PROMPTS[:3])
    scores = llm.score(PROMPTS[0], [PROMPTS[1], PROMPTS[2], PROMPTS[0]], use_tqdm=False)
    chex.assert_trees_all_close(
        [score.outputs.score for score in scores], [float(a @ b), float(a @ c), 1.0], atol=1e-6
    )
    assert [score.request_id for score in scores] == ["0", "1", "2"]
    assert scores[0].prompt_token_ids == (*PROMPTS[0], *PROMPTS[1])
    pairs = llm.score(["the cat", "the rain"], ["the cat", "a house"], use_tqdm=False)
    assert pairs[0].outputs.score == pytest.approx(1.0)
    assert pairs[1].outputs.score < 1
    with pytest.raises(
        ValueError, match="text_1 has 2 texts and text_2 3; give one, or one for each"
    ):
        llm.score(["a", "b"], ["a", "b", "c"], use_tqdm=False)


@pytest.mark.slow
def test_bfloat16_states_are_pooled_in_float32(one_layer_folder, hidden):
    llm = make(one_layer_folder, dtype="bfloat16", attention_impl="xla", linear_impl="xla")
    for kind in KINDS:
        (vector,) = embeddings(llm, [PROMPTS[3]], PoolingParams(pooling_type=kind))
        assert vector @ pooled_states(hidden[3], kind) > 0.99


@pytest.mark.slow
def test_a_model_without_a_head_of_its_own_and_with_biases_is_pooled(tmp_path):
    folder = tiny_llama(tmp_path / "llama", layers=1, qkv_bias=True, seed=5)
    llm = make(folder)
    for kind in KINDS:
        (vector,) = embeddings(llm, [PROMPTS[1]], PoolingParams(pooling_type=kind))
        expected = pooled_states(plain_hidden(folder, np.array(PROMPTS[1])), kind).astype(
            np.float32
        )
        chex.assert_trees_all_close(vector, expected, atol=2e-5)


# --- beside requests that generate ----------------------------------------------------------------


def run(
    llm: LLM, kinds: Sequence[str], params: SamplingParams | BeamSearchParams = LOGPROBS
) -> dict[str, Any]:
    """Two requests generate, and prompts are pooled beside them -> by id, what each got."""
    engine = llm.engine
    results = {}
    for i in (0, 1):
        engine.add(f"g{i}", PROMPTS[i], params)
    for i, kind in enumerate(kinds):
        task = {"task": "token_embed"} if kind == "ALL" else {"pooling_type": kind}
        engine.add(f"p{i}", PROMPTS[i % len(PROMPTS)], PoolingParams(**task))
    for _ in range(500):
        if not engine.has_work:
            break
        result = engine.step()
        scheduler.check(engine.scheduler_state)
        results |= dict(result.pooled)
        for entry in result.logprobs:
            results.setdefault(entry.request_id, []).append(entry[3:])
        sampled = [
            name
            for event in result.events
            if isinstance(event, Sampled)
            for name in event.request_ids
        ]
        assert all(name.startswith("g") for name in sampled)
    assert not engine.has_work
    return results


@pytest.mark.default_cases("{}", "{'lookahead': 0}")
@pytest.mark.parametrize(
    "config", [{}, {"lookahead": 0}, {"num_blocks": 40}, {"linear_impl": "xla"}], ids=str
)
def test_rows_beside_embeddings_have_the_bits_that_they_have_beside_other_rows(one_layer, config):
    """Beside pooled prompts that use the same programs, and beside those that use the programs with
    states.
    """
    llm = make(
        one_layer,
        enable_prefix_caching=False,
        max_num_batched_tokens=32,
        token_buckets=(32,),
        **config,
    )
    alone = run(llm, ())
    for kinds in (("LAST",) * 4, ("MEAN", "ALL", "CLS", "LAST")):
        mixed = run(llm, kinds)
        assert {name: mixed[name] for name in alone} == alone
        assert len(mixed) == len(alone) + len(kinds)


def test_embeddings_are_the_same_whatever_is_beside_them(llm):
    llm.reset_prefix_cache()
    kinds = ("LAST", "MEAN", "CLS", "ALL")
    mixed = run(llm, kinds)
    llm.reset_prefix_cache()
    for i, kind in enumerate(kinds):
        task = {"task": "token_embed"} if kind == "ALL" else {"task": "embed", "pooling_type": kind}
        (alone,) = llm.encode(PROMPTS[i], PoolingParams(**task), use_tqdm=False)
        chex.assert_trees_all_close(alone.outputs.data, mixed[f"p{i}"], atol=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize(
    "config",
    [
        {"lookahead": 0},
        {"lookahead": 3},
        {"num_blocks": 30, "max_num_seqs": 6},
        {"num_blocks": 30, "preemption": "swap", "swap_space_gib": 0.01},
        {"speculative": {"method": "ngram", "num_tokens": 3, "adaptive": False}},
        {"chunked_prefill": False, "max_num_batched_tokens": 128, "token_buckets": (128,)},
        {"mixed_steps": False},
        {"compilation": "lazy"},
    ],
    ids=str,
)
def test_vectors_are_the_same_in_every_mode_of_the_engine(one_layer, hidden, config, tmp_path):
    """Few blocks preempt prompts in the middle, which are then computed again or come back from the
    host.
    """
    llm = make(one_layer, **{"token_buckets": (32,)} | config)
    llm.engine.record(tmp_path / "run.jsonl")
    kinds = ("MEAN", "ALL", "LAST", "MEAN", "LAST", "CLS")
    params = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True)
    results = run(llm, kinds, params)
    for i, kind in enumerate(kinds):
        chex.assert_trees_all_close(
            results[f"p{i}"], pooled_states(hidden[i], kind).astype(np.float32), atol=2e-5
        )
    llm.engine.record(None)
    assert verify(tmp_path / "run.jsonl").identical


@pytest.mark.slow
def test_a_mesh_gives_the_same_vectors(one_layer_folder, hidden):
    llm = LLM(one_layer_folder, progress=False, mesh={"tensor": 2}, **SIZES)
    for kind in KINDS:
        for vector, states in zip(
            embeddings(llm, PROMPTS, PoolingParams(pooling_type=kind)), hidden, strict=True
        ):
            chex.assert_trees_all_close(
                vector, pooled_states(states, kind).astype(np.float32), atol=2e-5
            )


def test_a_beam_search_and_an_embedding_share_steps(llm, hidden):
    outputs = llm.generate(PROMPTS[0], BeamSearchParams(beam_width=2, max_tokens=5), use_tqdm=False)
    llm.engine.add("e", PROMPTS[3], PoolingParams(pooling_type="MEAN"))
    mixed = llm.generate(PROMPTS[0], BeamSearchParams(beam_width=2, max_tokens=5), use_tqdm=False)
    assert [beam.token_ids for beam in mixed[0].outputs] == [
        beam.token_ids for beam in outputs[0].outputs
    ]
    assert not llm.engine.has_work


def test_a_failed_step_computes_an_embedding_again(one_layer, hidden, monkeypatch):
    llm = make(one_layer, lookahead=0)
    llm.engine.add("p", PROMPTS[1], PoolingParams(pooling_type="MEAN"))
    llm.engine.step()

    def fails(*args: Any) -> Any:
        raise RuntimeError("no device")

    with monkeypatch.context() as patched:
        patched.setattr(step_module, "send", fails)
        with pytest.raises(RuntimeError, match="no device"):
            llm.engine.step()
    vectors = {}
    while llm.engine.has_work:
        vectors |= dict(llm.engine.step().pooled)
    chex.assert_trees_all_close(
        vectors["p"], pooled_states(hidden[1], "MEAN").astype(np.float32), atol=2e-5
    )


def test_a_cancelled_embedding_leaves_nothing_behind(llm):
    llm.engine.add("p", PROMPTS[1], PoolingParams(pooling_type="MEAN"))
    llm.engine.step()
    assert llm.engine.cancel("p") == (Finished(llm.engine.scheduler_state.step, "p", "abort", 0),)
    assert not llm.engine.has_work
    assert not llm.engine._state.readers


def test_only_the_last_tokens_state_shares_cached_blocks(llm):
    """Others need every token computed, and leave nothing in the cache: log-probabilities of
    prompts do the same.
    """
    greedy = SamplingParams(temperature=0, max_tokens=1)
    for kind, shared in (("MEAN", 0), ("CLS", 0), ("LAST", 96)):
        llm.reset_prefix_cache()
        embeddings(llm, [PROMPTS[1]], PoolingParams(pooling_type=kind))
        assert llm.generate(PROMPTS[1], greedy, use_tqdm=False)[0].num_cached_tokens == shared
        (output,) = llm.embed(PROMPTS[1], PoolingParams(pooling_type=kind), use_tqdm=False)
        assert output.num_cached_tokens == shared
    for options in ({"cache_salt": "other"}, {"enable_prefix_caching": False}):
        (output,) = llm.embed(PROMPTS[1], PoolingParams(**options), use_tqdm=False)
        assert output.num_cached_tokens == 0


# --- compilation ----------------------------------------------------------------------------------


def test_the_last_tokens_state_compiles_nothing_and_others_compile_once(one_layer):
    llm = make(one_layer)
    programs = llm.engine.runtime.tapped
    llm.generate(PROMPTS, SamplingParams(max_tokens=3), use_tqdm=False)
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
    with pytest.raises(
        ValueError, match="prompt of 41 tokens, but max_model_len is 40; shorten the prompt to 40"
    ):
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
    with pytest.raises(ValueError, match=message):
        PoolingParams(**options)


def test_calls_that_cannot_be_served_say_why(llm):
    embed = lambda prompts, params=None: llm.embed(prompts, params, use_tqdm=False)  # noqa: E731
    with pytest.raises(
        ValueError, match="dimensions is 65, but the model's hidden states have 64 numbers"
    ):
        embed("a", PoolingParams(dimensions=65))
    with pytest.raises(ValueError, match="the prompt is empty"):
        embed(["a", ""])
    with pytest.raises(ValueError, match="the prompt is empty"):
        embed([[]])
    with pytest.raises(ValueError, match="there are no prompts"):
        embed([])
    with pytest.raises(
        ValueError, match=r"pooling_params is SamplingParams.*; it must be PoolingParams"
    ):
        embed("a", SamplingParams())
    with pytest.raises(ValueError, match="2 PoolingParams for 1 prompts"):
        embed("a", [PoolingParams()] * 2)
    with pytest.raises(ValueError, match="task is 'token_embed', but this method's is 'embed'"):
        embed("a", PoolingParams(task="token_embed"))
    with pytest.raises(
        ValueError, match="pooling_task is 'score'; it must be 'embed' or 'token_embed'"
    ):
        llm.encode("a", pooling_task="score", use_tqdm=False)
    with pytest.raises(ValueError, match="sampling_params is PoolingParams"):
        llm.generate("a", PoolingParams(), use_tqdm=False)
    with pytest.raises(ValueError, match="has max_tokens 0 and branches"):
        llm.engine.add("a", [5], PoolingParams(), forks=["b"])
    with pytest.raises(ValueError, match="has token id 320"):
        embed([[320]])


def test_a_model_without_a_tokenizer_takes_token_ids(one_layer, hidden):
    from dataclasses import replace

    from pagedjax.text.tokenizer import NoTokenizer

    llm = make(replace(one_layer, tokenizer=NoTokenizer()))
    (vector,) = embeddings(llm, [PROMPTS[0]])
    chex.assert_trees_all_close(
        vector, pooled_states(hidden[0], "LAST").astype(np.float32), atol=2e-5
    )
    with pytest.raises(ValueError, match="this model has no tokenizer for the text 'abc'"):
        llm.embed("abc", use_tqdm=False)


@pytest.mark.filterwarnings("default")
def test_a_model_that_was_not_made_for_embeddings_says_so_once(one_layer):
    llm = make(one_layer, compilation="lazy")
    with pytest.warns(UserWarning, match="this model was not made for embeddings") as caught:
        llm.embed("abc", use_tqdm=False)
    assert caught[0].filename == __file__
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        llm.embed("abc", use_tqdm=False)
        llm.score("abc", "d", use_tqdm=False)
