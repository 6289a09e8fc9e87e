"""KV policies and windows in the engine, against dense attention with a mask and against engines
that keep all blocks.

The oracle runs the model once over a whole text. Its attention is jax.nn.dot_product_attention with
a mask of tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache as cached
from functools import partial
from typing import Any

import chex
import jax
import numpy as np
import pytest
from flax import nnx

from pagedjax import LLM, BeamSearchParams, SamplingParams, from_params
from pagedjax.device.layer_groups import LayerGroups, LayerPages, beside, layer_groups
from pagedjax.device.models import Decoder
from pagedjax.host.kv_policies import View, window_blocks
from pagedjax.host.types import HOLE
from pagedjax.options.config import EngineConfig
from pagedjax.weights.architectures import FAMILIES, normalised
from tests import quick_compiler
from tests.device.test_model_families import BODY
from tests.engine import runs
from tests.engine.poison import poisoned
from tests.engine.runs import check_idle, greedy, logprobs_of, small_llm, steps
from tests.engine.whole_text import TEXT, chosen_logprobs, padded, text_logits
from tests.refusals import refused

STREAMING = {"name": "streaming", "sinks": 4, "window": 9}
SMALL = {"max_num_seqs": 4, "max_num_batched_tokens": 16, "num_blocks": 60, "block_size": 4}
GREEDY = greedy(40, logprobs=0)
PROMPTS = [np.random.default_rng(n).integers(3, 320, n).tolist() for n in (70, 5, 33)]
VARIANTS: dict[str, dict[str, Any]] = {
    "as it is": {},
    "another budget": {"max_num_batched_tokens": 7},
    "preemption": {"num_blocks": 12},
    "swapping": {"num_blocks": 9, "preemption": "swap", "swap_space_gib": 0.01},
    "lookahead": {"lookahead": 2},
    "drafts": {"speculative": {"method": "ngram", "num_tokens": 4}},
    "no prefix cache": {"enable_prefix_caching": False},
    "xla": {"attention_impl": "xla"},
}


def make(model, **config) -> LLM:
    return small_llm(model, **SMALL | config)


def answers(llm: LLM, prompts: Sequence[list[int]] = PROMPTS, params: Any = GREEDY) -> list[Any]:
    return runs.answers(llm, list(prompts), params)


def tokens_of(
    llm: LLM, prompts: Sequence[list[int]] = PROMPTS, params: Any = GREEDY
) -> list[list[int]]:
    return [list(answer.token_ids) for answer in answers(llm, prompts, params)]


def assert_same_answers(llm: LLM, expected: list[Any]) -> None:
    for answer, expected_answer in zip(answers(llm), expected, strict=True):
        assert answer.token_ids == expected_answer.token_ids
        chex.assert_trees_all_close(
            logprobs_of(answer), logprobs_of(expected_answer), atol=1e-4, rtol=0
        )


def dense_logits(model, tokens: Sequence[int], mask: np.ndarray) -> np.ndarray:
    """[len(tokens), V] of a model over a text; mask [TEXT, TEXT]: whether a query (row) sees a
    token.
    """
    with quick_compiler.all_quickly():
        logits = _dense(model.graphdef, model.params, model.config, padded(tokens), mask)
        return np.asarray(logits)[: len(tokens)]


@partial(jax.jit, static_argnums=(0, 2))
def _dense(graphdef, params, c, tokens: jax.Array, mask: jax.Array) -> jax.Array:
    def attend(q, k, v):
        keys, values = (pages.transpose(1, 0, 2)[None] for pages in (k, v))
        return jax.nn.dot_product_attention(
            q[None], keys, values, mask=mask[None, None], scale=c.attn_scale
        )[0]

    return text_logits(graphdef, params, c, tokens, attend)


def seen_by(size: int, sinks: int, window: int) -> np.ndarray:
    """[TEXT, TEXT] of a streaming policy, whose sizes are rounded up to blocks."""
    query, token = np.mgrid[:TEXT, :TEXT]
    blocks, first = -(-(window - 1) // size) + 1, -(-sinks // size)
    return (token <= query) & ((token // size < first) | (token // size > query // size - blocks))


def assert_dense(model, prompt: Sequence[int], answer: Any, mask: np.ndarray) -> None:
    """The answer's tokens are the best of the oracle, with its log-probabilities."""
    logits = dense_logits(model, [*prompt, *answer.token_ids], mask)[len(prompt) - 1 : -1]
    assert logits.argmax(-1).tolist() == list(answer.token_ids)
    assert_close(logprobs_of(answer), logits, answer.token_ids)


