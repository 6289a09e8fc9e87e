"""Quest in the engine: against a brute-force model over whole texts, and requests against
themselves alone.

The oracle runs the model once over a whole text. Its attention is numpy's: of each query and key
head, over the blocks that `brute_quest` chooses.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache, partial
from itertools import count
from typing import Any

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from pagedjax import BeamSearchParams, SamplingParams, Taps
from pagedjax.device import cache as kv
from pagedjax.device.batch import Batch
from pagedjax.host import kv_policies
from pagedjax.host.kv_policies import KVPolicy, TopBlocks, View
from pagedjax.host.types import Sampled
from pagedjax.options.config import EngineConfig, KVPolicyOptions
from tests import quick_compiler
from tests.device.test_model_families import BODY
from tests.engine.brute_quest import chosen_blocks
from tests.engine.poison import poisoned
from tests.engine.test_kv_policies import GREEDY, PROMPTS, answers, make, random_model, tokens_of

QUEST: dict[str, Any] = {"name": "quest", "tokens": 16, "dense_layers": 1}
EVERY = QUEST | {"dense_prompts": False}
# of most engines, which share programs: enough for any request, and not for all PROMPTS at a time
FEW_BLOCKS = 40
ROOMY = {"num_blocks": 60}
VARIANTS: dict[str, dict[str, Any]] = {
    "another budget": {**ROOMY, "max_num_batched_tokens": 7, "token_buckets": (7,)},
    "preemption": {},
    "swapping": {"num_blocks": 34, "preemption": "swap", "swap_space_gib": 0.01},
    "lookahead": {**ROOMY, "lookahead": 2},
    "drafts": {**ROOMY, "speculative": {"method": "ngram", "num_tokens": 4}},
    "no prefix cache": {**ROOMY, "enable_prefix_caching": False},
    "xla": {**ROOMY, "attention_impl": "xla"},
    "mesh": {**ROOMY, "mesh": {"tensor": 2}},
    "large buckets": {**ROOMY, "max_num_batched_tokens": 128, "token_buckets": (128,)},
}
DEFAULT = ("preemption",)


@pytest.fixture(scope="module")
def model():
    """Two key heads, each of two query heads, in three layers."""
    return random_model(BODY | {"model_type": "llama"})


TEXT = 96  # no text of the brute-force model is longer


def brute_logits(
    model, text: Sequence[int], *, selects_from: int, size: int, blocks: int, dense_layers: int
):
    """[len(text), V] of a model over a text whose queries from a position on select blocks."""
    padded = np.zeros(TEXT, np.int32)
    padded[: len(text)] = text
    run = compiled_model(model.model.graphdef, model.model.config, size, blocks, dense_layers)
    with quick_compiler.all_quickly():
        return np.asarray(run(model.model.params, padded, len(text), selects_from))[: len(text)]


@cache
def compiled_model(
    graphdef, c, size: int, blocks: int, dense_layers: int
) -> Callable[..., jax.Array]:
    """(parameters, tokens, number of them, the first position that selects) -> logits."""

    def brute(layer: int, q, k, v, length, selects_from) -> np.ndarray:
        group = c.heads // c.kv_heads
        queries, keys, values = (np.asarray(a, np.float64) for a in (q, k, v))
        out = np.zeros((TEXT, c.heads, c.head_dim), np.float32)
        for i in range(int(length)):
            for head in range(c.kv_heads):
                group_queries = queries[i, head * group : (head + 1) * group]
                tokens = np.arange(i + 1)
                if layer >= dense_layers and i >= selects_from:
                    tokens = tokens[
                        np.isin(
                            tokens // size,
                            list(
                                chosen_blocks(
                                    c.attn_scale * group_queries, keys[head, : i + 1], size, blocks
                                )
                            ),
                        )
                    ]
                scores = c.attn_scale * group_queries @ keys[head, tokens].T
                weights = np.exp(scores - scores.max(1, keepdims=True))
                out[i, head * group : (head + 1) * group] = (
                    weights / weights.sum(1, keepdims=True) @ values[head, tokens]
                )
        return out

    @jax.jit
    def run(params, tokens, length, selects_from):
        layers = count()

        def attend(q, k_pages, v_pages, *_, window, soft_cap):
            shape = jax.ShapeDtypeStruct((TEXT, c.heads, c.head_dim), jnp.float32)
            call = partial(brute, next(layers))
            return jax.pure_callback(call, shape, q, k_pages[1], v_pages[1], length, selects_from)

        sizes = {"kv_heads": c.kv_heads, "head_dim": c.head_dim, "dtype": "float32"}
        pages = kv.init(layers=c.layers, blocks=1, block_size=TEXT, **sizes)
        positions = jnp.arange(TEXT, dtype=jnp.int32)
        rows = (
            jnp.ones((1, 1), jnp.int32),
            jnp.full(1, TEXT, jnp.int32),
            jnp.array([0, TEXT], jnp.int32),
        )
        unused: Any = None
        batch = Batch(
            tokens,
            positions,
            TEXT + positions,
            *rows,
            positions[-1:],
            positions[:1],
            positions,
            unused,
        )
        module = nnx.merge(graphdef, params)
        with jax.disable_jit():  # so that `attend` is called for each layer
            _, hidden, _ = module.hidden(pages, batch, attend)
        return module.logits(hidden)

    return run


def logprobs_of(logits: np.ndarray, tokens: Sequence[int]) -> np.ndarray:
    return np.asarray(jax.nn.log_softmax(jnp.asarray(logits)))[np.arange(len(tokens)), list(tokens)]


# --- against the brute-force model ----------------------------------------------------------------


@pytest.mark.parametrize(
    ("policy", "size"),
    [
        (QUEST, 4),
        (EVERY, 4),
        pytest.param(QUEST | {"tokens": 21, "dense_layers": 0}, 7, marks=pytest.mark.slow),
        pytest.param(EVERY | {"tokens": 1, "dense_layers": 2}, 8, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_tokens_and_logprobs_are_those_of_the_brute_force_model(model, policy, size):
    llm = make(model, kv_policy=policy, block_size=size, num_blocks=FEW_BLOCKS)
    dense = policy.get("dense_prompts", True)
    prompts = PROMPTS[:1] + PROMPTS[2:]
    outs = llm.generate(
        prompts,
        SamplingParams(temperature=0, max_tokens=24, ignore_eos=True, logprobs=0),
        use_tqdm=False,
    )
    for prompt, out in zip(prompts, outs, strict=True):
        (answer,) = out.outputs
        text = [*prompt, *answer.token_ids][:-1]
        selects = {
            "size": size,
            "blocks": -(-policy["tokens"] // size),
            "dense_layers": policy["dense_layers"],
        }
        logits = brute_logits(model, text, selects_from=len(prompt) if dense else 0, **selects)[
            len(prompt) - 1 :
        ]
        assert logits.argmax(-1).tolist() == list(answer.token_ids)
        got = np.array(
            [
                row[token].logprob
                for row, token in zip(answer.logprobs, answer.token_ids, strict=True)
            ]
        )
        chex.assert_shape(got, (24,))
        chex.assert_trees_all_close(
            got, logprobs_of(logits, answer.token_ids).astype(got.dtype), atol=2e-4, rtol=0
        )
        full = brute_logits(model, text, selects_from=len(text), **selects)[len(prompt) - 1 :]
        assert np.abs(logprobs_of(full, answer.token_ids) - got).max() > 1e-2, (
            "nothing is left out: a blind comparison"
        )


@pytest.mark.slow
def test_a_selection_of_all_blocks_gives_the_tokens_of_full_attention(model):
    full = answers(make(model))
    llm = make(model, kv_policy=QUEST | {"tokens": 128})
    assert llm.engine.runtime.shapes.selection is not None
    for got, expected in zip(answers(llm), full, strict=True):
        assert got.token_ids == expected.token_ids
        pairs = [
            (a[t].logprob, b[t].logprob)
            for a, b, t in zip(got.logprobs, expected.logprobs, got.token_ids, strict=True)
        ]
        logprobs, full_logprobs = (np.array(column) for column in zip(*pairs, strict=True))
        chex.assert_trees_all_close(logprobs, full_logprobs, atol=1e-4, rtol=0)


def test_a_selection_that_leaves_nothing_out_is_a_full_engine(model):
    """The same programs and the same cache."""
    wide, plain = (
        make(model, kv_policy=policy).engine.runtime for policy in (QUEST | {"tokens": 256}, None)
    )
    assert wide.shapes == plain.shapes
    assert wide.memory.block_bytes == plain.memory.block_bytes


# --- a request has the same tokens in any company -------------------------------------------------


@pytest.fixture(scope="module")
def alone(model) -> list[list[int]]:
    llm = make(model, kv_policy=QUEST, num_blocks=FEW_BLOCKS)
    answers = [tokens_of(llm, [prompt])[0] for prompt in PROMPTS]
    assert answers != tokens_of(make(model)), (
        "the policy changes nothing: the comparisons are blind"
    )
    return answers


@pytest.mark.parametrize(
    "variant",
    [pytest.param(name, marks=() if name in DEFAULT else pytest.mark.slow) for name in VARIANTS],
)
def test_tokens_do_not_depend_on_chunks_batch_mates_or_how_blocks_are_kept(model, alone, variant):
    llm = make(model, **{"kv_policy": QUEST, "num_blocks": FEW_BLOCKS} | VARIANTS[variant])
    # a step that is sent ahead has written blocks that are still free
    if variant not in ("lookahead", "mesh"):
        poisoned(llm.engine)
    assert tokens_of(llm) == alone
    assert tokens_of(llm) == alone, "after prefix hits"
    assert llm.engine.scheduler_state.pool.num_free == llm.engine.config.num_blocks


ENGINES: dict[str, dict[str, Any]] = {
    "roomy": {},
    "recomputed": {"num_blocks": 30, "max_num_batched_tokens": 24, "token_buckets": (24,)},
    "swapped": {"num_blocks": 30, "preemption": "swap", "swap_space_gib": 0.01},
    "drafted": {"num_blocks": 36, "speculative": {"method": "suffix", "num_tokens": 3}},
    "larger blocks": {"block_size": 8, "num_blocks": 16},
}


@pytest.fixture(scope="module")
def engines(model):
    return cache(lambda name: make(model, kv_policy=QUEST, max_model_len=100, **ENGINES[name]))


@pytest.fixture(scope="module")
def tokens_alone(model):
    """(size of a block, prompt, tokens) -> the answer of a request in an engine without a prefix
    cache.
    """
    make_one = cache(
        lambda size: make(
            model, kv_policy=QUEST, max_model_len=100, block_size=size, enable_prefix_caching=False
        )
    )

    @cache
    def found(size: int, prompt: tuple[int, ...], count: int) -> list[int]:
        return tokens_of(
            make_one(size),
            [list(prompt)],
            SamplingParams(temperature=0, max_tokens=count, ignore_eos=True),
        )[0]

    return found


def check_company(
    data: st.DataObject, names: Sequence[str], engines: Any, tokens_alone: Any
) -> None:
    """Requests that share beginnings, also with the outputs of others, enter an engine at different
    times.
    """
    engine = engines(data.draw(st.sampled_from(names))).engine
    engine.reset()
    expected = {}
    texts = [tuple(PROMPTS[0][: data.draw(st.integers(1, 50))])]
    entries = []
    for i in range(data.draw(st.integers(2, 5))):
        base = data.draw(st.sampled_from(texts))
        prompt = base[: data.draw(st.integers(1, len(base)))] + tuple(
            PROMPTS[2][: data.draw(st.integers(0, 9))]
        )
        prompt = prompt[:60]
        count = data.draw(st.integers(1, 30))
        expected[str(i)] = list(tokens_alone(engine.config.block_size, prompt, count))
        texts.append(prompt + tuple(expected[str(i)]))
        entries.append((data.draw(st.integers(0, 40)), str(i), prompt, count))
    step = 0
    while entries or engine.has_work:
        for entry in [entry for entry in entries if entry[0] <= step or not engine.has_work]:
            _, name, prompt, count = entry
            engine.add(
                name, prompt, SamplingParams(temperature=0, max_tokens=count, ignore_eos=True)
            )
            entries.remove(entry)
        result = engine.step()
        step += 1
        assert result is not None
        for event in result.events:
            if isinstance(event, Sampled):
                for name, token in zip(event.request_ids, event.token_ids, strict=True):
                    assert token == expected[name].pop(0), f"request {name}"
    assert not any(expected.values())


FEW = settings(
    max_examples=6, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)


@FEW
@given(data=st.data())
@pytest.mark.slow
def test_company_changes_no_token(data, engines, tokens_alone):
    check_company(data, ("recomputed", "swapped"), engines, tokens_alone)


@pytest.mark.slow
@settings(parent=FEW, max_examples=60)
@given(data=st.data())
def test_company_changes_no_token_in_any_engine(data, engines, tokens_alone):
    check_company(data, tuple(ENGINES), engines, tokens_alone)


def test_an_answer_in_a_longer_prompt_is_computed_again_unless_prompts_select(model):
    """Blocks with generated tokens have keys of queries that selected; a prompt's own queries do
    not.
    """
    for policy, shared in (
        (QUEST, len(PROMPTS[0]) // 4 * 4),
        (EVERY, (len(PROMPTS[0]) + 39) // 4 * 4),
    ):
        llm = make(model, kv_policy=policy, num_blocks=FEW_BLOCKS)
        (first,) = tokens_of(llm, PROMPTS[:1])
        longer = [*PROMPTS[0], *first, 7]
        llm.engine.add("again", longer, GREEDY)
        result = llm.engine.step()
        assert result is not None
        assert result.plan.starts == (shared,)
        while llm.engine.has_work:
            llm.engine.step()
        fresh = make(model, kv_policy=policy, num_blocks=FEW_BLOCKS)
        assert tokens_of(llm, [longer]) == tokens_of(fresh, [longer])


@pytest.mark.slow
def test_branches_and_beams_do_not_depend_on_chunks(model):
    draws = SamplingParams(temperature=1.0, n=3, seed=5, max_tokens=30, ignore_eos=True)
    beams = BeamSearchParams(beam_width=3, max_tokens=20, ignore_eos=True)
    runs = []
    for budget in (16, 7):
        llm = make(model, kv_policy=QUEST, max_num_batched_tokens=budget, token_buckets=(budget,))
        outs = llm.generate([PROMPTS[0]] * 2, [draws, draws], use_tqdm=False)
        searched = llm.beam_search([{"prompt_token_ids": PROMPTS[2]}], beams)
        runs.append(
            (
                [[branch.token_ids for branch in out.outputs] for out in outs],
                searched[0].sequences[0].tokens,
            )
        )
    assert runs[0] == runs[1]


@pytest.mark.slow
@pytest.mark.parametrize(
    "dtype", [pytest.param("bfloat16", marks=pytest.mark.exhaustive), "float8_e4m3fn"]
)
def test_a_smaller_cache_has_bounds_of_its_own_numbers(model, dtype):
    """The bounds have the dtype of the keys, so a selection of all blocks is that of full attention
    again.
    """
    answers = {
        tokens: tokens_of(make(model, kv_cache_dtype=dtype, kv_policy=QUEST | {"tokens": tokens}))
        for tokens in (16, 128)
    }
    assert answers[128] == tokens_of(make(model, kv_cache_dtype=dtype)) != answers[16]
    preempting = make(model, kv_cache_dtype=dtype, kv_policy=QUEST, num_blocks=40)
    assert tokens_of(preempting) == answers[16]


@pytest.mark.exhaustive  # test_selection.py has windows
def test_a_selection_within_a_window(model, tmp_path):
    """A policy of one's own with both: a query reads some of the blocks that it sees."""
    text = "from pagedjax.policies import KVPolicy, TopBlocks\n"
    text += "BOTH = KVPolicy('both', window=33, keeps=lambda start: start < 8, selects=TopBlocks({tokens}, 1))\n"
    answers = {}
    for tokens in (16, 40, 41):  # a query sees 9 blocks of 4 tokens in its window, and 2 before it
        (tmp_path / f"own{tokens}.py").write_text(text.format(tokens=tokens), encoding="utf-8")
        for name, options in (
            ("", {}),
            ("again", {"num_blocks": 26, "max_num_batched_tokens": 7, "token_buckets": (7,)}),
        ):
            llm = make(model, kv_policy=f"{tmp_path}/own{tokens}.py:BOTH", **options)
            assert (llm.engine.runtime.shapes.selection is None) == (tokens == 41)
            answers[tokens, name] = tokens_of(llm)
    assert answers[16, ""] == answers[16, "again"] != answers[41, ""]
    assert answers[40, ""] == answers[40, "again"]
    assert answers[41, ""] == answers[41, "again"]


