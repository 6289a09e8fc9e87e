"""The section `pools`: its errors, its key, run folders, summaries, and the example of configs/."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from experiments.core import engines, store
from experiments.core.config import expand, load
from experiments.simulation.cost import SHAPES
from tests.experiments.core.summaries import (
    BASE,
    changed_workload,
    run_files,
    simulated_run,
    simulated_run_at,
)

CONFIGS = Path(__file__).parents[3] / "configs"
OUTPUT = {"dist": "uniform", "low": 1, "high": 9}
RAW = {
    **BASE,
    "workload": changed_workload(shared_prefix=64, prefixes=6, output=OUTPUT),
    "pools": {"prefill": {"count": 2}, "decode": {"count": 3}, "link_gb_s": 50, "latency_s": 0.001},
}
FOUR = {"chip": "h100", "mesh": {"tensor": 4}, "model": "llama-3-8b"}


def test_a_run_and_its_summary():
    measurement = simulated_run(RAW)
    assert measurement.failed is None
    assert {step.replica for step in measurement.steps} == set(range(5))
    ends = [step.started + step.seconds for step in measurement.steps]
    assert ends == sorted(ends)
    moved = [request for request in measurement.requests if request.transfers]
    assert 0 < len(moved) < 40, "some answers have one token"
    pools = measurement.summary["pools"]
    assert pools["prefill"]["requests"]["mean"] * 2 == 40
    assert pools["decode"]["requests"]["mean"] * 3 == pools["transfers"] == len(moved)
    computed = {True: 0, False: 0}
    for step in measurement.steps:
        computed[step.replica < 2] += step.tokens
    assert pools["prefill"]["tokens_computed"]["mean"] * 2 == computed[True]
    assert pools["decode"]["tokens_computed"]["mean"] * 3 == computed[False]
    assert computed[False] == sum(request.max_tokens - 1 for request in measurement.requests), (
        "decode computes no prompt"
    )
    moved_bytes = sum(
        -(-request.prompt_tokens // 8) * 8 * SHAPES["llama-3-8b"].token_bytes for request in moved
    )
    assert pools["moved_bytes"] == moved_bytes
    assert pools["transfer_s"]["mean"] >= 0.001 + moved_bytes / 50e9 / len(moved) - 1e-12
    busy = 2 * pools["prefill"]["busy_share"]["mean"] + 3 * pools["decode"]["busy_share"]["mean"]
    assert measurement.summary["between_steps_s"] == pytest.approx((5 - busy) * ends[-1])
    assert measurement == simulated_run(RAW)


def test_pools_of_a_model_with_windows_move_the_blocks_that_are_kept():
    model = {"chip": "h100", "model": "gpt-oss-20b"}
    workload = changed_workload(prompt={"dist": "fixed", "value": 300}, output=OUTPUT)
    engine = {**RAW["engine"], "max_model_len": 512}
    raw = {**RAW, "simulate": model, "model": "gpt-oss-20b", "workload": workload}
    measurement = simulated_run({**raw, "engine": engine, "cache_tokens": 4096})
    moved = [request for request in measurement.requests if request.transfers]
    # of 12 layers, a token of 8 key heads of 64 in 16 bits; blocks of 8
    block = 8 * 12 * 2 * 8 * 64 * 2
    assert {request.prompt_tokens for request in moved} == {300}
    # the next query, at 300, sees the block of 300 and the 16 before it, and all blocks of the rest
    assert measurement.summary["pools"]["moved_bytes"] == len(moved) * block * (38 + 17)


def test_pools_whose_blocks_have_other_layers_are_refused():
    """A page is that of a device's key heads, so states take more of them on a mesh."""
    simulate = {"chip": "h100", "model": "granite-4-h-micro"}
    pools = {
        "prefill": {"simulate": {**simulate, "mesh": {"tensor": 4}}},
        "decode": {"simulate": simulate},
    }
    raw = {**RAW, "simulate": simulate, "model": "granite-4-h-micro", "pools": pools}
    (point,) = expand(raw, folder=Path())
    with pytest.raises(
        ValueError, match=r"pools.prefill has \d+ groups of layers .* give both the same mesh"
    ):
        engines.simulated_llm(point.experiment)