def assert_close(logprobs: np.ndarray, logits: np.ndarray, tokens: Sequence[int]) -> None:
    expected = chosen_logprobs(logits, tokens).astype(logprobs.dtype)
    chex.assert_trees_all_close(logprobs, expected, atol=2e-4, rtol=0)


# --- streaming ------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [4, pytest.param(7, marks=pytest.mark.slow)])
def test_streaming_is_dense_attention_with_its_mask(tiny, size):
    llm = make(tiny, kv_policy=STREAMING, block_size=size)
    mask = seen_by(size, 4, 9)
    with_prompts = size == 7  # the program of their log-probabilities is compiled in slow runs
    params = replace(GREEDY, prompt_logprobs=0) if with_prompts else GREEDY
    outs = llm.generate(PROMPTS, params)
    for prompt, out in zip(PROMPTS, outs, strict=True):
        (answer,) = out.outputs
        assert_dense(tiny.model, prompt, answer, mask)
        if with_prompts:
            places = zip(out.prompt_logprobs[1:], prompt[1:], strict=True)
            logprobs = np.array([place[token].logprob for place, token in places])
            assert_close(logprobs, dense_logits(tiny.model, prompt, mask)[:-1], prompt[1:])
        with pytest.raises(AssertionError):  # else the comparison is blind
            assert_dense(tiny.model, prompt, answer, seen_by(1, TEXT, TEXT))


@pytest.fixture(scope="module")
def streamed(tiny) -> list[list[int]]:
    return tokens_of(make(tiny, kv_policy=STREAMING))


@pytest.mark.default_cases("swapping")
@pytest.mark.parametrize("variant", VARIANTS)
def test_tokens_do_not_depend_on_chunks_batch_mates_or_how_blocks_are_kept(tiny, streamed, variant):
    llm = make(tiny, kv_policy=STREAMING, **VARIANTS[variant])
    if variant != "lookahead":  # a step that is sent ahead has written blocks that are still free
        poisoned(llm.engine)
    assert tokens_of(llm) == streamed
    assert tokens_of(llm) == streamed, "after prefix hits"
    check_idle(llm.engine)


@pytest.mark.slow
@pytest.mark.parametrize("policy", [STREAMING, {"name": "quest", "tokens": 16, "dense_layers": 1}])
def test_branches_and_beams_under_a_policy_do_not_depend_on_chunks(tiny, policy):
    draws = SamplingParams(temperature=1.0, n=3, seed=5, max_tokens=30, ignore_eos=True)
    beams = BeamSearchParams(beam_width=3, max_tokens=20, ignore_eos=True)
    outputs = []
    for budget in (16, 7):
        llm = make(tiny, kv_policy=policy, max_num_batched_tokens=budget)
        pair = llm.generate([PROMPTS[0]] * 2, draws)
        searched = llm.beam_search([{"prompt_token_ids": PROMPTS[2]}], beams)
        branches = [[branch.token_ids for branch in output.outputs] for output in pair]
        outputs.append((branches, searched[0].sequences[0].tokens))
    assert outputs[0] == outputs[1]


@pytest.mark.slow
def test_blocks_of_a_streaming_engine_are_an_exact_number(tiny):
    """110 tokens in blocks of 4: block 0 and a window of 3, where a full engine has 28."""
    assert used_blocks(make(tiny)) == 28
    assert used_blocks(make(tiny, kv_policy=STREAMING)) == 4


def used_blocks(llm: LLM) -> int:
    """In the last step of a request."""
    llm.engine.add("a", PROMPTS[0], GREEDY)
    return list(steps(llm.engine))[-1].plan.blocks_used


def test_sampling_that_reads_tokens_keeps_its_blocks(tiny):
    """The policy changes attention, and a penalty still counts every token."""
    params = greedy(40, frequency_penalty=2.0)
    llm = make(tiny, kv_policy=STREAMING)
    llm.engine.add("a", PROMPTS[0], params)
    llm.engine.add("b", PROMPTS[2], GREEDY)
    seqs = [seq for result in steps(llm.engine) for seq in result.plan.seqs]
    assert {seq.request_id for seq in seqs if HOLE in seq.blocks} == {"b"}
    (answer,) = answers(llm, PROMPTS[:1], params)
    text = [*PROMPTS[0], *answer.token_ids]
    logits = dense_logits(tiny.model, text, seen_by(4, 4, 9))[len(PROMPTS[0]) - 1 : -1]
    for i, token in enumerate(answer.token_ids):
        counts = np.bincount(answer.token_ids[:i], minlength=logits.shape[1])
        assert int(np.argmax(logits[i] - 2.0 * counts)) == token


