"""Taps: hidden states, attention and experts of requests, against a plain forward pass in numpy and
transformers.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import chex
import jax
import numpy as np
import pytest
from hypothesis import strategies as st

from pagedjax import (
    LLM,
    BeamSearchParams,
    EngineConfig,
    PoolingParams,
    SamplingParams,
    TapArrays,
    Taps,
    load_model,
    read_taps,
)
from pagedjax.device.side_outputs import SideOutputs, union
from pagedjax.engine import state as engine_state
from pagedjax.engine.session import Session, SessionStep
from pagedjax.host import scheduler
from pagedjax.host.replay import verify
from pagedjax.host.types import Preempted, Verified
from pagedjax.text.tap_arrays import TapPart, collectors
from pagedjax.weights.pretrained import LoadedModel
from tests import drawn
from tests.device.test_llama import plain_run
from tests.device.test_model_families import saved  # noqa: F401  (a fixture)
from tests.engine.runs import answers, greedy, sampled, small_llm, steps, token_ids
from tests.engine.test_batch_invariance import model_of
from tests.engine.test_draft_models import folders  # noqa: F401  (a fixture)
from tests.refusals import refused

# The cache is small, so that requests of a case are preempted with the programs of all others.
SIZES = {
    "max_num_seqs": 4,
    "max_num_batched_tokens": 16,
    "block_size": 4,
    "num_blocks": 26,
}
PAGE = Path(__file__).parents[2] / "docs" / "design" / "taps.md"
PROMPTS = [
    np.random.default_rng(i).integers(3, 320, n).tolist() for i, n in enumerate((5, 60, 1, 33))
]
TAPS = Taps(hidden_states=(0, 1, 2), attention={0: (3, 0), 1: 1})
PARAMS = SamplingParams(
    temperature=0.8, seed=3, max_tokens=9, ignore_eos=True, logprobs=2, taps=TAPS
)


def make(model: Any, **config: Any) -> LLM:
    return small_llm(model, **SIZES | config)


@pytest.fixture(scope="module")
def llm(tiny):
    yield (llm := make(tiny))
    scheduler.check(llm.engine.scheduler_state)
    assert not llm.engine.has_work
    assert not llm.engine._state.readers


def check(folder: Path, prompt: Sequence[int], answer: Any, taps: Taps = TAPS) -> None:
    """Compare with numpy's float64 forward pass over the prompt and what was generated."""
    tokens = answer.token_ids
    arrays = answer.taps
    states, probabilities = plain_run(folder, np.array([*prompt, *tokens])[:-1])
    assert tuple(arrays.hidden_states) == taps.hidden_states
    for i, array in arrays.hidden_states.items():
        chex.assert_shape(array, (len(prompt) + len(tokens) - 1, 64))
        chex.assert_type(array, np.float32)
        chex.assert_trees_all_close(array, states[i].astype(np.float32), atol=1e-4)
    assert tuple(arrays.attention) == tuple(layer for layer, _ in taps.attention)
    for layer, heads in taps.attention:
        assert len(arrays.attention[layer]) == len(tokens)
        for j, array in enumerate(arrays.attention[layer]):
            context = len(prompt) + j  # tokens of the context
            chex.assert_type(array, np.float32)
            chex.assert_trees_all_close(
                array,
                probabilities[layer][list(heads), context - 1, :context].astype(np.float32),
                atol=1e-5,
            )


def close(arrays: TapArrays, expected: TapArrays, atol: float) -> None:
    chex.assert_trees_all_close(vars(arrays), vars(expected), atol=atol)


# --- the arrays -----------------------------------------------------------------------------------


def test_arrays_are_those_of_a_forward_pass_and_tokens_do_not_change(llm, tiny_folder):
    """Prompts of several lengths, one of more tokens than a step, twice: nothing is found in the
    prefix cache.
    """
    untapped = replace(PARAMS, taps=None)
    plain = answers(llm, PROMPTS, untapped)
    assert not llm.engine.runtime.side_programs, "a program was made for nothing"
    for _ in range(2):
        outputs = llm.generate(PROMPTS, [PARAMS, PARAMS, untapped, PARAMS])
        assert [output.num_cached_tokens for output in outputs] == [0] * 4
        branches = [output.outputs[0] for output in outputs]
        assert [branch.logprobs for branch in branches] == [branch.logprobs for branch in plain]
        assert branches[2].taps is None
        for i in (0, 1, 3):
            check(tiny_folder, PROMPTS[i], branches[i])
    (programs,) = llm.engine.runtime.side_programs.values()
    assert len(programs) == 1