# --- memory, options, errors ----------------------------------------------------------------------


def test_the_cache_has_bounds_of_the_layers_that_select(model):
    """Two numbers for each dimension of a key: those of one slot."""
    slot = 4 * 2 * model.model.config.kv_heads * model.model.config.head_dim
    plain = make(model).engine.memory
    for dense_layers in (0, 1, 2):
        engine = make(model, kv_policy=QUEST | {"dense_layers": dense_layers}).engine
        assert engine.memory.block_bytes == plain.block_bytes + (3 - dense_layers) * slot
        assert engine.memory.cache == sum(
            array.nbytes for array in jax.tree.leaves(engine._state.cache)
        )


def test_names_are_short_for_options():
    policy = EngineConfig(kv_policy="quest").kv_policy
    assert isinstance(policy, KVPolicyOptions)
    assert (policy.tokens, policy.dense_layers, policy.dense_prompts) == (1024, 2, True)
    assert kv_policies.find(policy) == kv_policies.quest(1024)
    assert policy == KVPolicyOptions("quest", tokens=1024)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"tokens": 0}, "kv_policy.tokens is 0; it must be an integer of at least 1"),
        ({"dense_layers": -1}, "kv_policy.dense_layers is -1; it must be an integer of at least 0"),
        ({"dense_prompts": 1}, "kv_policy.dense_prompts is 1; it must be True or False"),
        (
            {"window": 8},
            "kv_policy.window is 8, and kv_policy.name 'quest', which does not take it; .*'streaming'",
        ),
        (
            {"name": "streaming"},
            "kv_policy.tokens is 16, and kv_policy.name 'streaming', which .* use 'quest'",
        ),
    ],
    ids=str,
)
def test_wrong_options_are_refused(config, message):
    with pytest.raises(ValueError, match=message):
        EngineConfig(kv_policy=QUEST | {"dense_layers": None} | config)