def test_a_policy_that_hides_nothing_is_a_full_engine(tiny):
    """The same batches, and so the same programs."""
    wide = make(tiny, kv_policy={"name": "streaming", "window": 600})
    plain = make(tiny)
    assert wide.engine.runtime.scheduler_config == plain.engine.runtime.scheduler_config
    assert wide.engine.runtime.shapes == plain.engine.runtime.shapes


# --- windows of layers ----------------------------------------------------------------------------

WINDOWS = BODY | {"head_dim": 32, "sliding_window": 16}
GEMMA = WINDOWS | {"model_type": "gemma2", "query_pre_attn_scalar": 24, "num_hidden_layers": 2}
MISTRAL = WINDOWS | {"model_type": "mistral", "num_hidden_layers": 2}


def random_model(config: dict[str, Any]):
    shape = FAMILIES[config["model_type"]].from_hf(normalised(config, "a test"))
    rng = np.random.default_rng(0)

    def draw(a: jax.ShapeDtypeStruct) -> np.ndarray:
        deviation = (0.5 if a.shape[0] == 320 else a.shape[-1] ** -0.5) if a.ndim > 1 else 0.3
        return rng.normal(0, deviation, a.shape).astype(np.float32)

    abstract = nnx.eval_shape(lambda: Decoder(shape, "float32"))
    return from_params(jax.tree.map(draw, nnx.state(abstract, nnx.Param)), config=config)


@pytest.fixture(scope="module")
def gemma():
    """The first of two layers sees 16 tokens."""
    return random_model(GEMMA)


@pytest.fixture(scope="module")
def mistral():
    """All layers see 16 tokens."""
    return random_model(MISTRAL)


@pytest.fixture(scope="module")
def kept(gemma, mistral) -> Callable[[str], list[Any]]:
    """name -> the answers of an engine that gives no block back."""
    models = {"gemma": gemma, "mistral": mistral}
    return cached(lambda name: answers(make(models[name], free_window_blocks=False)))


@pytest.mark.default_cases
@pytest.mark.slow_cases(
    "gemma-swapping",
    "gemma-as it is",
    "gemma-another budget",
    "gemma-drafts",
    "gemma-mesh",
    "mistral-preemption",
    "mistral-swapping",
    "mistral-lookahead",
    "mistral-no prefix cache",
    "mistral-xla",
)
@pytest.mark.parametrize("variant", [*VARIANTS, "mesh"])
@pytest.mark.parametrize("name", ["gemma", "mistral"])
def test_giving_blocks_back_changes_no_token(request, kept, name, variant):
    config = VARIANTS.get(variant, {"mesh": {"tensor": 2}})
    config = config | ({"num_blocks": 24} if "num_blocks" in config else {})
    llm = make(request.getfixturevalue(name), **config)
    for _ in range(2):
        assert_same_answers(llm, kept(name))


@pytest.mark.slow
def test_the_memory_of_a_model_with_windows_is_an_exact_number(gemma):
    """110 tokens in blocks of 4. Before: 28 blocks of 2 layers. Now: 28 of the full layer, 5 of the
    other.
    """
    for free, blocks in ((False, 28), (True, 28 + 5)):
        llm = make(gemma, free_window_blocks=free)
        assert used_blocks(llm) == blocks
        arrays = jax.tree.leaves(llm.engine._state.cache)
        assert llm.engine.memory.cache == sum(array.nbytes for array in arrays)
    shorter = make(gemma, max_model_len=16)
    assert shorter.engine.runtime.shapes.layout is None, "no sequence is longer than the window"


def test_the_report_counts_the_sequences_that_fit(gemma, mistral):
    """256 tokens are 64 blocks: of 2 layers before; now 64 + (5 + 4 of a chunk) of one layer. 60
    blocks are 121.
    """
    assert make(gemma, free_window_blocks=False).engine.memory.sequences == 0
    assert make(gemma).engine.memory.sequences == 121 // (64 + 9) == 1
    assert make(mistral).engine.memory.sequences == 60 // 9 == 6


def groups_of(windows: Sequence[int | None]) -> LayerGroups:
    """Groups for layers of attention."""
    return layer_groups([LayerPages(window) for window in windows])


def test_pages_of_a_layer_without_attention_are_in_one_array():
    """The rarest attention has two layers; the mixers' pages are 3 + 3 + 1 in two arrays."""
    layers = [LayerPages(5, pages, attention=False) for pages in (3, 3, 1)]
    groups = layer_groups([*layers, LayerPages(None), LayerPages(None)])
    assert (groups.windows, groups.size) == ((None, 5, 5, 5, 5), 2)
    assert groups.places == ((1, 0), (1, 1), (4, 0), (0, 0), (0, 1))
    assert groups.pages == (3, 3, 1, 1, 1)
    assert groups.attention == (False, False, False, True, True)


