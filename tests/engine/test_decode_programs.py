"""Steps of decodes alone have programs of their own, where the attention implementation is faster
for them.
"""

from __future__ import annotations

from dataclasses import replace
from unittest import mock

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pagedjax import LLM, SamplingParams
from pagedjax.device import attention, batch
from pagedjax.device.batch import StepShape
from pagedjax.engine import compilations, programs, resolve, runtime
from pagedjax.host.replay import verify
from pallas_kernels.paged_attention import IMPLS, Implementation, paged_attention
from tests.engine.runs import answers, greedy, logprobs_of, small_llm, steps, token_ids
from tests.refusals import refused

SIZES = {
    "block_size": 4,
    "max_num_batched_tokens": 16,
    "max_num_seqs": 4,
    "num_blocks": 64,
    "max_model_len": 32,
}
BUCKETS = (4, 16)
PROMPTS = [list(range(3, 3 + n)) for n in (1, 5, 11, 9)]
PARAMS = [
    greedy(9, logprobs=2),
    SamplingParams(temperature=0.9, seed=5, max_tokens=7, ignore_eos=True, logprobs=0),
    greedy(3, logprobs=0),
    greedy(8, logprobs=0),
]
# they have larger programs: in slow runs
WITH_OPTIONS = [
    PARAMS[0],
    replace(PARAMS[1], top_p=0.9),
    replace(PARAMS[2], frequency_penalty=0.5),
    PARAMS[3],
]


def attend(*arrays, **options) -> jax.Array:
    """The reference. Without offsets it reads the query of row b at b, as the contract says."""
    *tensors, seq_lens, offsets = arrays
    if offsets is None:
        offsets = jnp.minimum(jnp.arange(len(seq_lens) + 1), (seq_lens > 0).sum()).astype(jnp.int32)
    return IMPLS["reference"].attend(*tensors, seq_lens, offsets, **options)


def without_drafts(*arrays, **options) -> jax.Array:
    return attend(*arrays, **options)


SEPARATE = Implementation("separate", attend, without_drafts=without_drafts, decodes_alone=True)
OWN = f"{__name__}:SEPARATE"


