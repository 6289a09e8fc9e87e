"""Drafters on the device: a model or a head, whose pages lie in the blocks of the model's cache.

The model itself is the best drafter: each of its drafts must be accepted, in whatever blocks,
budgets and preemptions. One that is not means that the drafter saw other keys, values or features
than those of the sequence's tokens. For a head, the oracle is the training's forward pass, which
knows no cache.
"""

from __future__ import annotations

import itertools
import json
import shutil
from collections import Counter
from dataclasses import replace
from typing import Any, NamedTuple

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from scipy import stats

import pagedjax.engine.state as engine_state
from experiments.training import draft_data, draft_loss, train_draft
from pagedjax import EngineConfig, SamplingParams
from pagedjax.device import cache, draft_model
from pagedjax.engine import drafting
from pagedjax.engine.engine import Engine
from pagedjax.engine.resolve import resolve
from pagedjax.host.replay import verify
from pagedjax.host.types import Verified
from pagedjax.options.config import Speculative
from pagedjax.weights.draft_model import load_draft_model, read_eagle, write_eagle
from tests.engine.runs import greedy, sampled, steps, token_ids
from tests.engine.test_lookahead import tokens
from tests.engine.test_speculation import CONFIG, asks, make, plain_runs, run
from tests.refusals import refused
from tests.weights.tiny import tiny_llama

SWAPPED = {"num_blocks": 20, "max_model_len": 80, "preemption": "swap", "swap_space_gib": 0.002}
LAZY = "compiled when needed"
CASES: dict[str, tuple[int, dict[str, Any]]] = {
    "k 1": (1, {}),
    "k 7": (7, {"max_num_seqs": 24}),  # as many as tokens: one program for all samples
    "blocks of 1": (3, {"block_size": 1, "num_blocks": 256}),
    "blocks of 16": (5, {"block_size": 16, "num_blocks": 24}),
    "a small budget": (3, {"max_num_batched_tokens": 8, "token_buckets": (8,)}),
    "two buckets": (3, {"token_buckets": (8, 24)}),
    "no prefix cache": (3, {"enable_prefix_caching": False}),
    "few blocks, computed again": (3, {"num_blocks": 20, "max_model_len": 80}),
    "few blocks, swapped": (3, SWAPPED),
    "prompts and decodes in turn": (3, {"mixed_steps": False}),
    LAZY: (3, {"compilation": "lazy"}),
}


class Drafters(NamedTuple):
    """Folders of drafters for the model `tiny`."""

    itself: str
    small: str
    head: str


@pytest.fixture(scope="module")
def folders(tiny, tiny_folder, tmp_path_factory) -> Drafters:
    root = tmp_path_factory.mktemp("drafters")
    small = tiny_llama(root / "small", layers=1, heads=2, kv_heads=1, hidden=32, tied=False, seed=5)
    ids = np.arange(0, 320, 2)
    params = train_draft.initial(tiny.model, ids, 1)[1]
    head = write_eagle(root / "head", tiny.model.config, ids.tolist(), params)
    return Drafters(str(tiny_folder), str(small), str(head))


@pytest.fixture(scope="module")
def plain(tiny):
    return plain_runs(tiny)


def speculative_engine(tiny, folders: Drafters, drafter: str, k: int, rule="strict", **config):
    options = {"num_tokens": k, "adaptive": False, "rule": rule}
    if drafter != "ngram":
        options |= {"method": "eagle" if drafter == "head" else "draft"}
        options |= {"model": getattr(folders, drafter)}
    return make(tiny, speculative=options, **config).engine


def drafts_of(results) -> tuple[int, int]:
    """How many drafts steps verified, and how many they accepted."""
    verified = [event for result in results for event in result.events if type(event) is Verified]
    drafts = sum(sum(event.drafts) for event in verified)
    return drafts, sum(sum(event.accepted) for event in verified)


# --- tokens ---------------------------------------------------------------------------------------