def test_what_a_selection_cannot_be_combined_with_is_refused(model, tmp_path):
    with pytest.raises(
        ValueError,
        match=r"dense_layers is 3, and the model has 3 layers.*at most 2, or use kv_policy",
    ):
        make(model, kv_policy=QUEST | {"dense_layers": 3})
    with pytest.raises(
        ValueError,
        match=r"'quest' selects blocks for each key head.*mesh of 4 devices.*at most 2 devices",
    ):
        make(model, kv_policy=QUEST, mesh={"tensor": 4})
    windows = random_model(BODY | {"model_type": "mistral", "sliding_window": 16})
    for free in (True, False):
        with pytest.raises(
            ValueError,
            match=r"layers of the model have windows of \[16\] tokens.*use kv_policy='full'",
        ):
            make(windows, kv_policy=QUEST, free_window_blocks=free)
    # A window that gives no block back, and still hides tokens.
    windows = random_model(BODY | {"model_type": "mistral", "sliding_window": 50})
    with pytest.raises(
        ValueError, match=r"layers of the model have windows of \[50\] tokens.*use kv_policy='full'"
    ):
        make(windows, kv_policy=QUEST, block_size=16, max_model_len=64)
    with pytest.raises(
        ValueError, match=r"taps.attention gives probabilities by position.*use kv_policy='full'"
    ):
        make(model, kv_policy=QUEST).generate(
            [PROMPTS[1]], SamplingParams(taps=Taps(attention={0: 0})), use_tqdm=False
        )
    (tmp_path / "own.py").write_text(
        "from pagedjax.policies import *\nBAD = KVPolicy('bad', selects=3)\n", "utf-8"
    )
    with pytest.raises(
        ValueError, match=r"has selects 3; it must be None, or a TopBlocks of at least 1 token"
    ):
        make(model, kv_policy=f"{tmp_path}/own.py:BAD")


