"""A model of all kinds of layers in an engine: its tokens do not depend on how its pages are cut,
shared, copied, moved, given back or found again.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import chex
import numpy as np
import pytest
from flax import nnx

import pagedjax.engine.step as engine_step
from experiments.training import train_draft
from pagedjax import LLM, BeamSearchParams, SamplingParams, Taps
from pagedjax.device.adapters import adapted
from pagedjax.device.draft_model import of_decoder
from pagedjax.device.models import assemble
from pagedjax.device.models.decoder import Decoder, DecoderConfig, LayerKind
from pagedjax.device.models.mixers.gated_delta import GatedDelta
from pagedjax.device.models.mixers.mamba2 import Mamba2
from pagedjax.device.models.mixers.short_conv import ShortConv
from pagedjax.device.score import score
from pagedjax.engine.engine import Engine
from pagedjax.engine.resolve import resolve
from pagedjax.host import scheduler
from pagedjax.host.kv_policies import View
from pagedjax.host.policies import find
from pagedjax.host.replay import replay
from pagedjax.host.types import HOLE, Request, StepResult, Verified
from pagedjax.options.config import EngineConfig, Speculative
from pagedjax.weights.draft_model import write_eagle
from pagedjax.weights.tree import named, nested
from tests.device.test_llama import chosen
from tests.engine.runs import check_idle, greedy, sampled, small_llm, steps
from tests.refusals import refused

DELTA = GatedDelta(length=3, heads=4, key_heads=2, key_dim=8, value_dim=12)
MAMBA = Mamba2(length=4, heads=4, key_heads=2, key_dim=6, value_dim=8)
pytestmark = pytest.mark.few_optimisations
KINDS = (
    LayerKind(mixer=ShortConv(3)),
    LayerKind(),
    LayerKind(mixer=DELTA),
    LayerKind(mixer=MAMBA),
)
PARAMS = SamplingParams(n=2, temperature=1.0, seed=3, max_tokens=16, ignore_eos=True, logprobs=0)
BEAMS = BeamSearchParams(beam_width=3, max_tokens=8, ignore_eos=True)


@pytest.fixture(scope="module")
def loaded(tiny) -> Any:
    """The tiny model's tokenizer and sizes, with random layers of all kinds."""
    config = replace(tiny.model.config, kinds=KINDS)
    return replace(tiny, model=assemble(config, random_parameters(config), "float32"))


def random_parameters(config: DecoderConfig) -> dict[str, Any]:
    """Numbers of a size that keeps activations near 1."""
    state = nnx.state(nnx.eval_shape(lambda: Decoder(config, "float32")), nnx.Param)
    rng = np.random.default_rng(0)

    def drawn(shape: tuple[int, ...]) -> np.ndarray:
        numbers = rng.standard_normal(shape).astype(np.float32)
        return numbers / np.sqrt(shape[-1]) if len(shape) > 1 else 1 + 0.3 * numbers

    leaves = nnx.to_flat_state(state)
    return nested({".".join(map(str, path)): drawn(leaf.shape) for path, leaf in leaves})


def prompts() -> list[list[int]]:
    """Prompts that share their first 14 tokens."""
    rng = np.random.default_rng(0)
    shared = rng.integers(3, 320, 14).tolist()
    return [shared + rng.integers(3, 320, n).tolist() for n in (1, 9, 5, 22)]


def tokens_of(llm: LLM, params: SamplingParams = PARAMS, rounds: int = 1) -> list[Any]:
    """(tokens, log-probability) of each branch. A later round finds prefixes in the cache."""
    outputs = [output for _ in range(rounds) for output in llm.generate(prompts(), params)]
    check_idle(llm.engine)
    branches = [branch for output in outputs for branch in output.outputs]
    return [(branch.token_ids, branch.cumulative_logprob) for branch in branches]


def check_same(results: list[Any], expected: list[Any]) -> None:
    for (tokens, logprob), (expected_tokens, expected_logprob) in zip(
        results, expected, strict=True
    ):
        assert tokens == expected_tokens
        chex.assert_trees_all_close(logprob, expected_logprob, atol=1e-3)


@pytest.fixture(scope="module")
def expected(loaded) -> list[Any]:
    """What one engine gives, with whole prompts and no sharing."""
    llm = small_llm(loaded, enable_prefix_caching=False, block_size=16, max_num_batched_tokens=128)
    return tokens_of(llm)


CASES: dict[str, dict[str, Any]] = {
    "small blocks, cut prompts, swapping": {
        "block_size": 4,
        "max_num_batched_tokens": 7,
        "num_blocks": 16,
        "preemption": "swap",
        "swap_space_gib": 0.05,
    },
    "blocks of a token": {"block_size": 1, "max_num_batched_tokens": 9},
    "recomputed": {"block_size": 4, "max_num_batched_tokens": 12, "num_blocks": 16},
    "all blocks kept": {"block_size": 4, "free_window_blocks": False},
    "drafts": {
        "block_size": 8,
        "speculative": {"method": "ngram", "num_tokens": 3},
        "max_num_batched_tokens": 32,
    },
    "no lookahead": {"block_size": 8, "lookahead": 0},
    "two devices": {"block_size": 8, "mesh": {"tensor": 2}},
    "a draft model": {"block_size": 4, "max_num_batched_tokens": 24, "num_blocks": 20},
    "a draft head": {"block_size": 8, "max_num_batched_tokens": 32},
}


