"""Models with layers that keep states: drafts, what a prefix cache keeps of them, scores. That their
tokens do not depend on pages is tested in test_page_contract.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from pagedjax import SamplingParams, Taps
from pagedjax.device.adapters import adapted
from pagedjax.device.draft_model import of_decoder
from pagedjax.device.models import assemble
from pagedjax.device.models.decoder import LayerKind
from pagedjax.device.models.mixers.short_conv import ShortConv
from pagedjax.engine import state as engine_state
from pagedjax.engine.engine import Engine
from pagedjax.engine.resolve import resolve
from pagedjax.host import scheduler
from pagedjax.host.kv_policies import View
from pagedjax.host.policies import find
from pagedjax.host.replay import replay
from pagedjax.host.types import HOLE, Request, StepResult, Verified
from pagedjax.options.config import EngineConfig, Speculative
from pagedjax.weights.tree import named, nested
from tests.engine.page_kinds import (
    DELTA,
    ENGINES,
    MAMBA,
    MIXED,
    Subject,
    check_same,
    check_scores,
    prompts,
    random_parameters,
    tokens_of,
)
from tests.engine.runs import check_idle, greedy, sampled, small_llm, steps
from tests.refusals import refused

pytestmark = pytest.mark.few_optimisations


@pytest.fixture(scope="module")
def mixers(tiny) -> Subject:
    return Subject("mixers", tiny)


@pytest.fixture(scope="module")
def loaded(mixers) -> Any:
    return mixers.loaded


# draft models -------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def near(tiny) -> Any:
    """The tiny model and layers without attention between its own, which change little: so it
    drafts well for this model, and not always.
    """
    mixers = DELTA, MAMBA, ShortConv(3)
    first, second, third = (LayerKind(mixer=mixer) for mixer in mixers)
    config = replace(tiny.model.config, kinds=(first, LayerKind(), second, LayerKind(), third))
    values = named(random_parameters(config))
    for layer in (0, 2, 4):
        for matrix in ("attn.out", "mlp.down"):
            values[f"blocks.{layer}.{matrix}.weight"] *= 0.1
    for name, x in named(tiny.model.params).items():
        own_name = name.replace("blocks.1.", "blocks.3.").replace("blocks.0.", "blocks.1.")
        values[own_name] = x
    return replace(tiny, model=assemble(config, nested(values), "float32"))


def results_of(engine: Engine) -> list[StepResult]:
    """Two greedy requests and two that are sampled."""
    for i, prompt in enumerate(prompts()):
        params = greedy(20)
        if i % 2:
            params = SamplingParams(temperature=1.0, seed=i, max_tokens=20, ignore_eos=True)
        engine.add(f"r{i}", prompt, params)
    return list(steps(engine))


def drafts_of(results: Sequence[StepResult]) -> tuple[int, int]:
    """How many drafts steps verified, and how many they accepted."""
    verified = [event for result in results for event in result.events if type(event) is Verified]
    drafts = sum(sum(event.drafts) for event in verified)
    return drafts, sum(sum(event.accepted) for event in verified)


@pytest.mark.slow
def test_a_draft_model_reads_all_tokens_and_changes_none(near, tiny_llm, tiny_folder, monkeypatch):
    """Its drafts are what it says alone, although the other layers give blocks back."""
    drafted: list[tuple[list[int], list[int]]] = []
    original = engine_state.run_drafter

    def watched(runtime, sequences, cache, plan):
        result = original(runtime, sequences, cache, plan)
        for seq, length, k in zip(plan.seqs, plan.lengths, plan.drafts, strict=True):
            if k and seq.request_id in ("r0", "r2"):  # they are greedy
                tokens = sequences[seq.request_id].tokens.tolist()
                drafted.append((tokens[:length], tokens[length : length + k]))
        return result

    monkeypatch.setattr(engine_state, "run_drafter", watched)
    options = {"method": "draft", "model": str(tiny_folder), "num_tokens": 3, "adaptive": False}
    llm = small_llm(near, block_size=4, speculative=options)
    config = llm.engine.scheduler_state.config
    assert config.views == (View(),) + (View(2),) * (config.groups - 1)
    results = results_of(llm.engine)
    assert sampled(results) == sampled(results_of(small_llm(near, block_size=4).engine))
    drafts, accepted = drafts_of(results)
    assert 0.3 * drafts < accepted < drafts, "accepted and rejected drafts are both to be seen"
    assert max(len(context) for context, _ in drafted) > 30
    alone = tiny_llm.generate([context for context, _ in drafted], greedy(3))
    for output, (_, drafts_of_row) in zip(alone, drafted, strict=True):
        assert list(output.outputs[0].token_ids[: len(drafts_of_row)]) == drafts_of_row


def drafting_engine(target: Any, drafter: Any, **config: Any) -> Engine:
    """An engine with a draft model in memory."""
    options = Speculative(method="draft", model="given", num_tokens=3, adaptive=False)
    config = {"max_num_seqs": 8, "max_num_batched_tokens": 64, "num_blocks": 256, **config}
    config.setdefault("token_buckets", (config["max_num_batched_tokens"],))
    return Engine(
        target.model,
        EngineConfig(speculative=options, compilation="lazy", **config),
        draft_model=of_decoder(drafter.model),
    )


@pytest.fixture(scope="module")
def undrafted(loaded) -> dict[str, list[int]]:
    return sampled(results_of(small_llm(loaded, block_size=4).engine))


def check_its_own_drafts(engine: Engine, undrafted: dict[str, list[int]]) -> None:
    """The model drafts for itself: every draft is accepted, of found prefixes too. One that is not
    means that the drafter saw another state than that of its tokens.
    """
    for _ in range(2):
        results = results_of(engine)
        assert sampled(results) == undrafted
        drafts, accepted = drafts_of(results)
        assert drafts == accepted > 20


def test_drafts_that_are_rejected_leave_the_states_as_they_were(loaded, undrafted):
    options = {"method": "ngram", "num_tokens": 3, "adaptive": False}
    # as many samples as tokens: steps with drafts and those without have one program
    sizes = {"max_num_seqs": 16, "max_num_batched_tokens": 16}
    llm = small_llm(loaded, block_size=4, speculative=options, **sizes)
    results = results_of(llm.engine)
    assert sampled(results) == undrafted
    drafts, accepted = drafts_of(results)
    assert drafts > accepted


@pytest.mark.slow
def test_every_draft_of_such_a_model_for_itself_is_accepted(loaded, undrafted):
    """Its layers are in groups behind the model's; the first group is one of both."""
    engine = drafting_engine(loaded, loaded, block_size=4)
    groups = len(small_llm(loaded, block_size=4).engine.scheduler_state.config.views)
    assert engine.scheduler_state.config.views == (View(),) + (View(2),) * (2 * (groups - 1))
    check_its_own_drafts(engine, undrafted)