def test_a_kernel_that_cannot_read_one_key_head_is_refused(model, tmp_path):
    (tmp_path / "own.py").write_text(
        "from pallas_kernels.paged_attention import IMPLS\n"
        "def obstacle(device, *, kv_heads, **sizes):\n"
        "    return 'needs two key heads' if kv_heads == 1 else ''\n"
        "MINE = IMPLS['xla']._replace(name='mine', obstacle=obstacle)\n",
        encoding="utf-8",
    )
    with pytest.raises(
        ValueError, match=r"kv_policy 'quest': attention_impl .*needs two key heads"
    ):
        make(model, kv_policy=QUEST, attention_impl=f"{tmp_path}/own.py:MINE")


@pytest.mark.slow
def test_a_batch_invariant_engine_stays_so(model):
    """The scores decide what is read, and they are a product of XLA."""
    llm = make(model, kv_policy=EVERY, batch_invariant=True, num_blocks=120)
    alone = [answers(llm, [prompt])[0] for prompt in PROMPTS]
    llm.reset_prefix_cache()
    for answer, expected in zip(answers(llm), alone, strict=True):
        assert answer.token_ids == expected.token_ids
        bits = [
            [p.logprob for entry in run.logprobs for p in entry.values()]
            for run in (answer, expected)
        ]
        chex.assert_trees_all_equal(*map(np.array, bits))


def test_policies_are_values():
    assert kv_policies.quest(64, 1) == KVPolicy("quest", selects=TopBlocks(64, 1))


def test_the_documents_example_sees_a_window_and_reads_a_part_of_it(documented_file):
    file = documented_file("quest.md", "quest_in_window.py")
    policy = kv_policies.find(KVPolicyOptions(f"{file}:MINE"))
    assert policy.selects == TopBlocks(256)
    assert kv_policies.view(policy, 16, 1000) == View(1 + 2048 // 16, (0,))
