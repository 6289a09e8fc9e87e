"""Drafters on the device: a model or a head, whose pages lie in the blocks of the model's cache.

The model itself is the best drafter: each of its drafts must be accepted, in whatever blocks,
budgets and preemptions. One that is not means that the drafter saw other keys, values or features
than those of the sequence's tokens. For a head, the oracle is the training's forward pass, which
knows no cache.
"""

from __future__ import annotations

import json
import shutil
from collections import Counter
from typing import Any, NamedTuple

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from scipy import stats

import pagedjax.engine.step as engine_step
from experiments.training import draft_data, draft_loss, train_draft
from pagedjax import LLM, EngineConfig, SamplingParams
from pagedjax.device import cache, draft_model
from pagedjax.engine import drafting
from pagedjax.engine.engine import Engine
from pagedjax.host.replay import verify
from pagedjax.host.types import Admitted, Sampled, Verified
from pagedjax.options.config import Speculative
from pagedjax.weights.draft_model import load_draft_model, read_eagle, write_eagle
from tests.engine.test_lookahead import tokens
from tests.engine.test_speculation import CONFIG, asks, run
from tests.weights.tiny import tiny_llama

SWAPPED = {"num_blocks": 20, "max_model_len": 80, "preemption": "swap", "swap_space_gib": 0.002}
LAZY = "compiled when needed"
CASES: dict[str, tuple[int, dict[str, Any]]] = {
    "k 1": (1, {}),
    "k 7": (7, {}),
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
    engine = LLM(tiny, progress=False, **CONFIG).engine
    requests_by_seed = {seed: asks(seed) for seed in range(3)}
    return {
        seed: run(engine, requests, seed) for seed, requests in requests_by_seed.items()
    }, requests_by_seed


def speculative_engine(
    tiny, folders: Drafters, drafter: str, k: int, rule: str = "strict", **config
):
    method = "eagle" if drafter == "head" else "draft"
    options = {
        "method": method,
        "model": getattr(folders, drafter),
        "num_tokens": k,
        "adaptive": False,
        "rule": rule,
    }
    return LLM(tiny, progress=False, speculative=options, **CONFIG | config).engine


def run_to_the_end(engine) -> tuple[list[int], int, int]:
    """Run all requests of an engine to their end: tokens, drafts and accepted drafts."""
    output = []
    drafts = 0
    accepted = 0
    while engine.has_work:
        for event in engine.step().events:
            if isinstance(event, Sampled):
                output += event.token_ids
            if isinstance(event, Verified):
                drafts += sum(event.drafts)
                accepted += sum(event.accepted)
    return output, drafts, accepted


# --- tokens ---------------------------------------------------------------------------------------


# Each case compiles an engine: slow runs have each drafter, and each case once.
SLOW = (
    "itself-k 7",
    "itself-two buckets",
    "itself-few blocks, swapped",
    "small-no prefix cache",
    "small-few blocks, computed again",
    "head-blocks of 16",
    "head-prompts and decodes in turn",
)


@pytest.mark.default_cases("head-k 7")
@pytest.mark.slow_cases(*SLOW)
# `run` allows no compilation
@pytest.mark.parametrize("case", [case for case in CASES if case != LAZY])
@pytest.mark.parametrize("drafter", ["itself", "small", "head"])
def test_outputs_are_those_without_drafts(tiny, folders, plain, tmp_path, drafter, case):
    k, config = CASES[case]
    outcomes, requests = plain
    engine = speculative_engine(tiny, folders, drafter, k, **config)
    drafted = accepted = preempted = 0
    for seed, expected in outcomes.items():
        outcome = run(engine, requests[seed], seed + 100, tmp_path / "log.jsonl")
        assert (outcome.tokens, outcome.reasons) == (expected.tokens, expected.reasons)
        drafted += outcome.drafted
        accepted += outcome.accepted
        preempted += outcome.preempted
        assert verify(tmp_path / "log.jsonl").identical
    assert drafted > (10 if "budget" in case else 100)
    assert preempted or "few blocks" not in case
    if drafter == "itself":  # drafts behind a stop token are not accepted
        assert accepted > 0.85 * drafted


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_every_draft_of_the_model_itself_is_accepted(tiny, folders, case):
    k, config = CASES[case]
    engine = speculative_engine(tiny, folders, "itself", k, **config)
    for i in range(9):
        options: dict[str, Any] = {
            "temperature": float(i % 2),
            "seed": i,
            "max_tokens": 20,
            "ignore_eos": True,
        }
        if i % 3 == 0:
            options |= {"repetition_penalty": 1.3, "top_k": 40, "logit_bias": {7: 2.0}}
        engine.add(f"r{i}", tokens(5 + 6 * i, i % 4), SamplingParams(**options))
    output, drafts, accepted = run_to_the_end(engine)
    assert len(output) == 180
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
    params = SamplingParams(temperature=0, max_tokens=16, ignore_eos=True)
    engine.add("first", prompt, params)
    first = run_to_the_end(engine)
    engine.add("second", prompt + first[0], params)
    cached = 0
    drafts = 0
    accepted = 0
    while engine.has_work:
        for event in engine.step().events:
            cached += event.num_cached if isinstance(event, Admitted) else 0
            if isinstance(event, Verified):
                drafts += sum(event.drafts)
                accepted += sum(event.accepted)
    assert cached == 44
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


@pytest.mark.slow
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
    original = engine_step.run_drafter

    def watched(runtime, sequences, pages, plan):
        out = original(runtime, sequences, pages, plan)
        for seq, length, k in zip(plan.seqs, plan.lengths, plan.drafts, strict=True):
            if k:
                data = sequences[seq.request_id].tokens.tolist()
                drafted.append((data[:length], data[length : length + k]))
        return out

    monkeypatch.setattr(engine_step, "run_drafter", watched)
    engine = speculative_engine(tiny, folders, "head", 3, **config)
    shared = tokens(12, 0)
    for i in range(6):
        engine.add(
            f"r{i}",
            shared + tokens(3 + 5 * i, i),
            SamplingParams(temperature=0, max_tokens=8, ignore_eos=True),
        )
    run_to_the_end(engine)
    assert len(drafted) >= 8
    for context, drafts in drafted[:: len(drafted) // 8]:
        best, lead = dense_drafts(tiny, folders.head, context, drafts)
        agreements = [
            a == b or margin < 1e-4 for a, b, margin in zip(best, drafts, lead, strict=True)
        ]
        assert all(agreements), (best, drafts, lead)


# --- rejection sampling ---------------------------------------------------------------------------


@pytest.mark.slow
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
    length = 4
    allowed = [5, 9, 17, 33]
    config = {
        "max_num_seqs": 64,
        "max_num_batched_tokens": 256,
        "token_buckets": (256,),
        "num_blocks": 512,
    }
    if drafter == "ngram":
        options = {"num_tokens": 2, "adaptive": False, "rule": "rejection"}
        drafting_engine = LLM(tiny, progress=False, speculative=options, **config).engine
    else:
        drafting_engine = speculative_engine(tiny, folders, drafter, 2, "rejection", **config)
    counts = []
    for first, engine in (
        (0, LLM(tiny, progress=False, **config).engine),
        (number, drafting_engine),
    ):
        for i in range(number):
            params = SamplingParams(
                seed=first + i,
                temperature=2.0,
                max_tokens=length,
                ignore_eos=True,
                allowed_token_ids=allowed,
            )
            engine.add(f"r{i}", [5, 9, 5, 9, 17, 5], params)
        outputs: dict[str, list[int]] = {}
        verified = 0
        while engine.has_work:
            for event in engine.step().events:
                verified += isinstance(event, Verified)
                if isinstance(event, Sampled):
                    for name, token in zip(event.request_ids, event.token_ids, strict=True):
                        outputs.setdefault(name, []).append(token)
        assert bool(verified) == bool(first)
        counts.append(Counter(tuple(output) for output in outputs.values()))
    cells = [
        cell for cell in set(counts[0]) | set(counts[1]) if counts[0][cell] + counts[1][cell] >= 20
    ]
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
    config = {**CONFIG, "token_buckets": (1, 2, 4, 8, 24)}
    engine = LLM(tiny, progress=False, speculative=options, **config).engine
    engine.add("a", tokens(9, 1), SamplingParams(temperature=0, max_tokens=60, ignore_eos=True))
    draft_seconds = 0.0
    while engine.has_work:
        result = engine.step()
        assert (result.draft_seconds > 0) == (result.draft_rows > 0) == any(result.plan.drafts)
        assert (
            0 <= result.draft_seconds <= result.device_seconds <= result.finished - result.started
        )
        draft_seconds += result.draft_seconds
    learned = engine._state.drafting.draft_seconds
    assert set(learned) == {1}, "the drafts of one row are known by another number of rows"
    assert draft_seconds > 0
    assert drafting.draft_cost(learned, 1) == drafting.draft_cost({4: learned[1]}, 1) == learned[1]
    assert drafting.draft_cost({}, 1) == 0
    engine.reset()
    assert engine._state.drafting.draft_seconds == learned


def test_no_draft_model_is_an_error_before_anything_is_compiled(tiny):
    with pytest.raises(
        ValueError, match=r"method is 'draft' and speculative\.model is None; name a smaller model"
    ):
        LLM(tiny, progress=False, speculative={"method": "draft"}, **CONFIG)
    with pytest.raises(
        ValueError, match=r"method is 'eagle' and speculative\.model is None; name the folder"
    ):
        LLM(tiny, progress=False, speculative={"method": "eagle"}, **CONFIG)
    config = EngineConfig(speculative=Speculative(method="draft", model="x"), **CONFIG)
    with pytest.raises(
        ValueError,
        match=r"'draft', and the engine has no draft model; set speculative\.model, or give",
    ):
        Engine(tiny.model, config)


def test_a_draft_model_without_its_method_is_an_error(tiny, folders):
    draft = load_draft_model(Speculative(method="draft", model=folders.small), tiny)
    with pytest.raises(
        ValueError,
        match=r"there is a draft model, but speculative\.method is None; it must be one of",
    ):
        Engine(tiny.model, EngineConfig(**CONFIG), draft_model=draft)
    with pytest.raises(
        ValueError, match=r"speculative\.model is 'x', and the drafter 'ngram' has no model"
    ):
        Speculative(model="x")
    with pytest.raises(
        ValueError, match=r"speculative\.model is 5; it must be a path, a hub id or a name"
    ):
        Speculative(method="draft", model=5)  # type: ignore[arg-type]
    with pytest.raises(
        ValueError, match=r"speculative\.method is 'suffix', which learns from other requests"
    ):
        Speculative(method="suffix", rule="rejection")
    with pytest.raises(
        ValueError, match=r"speculative\.rule is 'loose'; it must be one of 'strict', 'rejection'"
    ):
        Speculative(rule="loose")  # type: ignore[arg-type]


def test_a_draft_model_with_another_tokenizer_is_refused(tiny, tmp_path):
    file = tiny_llama(tmp_path / "other", layers=1) / "tokenizer.json"
    tokenizer = json.loads(file.read_text())
    ids = tokenizer["model"]["vocab"]
    ids["a"], ids["b"] = ids["b"], ids["a"]
    file.write_text(json.dumps(tokenizer))
    with pytest.raises(
        ValueError,
        match=r"has another tokenizer than the model: '[ab]' is token \d+ there and \d+ here",
    ):
        LLM(
            tiny,
            progress=False,
            speculative={"method": "draft", "model": str(file.parent)},
            **CONFIG,
        )


def test_a_draft_model_that_is_too_short_is_refused(tiny, tmp_path):
    folder = tiny_llama(tmp_path / "other", layers=1, max_len=64)
    with pytest.raises(
        ValueError,
        match="the draft model was made for 64 tokens and max_model_len is 512; lower it",
    ):
        LLM(tiny, progress=False, speculative={"method": "draft", "model": str(folder)}, **CONFIG)


@pytest.mark.parametrize(
    ("vocab", "rule"), [pytest.param(330, "strict", marks=pytest.mark.slow), (304, "rejection")]
)
def test_a_draft_model_whose_vocabulary_is_padded_to_another_size_drafts(
    tiny, tmp_path, vocab, rule
):
    """The tokenizer has 303 tokens. The random model also samples ids behind them."""
    folder = tiny_llama(tmp_path / str(vocab), layers=1, tied=False, vocab=vocab)
    prompts = [[i, i + 1, i + 2] for i in range(20, 60, 10)]
    params = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
    drafts = {"method": "draft", "model": str(folder), "num_tokens": 2, "rule": rule}
    answers = []
    for speculative in (None, drafts):
        llm = LLM(tiny, progress=False, speculative=speculative, **CONFIG)
        outputs = llm.generate(prompts, params, use_tqdm=False)
        answers.append([output.outputs[0].token_ids for output in outputs])
    assert answers[0] == answers[1]
    assert max(map(max, answers[0])) >= 303, "no id that pads a vocabulary was sampled"


def test_ids_that_pad_the_vocabulary_of_a_draft_model_are_no_drafts():
    logits = np.arange(8, dtype=np.float32).reshape(2, 4)
    chex.assert_trees_all_equal(
        draft_model.fitted(jnp.asarray(logits), 3), jnp.asarray(logits[:, :3])
    )
    padded = np.pad(logits, ((0, 0), (0, 2)), constant_values=-np.inf)
    chex.assert_trees_all_equal(draft_model.fitted(jnp.asarray(logits), 6), jnp.asarray(padded))


def test_a_draft_model_of_another_dtype_is_refused(tiny, folders, tmp_path):
    config = EngineConfig(speculative=Speculative(method="draft", model="x"), **CONFIG)
    draft = load_draft_model(Speculative(method="draft", model=folders.small), tiny)
    assert draft is not None
    with pytest.raises(
        ValueError,
        match=r"the draft model is in 'bfloat16' and the model in 'float32'; load it again",
    ):
        Engine(tiny.model, config, draft_model=draft._replace(dtype="bfloat16"))


@pytest.mark.slow
def test_a_drafter_of_ones_own_has_a_function(tiny, tmp_path):
    (tmp_path / "mine.py").write_text(
        "from pagedjax.engine.drafters import Drafter\nMINE = Drafter('mine', None)\n"
    )
    method = f"{tmp_path / 'mine.py'}:MINE"
    with pytest.raises(
        ValueError, match=r"mine\.py:MINE', and its propose is None; give it a function"
    ):
        LLM(tiny, progress=False, speculative={"method": method}, **CONFIG)


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
    config = {**CONFIG, "token_buckets": (8, 24)}
    for method, folder in (("draft", folders.itself), ("eagle", folders.head)):
        options = {"method": method, "model": folder, "num_tokens": 3, "adaptive": False}
        engine = LLM(tiny_folder, progress=False, speculative=options, **config, **dtypes).engine
        for i in range(3):
            params = SamplingParams(
                temperature=float(i % 2), seed=i, max_tokens=16, ignore_eos=True
            )
            engine.add(f"r{i}", tokens(5 + 6 * i, i), params)
        output, drafts, accepted = run_to_the_end(engine)
        assert len(output) == 48
        assert drafts > 10
        if method == "draft" and "weight_dtype" not in dtypes:
            assert accepted > 0.7 * drafts


@pytest.mark.slow
def test_a_failed_step_after_its_drafts_is_rolled_back(tiny, folders, monkeypatch):
    requests = asks(1)
    expected = run(LLM(tiny, progress=False, **CONFIG).engine, requests, 1).tokens
    engine = speculative_engine(tiny, folders, "itself", 3)
    original = engine_step.batch_of
    calls = []

    def failing(*arguments):
        calls.append(1)
        if len(calls) in (9, 17):
            raise RuntimeError("out of luck")
        return original(*arguments)

    monkeypatch.setattr(engine_step, "batch_of", failing)
    for ask in requests:
        engine.add(ask.names[0], ask.prompt, ask.params, forks=ask.names[1:])
    outputs: dict[str, list[int]] = {name: [] for ask in requests for name in ask.names}
    failed = 0
    while engine.has_work:
        try:
            result = engine.step()
        except RuntimeError:
            failed += 1
            continue
        for event in result.events:
            if isinstance(event, Sampled):
                for name, token in zip(event.request_ids, event.token_ids, strict=True):
                    outputs[name].append(token)
    assert failed == 2
    assert outputs == expected


@pytest.mark.slow
def test_new_parameters_leave_the_drafter_as_it_is(tiny, folders):
    config = {**CONFIG, "compilation": "lazy"}
    options = {"method": "draft", "model": folders.itself, "num_tokens": 3}
    llm = LLM(tiny, progress=False, speculative=options, **config)
    halved = jax.tree.map(lambda x: x * 0.5, llm.engine.model.params)
    llm.update_params(halved)
    undrafted = LLM(tiny, progress=False, **config)
    undrafted.update_params(halved)
    params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
    tokens_with_drafts, expected = (
        engine.generate(tokens(9, 2), params, use_tqdm=False)[0].outputs[0].token_ids
        for engine in (llm, undrafted)
    )
    assert tokens_with_drafts == expected