@pytest.fixture(scope="module", autouse=True)
def _shared_programs():
    """Engines share programs with the attention of this file in them, and leave none on disk for
    its next version.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(runtime, "_is_built_in", lambda *parts: True)
        patch.setattr(compilations, "folder", lambda: None)
        yield


def make(one_layer, impl: str, **config) -> LLM:
    """Only an implementation with programs for decodes needs a bucket for them."""
    buckets = BUCKETS if impl == OWN else BUCKETS[-1:]
    config = {"token_buckets": buckets, **SIZES, **config}
    return small_llm(one_layer, attention_impl=impl, **config)


@pytest.mark.default_cases("plain")
@pytest.mark.parametrize(
    "config",
    [
        {},
        {"lookahead": 2},
        {"speculative": {"method": "ngram", "num_tokens": 2}},
        {"compilation": "lazy"},
    ],
    ids=lambda config: next(iter(config), "plain"),
)
def test_tokens_are_those_of_mixed_programs(one_layer, config):
    separate = make(one_layer, OWN, **config)
    mixed = make(one_layer, "reference", **config)
    params = WITH_OPTIONS if config else PARAMS
    outputs = answers(separate, PROMPTS, params)
    expected = answers(mixed, PROMPTS, params)
    assert [answer.token_ids for answer in outputs] == [answer.token_ids for answer in expected]
    chex.assert_trees_all_close(logprobs_of(outputs[0]), logprobs_of(expected[0]), atol=1e-5)
    shapes = set(separate.engine.runtime.programs)
    assert any(shape.decodes_alone for shape in shapes)
    assert not any(shape.decodes_alone for shape in mixed.engine.runtime.programs)


def test_a_step_of_decodes_runs_its_own_program_and_a_mixed_one_does_not(one_layer):
    """Nor does a step of a short prompt, which has as few tokens."""
    llm = make(one_layer, OWN)
    short = list(range(50, 53))
    for prompts in (PROMPTS, [short]):  # compiles
        llm.generate(prompts, PARAMS[: len(prompts)])
    engine = llm.engine
    engine.reset()
    ran = []
    programs = engine.runtime.programs

    def noted(shape, program):
        def run(*arrays):
            ran.append(shape.decodes_alone)
            return program(*arrays)

        return run

    programs |= {shape: noted(shape, program) for shape, program in programs.items()}
    for i, prompt in enumerate(PROMPTS):
        engine.add(str(i), prompt, PARAMS[i])
    results = list(steps(engine))
    engine.add("short", short, PARAMS[0])
    results += steps(engine)
    alone = [max(result.plan.counts) == 1 for result in results]
    assert ran == alone
    assert set(alone) == {True, False}


def test_a_decode_that_wants_a_log_probability_of_its_prompt_is_in_a_mixed_step(one_layer):
    """A chunk of one token, the last but one of a prompt."""
    logprobs = []
    for impl, config in (
        (OWN, {"max_num_batched_tokens": 4}),
        ("reference", {}),
    ):
        llm = make(one_layer, impl, **config)
        (output,) = llm.generate([list(range(3, 8))], greedy(2, logprobs=0, prompt_logprobs=1))
        places = output.prompt_logprobs[1:]
        logprobs.append([[p.logprob for p in place.values()] for place in places])
    assert len(logprobs[0]) == 4
    chex.assert_trees_all_close(*logprobs, atol=1e-4)


def test_decodes_have_buckets_of_their_own_on_a_gpu(one_layer, monkeypatch):
    """A step of 3 rows has a program for 3 tokens then, unless a row wants a log-probability of its
    prompt; and buckets that a user gives are those of all steps."""
    params = [greedy(3, prompt_logprobs=1), *[greedy(3)] * 2]
    prompts = [list(range(3, 3 + n)) for n in (2, 5, 7)]
    # before a function is replaced, which would give it programs of its own
    expected = token_ids(make(one_layer, "reference"), prompts, params)
    monkeypatch.setattr(batch, "DECODE_SPACING", 1)
    choose = resolve._decode_buckets
    monkeypatch.setattr(resolve, "_decode_buckets", lambda c, rows, _: choose(c, rows, "gpu"))
    llm = make(one_layer, OWN, token_buckets=None, compilation="lazy")
    given = make(one_layer, OWN, token_buckets=BUCKETS, compilation="lazy")
    assert llm.engine.runtime.shapes.decode_buckets == (1, 2, 3, 4)
    assert llm.engine.runtime.shapes.tokens == (1, 2, 4, 8, 16)
    assert given.engine.runtime.shapes.decode_buckets == (4,)
    assert token_ids(llm, prompts, params) == expected
    programs = llm.engine.runtime.programs
    of_three = {shape for shape in programs if shape.tokens == 3}
    assert of_three == {StepShape(3, 3, True, plain=True, logprobs=False)}


def test_buckets_above_the_sequences_have_mixed_programs_alone(one_layer):
    shapes = make(one_layer, OWN, max_num_seqs=3, token_buckets=(2, 4, 16)).engine.runtime.shapes
    assert {shape for shape in shapes.steps if shape.decodes_alone} == {StepShape(2, 2, True)}
    assert make(one_layer, OWN, kv_policy="streaming").engine.runtime.shapes.decode_buckets == ()


def test_programs_that_come_in_later_serve_the_steps_after_them(one_layer, tmp_path):
    one_size = {"max_num_batched_tokens": 4, "token_buckets": (4,)}
    llm = make(one_layer, OWN, compilation="background", **one_size)
    llm.engine.record(tmp_path / "events.jsonl")
    expected = token_ids(make(one_layer, "reference"), PROMPTS, PARAMS)
    assert token_ids(llm, PROMPTS, PARAMS) == expected
    background = llm.engine.background
    assert background is not None
    background.join(120)
    assert background.present.decode_buckets == (4,)
    assert background.present.tokens == (4,)
    assert token_ids(llm, PROMPTS, PARAMS) == expected
    llm.engine.record(None)
    assert verify(tmp_path / "events.jsonl").identical


def test_the_invariant_form_of_an_implementation_gets_offsets():
    implementation = SEPARATE._replace(invariant=IMPLS["reference"].attend)
    with mock.patch.object(attention, "find", return_value=implementation):
        bound = attention.attend("own", 1.0, invariant=True)
    q = jnp.ones((2, 2, 8))
    pages = jnp.ones((3, 2, 4, 8))
    result = bound(q, pages, pages, jnp.zeros((2, 1), jnp.int32), jnp.ones(2, jnp.int32), None)
    chex.assert_trees_all_close(result, q)


def test_steps_are_graphs_on_a_gpu_and_have_no_options_elsewhere():
    kinds = str(programs.compiler_options("gpu")["xla_gpu_enable_command_buffer"]).split(",")
    assert {"FUSION", "CUSTOM_CALL", "CONDITIONAL", "WHILE"} <= set(kinds)
    assert programs.compiler_options("tpu") == {}  # on a CPU tests may have options of their own


def test_an_engine_without_drafts_has_the_attention_for_it():
    assert attention.attend(OWN, 1.0, drafts=False).impl.attend is without_drafts
    assert attention.attend(OWN, 1.0).impl.attend is attend
    assert attention.attend("xla", 1.0, drafts=False) == attention.attend("xla", 1.0)


@pytest.mark.parametrize("impl", ["reference", "xla", "cpu"])
@pytest.mark.parametrize("lengths", [(3, 9, 1), (5, 2, 0), (0, 0, 0)])
def test_a_call_without_offsets_is_a_batch_of_decodes(impl, lengths):
    draw = np.random.default_rng(0)
    rows = len(lengths)
    q = draw.standard_normal((rows, 4, 8)).astype(np.float32)
    k, v = draw.standard_normal((2, 1 + rows * 3, 2, 4, 8)).astype(np.float32)
    tables = 1 + np.arange(rows * 3, dtype=np.int32).reshape(rows, 3)
    offsets = np.concatenate([[0], np.cumsum(np.array(lengths) > 0)]).astype(np.int32)
    arrays = q, k, v, tables, np.array(lengths, np.int32)
    result = paged_attention(*arrays, None, scale=0.3, impl=impl)
    expected = paged_attention(*arrays, offsets, scale=0.3, impl="reference")
    chex.assert_shape(result, q.shape)
    chex.assert_trees_all_close(result, expected, atol=1e-5)


def test_without_offsets_there_are_as_many_tokens_as_rows():
    q = jnp.zeros((4, 2, 8))
    pages = jnp.zeros((3, 2, 4, 8))
    tables = jnp.zeros((3, 2), jnp.int32)
    lengths = jnp.ones(3, jnp.int32)
    with refused(r"without cu_q_lens every row has one token, so T must be seq_lens's B = 3"):
        paged_attention(q, pages, pages, tables, lengths, None, scale=1.0, impl="xla")