@pytest.mark.default_cases("head-k 7")
# Each case compiles an engine: slow runs have each drafter, and those cases that differ in kind.
@pytest.mark.slow_cases(
    "itself-two buckets",
    "small-few blocks, computed again",
    "head-blocks of 16",
    "head-prompts and decodes in turn",
)
# `run` allows no compilation
@pytest.mark.parametrize("case", [case for case in CASES if case != LAZY])
@pytest.mark.parametrize("drafter", ["itself", "small", "head"])
def test_outputs_are_those_without_drafts(tiny, folders, plain, tmp_path, drafter, case):
    k, config = CASES[case]
    outcomes, requests = plain
    engine = speculative_engine(tiny, folders, drafter, k, **config)
    runs = []
    for seed, expected in outcomes.items():
        outcome = run(engine, requests[seed], seed + 100, tmp_path / "log.jsonl")
        assert (outcome.tokens, outcome.reasons) == (expected.tokens, expected.reasons)
        assert verify(tmp_path / "log.jsonl").identical
        runs.append(outcome)
    drafted = sum(outcome.drafted for outcome in runs)
    assert drafted > (10 if "budget" in case else 100)
    assert any(outcome.preempted for outcome in runs) or "few blocks" not in case
    if drafter == "itself":  # drafts behind a stop token are not accepted
        assert sum(outcome.accepted for outcome in runs) > 0.85 * drafted


@pytest.mark.slow_cases("blocks of 1", "few blocks, swapped", "prompts and decodes in turn")
@pytest.mark.parametrize("case", CASES)
def test_every_draft_of_the_model_itself_is_accepted(tiny, folders, case):
    k, config = CASES[case]
    engine = speculative_engine(tiny, folders, "itself", k, **config)
    special = {"repetition_penalty": 1.3, "top_k": 40, "logit_bias": {7: 2.0}}
    for i in range(9):
        options = {"max_tokens": 20, "ignore_eos": True} | (special if i % 3 == 0 else {})
        params = SamplingParams(temperature=float(i % 2), seed=i, **options)
        engine.add(f"r{i}", tokens(5 + 6 * i, i % 4), params)
    results = list(steps(engine))
    assert sum(map(len, sampled(results).values())) == 180
    drafts, accepted = drafts_of(results)
    assert drafts == accepted > 10


@pytest.mark.slow
def test_drafts_behind_a_prefix_that_was_found_are_as_good_as_behind_one_that_was_computed(
    tiny, folders
):
    """Elsewhere acceptance fell after prefix hits (vllm#47930): the drafter had not computed what
    was shared.
    """
    engine = speculative_engine(tiny, folders, "itself", 4)
    prompt = tokens(30, 3)
    engine.add("first", prompt, greedy(16))
    engine.add("second", prompt + sampled(steps(engine))["first"], greedy(16))
    results = list(steps(engine))
    assert results[0].plan.cached == (44,)
    drafts, accepted = drafts_of(results)
    assert drafts == accepted > 0


# --- a head against the forward pass of its training ----------------------------------------------


def dense_drafts(
    tiny, folder: str, context: list[int], drafts: list[int]
) -> tuple[list[int], list[float]]:
    """The drafts after known tokens by the training's forward pass, and by how much each is the
    best one.
    """
    head_files = read_eagle(folder, tiny.model.config, "float32")
    head = nnx.merge(head_files.graphdef, head_files.params)
    model = nnx.merge(tiny.model.graphdef, tiny.model.params)
    # of one shape, for one compilation; what follows changes nothing before it
    text = np.zeros((1, 64), np.int32)
    text[0, : len(context) + len(drafts)] = [*context, *drafts]
    windows = draft_data.read(tiny.model, head_files.taps, text, 1, "float32")
    embedded = model.embedded(draft_loss.packed(jnp.asarray(text)))
    best = []
    lead = []
    for i, logits in enumerate(draft_loss.drafts(head, embedded, windows, len(drafts))):
        row = np.asarray(logits[0, len(context) - 1 + i])
        best.append(int(head.ids[...][row.argmax()]))
        lead.append(float(np.diff(np.sort(row)[-2:])[0]))
    return best, lead


