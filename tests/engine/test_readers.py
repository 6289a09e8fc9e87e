"""A new output of steps is one value in one file: what the device computes for it, who asks for it,
and how the host reads it.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from immutables import Map

from pagedjax import LLM, SamplingParams
from pagedjax.device.sampling import SampledTokens
from pagedjax.device.side_outputs import SampleOutput, SideOutputs
from pagedjax.engine import readers
from pagedjax.engine.outcome import NewRequest, Outcome, Reader, Reading
from pagedjax.host.types import StepResult
from tests.device.test_llama import plain_llama
from tests.engine.runs import small_llm
from tests.refusals import refused

PROMPTS = [[5, 6, 7, 8, 9, 10, 11, 12, 13], [3, 4], [14]]


# the output ---------------------------------------------------------------------------------------


def compute_entropy(logits: jax.Array, sampled: SampledTokens) -> jax.Array:
    """Returns [R] float32, in nats."""
    logprobs = jax.nn.log_softmax(logits)
    return -(jnp.exp(logprobs) * logprobs).sum(axis=-1)


ENTROPY = SideOutputs(samples=(SampleOutput("entropy", compute_entropy),))


def start(request: NewRequest) -> dict[str, SideOutputs]:
    return dict.fromkeys(request.submitted.names, ENTROPY)


def read(entries: Map[str, SideOutputs], outcome: Outcome) -> Reading:
    """The result is (sequence id, index of the sampled token in the output, its entropy) of each
    row that asked and sampled.
    """
    plan = outcome.plan
    rows = [i for i in outcome.rows_of(entries) if outcome.reaches_end(i)]
    if not rows:
        return Reading(entries)
    taps = outcome.sent.output.taps
    assert taps is not None
    values = np.asarray(taps.samples["entropy"])
    result = []
    for i in rows:
        position = plan.lengths[i] - outcome.data[i].prompt_len
        value = values[outcome.first_samples[i]]
        result.append((plan.seqs[i].request_id, position, float(value)))
    return Reading(entries, tuple(result))


ENTROPIES = Reader(
    "entropy",
    SamplingParams,
    read=read,
    options=("logprobs",),  # such requests ask for it
    start=start,
    side_outputs=lambda entry: entry,
)


# the tests ----------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def llm(one_layer) -> LLM:
    return small_llm(
        one_layer,
        max_num_seqs=4,
        max_num_batched_tokens=8,
        block_size=4,
        num_blocks=64,
    )


def run(llm: LLM, *params: SamplingParams) -> list[StepResult]:
    for i, (prompt, options) in enumerate(zip(PROMPTS, params, strict=False)):
        llm.engine.add(str(i), prompt, options)
    results = []
    while llm.engine.has_work:
        result = llm.engine.step()
        assert result is not None
        results.append(result)
    return results


def params(**options: Any) -> SamplingParams:
    return SamplingParams(max_tokens=4, ignore_eos=True, seed=1, **options)


def test_an_output_has_the_entropy_of_the_log_probabilities(llm, one_layer_folder, monkeypatch):
    """Of a prompt longer than a step too; against a forward pass without a cache, in float64."""
    monkeypatch.setattr(readers, "READERS", (*readers.READERS, ENTROPIES))
    asking = params(temperature=0.8, logprobs=1)
    results = run(llm, asking, params(temperature=0), asking)
    outputs: dict[str, list[int]] = {"0": [], "2": []}
    for entry in [entry for result in results for entry in result.logprobs]:
        outputs[entry.request_id].append(entry.token_id)
    entropies = [entry for result in results for entry in result.outputs.get("entropy", ())]
    assert len(entropies) == 2 * 4, "of two requests, each token once"
    for name, position, entropy in entropies:
        tokens = PROMPTS[int(name)] + outputs[name][:position]
        logits = plain_llama(one_layer_folder, np.array(tokens))[-1]
        logprobs = logits - np.log(np.exp(logits).sum())
        np.testing.assert_allclose(entropy, -(np.exp(logprobs) * logprobs).sum(), rtol=1e-4)
    assert not llm.engine._state.readers


def test_steps_without_a_row_that_asks_run_the_usual_program(llm, monkeypatch):
    monkeypatch.setattr(readers, "READERS", (*readers.READERS, ENTROPIES))
    programs = set(llm.engine.runtime.side_programs)
    results = run(llm, params(temperature=0))
    assert [dict(result.outputs) for result in results] == [{}] * len(results)
    assert set(llm.engine.runtime.side_programs) == programs


def test_a_reader_may_refuse_a_request(llm, monkeypatch):
    def refuse(request: NewRequest) -> dict[str, Any]:
        raise ValueError(f"request {request.submitted.names[0]!r} wants too much")

    picky = ENTROPIES._replace(start=refuse)
    monkeypatch.setattr(readers, "READERS", (*readers.READERS, picky))
    with refused("request '0' wants too much"):
        run(llm, params(logprobs=1))
    assert not llm.engine.has_work