ROOMY = {"num_blocks": 128}
CASES: dict[str, dict[str, Any]] = {
    "preempted": {},
    "swapped": {"preemption": "swap", "swap_space_gib": 0.001},
    "lookahead": ROOMY | {"lookahead": 2},
    "drafts": ROOMY
    | {"speculative": {"method": "ngram", "num_tokens": 3, "adaptive": False, "ngram_min": 1}},
    "xla": ROOMY | {"attention_impl": "xla", "linear_impl": "xla"},
    "whole prompts": ROOMY
    | {"mixed_steps": False, "chunked_prefill": False, "max_num_batched_tokens": 64},
    "background": ROOMY | {"compilation": "background", "token_buckets": (8, 16)},
    "reserved": ROOMY | {"reservation": "max", "enable_prefix_caching": False, "max_model_len": 64},
}


@pytest.mark.default_cases("preempted")
@pytest.mark.parametrize("case", CASES)
def test_arrays_do_not_depend_on_how_steps_are_made(tiny_folder, monkeypatch, case):
    """Preempted and computed again, swapped, sent ahead, or with drafts of which some are rejected."""
    config = CASES[case]
    llm = make(tiny_folder, **config)
    events = []
    original = Session.step

    def step(session: Session) -> SessionStep:
        session_step = original(session)
        events.extend(session_step.events)
        return session_step

    monkeypatch.setattr(Session, "step", step)
    params = replace(PARAMS, temperature=0.0, max_tokens=24)
    prompts = [PROMPTS[0], PROMPTS[1][:40], [7, 8, 9] * 5, PROMPTS[3]]
    outputs = answers(llm, prompts, params)
    assert any(isinstance(event, Preempted) for event in events) == ("num_blocks" not in config)
    verified = [event for event in events if isinstance(event, Verified)]
    assert any(event.accepted < event.drafts for event in verified) == (case == "drafts")
    for prompt, answer in zip(prompts, outputs, strict=True):
        check(tiny_folder, prompt, answer)


def test_branches_share_the_prompts_arrays_and_have_their_own_behind_it(llm, tiny_folder):
    (output,) = llm.generate(PROMPTS[1], replace(PARAMS, n=3))
    assert len({branch.token_ids for branch in output.outputs}) == 3
    for branch in output.outputs:
        check(tiny_folder, PROMPTS[1], branch)
    (best,) = answers(llm, PROMPTS[0], replace(PARAMS, n=1, best_of=3))
    check(tiny_folder, PROMPTS[0], best)


@pytest.mark.slow
def test_requests_with_taps_share_steps_with_every_other_kind(llm, tiny_folder):
    """With a pooled prompt and a beam search."""
    requested_taps = [
        Taps(hidden_states=2),
        Taps(attention={1: (0, 2)}),
        None,
        Taps((1,), ((0, (1,)),)),
    ]
    llm.engine.add("e", PROMPTS[3], PoolingParams(pooling_type="MEAN"))
    llm.engine.add("b", PROMPTS[0], BeamSearchParams(beam_width=2, max_tokens=5), forks=["b/1"])
    branches = answers(llm, PROMPTS, [replace(PARAMS, taps=taps) for taps in requested_taps])
    assert list(steps(llm.engine)) == []
    for prompt, taps, branch in zip(PROMPTS, requested_taps, branches, strict=True):
        assert (branch.taps is None) == (taps is None)
        if taps:
            check(tiny_folder, prompt, branch, taps)


def test_a_stop_string_ends_the_arrays_too(llm, tiny_folder):
    (uncut,) = token_ids(llm, PROMPTS[0], PARAMS)
    cut = llm.tokenizer.decode(uncut[:4])[-1]
    (answer,) = answers(llm, PROMPTS[0], replace(PARAMS, stop=(cut,)))
    assert len(answer.token_ids) < 9
    check(tiny_folder, PROMPTS[0], answer)