@pytest.mark.slow_cases("config0", "config2")
@pytest.mark.parametrize(
    "config", [{}, {"block_size": 16, "num_blocks": 24}, SWAPPED, {"max_num_batched_tokens": 8}]
)
def test_a_head_drafts_in_an_engine_what_it_drafts_in_training(
    tiny, folders, tmp_path, monkeypatch, config
):
    folder = shutil.copytree(folders.head, tmp_path / "head")
    stored = json.loads((folder / "config.json").read_text())
    # so that it ends within these texts
    (folder / "config.json").write_text(json.dumps(stored | {"window": 16}))
    folders = folders._replace(head=str(folder))
    drafted: list[tuple[list[int], list[int]]] = []
    original = engine_state.run_drafter

    def watched(runtime, sequences, pages, plan):
        out = original(runtime, sequences, pages, plan)
        for seq, length, k in zip(plan.seqs, plan.lengths, plan.drafts, strict=True):
            if k:
                data = sequences[seq.request_id].tokens.tolist()
                drafted.append((data[:length], data[length : length + k]))
        return out

    monkeypatch.setattr(engine_state, "run_drafter", watched)
    engine = speculative_engine(tiny, folders, "head", 3, **config)
    for i in range(6):
        engine.add(f"r{i}", tokens(12, 0) + tokens(3 + 5 * i, i), greedy(8))
    list(steps(engine))
    assert len(drafted) >= 8
    for context, drafts in drafted[:: len(drafted) // 8]:
        best, lead = dense_drafts(tiny, folders.head, context, drafts)
        for expected, draft, margin in zip(best, drafts, lead, strict=True):
            assert expected == draft or margin < 1e-4, (best, drafts, lead)


# --- rejection sampling ---------------------------------------------------------------------------


@pytest.mark.slow_cases("head")
@pytest.mark.parametrize("drafter", ["itself", "small", "head"])
def test_with_rejection_greedy_requests_keep_their_tokens_and_runs_replay(
    tiny, folders, plain, tmp_path, drafter
):
    outcomes, requests = plain
    engine = speculative_engine(tiny, folders, drafter, 3, "rejection")
    for seed, expected in outcomes.items():
        outcome = run(engine, requests[seed], seed, tmp_path / "log.jsonl")
        repeated = run(engine, requests[seed], seed)
        assert outcome.tokens == repeated.tokens, "a run is not a function of its seeds"
        assert verify(tmp_path / "log.jsonl").identical
        for ask in requests[seed]:
            if ask.params.temperature == 0:
                assert outcome.tokens[ask.names[0]] == expected.tokens[ask.names[0]]
        if drafter == "itself":
            assert outcome.accepted > 0.85 * outcome.drafted


@pytest.mark.slow
@pytest.mark.parametrize("drafter", ["small", "ngram"])
def test_with_rejection_outputs_have_the_distribution_of_an_engine_without_drafts(
    tiny, folders, drafter
):
    number = 2000
    sizes = {"max_num_seqs": 64, "max_num_batched_tokens": 256, "token_buckets": (256,)}
    sizes |= {"num_blocks": 512}
    drafting_engine = speculative_engine(tiny, folders, drafter, 2, "rejection", **sizes)
    counts = []
    for first, engine in ((0, make(tiny, **sizes).engine), (number, drafting_engine)):
        for i in range(number):
            params = SamplingParams(
                seed=first + i,
                temperature=2.0,
                max_tokens=4,
                ignore_eos=True,
                allowed_token_ids=[5, 9, 17, 33],
            )
            engine.add(f"r{i}", [5, 9, 5, 9, 17, 5], params)
        results = list(steps(engine))
        assert bool(drafts_of(results)[0]) == bool(first)
        counts.append(Counter(map(tuple, sampled(results).values())))
    cells = [cell for cell, total in (counts[0] + counts[1]).items() if total >= 20]
    table = np.array([[count[cell] for cell in cells] for count in counts])
    assert len(cells) > 20
    assert stats.chi2_contingency(table).pvalue > 1e-3


# --- sizes, times, errors -------------------------------------------------------------------------


@pytest.mark.slow
def test_a_block_has_the_drafters_pages(tiny, folders):
    for drafter in ("small", "head"):
        engine = speculative_engine(tiny, folders, drafter, 2)
        pages = engine._state.cache
        chex.assert_tree_shape_prefix(pages, (engine.config.num_blocks + 1,))
        sizes = engine.runtime.geometry.block
        assert engine.memory.cache == cache.block_bytes(**sizes) * (engine.config.num_blocks + 1)
        assert engine.memory.cache == sum(x.nbytes for x in jax.tree.leaves(pages))
        features = pages.draft.features
        assert (features is None) == (drafter == "small")
        if features is not None:
            chex.assert_shape(features, (65, 4, 64))


@pytest.mark.slow
@pytest.mark.parametrize(
    "rule", ["strict", pytest.param("rejection", marks=pytest.mark.exhaustive)]
)
def test_an_engine_learns_what_drafts_on_the_device_cost(tiny, folders, rule):
    options = {"method": "draft", "model": folders.itself, "num_tokens": 3, "rule": rule}
    engine = make(tiny, speculative=options, token_buckets=(1, 2, 4, 8, 24)).engine
    engine.add("a", tokens(9, 1), greedy(60))
    for result in steps(engine):
        assert (result.draft_seconds > 0) == (result.draft_rows > 0) == any(result.plan.drafts)
        seconds = result.finished - result.started
        assert 0 <= result.draft_seconds <= result.device_seconds <= seconds
    learned = engine._state.drafting.draft_seconds
    assert set(learned) == {1}, "the drafts of one row are known by another number of rows"
    assert drafting.draft_cost(learned, 1) == drafting.draft_cost({4: learned[1]}, 1) == learned[1]
    assert drafting.draft_cost({}, 1) == 0
    engine.reset()
    assert engine._state.drafting.draft_seconds == learned


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"method": "draft"},
            r"method is 'draft' and speculative\.model is None; name a smaller model",
        ),
        ({"method": "eagle"}, r"method is 'eagle' and speculative\.model is None; name the folder"),
        (
            {"method": "draft", "model": 5},
            r"speculative\.model is 5; it must be a path, a hub id or a name",
        ),
        (
            {"rule": "loose"},
            r"speculative\.rule is 'loose'; it must be one of 'strict', 'rejection'",
        ),
    ],
)
def test_options_that_do_not_go_together_are_refused(tiny, options, message):
    with refused(message):
        make(tiny, speculative=options)


