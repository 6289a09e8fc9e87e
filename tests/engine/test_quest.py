"""Quest in the engine: against a brute-force model over whole texts, and requests against
themselves alone.

The oracle runs the model once over a whole text. Its attention is numpy's: of each query and key
head, over the blocks that `brute_quest` chooses.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache, partial
from itertools import count, product
from typing import Any

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import strategies as st

from pagedjax import SamplingParams, Taps
from pagedjax.host import kv_policies
from pagedjax.host.kv_policies import TopBlocks, View
from pagedjax.options.config import EngineConfig, KVPolicyOptions
from tests import drawn, quick_compiler
from tests.device.test_model_families import BODY
from tests.engine.brute_quest import chosen_blocks
from tests.engine.poison import poisoned
from tests.engine.runs import check_idle, greedy, logprobs_of, sampled, steps
from tests.engine.test_kv_policies import (
    GREEDY,
    PROMPTS,
    answers,
    assert_close,
    make,
    random_model,
    tokens_of,
)
from tests.engine.whole_text import TEXT, chosen_logprobs, padded, text_logits
from tests.refusals import refused

QUEST: dict[str, Any] = {"name": "quest", "tokens": 16, "dense_layers": 1}
EVERY = QUEST | {"dense_prompts": False}
# of most engines, which share programs: enough for any request, and not for all PROMPTS at a time
FEW_BLOCKS = 40
ROOMY = {"num_blocks": 60}
VARIANTS: dict[str, dict[str, Any]] = {
    "another budget": {**ROOMY, "max_num_batched_tokens": 7},
    "preemption": {},
    "swapping": {"num_blocks": 34, "preemption": "swap", "swap_space_gib": 0.01},
    "lookahead": {**ROOMY, "lookahead": 2},
    "drafts": {**ROOMY, "speculative": {"method": "ngram", "num_tokens": 4}},
    "no prefix cache": {**ROOMY, "enable_prefix_caching": False},
    "xla": {**ROOMY, "attention_impl": "xla"},
    "mesh": {**ROOMY, "mesh": {"tensor": 2}},
    "large buckets": {**ROOMY, "max_num_batched_tokens": 128},
}


@pytest.fixture(scope="module")
def model():
    """Two key heads, each of two query heads, in three layers."""
    return random_model(BODY | {"model_type": "llama"})


def brute_logits(model, text: Sequence[int], *, selects_from: int, **selection: int) -> np.ndarray:
    """[len(text), V] of a model over a text whose queries from a position on select blocks."""
    run = compiled_model(model.model.graphdef, model.model.config, **selection)
    with quick_compiler.all_quickly():
        logits = run(model.model.params, padded(text), len(text), selects_from)
        return np.asarray(logits)[: len(text)]


@cache
def compiled_model(
    graphdef, c, size: int, blocks: int, dense_layers: int
) -> Callable[..., jax.Array]:
    """(parameters, tokens, number of them, the first position that selects) -> logits."""

    def brute(layer: int, q, k, v, length, selects_from) -> np.ndarray:
        queries = np.asarray(q, np.float64).reshape(TEXT, c.kv_heads, -1, c.head_dim)
        keys, values = (np.asarray(array, np.float64) for array in (k, v))
        out = np.zeros_like(queries)
        for i, head in product(range(int(length)), range(c.kv_heads)):
            scaled = c.attn_scale * queries[i, head]
            tokens = np.arange(i + 1)
            if layer >= dense_layers and i >= selects_from:
                read = chosen_blocks(scaled, keys[head, : i + 1], size, blocks)
                tokens = tokens[np.isin(tokens // size, list(read))]
            scores = scaled @ keys[head, tokens].T
            weights = np.exp(scores - scores.max(1, keepdims=True))
            weights /= weights.sum(1, keepdims=True)
            out[i, head] = weights @ values[head, tokens]
        return out.reshape(TEXT, c.heads, c.head_dim).astype(np.float32)

    @jax.jit
    def run(params, tokens, length, selects_from):
        layers = count()

        def attend(q, k, v):
            shape = jax.ShapeDtypeStruct((TEXT, c.heads, c.head_dim), jnp.float32)
            call = partial(brute, next(layers))
            return jax.pure_callback(call, shape, q, k, v, length, selects_from)

        return text_logits(graphdef, params, c, tokens, attend)

    return run


# --- against the brute-force model ----------------------------------------------------------------


@pytest.mark.parametrize(
    ("policy", "size"),
    [
        pytest.param(QUEST, 4, marks=pytest.mark.slow),
        (EVERY, 4),
        pytest.param(QUEST | {"tokens": 21, "dense_layers": 0}, 7, marks=pytest.mark.slow),
        pytest.param(EVERY | {"tokens": 1, "dense_layers": 2}, 8, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_tokens_and_logprobs_are_those_of_the_brute_force_model(model, policy, size):
    llm = make(model, kv_policy=policy, block_size=size, num_blocks=FEW_BLOCKS)
    selection = {
        "size": size,
        "blocks": -(-policy["tokens"] // size),
        "dense_layers": policy["dense_layers"],
    }
    prompts = PROMPTS[:1] + PROMPTS[2:]
    for prompt, answer in zip(prompts, answers(llm, prompts, greedy(24, logprobs=0)), strict=True):
        text = [*prompt, *answer.token_ids][:-1]
        first = len(prompt) if policy.get("dense_prompts", True) else 0
        logits = brute_logits(model, text, selects_from=first, **selection)[len(prompt) - 1 :]
        assert logits.argmax(-1).tolist() == list(answer.token_ids)
        logprobs = logprobs_of(answer)
        assert_close(logprobs, logits, answer.token_ids)
        full = brute_logits(model, text, selects_from=len(text), **selection)[len(prompt) - 1 :]
        differences = chosen_logprobs(full, answer.token_ids) - logprobs
        assert np.abs(differences).max() > 1e-2, "nothing is left out: a blind comparison"


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


@pytest.mark.slow
@pytest.mark.default_cases("preemption")
@pytest.mark.slow_cases("another budget", "swapping", "drafts", "mesh")
@pytest.mark.parametrize("variant", VARIANTS)
def test_tokens_do_not_depend_on_chunks_batch_mates_or_how_blocks_are_kept(model, alone, variant):
    llm = make(model, **{"kv_policy": QUEST, "num_blocks": FEW_BLOCKS} | VARIANTS[variant])
    # a step that is sent ahead has written blocks that are still free
    if variant not in ("lookahead", "mesh"):
        poisoned(llm.engine)
    assert tokens_of(llm) == alone
    assert tokens_of(llm) == alone, "after prefix hits"
    check_idle(llm.engine)


ENGINES: dict[str, dict[str, Any]] = {
    "roomy": {},
    "recomputed": {"num_blocks": 30, "max_num_batched_tokens": 24},
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
    options = {"kv_policy": QUEST, "max_model_len": 100, "enable_prefix_caching": False}
    llm_of = cache(lambda size: make(model, block_size=size, **options))

    @cache
    def tokens(size: int, prompt: tuple[int, ...], count: int) -> list[int]:
        return tokens_of(llm_of(size), [list(prompt)], greedy(count))[0]

    return tokens


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
        prompt = base[: data.draw(st.integers(1, len(base)))]
        prompt = (*prompt, *PROMPTS[2][: data.draw(st.integers(0, 9))])[:60]
        count = data.draw(st.integers(1, 30))
        expected[str(i)] = tokens_alone(engine.config.block_size, prompt, count)
        texts.append((*prompt, *expected[str(i)]))
        entries.append((data.draw(st.integers(0, 40)), str(i), prompt, count))
    results = []
    while entries or engine.has_work:
        due = [entry for entry in entries if entry[0] <= len(results) or not engine.has_work]
        for entry in due:
            _, name, prompt, count = entry
            engine.add(name, prompt, greedy(count))
            entries.remove(entry)
        results.append(engine.step())
    assert sampled(results) == expected


@pytest.mark.slow
@pytest.mark.parametrize(
    ("names", "number"),
    [(("recomputed", "swapped"), 6), (tuple(ENGINES), 12)],
    ids=["few blocks", "any engine"],
)
def test_company_changes_no_token(engines, tokens_alone, names, number):
    def holds(data: st.DataObject) -> None:
        check_company(data, names, engines, tokens_alone)

    drawn.check(number, holds, data=st.data())


@pytest.mark.slow
def test_an_answer_in_a_longer_prompt_is_computed_again_unless_prompts_select(model):
    """Blocks with generated tokens have keys of queries that selected; a prompt's own queries do
    not.
    """
    length = len(PROMPTS[0])
    for policy, shared in ((QUEST, length // 4 * 4), (EVERY, (length + 39) // 4 * 4)):
        llm, fresh = (make(model, kv_policy=policy, num_blocks=FEW_BLOCKS) for _ in range(2))
        longer = [*PROMPTS[0], *tokens_of(llm, PROMPTS[:1])[0], 7]
        llm.engine.add("longer", longer, GREEDY)
        assert next(steps(llm.engine)).plan.starts == (shared,)
        list(steps(llm.engine))
        assert tokens_of(llm, [longer]) == tokens_of(fresh, [longer])


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
    with refused(message):
        EngineConfig(kv_policy=QUEST | {"dense_layers": None} | config)


def test_what_a_selection_cannot_be_combined_with_is_refused(model, tmp_path):
    windows = "layers of the model have windows of \\[{}\\] tokens.*use kv_policy='full'"
    mistral = BODY | {"model_type": "mistral"}
    short, long = (random_model(mistral | {"sliding_window": size}) for size in (16, 50))
    (tmp_path / "own.py").write_text(
        "from pagedjax.policies import *\n"
        "from pallas_kernels.paged_attention import IMPLS\n"
        "BAD = KVPolicy('bad', selects=3)\n"
        "def obstacle(device, *, kv_heads, **sizes):\n"
        "    return 'needs two key heads' if kv_heads == 1 else ''\n"
        "MINE = IMPLS['xla']._replace(name='mine', obstacle=obstacle)\n",
        "utf-8",
    )
    for loaded, options, message in (
        (
            model,
            {"kv_policy": QUEST | {"dense_layers": 3}},
            "dense_layers is 3, and the model has 3 layers.*at most 2, or use kv_policy",
        ),
        (
            model,
            {"mesh": {"tensor": 4}},
            "'quest' selects blocks for each key head.*mesh of 4 devices.*at most 2 devices",
        ),
        (short, {"free_window_blocks": True}, windows.format(16)),
        (short, {"free_window_blocks": False}, windows.format(16)),
        # A window that gives no block back, and still hides tokens.
        (long, {"block_size": 16, "max_model_len": 64}, windows.format(50)),
        (
            model,
            {"kv_policy": f"{tmp_path}/own.py:BAD"},
            "has selects 3; it must be None, or a TopBlocks of at least 1 token",
        ),
        (
            model,
            {"attention_impl": f"{tmp_path}/own.py:MINE"},
            "kv_policy 'quest': attention_impl .*needs two key heads",
        ),
    ):
        with refused(message):
            make(loaded, **{"kv_policy": QUEST} | options)
    with refused("taps.attention gives probabilities by position.*use kv_policy='full'"):
        params = SamplingParams(taps=Taps(attention={0: 0}))
        make(model, kv_policy=QUEST).generate([PROMPTS[1]], params)


@pytest.mark.slow
def test_a_batch_invariant_engine_stays_so(model):
    """The scores decide what is read, and they are a product of XLA."""
    llm = make(model, kv_policy=EVERY, batch_invariant=True, num_blocks=120)
    alone = [answers(llm, [prompt])[0] for prompt in PROMPTS]
    llm.reset_prefix_cache()
    for answer, expected in zip(answers(llm), alone, strict=True):
        assert answer.token_ids == expected.token_ids
        chex.assert_trees_all_equal(logprobs_of(answer), logprobs_of(expected))


def test_the_documents_example_sees_a_window_and_reads_a_part_of_it(documented_file):
    file = documented_file("quest.md", "quest_in_window.py")
    policy = kv_policies.find(KVPolicyOptions(f"{file}:MINE"))
    assert policy.selects == TopBlocks(256)
    assert kv_policies.view(policy, 16, 1000) == View(1 + 2048 // 16, (0,))