def test_a_failed_step_computes_arrays_again(llm, tiny_folder, monkeypatch):
    llm.engine.add("r", PROMPTS[1], PARAMS)
    results = [llm.engine.step()]
    with monkeypatch.context() as patched:
        patched.setattr(engine_state.requests, "hashes_of_filled", None)
        with pytest.raises(TypeError):
            llm.engine.step()
    results += steps(llm.engine)
    parts = [part for result in results for part in result.taps]
    assert [part.start for part in parts][:2] == [0, 0]
    collected = collectors(["r"], len(PROMPTS[1]))["r"]
    for part in parts:
        collected.take(part)
    tokens = sampled(results)["r"]
    answer = SimpleNamespace(token_ids=tokens, taps=collected.arrays(len(tokens)))
    check(tiny_folder, PROMPTS[1], answer)


@pytest.mark.slow
def test_attention_alone_shares_prefixes_and_hidden_states_do_not(llm, tiny_folder):
    llm.reset_prefix_cache()
    plain = replace(PARAMS, taps=None)
    attention = replace(PARAMS, taps=Taps(attention={1: 0}))
    prompt = PROMPTS[1][:30]
    for params, cached in ((PARAMS, 0), (attention, 0), (PARAMS, 0), (attention, 28), (plain, 28)):
        (output,) = llm.generate(prompt, params)
        assert output.num_cached_tokens == cached
        if params.taps:
            check(tiny_folder, prompt, output.outputs[0], params.taps)


@pytest.fixture(scope="module")
def experts() -> LoadedModel:
    """Layers 0 and 2 of 3 have experts."""
    return model_of("Qwen3-MoE")


@pytest.mark.slow
def test_experts_of_chunks_are_those_of_a_whole_prompt(experts):
    """The last layer is computed for all tokens."""
    params = greedy(6, logprobs=1)
    tapped = replace(params, taps=Taps(hidden_states=3, experts=(0, 2)))
    unchunked = make(experts, max_num_batched_tokens=64)
    plain = answers(unchunked, PROMPTS, params)
    expected = answers(unchunked, PROMPTS, tapped)
    outputs = answers(make(experts), PROMPTS, tapped)
    assert [answer.logprobs for answer in expected] == [answer.logprobs for answer in plain]
    for unchunked_answer, answer, prompt in zip(expected, outputs, PROMPTS, strict=True):
        close(answer.taps, unchunked_answer.taps, atol=2e-5)
        for ids, weights in answer.taps.experts.values():
            chex.assert_shape((ids, weights), (len(prompt) + 5, 3))
            chex.assert_type((ids, weights), (np.int32, np.float32))
            assert set(ids.reshape(-1).tolist()) <= set(range(6))
            assert all(len(set(row)) == 3 for row in ids.tolist())
            ones = np.ones(len(weights), np.float32)
            chex.assert_trees_all_close(weights.sum(1), ones, atol=1e-6)
            assert (np.diff(weights) <= 0).all()
    message = "taps.experts has layer 1, which is dense; those with experts are 0, 2"
    with refused(message):
        unchunked.generate(PROMPTS[0], replace(params, taps=Taps(experts=1)))


@pytest.mark.slow_cases("{'tensor': 2, 'expert': 2}")
@pytest.mark.parametrize("mesh", [{"tensor": 2}, {"tensor": 2, "expert": 2}], ids=str)
def test_a_mesh_gives_the_same_hidden_states_and_experts(experts, mesh):
    params = greedy(6, taps=Taps(hidden_states=(1, 3), experts=(0, 2)))
    expected = answers(make(experts), PROMPTS, params)
    llm = make(experts, mesh=mesh)
    for answer, expected_answer in zip(answers(llm, PROMPTS, params), expected, strict=True):
        close(answer.taps, expected_answer.taps, atol=1e-4)
    with refused(r"taps\.attention needs a model on one device"):
        llm.generate(PROMPTS[0], replace(params, taps=Taps(attention={0: 0})))


@pytest.mark.slow_cases("eagle-head")
@pytest.mark.parametrize(("method", "drafter"), [("eagle", "head"), ("draft", "small")])
def test_arrays_beside_a_drafter_on_the_device(tiny_folder, folders, method, drafter):  # noqa: F811
    """A head observes the last layer too, which is then computed for all tokens."""
    options = {
        "method": method,
        "model": getattr(folders, drafter),
        "num_tokens": 2,
        "adaptive": False,
    }
    llm = make(tiny_folder, speculative=options)
    for prompt, answer in zip(PROMPTS, answers(llm, PROMPTS, PARAMS), strict=True):
        check(tiny_folder, prompt, answer)