def test_held_blocks_count_as_used_until_the_pages_are_adopted():
    """One request, whose pages take most of the run: a later one sees its blocks in `prefill`."""
    workload = {
        "kind": "synthetic",
        "count": 2,
        "prompt": {"dist": "fixed", "value": 30},
        "output": {"dist": "fixed", "value": 2},
        "arrivals": {"process": "poisson", "rate": 100.0},
    }
    slow = {"link_gb_s": 0.001, "prefill": {"max_num_seqs": 1}}  # 32 tokens are 4.2 MB: 4.2 s
    measurement = simulated_run(
        {
            **RAW,
            "workload": workload,
            "pools": slow,
            "simulate": {"step_s": 0.001, "model": "llama-3-8b"},
        }
    )
    first, second = [step for step in measurement.steps if step.replica == 0]
    assert (first.blocks_used, first.held_tokens) == (4, 30)
    assert (second.blocks_used, second.held_tokens) == (8, 60)
    last = measurement.steps[-1]
    assert (last.replica, last.blocks_used, last.held_tokens) == (1, 4, 31)


def test_a_summary_has_the_blocks_of_each_pool():
    """With few blocks in a slow `decode`, sequences wait for room, and hold all those of
    `prefill`.
    """
    slow = {"step_s": 0.05, "model": "llama-3-8b"}
    wide, narrow = (
        simulated_run({**RAW, "pools": {"prefill": {"cache_tokens": 512}, "decode": decode}})
        for decode in ({"cache_tokens": 4096}, {"cache_tokens": 256, "simulate": slow})
    )
    for measurement, of_decode in ((wide, 512), (narrow, 32)):
        pools = measurement.summary["pools"]
        assert (pools["prefill"]["blocks_total"], pools["decode"]["blocks_total"]) == (
            64,
            of_decode,
        )
        assert [
            measurement.summary[key] for key in ("blocks_total", "blocks_used", "slots_used")
        ] == [None] * 3
        for name, replica in (("prefill", 0), ("decode", 1)):
            used = [step.blocks_used for step in measurement.steps if step.replica == replica]
            assert pools[name]["blocks_used"] == {
                "mean": pytest.approx(sum(used) / len(used)),
                "peak": max(used),
            }
    held_blocks, free = (
        measurement.summary["pools"]["prefill"]["blocks_used"]["mean"]
        for measurement in (narrow, wide)
    )
    assert held_blocks > 2 * free


def test_a_pool_without_steps_has_no_blocks_in_use():
    workload = {**RAW["workload"], "output": {"dist": "fixed", "value": 1}}
    decode = simulated_run({**RAW, "workload": workload}).summary["pools"]["decode"]
    assert (decode["blocks_total"], decode["blocks_used"], decode["requests"]["most"]) == (
        None,
        None,
        0,
    )


def test_clients_of_a_closed_loop_send_when_their_last_request_has_ended():
    workload = {**RAW["workload"], "arrivals": {"process": "closed_loop", "clients": 3}}
    measurement = simulated_run({**RAW, "workload": workload})
    assert measurement.failed is None
    ends = sorted(request.arrival + (request.e2e or 0.0) for request in measurement.requests)
    assert [request.arrival for request in measurement.requests] == pytest.approx(
        [0.0] * 3 + ends[:37]
    )


@pytest.mark.parametrize(
    ("top", "pools_model", "status"), [(None, "llama-3-8b", 0), ("llama-3-8b", None, 2)]
)
def test_a_model_is_opened_only_for_pools_that_name_no_shape(
    tmp_path, capsys, top, pools_model, status: int
):
    """The experiment's own model does not exist."""
    simulate = {"simulate": {"step_s": 0.01, "model": pools_model}}
    raw = {
        **RAW,
        "simulate": {"step_s": 0.01, "model": top},
        "pools": {"prefill": simulate, "decode": simulate},
    }
    run_files(tmp_path, raw, status)
    assert ("error: model: " in capsys.readouterr().err) == (status == 2)