@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    [
        "swapped",
        "recomputed",
        "two devices",
        # other sizes and spans of the same blocks, which have a test without drafts, above
        pytest.param("blocks of a token", marks=pytest.mark.exhaustive),
        pytest.param("all blocks kept", marks=pytest.mark.exhaustive),
    ],
)
def test_drafts_of_such_a_model_do_not_depend_on_how_pages_are_kept(name, loaded, undrafted):
    check_its_own_drafts(drafting_engine(loaded, loaded, **ENGINES[name]), undrafted)


@pytest.mark.slow
def test_such_a_model_drafts_for_one_of_attention_alone(tiny, near):
    engine = drafting_engine(tiny, near, block_size=4)
    expected = sampled(results_of(small_llm(tiny, block_size=4).engine))
    for _ in range(2):
        results = results_of(engine)
        assert sampled(results) == expected
        drafts, accepted = drafts_of(results)
        assert 0.3 * drafts < accepted < drafts


# whole sequences ----------------------------------------------------------------------------------


@pytest.mark.slow  # test_score.py has attention; test_mixers.py has whole sequences of mixers
def test_scores_are_the_engines_log_probabilities(loaded):
    """Of texts of several lengths, one of which has more tokens than a block of the recurrence."""
    long_text = np.random.default_rng(7).integers(3, 320, 80).tolist()
    check_scores(loaded.model, small_llm(loaded, block_size=4), [*prompts(), long_text])


@pytest.mark.slow
def test_blocks_before_the_window_are_given_back_and_found_again(loaded, tmp_path):
    """Only the layer of attention keeps all blocks of a sequence; the others keep two."""
    llm = small_llm(loaded, block_size=4, num_blocks=40)
    config = llm.engine.scheduler_state.config
    assert config.views == (View(),) + (View(2),) * (config.groups - 1)
    prompt = prompts()[3]
    results = []
    for num_cached in (0, 32):  # of 36 tokens; the last block is computed again
        output = llm.generate([prompt], greedy(24))[0]
        assert output.num_cached_tokens == num_cached
        results.append(output.outputs[0].token_ids)
    assert results[0] == results[1]
    recording = tmp_path / "run.jsonl"
    llm.engine.record(recording)
    llm.generate([prompt], greedy(24))
    llm.engine.record(None)
    transitions = replay(recording)
    tables = [
        seq.blocks for transition in transitions for seq in scheduler.running(transition.state)
    ]
    blocks = (36 + 24) // 4
    assert max(table.count(HOLE) for table in tables) >= (config.groups - 1) * (blocks - 3)