def test_groups_of_a_draft_model_are_behind_those_of_the_model():
    attention = LayerPages(None)
    model = layer_groups([attention, LayerPages(5, 3, attention=False)])
    draft = layer_groups([LayerPages(3, 2, attention=False), attention, attention])
    windows = (None, 5, 5, 5, 3, 3)
    groups = beside(model, draft)
    assert [layout.windows for layout in groups] == [windows, windows]
    assert groups[0].places == model.places
    assert groups[1].places == ((4, 0), (0, 0), (0, 1)), "attention has the first group of both"
    kept = layer_groups([LayerPages(None, 2, attention=False), attention])
    groups = beside(model, kept)
    assert groups[1].windows == (None, 5, 5, 5, None, None, None)
    assert groups[1].places == ((4, 0), (6, 0)), "a state is in its first group: none is shared"


def test_layers_are_dealt_to_groups_of_one_size():
    groups = groups_of([16, 16, None, 16, 16, None, 16])
    assert (groups.windows, groups.size) == ((None, 16, 16, 16), 2)
    assert groups.places == ((1, 0), (1, 1), (0, 0), (2, 0), (2, 1), (0, 1), (3, 0))
    assert groups_of([8, 64]).windows == (64, 8)
    for windows in ([None] * 4 + [9] * 22, [5, None, 7, 5, 5]):
        groups = groups_of(windows)
        assert len(set(groups.places)) == len(windows)
        assert [groups.windows[group] for group, _ in groups.places] == windows
        assert all(at < groups.size for _, at in groups.places)


# --- errors ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (
            {"kv_policy": "streming"},
            r"kv_policy is 'streming'; it must be one of .*did you mean 'streaming'",
        ),
        (
            {"kv_policy": {"name": "streaming", "window": 0}},
            "kv_policy.window is 0; it must be an integer of at least 1",
        ),
        (
            {"kv_policy": {"name": "streaming", "sink": 1}},
            r"unknown key kv_policy\.'sink'; did you mean 'sinks'",
        ),
        (
            {"kv_policy": {"name": "full", "sinks": 4}},
            "kv_policy.sinks is 4, and kv_policy.name 'full', which does not take it",
        ),
        ({"kv_policy": 3}, "kv_policy is 3; it must be a name, or a mapping"),
        ({"free_window_blocks": 1}, "free_window_blocks is 1; it must be True or False"),
    ],
    ids=str,
)
def test_wrong_configurations_are_refused(config, message):
    with refused(message):
        EngineConfig(**config)


def test_a_policy_for_a_model_with_windows_is_refused(gemma):
    # a kernel's window counts positions, and tables of a policy are compact
    for free in (True, False):
        with refused(r"layers of the model have windows of \[16\] tokens.*use kv_policy='full'"):
            make(gemma, kv_policy=STREAMING, free_window_blocks=free)
    assert make(gemma, kv_policy=STREAMING, max_model_len=16) is not None


def test_the_documents_example_is_a_policy(documented_file, tiny):
    file = documented_file("kv-policies.md", "strided.py")
    llm = make(tiny, kv_policy=f"{file}:STRIDED", block_size=8)
    assert llm.engine.runtime.scheduler_config.views == (View(9, (0, 16, 32, 48)),)


@pytest.mark.parametrize(
    ("windows", "tokens", "share"),
    [
        ([4096, None] * 13, 512 + 257, 0.75),
        (([512] * 5 + [None]) * 4 + [512] * 2, 512 + 6 * 33, 0.21),
    ],
    ids=["Gemma 2 2B", "Gemma 3 1B"],
)
def test_the_documents_numbers_of_gemma(windows, tokens, share):
    """8,192 tokens in blocks of 16; a block has the layers of one group."""
    groups = groups_of(windows)
    blocks = sum(512 if window is None else window_blocks(window, 16) for window in groups.windows)
    assert (blocks, round(blocks * groups.size / (512 * len(windows)), 2)) == (tokens, share)


def test_names_are_short_for_options():
    assert EngineConfig(kv_policy="full").kv_policy is None
    policy = EngineConfig(kv_policy="streaming").kv_policy
    assert (policy.sinks, policy.window) == (4, 1020)
    assert EngineConfig(kv_policy=policy) == EngineConfig(
        kv_policy={"name": "streaming", "sinks": 4}
    )
