"""A model of all kinds of layers in an engine: its tokens do not depend on how its pages are cut,
shared, copied, moved, given back or found again.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import chex
import numpy as np
import pytest
from flax import nnx

from pagedjax import LLM, BeamSearchParams, SamplingParams, Taps
from pagedjax.device.adapters import adapted
from pagedjax.device.draft_model import of_decoder
from pagedjax.device.models import assemble
from pagedjax.device.models.decoder import Decoder, DecoderConfig, LayerKind
from pagedjax.device.models.eagle import eagle_config
from pagedjax.device.models.mixers.gated_delta import GatedDelta
from pagedjax.device.models.mixers.mamba2 import Mamba2
from pagedjax.device.models.mixers.short_conv import ShortConv
from pagedjax.device.score import score
from pagedjax.engine.resolve import resolve
from pagedjax.host import scheduler
from pagedjax.host.kv_policies import View
from pagedjax.host.policies import find
from pagedjax.host.replay import replay
from pagedjax.host.types import HOLE, Request
from pagedjax.options.config import EngineConfig, Speculative
from pagedjax.weights.trained import nested
from tests.engine.runs import check_idle, greedy, small_llm
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
}


def test_tokens_of_a_request_do_not_depend_on_its_company(loaded):
    """Together they are cut, swapped and copied; alone they find what is in the cache."""
    llm = small_llm(loaded, **CASES["small blocks, cut prompts, swapping"])
    together = tokens_of(llm)
    outputs = [llm.generate([prompt], PARAMS)[0] for prompt in prompts()]
    assert outputs[-1].num_cached_tokens == 12  # three blocks that all prompts share
    alone = [branch for output in outputs for branch in output.outputs]
    check_same([(branch.token_ids, branch.cumulative_logprob) for branch in alone], together)


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_tokens_do_not_depend_on_how_pages_are_kept(name, loaded, expected):
    llm = small_llm(loaded, **CASES[name])
    check_same(tokens_of(llm, rounds=2), expected * 2)


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


def test_draft_models_and_heads_of_such_layers_and_beside_them_are_refused(loaded, tiny):
    with refused(r"the draft model has layers without attention \(ShortConv\), .* use one with"):
        of_decoder(loaded.model)
    with refused(r"layers without attention \(ShortConv\), beside which no draft head runs yet"):
        eagle_config(loaded.model.config, 100)
    options = Speculative(method="draft", model="x")
    config = EngineConfig(speculative=options, num_blocks=8, max_model_len=64)
    with refused("beside which no draft model or head runs yet; use speculative.method='ngram'"):
        resolve(config, loaded.model, draft=of_decoder(tiny.model))


def test_adapters_are_for_attention_and_mlps(loaded):
    names = [set(layer) for layer in adapted(loaded.model.config)]
    assert names[0] == names[2] == {"mlp.up", "mlp.down"}
    assert names[1] == {"attn.qkv", "attn.out", "mlp.up", "mlp.down"}


def test_whole_sequences_and_taps_of_such_layers_are_refused(loaded):
    model = loaded.model
    with refused("run with a cache alone"):
        score(nnx.merge(model.graphdef, model.params), np.array([[1, 2, 3]]))
    llm = small_llm(loaded)
    with refused("layer 0, which has no attention; those with attention are 1"):
        llm.generate(prompts()[:1], greedy(1, taps=Taps(attention=((0, (0,)),))))