def test_an_engine_has_the_draft_model_of_its_method_and_dtype(tiny, folders):
    draft = load_draft_model(Speculative(method="draft", model=folders.small), tiny)
    assert draft is not None
    config = EngineConfig(speculative=Speculative(method="draft", model="x"), **CONFIG)
    bfloat16 = draft._replace(dtype="bfloat16")
    for engine_config, drafter, message in (
        (
            config,
            None,
            r"'draft', and the engine has no draft model; set speculative\.model, or give",
        ),
        (
            EngineConfig(**CONFIG),
            draft,
            r"there is a draft model, but speculative\.method is None; it must be one of",
        ),
        (
            config,
            bfloat16,
            r"the draft model is in 'bfloat16' and the model in 'float32'; load it again",
        ),
    ):
        with refused(message):
            Engine(tiny.model, engine_config, draft_model=drafter)


def test_a_draft_model_with_another_tokenizer_is_refused(tiny, tmp_path):
    file = tiny_llama(tmp_path / "other", layers=1) / "tokenizer.json"
    tokenizer = json.loads(file.read_text())
    ids = tokenizer["model"]["vocab"]
    ids["a"], ids["b"] = ids["b"], ids["a"]
    file.write_text(json.dumps(tokenizer))
    with refused("has another tokenizer than the model: '[ab]' is token \\d+ there and \\d+ here"):
        make(tiny, speculative={"method": "draft", "model": str(file.parent)})


def test_a_draft_model_that_no_attention_with_equal_bits_reads_is_refused(tiny):
    layers = replace(tiny.model.config, head_dim=12)
    draft = draft_model.of_decoder(tiny.model)._replace(layers=layers)
    options = Speculative(method="draft", model="x")
    with refused(
        "batch_invariant is True, and the draft model cannot run beside it: .* a head size that is "
        "a multiple of 8, and it is 12.*; use another draft model, or set batch_invariant=False"
    ):
        config = EngineConfig(speculative=options, batch_invariant=True, **CONFIG)
        exact = tiny.model._replace(config=replace(tiny.model.config, linear="cpu"))
        resolve(config, exact, draft=draft)