def test_tokens_of_a_request_do_not_depend_on_its_company(loaded):
    """Together they are cut, swapped and copied; alone they find what is in the cache."""
    llm = small_llm(loaded, **CASES["small blocks, cut prompts, swapping"])
    together = tokens_of(llm)
    outputs = [llm.generate([prompt], PARAMS)[0] for prompt in prompts()]
    assert outputs[-1].num_cached_tokens == 12  # three blocks that all prompts share
    alone = [branch for output in outputs for branch in output.outputs]
    check_same([(branch.token_ids, branch.cumulative_logprob) for branch in alone], together)


@pytest.fixture(scope="module")
def drafters(loaded, tiny_folder, tmp_path_factory) -> dict[str, dict[str, Any]]:
    """By case, a drafter of the device: a model of attention alone, and a head for this model."""
    ids = np.arange(0, 320, 2)
    params = train_draft.initial(loaded.model, ids, 1)[1]
    folder = tmp_path_factory.mktemp("drafters") / "head"
    head = write_eagle(folder, loaded.model.config, ids.tolist(), params)
    return {
        "a draft model": {"method": "draft", "model": str(tiny_folder), "num_tokens": 3},
        "a draft head": {"method": "eagle", "model": str(head), "num_tokens": 3},
    }


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_tokens_do_not_depend_on_how_pages_are_kept(name, loaded, drafters, expected):
    options = CASES[name]
    if name in drafters:
        options = options | {"speculative": drafters[name]}
    llm = small_llm(loaded, **options)
    check_same(tokens_of(llm, rounds=2), expected * 2)


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


@pytest.mark.slow  # a draft model with such layers, below, is the quick one
def test_a_draft_model_reads_all_tokens_and_changes_none(near, tiny_llm, tiny_folder, monkeypatch):
    """Its drafts are what it says alone, although the other layers give blocks back."""
    drafted: list[tuple[list[int], list[int]]] = []
    original = engine_step.run_drafter

    def watched(runtime, sequences, cache, plan):
        result = original(runtime, sequences, cache, plan)
        for seq, length, k in zip(plan.seqs, plan.lengths, plan.drafts, strict=True):
            if k and seq.request_id in ("r0", "r2"):  # they are greedy
                tokens = sequences[seq.request_id].tokens.tolist()
                drafted.append((tokens[:length], tokens[length : length + k]))
        return result

    monkeypatch.setattr(engine_step, "run_drafter", watched)
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
        "small blocks, cut prompts, swapping",
        "recomputed",
        "two devices",
        # other sizes and spans of the same blocks, which have a test without drafts, above
        pytest.param("blocks of a token", marks=pytest.mark.exhaustive),
        pytest.param("all blocks kept", marks=pytest.mark.exhaustive),
    ],
)
def test_drafts_of_such_a_model_do_not_depend_on_how_pages_are_kept(name, loaded, undrafted):
    check_its_own_drafts(drafting_engine(loaded, loaded, **CASES[name]), undrafted)


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


def test_scores_are_the_engines_log_probabilities(loaded):
    """Of texts of several lengths, one of which has more tokens than a block of the recurrence."""
    texts = [*prompts(), np.random.default_rng(7).integers(3, 320, 80).tolist()]
    llm = small_llm(loaded, block_size=4)
    outputs = llm.generate(texts, greedy(6, logprobs=0, prompt_logprobs=0))
    tokens = np.full((len(texts), 86), 7)
    expected = np.zeros(tokens.shape, np.float32)
    lengths = []
    for i, output in enumerate(outputs):
        branch = output.outputs[0]
        text = [*output.prompt_token_ids, *branch.token_ids]
        assert output.prompt_logprobs
        entries = [*output.prompt_logprobs[1:], *(branch.logprobs or ())]
        tokens[i, : len(text)] = text
        expected[i, 1 : len(text)] = chosen(text[1:], entries)
        lengths.append(len(text))
    module = nnx.merge(loaded.model.graphdef, loaded.model.params)
    scored = score(module, tokens, np.array(lengths))
    chex.assert_trees_all_close(scored, expected, rtol=0, atol=2e-4)


@pytest.mark.slow
def test_a_beam_search_has_the_same_beams_in_any_blocks(loaded):
    searches = []
    for sizes in ({"block_size": 16}, {"block_size": 4, "max_num_batched_tokens": 11}):
        llm = small_llm(loaded, **sizes)
        searches.append([output.sequences for output in llm.beam_search(prompts(), BEAMS)])
    first, second = ([[beam.tokens for beam in beams] for beams in search] for search in searches)
    assert first == second


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
def test_preempted_sequences_go_on_behind_kept_states(name, loaded, expected):
    llm = small_llm(loaded, **CASES["recomputed"], prefix_checkpoints=CHECKPOINTS[name][0])
    check_same(tokens_of(llm, rounds=2), expected * 2)


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "a baseline": ({"mixed_steps": False}, "a baseline keeps every block in one table"),
    "a KV policy": ({"kv_policy": "streaming"}, "whose pages a kv_policy cannot thin out"),
    "8 bits": ({"kv_cache_dtype": "float8_e4m3fn"}, "whose pages would not become smaller"),
    "equal bits": ({"batch_invariant": True}, "whose bits may depend on the shapes of a step"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_such_a_model_cannot_have_is_refused(name, loaded):
    options, text = REFUSED[name]
    with refused(text):
        small_llm(loaded, **options)


def test_draft_models_are_refused_what_such_layers_are_refused(loaded, tiny):
    options = Speculative(method="draft", model="x")
    config = EngineConfig(speculative=options, num_blocks=8, max_model_len=64)
    baseline = replace(config, mixed_steps=False)
    with refused(r"the draft model has layers without attention \(ShortConv\), and a baseline"):
        resolve(baseline, tiny.model, draft=of_decoder(loaded.model))
    mixers_alone = replace(loaded.model.config, kinds=(KINDS[0], KINDS[2]))
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