@pytest.mark.slow
def test_arrays_of_16_bits_are_given_in_float32(tiny_folder):
    llm = make(
        tiny_folder,
        dtype="bfloat16",
        kv_cache_dtype="float8_e4m3fn",
        attention_impl="xla",
        linear_impl="xla",
    )
    (answer,) = answers(llm, PROMPTS[0], PARAMS)
    text = np.array([*PROMPTS[0], *answer.token_ids])
    states, probabilities = plain_run(tiny_folder, text[:-1])
    arrays = answer.taps
    chex.assert_type([*arrays.hidden_states.values(), *arrays.attention[0]], np.float32)
    chex.assert_trees_all_close(arrays.hidden_states[2], states[2].astype(np.float32), atol=0.3)
    expected = probabilities[0][[0, 3], 4, :5].astype(np.float32)
    chex.assert_trees_all_close(arrays.attention[0][0], expected, atol=0.1)


@pytest.mark.slow
def test_the_example_of_the_page_runs(tiny_folder, tmp_path, monkeypatch, capsys):
    (code,) = re.findall(r"```python\n(.*?)```", PAGE.read_text("utf-8"), re.DOTALL)
    options = "".join(f", {name}={value!r}" for name, value in SIZES.items())
    model = f"model={str(tiny_folder)!r}, token_buckets=(16,), progress=False{options}"
    monkeypatch.chdir(tmp_path)
    namespace: dict[str, Any] = {}
    exec(code.replace('model="smollm2-135m"', model), namespace)
    output = namespace["output"]
    tokens = len(output.prompt_token_ids) + len(output.outputs[0].token_ids) - 1
    printed = capsys.readouterr().out
    assert printed.startswith(f"({tokens}, 64) [")
    assert printed.endswith(f"{{'0': ({tokens}, 64)}}\n")


# --- a recording ----------------------------------------------------------------------------------


def test_a_recording_has_the_arrays_beside_it(llm, tmp_path):
    file = tmp_path / "run.jsonl"
    llm.engine.record(file)
    with refused(r"there is no folder .*run.jsonl.taps: no request with taps ended"):
        read_taps(file)
    outputs = llm.generate(
        PROMPTS, [replace(PARAMS, taps=None), PARAMS, replace(PARAMS, n=2), PARAMS]
    )
    llm.engine.add("a/ü", PROMPTS[0], replace(PARAMS, taps=Taps(attention={1: 0})))
    llm.engine.step()
    llm.engine.step()
    llm.engine.cancel("a/ü")
    llm.engine.record(None)
    assert verify(file).identical
    recorded = read_taps(file)
    expected = [branch.taps for output in outputs[1:] for branch in output.outputs]
    assert len(recorded) == len(expected) + 1
    for name, arrays in zip(sorted(set(recorded) - {"a/ü"}, key=int), expected, strict=True):
        close(recorded[name], arrays, atol=0)
    assert [array.shape for array in recorded["a/ü"].attention[1]] == [(1, 5), (1, 6)]
    assert recorded["a/ü"].hidden_states == {}
    assert set(read_taps(tmp_path / "run.jsonl.taps")) == set(recorded)
    llm.engine.record(file)  # another recording of that name
    llm.engine.record(None)
    assert not read_taps(file)
    (tmp_path / "run.jsonl.taps" / "x.npz").write_bytes(b"no file")
    with refused(r"x\.npz is no file of taps"):
        read_taps(file)["x"]


# --- what is refused ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            {"hidden_states": (-1,)},
            "taps.hidden_states holds -1; layers and heads are integers of at least 0",
        ),
        ({"hidden_states": "all"}, "taps.hidden_states holds 'all'"),
        ({"experts": (True,)}, "taps.experts holds True"),
        (
            {"attention": (0, 1)},
            r"taps.attention is \(0, 1\); it must be heads by layer, such as {3: \(0, 1\)}",
        ),
        ({"attention": {0: ()}}, "name each layer once, and at least one of its heads"),
        ({"attention": ((0, 1), (0, 2))}, "name each layer once"),
        ({"attention": {0: 1.5}}, "taps.attention holds 1.5"),
    ],
)
def test_taps_that_mean_nothing_are_refused(arguments, message):
    with refused(message):
        Taps(**arguments)


