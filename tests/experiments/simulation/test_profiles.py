"""Published coefficients as the time of a step."""

from __future__ import annotations

import pytest

from experiments.core.config import expand
from experiments.core.drive import measure
from experiments.core.engines import simulated_llm
from experiments.simulation.cost import work_of
from experiments.simulation.profiles import LARGE, PROFILES
from pagedjax.host.types import EMPTY_PLAN, Plan, Request, Seq

TP2 = "distserve/opt-13b/tp2"
RAW = {
    "name": "profiled",
    "model": "opt-13b",
    "engine": {
        "max_num_seqs": 200,
        "max_model_len": 512,
        "max_num_batched_tokens": 4096,
        "mixed_steps": False,
    },
    "cache_tokens": 65536,
    "workload": {
        "kind": "synthetic",
        "count": 3,
        "prompt": {"dist": "fixed", "value": 100},
        "output": {"dist": "fixed", "value": 3},
    },
    "sampling": {"temperature": 0.0, "ignore_eos": True},
    "simulate": {"profile": TP2, "padded": False, "model": "opt-13b"},
}


def plan_of(*rows: tuple[int, int, int]) -> Plan:
    """rows: length, tokens before the step, tokens of the step."""
    seqs = tuple(
        Seq(Request(f"r{i}", rows[i][0], 4), i, rows[i][0] + 4, rows[i][0])
        for i in range(len(rows))
    )
    lengths, starts, counts = zip(*rows, strict=True)
    return EMPTY_PLAN._replace(seqs=seqs, lengths=lengths, starts=starts, counts=counts)


def milliseconds(profile: str, *rows: tuple[int, int, int]) -> float:
    plan = plan_of(*rows)
    return 1e3 * PROFILES[profile](work_of(plan, plan.num_tokens))


def test_whole_prompts():
    a, b, c = PROFILES[TP2].prompts
    expected = a + b * 800 + c * (300**2 + 500**2) + 1 + 2 + 1e-4 * 800
    assert milliseconds(TP2, (300, 0, 300), (500, 0, 500)) == pytest.approx(expected)


@pytest.mark.parametrize("count", [1, LARGE - 1, LARGE, 200])
def test_decodes(count):
    profile = PROFILES[TP2]
    a, b, c = profile.small if count < LARGE else profile.large
    contexts = [100 + i for i in range(count)]
    expected = a + b * sum(contexts) + c * count + 2 + 1e-4 * sum(contexts)
    assert milliseconds(TP2, *[(n, n - 1, 1) for n in contexts]) == pytest.approx(expected)


def test_two_chunks_take_the_time_of_a_prompt_and_one_more_constant():
    whole_prompt = milliseconds(TP2, (500, 0, 500))
    first_chunk = milliseconds(TP2, (500, 0, 200))
    second_chunk = milliseconds(TP2, (500, 200, 300))
    constant = PROFILES[TP2].prompts[0] + 1 + 2
    assert first_chunk + second_chunk == pytest.approx(whole_prompt + constant + 1e-4 * 200)


def test_a_mixed_step_has_the_larger_constant_once():
    prompt = [(300, 0, 300)]
    decodes = [(400, 399, 1), (150, 149, 1)]
    profile = PROFILES[TP2]
    mixed = milliseconds(TP2, *decodes, *prompt)
    apart = milliseconds(TP2, *prompt) + milliseconds(TP2, *decodes)
    assert mixed == pytest.approx(apart - min(profile.prompts[0], profile.small[0]) - 2)


def test_the_clock_of_an_engine_is_that_of_its_profile():
    (point,) = expand(RAW, folder=None)  # type: ignore[arg-type]
    result = measure(simulated_llm(point.experiment), point, 0)
    first, second, third = result.steps
    assert first.seconds == pytest.approx(1e-3 * milliseconds(TP2, *[(100, 0, 100)] * 3))
    assert second.seconds == pytest.approx(1e-3 * milliseconds(TP2, *[(101, 100, 1)] * 3))
    assert third.seconds == pytest.approx(1e-3 * milliseconds(TP2, *[(102, 101, 1)] * 3))


def test_swapping_and_a_cache_without_a_size_are_refused():
    for change, message in (
        (
            {"engine": {**RAW["engine"], "preemption": "swap"}},
            r"preemption is 'swap', and a profile \(simulate.profile\)",
        ),
        ({"cache_tokens": None}, "no chip, so no memory to size the cache by; set cache_tokens"),
    ):
        (point,) = expand({**RAW, **change}, folder=None)  # type: ignore[arg-type]
        with pytest.raises(ValueError, match=message):
            simulated_llm(point.experiment)