def test_a_run_records_its_transfers_and_both_engines(tmp_path):
    pools = {**RAW["pools"], "prefill": {"simulate": FOUR, "max_num_seqs": 2}}
    (folder,) = run_files(tmp_path, {**RAW, "pools": pools}).glob("*/0")
    requests = store.read_requests(folder)
    assert {request.replica for request in requests} == {0}
    assert {transfer.replica for request in requests for transfer in request.transfers} == {1, 2, 3}
    facts = json.loads((folder / "env.json").read_text())
    for name, sequences, chip in (("prefill", 2, "h100"), ("decode", 8, "h200")):
        assert facts["engine"][name]["max_num_seqs"] == sequences
        assert facts["simulate"][name]["chip"] == chip


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"pools": {"prefill": {"count": 0}}}, "pools.prefill.count is 0; it must be at least 1"),
        (
            {"pools": {"link_gb_s": 0}},
            "pools.link_gb_s is 0.0; it must be above 0, or null for no time",
        ),
        ({"pools": {"split": 1.5}}, "pools.split is 1.5; it must be a share above 0 and at most 1"),
        ({"pools": {"latency_s": -1}}, "pools.latency_s is -1.0; it must be at least 0 seconds"),
        (
            {"pools": {"decode": {"cache_tokens": 5}}},
            r"pools.decode: cache_tokens is 5; it must be a multiple",
        ),
        ({"replicas": {}}, "replicas and pools are both given; give one"),
        (
            {"simulate": None},
            "pools is given and there is no simulate section, but a measured run has 1 engine; add",
        ),
        (
            {
                "simulate": None,
                "pools": {"prefill": {"simulate": FOUR}, "decode": {"simulate": FOUR}},
            },
            r"there is no simulate section.*; add one at the top \(also if each pool has a simulate of its own\)",
        ),
        (
            {"pools": {"decode": {"simulate": {"chip": "h100", "model": "opt-13b"}}}},
            "pools.prefill simulates llama-3-8b and pools.decode simulates opt-13b; blocks are those of one model",
        ),
        (
            {"pools": {"decode": {"simulate": {"fit": "runs/a", "model": "llama-3-8b"}}}},
            "pools.decode.simulate.fit: a pool takes a chip, step_s or a profile",
        ),
        (
            {"engine": {**RAW["engine"], "speculative": {"method": "ngram", "num_tokens": 2}}},
            "pools and engine.speculative are both given, and such sequences are not handed over; leave it out",
        ),
        (
            {"engine": {**RAW["engine"], "reservation": "max", "enable_prefix_caching": False}},
            "pools and engine.reservation 'max' are both given.*; set it to none",
        ),
        (
            {"simulate": {**RAW["simulate"], "kv_cache": False}},
            "pools and simulate.kv_cache false are both given",
        ),
        (
            {"pools": {"decode": {"simulate": {**RAW["simulate"], "whole_batches": True}}}},
            "pools and simulate.whole_batches are both given",
        ),
    ],
)
def test_wrong_sections_are_reported(change: dict, message: str):
    with pytest.raises(ValueError, match=message):
        expand({**RAW, **change}, folder=Path())


def test_a_pool_that_does_not_fit_its_chip_is_named():
    large = {"simulate": {"chip": "a100-40g", "model": "llama-3-8b"}, "cache_tokens": 8 * 10**6}
    (point,) = expand({**RAW, "pools": {"decode": large}}, folder=Path())
    with pytest.raises(
        ValueError,
        match=r"pools.decode: weights of .* lower num_blocks, or use more or larger chips",
    ):
        engines.simulated_llm(point.experiment)


def test_engines_for_prompts_bound_the_gaps_on_the_example():
    points = load(CONFIGS / "pools.yaml", ("workload.count=60",))
    mixed, apart = (simulated_run_at(point).summary for point in points)
    assert apart["itl_s"]["p99"] < mixed["itl_s"]["p99"] / 3
    assert apart["output_tokens"] == mixed["output_tokens"]