def test_taps_are_normalised():
    assert Taps([2, 0, 2], {1: [3, 1], 0: 2}, 4) == Taps((0, 2), ((0, (2,)), (1, (1, 3))), (4,))
    assert SamplingParams(taps=Taps()).taps is None
    assert not Taps(None, None, None)
    with refused("taps is 3; it must be None or Taps"):
        SamplingParams(taps=3)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="BeamSearchParams has no argument 'taps'"):
        BeamSearchParams(2, taps=TAPS)  # type: ignore[call-arg]


@pytest.mark.parametrize(
    ("taps", "message"),
    [
        (Taps(hidden_states=3), "taps.hidden_states has 3; hidden states of this model are 0 to 2"),
        (Taps(attention={2: 0}), "taps.attention has 2; layers of this model are 0 to 1"),
        (Taps(attention={1: 4}), "taps.attention has 4; heads of this model are 0 to 3"),
        (Taps(experts=0), "taps.experts has layer 0, which is dense; this model has no experts"),
        (Taps(experts=2), "taps.experts has 2; layers of this model are 0 to 1"),
    ],
)
def test_what_a_model_does_not_have_is_refused(llm, taps, message):
    with refused(f"request '[0-9]+': {message}"):
        llm.generate([[5], [6]], [SamplingParams(max_tokens=2), SamplingParams(taps=taps)])
    assert not llm.engine.has_work


def test_bytes_are_bounded_and_counted_before_anything_runs(tiny):
    """Two branches of 15 tokens: 3 times 5 + 2 * 9 states of 64 numbers, and contexts of 5, 6, ...
    14 tokens.
    """
    size = 4 * (3 * 64 * (5 + 2 * 9) + 2 * 3 * sum(range(5, 15)))
    params = replace(PARAMS, max_tokens=10, n=2)
    message = (
        f"would be {size} bytes, for 5 tokens of prompt and up to 10 of output in 2 branches; max_tap_bytes is "
        rf"{size - 1}; lower max_tokens, name fewer layers or heads, or raise LLM\(max_tap_bytes=...\)"
    )
    with refused(message):
        make(tiny, max_tap_bytes=size - 1).generate(PROMPTS[0], params)
    llm = make(tiny, max_tap_bytes=size)
    (output,) = llm.generate(PROMPTS[0], params)
    taps = [branch.taps for branch in output.outputs]
    arrays = jax.tree.leaves([[branch.hidden_states, branch.attention] for branch in taps])
    assert sum(array.nbytes for array in arrays) - 4 * 3 * 64 * 5 == size, (
        "the prompt's states are shared until they are given"
    )
    assert make(tiny).engine.config.max_tap_bytes == 2**30
    with refused(r"max_tap_bytes is 0; it must be an integer of at least 1"):
        EngineConfig(max_tap_bytes=0)


def test_a_stream_has_no_place_for_arrays(llm):
    with refused("taps come with an output, and a stream is text; use generate"):
        next(llm.stream("a", PARAMS))


OWN = """
from pallas_kernels.paged_attention import IMPLS

OPAQUE = IMPLS["xla"]._replace(name="opaque", probabilities=None)
"""


def test_attention_of_ones_own_that_does_not_say_its_weights_is_refused(tiny_folder, tmp_path):
    (tmp_path / "own.py").write_text(OWN, "utf-8")
    llm = make(tiny_folder, attention_impl=f"{tmp_path}/own.py:OPAQUE")
    with refused(r"own.py:OPAQUE' does not say what it weighs values with; give its Impl"):
        llm.generate(PROMPTS[0], PARAMS)


# --- parts ----------------------------------------------------------------------------------------


def test_the_union_is_what_all_want():
    first = SideOutputs((0, 2), ((1, (0, 3)),))
    second = SideOutputs((2, 5), ((0, (1,)), (1, (2,))), (4,))
    assert union([first, second]) == SideOutputs((0, 2, 5), ((0, (1,)), (1, (0, 2, 3))), (4,))
    assert union([]) == SideOutputs()
    assert not SideOutputs()
    assert SideOutputs(experts=(0,))
    assert SideOutputs((0, 6), ((3, (0,)),)).outputs(6) == (2,)