def test_a_draft_model_that_is_too_short_is_refused(tiny, tmp_path):
    folder = tiny_llama(tmp_path / "other", layers=1, max_len=64)
    with refused("the draft model was made for 64 tokens and max_model_len is 512; lower it"):
        make(tiny, speculative={"method": "draft", "model": str(folder)})


@pytest.mark.slow
@pytest.mark.parametrize(("vocab", "rule"), [(330, "strict"), (304, "rejection")])
def test_a_draft_model_whose_vocabulary_is_padded_to_another_size_drafts(
    tiny, tmp_path, vocab, rule
):
    """The tokenizer has 303 tokens. The random model also samples ids behind them."""
    folder = tiny_llama(tmp_path / str(vocab), layers=1, tied=False, vocab=vocab)
    prompts = [[i, i + 1, i + 2] for i in range(20, 60, 10)]
    drafts = {"method": "draft", "model": str(folder), "num_tokens": 2, "rule": rule}
    outputs, expected = (
        token_ids(make(tiny, speculative=speculative), prompts, greedy(12))
        for speculative in (drafts, None)
    )
    assert outputs == expected
    assert max(map(max, outputs)) >= 303, "no id that pads a vocabulary was sampled"


def test_ids_that_pad_the_vocabulary_of_a_draft_model_are_no_drafts():
    logits = jnp.arange(8, dtype=jnp.float32).reshape(2, 4)
    chex.assert_trees_all_equal(draft_model.fitted(logits, 3), logits[:, :3])
    padded = jnp.pad(logits, ((0, 0), (0, 2)), constant_values=-np.inf)
    chex.assert_trees_all_equal(draft_model.fitted(logits, 6), padded)


@pytest.mark.slow
@pytest.mark.parametrize(
    "dtypes",
    [
        {"dtype": "bfloat16"},
        pytest.param({"kv_cache_dtype": "float8_e4m3fn"}, marks=pytest.mark.exhaustive),
        pytest.param({"weight_dtype": "int8"}, marks=pytest.mark.exhaustive),
    ],
)
def test_other_dtypes_draft_too(tiny_folder, folders, dtypes):
    """In 16 bits a step of several tokens rounds in another way than a draft, so a few drafts are
    not accepted.
    """
    for drafter in ("itself", "head"):
        config = {"token_buckets": (8, 24), **dtypes}
        engine = speculative_engine(tiny_folder, folders, drafter, 3, **config)
        for i in range(3):
            params = SamplingParams(
                temperature=float(i % 2), seed=i, max_tokens=16, ignore_eos=True
            )
            engine.add(f"r{i}", tokens(5 + 6 * i, i), params)
        results = list(steps(engine))
        assert sum(map(len, sampled(results).values())) == 48
        drafts, accepted = drafts_of(results)
        assert drafts > 10
        if drafter == "itself" and "weight_dtype" not in dtypes:
            assert accepted > 0.7 * drafts


@pytest.mark.slow
def test_a_failed_step_after_its_drafts_is_rolled_back(tiny, folders, monkeypatch):
    requests = asks(1)
    expected = run(make(tiny).engine, requests, 1).tokens
    engine = speculative_engine(tiny, folders, "itself", 3)
    original = engine_state.packed_plan
    calls = itertools.count(1)

    def failing(*arguments):
        if next(calls) in (9, 17):
            raise RuntimeError("out of luck")
        return original(*arguments)

    monkeypatch.setattr(engine_state, "packed_plan", failing)
    for ask in requests:
        engine.add(ask.names[0], ask.prompt, ask.params, forks=ask.names[1:])
    results = []
    for _ in range(2):
        with pytest.raises(RuntimeError, match="out of luck"):
            results.extend(steps(engine))
    results.extend(steps(engine))
    assert sampled(results) == {name: output for name, output in expected.items() if output}


@pytest.mark.slow
def test_new_parameters_leave_the_drafter_as_it_is(tiny, folders):
    options = {"method": "draft", "model": folders.itself, "num_tokens": 3}
    outputs = []
    for speculative in (options, None):
        llm = make(tiny, speculative=speculative, compilation="lazy")
        llm.update_params(jax.tree.map(lambda x: x * 0.5, tiny.model.params))
        outputs.append(token_ids(llm, tokens(9, 2), greedy(12)))
    assert outputs[0] == outputs[1]