def test_requests_with_one_prefix_that_arrive_together_share_no_block_of_the_step(loaded):
    """The second one would read states before the first one has written them."""
    llm = small_llm(loaded, block_size=4)
    config = llm.engine.scheduler_state.config
    assert not config.shares_filling
    state = scheduler.init(config)
    for name in "ab":
        hashes = ("first block", "second block")
        state = scheduler.submit(state, Request(name, 9, 4, hashes=hashes))
    _, plan = scheduler.schedule(state, find("fcfs"))
    assert plan.starts == (0, 0)
    _, plan = scheduler.schedule(
        state._replace(config=config._replace(shares_filling=True)), find("fcfs")
    )
    assert plan.starts == (0, 8)


# of each policy, the tokens that the prompts find in a second round, and that a third prompt finds
# which shares 14 tokens with them
CHECKPOINTS: dict[str, tuple[Any, list[int], int]] = {
    "every": ("every", [12, 20, 16, 32], 12),
    "last": ("last", [12, 20, 16, 32], 12),
    "prompts": ({"prompts": True}, [12, 20, 16, 32], 12),
    "interval": ({"interval": 8}, [8, 16, 16, 32], 8),
    "texts": ({"texts": True}, [0, 0, 0, 0], 0),
}


@pytest.mark.parametrize("name", CHECKPOINTS)
def test_tokens_do_not_depend_on_which_states_are_kept(name, loaded, uncached):
    policy, second_round, of_another = CHECKPOINTS[name]
    llm = small_llm(loaded, block_size=4, prefix_checkpoints=policy)
    cached = []
    for _ in range(2):
        outputs = llm.generate(prompts(), greedy(9))
        assert [output.outputs[0].token_ids for output in outputs] == uncached
        cached = [output.num_cached_tokens for output in outputs]
    assert cached == second_round
    another = llm.generate([[*prompts()[0][:14], 7, 7, 7]], greedy(1))[0]
    assert another.num_cached_tokens == of_another
    check_idle(llm.engine)


@pytest.fixture(scope="module")
def uncached(loaded) -> list[Any]:
    """What an engine gives that shares nothing."""
    llm = small_llm(loaded, block_size=4, enable_prefix_caching=False)
    return [output.outputs[0].token_ids for output in llm.generate(prompts(), greedy(9))]


def test_a_conversation_goes_on_behind_the_end_of_its_text(loaded):
    """The turn before ended with 24 computed tokens; its prompt alone had 15."""
    first = prompts()[0]
    found = []
    for policy in ({"texts": True}, {"prompts": True}):
        llm = small_llm(loaded, block_size=4, prefix_checkpoints=policy)
        text = llm.generate([first], greedy(10))[0].outputs[0].token_ids
        found.append(llm.generate([[*first, *text, 5, 6]], greedy(1))[0].num_cached_tokens)
    assert found == [24, 12]


def test_a_junction_is_kept_when_a_second_request_comes_to_it(loaded):
    """The first one that diverges computes the shared beginning again, the next one finds it."""
    llm = small_llm(loaded, block_size=4, prefix_checkpoints={"junctions": True, "texts": True})
    shared = list(range(30, 46))
    found = [
        llm.generate([[*shared, n, n, n]], greedy(6))[0].num_cached_tokens for n in (60, 70, 80)
    ]
    assert found == [0, 0, 16]


@pytest.mark.slow
@pytest.mark.parametrize("name", CHECKPOINTS)
def test_preempted_sequences_go_on_behind_kept_states(name, mixers):
    options = ENGINES["recomputed"] | {"prefix_checkpoints": CHECKPOINTS[name][0]}
    llm = small_llm(mixers.loaded, **options)
    check_same(tokens_of(llm, rounds=2), mixers.expected * 2)


def test_draft_models_are_refused_what_such_layers_are_refused(loaded, tiny):
    options = Speculative(method="draft", model="x")
    config = EngineConfig(speculative=options, num_blocks=8, max_model_len=64)
    baseline = replace(config, mixed_steps=False)
    with refused(r"the draft model has layers without attention \(ShortConv\), and a baseline"):
        resolve(baseline, tiny.model, draft=of_decoder(loaded.model))
    mixers_alone = replace(loaded.model.config, kinds=(MIXED[0], MIXED[2]))
    model = loaded.model._replace(config=mixers_alone)
    with refused("alone, whose blocks are given back, .*; use speculative.method='ngram'"):
        resolve(config, model, draft=of_decoder(tiny.model))


def test_adapters_are_for_attention_and_mlps(loaded):
    names = [set(layer) for layer in adapted(loaded.model.config)]
    assert names[0] == names[2] == {"mlp.up", "mlp.down"}
    assert names[1] == {"attn.qkv", "attn.out", "mlp.up", "mlp.down"}


def test_taps_of_the_attention_of_such_layers_are_refused(loaded):
    llm = small_llm(loaded)
    with refused("layer 0, which has no attention; those with attention are 1"):
        llm.generate(prompts()[:1], greedy(1, taps=Taps(attention=((0, (0,)),))))