@drawn.given(20, 200, data=st.data())
def test_parts_in_any_chunks_with_repeats_give_the_same_arrays(data):
    """Two branches: chunks of any size, and from time to time a branch begins again."""
    prompt = data.draw(st.integers(1, 9))
    outputs = data.draw(st.integers(1, 6))
    length = prompt + outputs - 1
    rng = np.random.default_rng(data.draw(st.integers(0, 99)))
    shared = rng.normal(size=(prompt, 3)).astype(np.float32)
    collected = collectors(["a", "b"], prompt)
    for name in ("a", "b"):
        states = np.concatenate([shared, rng.normal(size=(outputs - 1, 3)).astype(np.float32)])
        ids = rng.integers(0, 9, (length, 2)).astype(np.int32)
        ids[:prompt] = np.arange(2 * prompt).reshape(-1, 2)
        probabilities = [
            rng.normal(size=(1, prompt + i)).astype(np.float32) for i in range(outputs)
        ]
        position = 0 if name == "a" else prompt - 1
        restarts = 2
        while position < length:
            count = data.draw(st.integers(1, length - position))
            first = max(position + 1 - prompt, 0)
            sampled = (
                probabilities[first : max(position + count - prompt + 1, 0)]
                if position + count >= prompt
                else []
            )
            chunk = slice(position, position + count)
            part = TapPart(
                name,
                position,
                {0: states[chunk]},
                {2: (ids[chunk], states[chunk, :2])},
                first,
                {1: sampled},
            )
            collected[name].take(part)
            position += count
            if restarts and data.draw(st.booleans()):
                position = 0
                restarts = restarts - 1
        arrays = collected[name].arrays(outputs)
        chex.assert_trees_all_equal(arrays.hidden_states, {0: states})
        chex.assert_trees_all_equal(arrays.experts, {2: (ids, states[:, :2])})
        chex.assert_trees_all_equal(arrays.attention, {1: tuple(probabilities)})


# --- transformers ---------------------------------------------------------------------------------

KINDS = (
    "GPT-2",
    "Llama 3",
    "Mistral",
    "Qwen3",
    "Gemma 2",
    "Gemma 2, caps that bind",
    "Gemma 3",
    "Mixtral",
    "Qwen3-MoE",
    "GPT-OSS",
)


@pytest.mark.oracle
@pytest.mark.parametrize("saved", KINDS, indirect=True)
def test_arrays_are_those_of_transformers(saved):  # noqa: F811
    import torch

    folder, reference = saved
    model = load_model(folder)
    c = model.model.config
    sparse = [i for i, kind in enumerate(c.kinds) if kind.sparse]
    layers = range(c.layers)
    taps = Taps(range(c.layers + 1), {layer: range(c.heads) for layer in layers}, sparse)
    params = greedy(6, taps=taps)
    llm = make(model, block_size=8, num_blocks=64)
    for prompt, answer in zip(PROMPTS, answers(llm, PROMPTS, params), strict=True):
        arrays = answer.taps
        tokens = [*prompt, *answer.token_ids]
        options = {"output_hidden_states": True, "output_attentions": True}
        options |= {"output_router_logits": True} if sparse else {}
        with torch.no_grad():
            expected = reference(torch.tensor([tokens[:-1]]), **options)
        for i, states in enumerate(expected.hidden_states):
            chex.assert_trees_all_close(arrays.hidden_states[i], states[0].numpy(), atol=1e-4)
        for layer, weights in enumerate(expected.attentions):
            for j, probabilities in enumerate(arrays.attention[layer]):
                context = len(prompt) + j
                chex.assert_trees_all_close(
                    probabilities, weights[0, :, context - 1, :context].numpy(), atol=1e-4
                )
        routed = (
            [logits.reshape(len(tokens) - 1, -1) for logits in expected.router_logits]
            if sparse
            else []
        )
        for layer, logits in zip(sparse, routed, strict=True):
            shares = torch.softmax(logits.float(), -1)
            shares = shares if (shares.sum(-1) - 1).abs().max() < 1e-3 else logits
            best, ids = torch.topk(shares, c.experts.chosen)
            best = best / best.sum(-1, keepdim=True)
            chex.assert_trees_all_equal(arrays.experts[layer][0], ids.numpy().astype(np.int32))
            chex.assert_trees_all_close(arrays.experts[layer][1], best.numpy(), atol=1e-4)
