"""Metrics of requests with several branches, from steps with known times."""

from __future__ import annotations

import pytest
from prometheus_client.parser import text_string_to_metric_families

from pagedjax import BeamSearchParams, SamplingParams
from pagedjax.engine.session import GenerationRequest
from pagedjax.host.types import (
    EMPTY_PLAN,
    Beamed,
    BeamResult,
    Event,
    Finished,
    Hypothesis,
    Request,
    Sampled,
    Seq,
    StepResult,
)
from pagedjax.server.metrics import Metrics

PROMPT = (20, 30, 40, 50)


class Run:
    """Metrics, and steps for them."""

    def __init__(self, llm) -> None:
        self.state = llm.engine.scheduler_state
        self.metrics = Metrics("m", llm.engine.config)

    def add(self, names: tuple[str, ...], params: SamplingParams | BeamSearchParams) -> None:
        self.metrics.added(names, GenerationRequest(PROMPT, params), 0.0, self.state)

    def step(
        self, started: float, ended: float, rows: dict[str, int], *events: Event, beams=()
    ) -> None:
        """`rows`: tokens computed, by name."""
        seqs = tuple(Seq(Request(name, len(PROMPT), 8), 0, 12, len(PROMPT)) for name in rows)
        plan = EMPTY_PLAN._replace(
            seqs=seqs,
            lengths=(len(PROMPT),) * len(rows),
            starts=tuple(len(PROMPT) - count for count in rows.values()),
            counts=tuple(rows.values()),
        )
        result = StepResult(plan, events, started, ended, 0.0, 8, 0, {"beams": beams})
        self.metrics.stepped(self.state, result, events, self.state)

    def check(self, **expected: float) -> None:
        """Values by name."""
        families = text_string_to_metric_families(self.metrics.text(0))
        samples = {
            sample.name.removeprefix("pagedjax:"): sample.value
            for family in families
            for sample in family.samples
            if sample.labels.get("finished_reason", "length") == "length"
        }
        assert {name: samples[name] for name in expected} == expected


@pytest.fixture
def run(reference) -> Run:
    return Run(reference)


def test_branches_share_the_queue_and_prefill_times_of_the_first(run):
    run.add(("0", "1"), SamplingParams(n=2, max_tokens=2))
    run.step(10, 20, {"0": 4}, Sampled(0, ("0",), (7,)))
    run.step(
        20, 21, {"0": 1, "1": 1}, Sampled(1, ("0", "1"), (7, 8)), Finished(1, "0", "length", 2)
    )
    run.step(21, 22, {"1": 1}, Sampled(2, ("1",), (7,)), Finished(2, "1", "length", 2))
    run.check(
        request_queue_time_seconds_count=2,
        request_queue_time_seconds_sum=20,
        request_prefill_time_seconds_sum=(20 - 10) + (21 - 10),
        request_inference_time_seconds_sum=(21 - 10) + (22 - 10),
        e2e_request_latency_seconds_sum=21 + 22,
    )


def test_the_time_of_an_output_token_is_that_of_the_tokens_after_the_first(run):
    run.add(("0",), SamplingParams(max_tokens=3))
    run.step(10, 20, {"0": 4}, Sampled(0, ("0",), (7,)))
    run.step(20, 22, {"0": 1}, Sampled(1, ("0",), (7,)))
    run.step(22, 26, {"0": 1}, Sampled(2, ("0",), (7,)), Finished(2, "0", "length", 3))
    run.check(
        request_decode_time_seconds_sum=26 - 20,
        request_time_per_output_token_seconds_sum=(26 - 20) / 2,
    )


def test_a_beam_search_counts_as_one_request_with_the_tokens_it_found(run):
    names = ("0", "1")
    run.add(("0",), BeamSearchParams(beam_width=2, max_tokens=3))
    run.step(1, 2, {"0": 4}, Beamed(0, names, ("0", "0"), (7, 8)))
    run.step(2, 4, {"0": 1, "1": 1}, Beamed(1, names, ("0", "1"), (7, 8)))
    hypotheses = tuple(Hypothesis((7,) * count, -1.0, -1.0, "length") for count in (3, 2))
    ends = tuple(Finished(2, name, "length", 2) for name in names)
    run.step(4, 7, {"0": 1, "1": 1}, *ends, beams=(BeamResult("0", hypotheses),))
    run.check(
        request_params_n_sum=2,
        generation_tokens_total=5,
        request_generation_tokens_count=2,
        request_generation_tokens_sum=5,
        time_to_first_token_seconds_sum=2,
        inter_token_latency_seconds_count=2,
        inter_token_latency_seconds_sum=5,
        e2e_request_latency_seconds_count=1,
        e2e_request_latency_seconds_sum=7,
        request_queue_time_seconds_sum=1,
        request_success_total=2,
    )
