"""The section `pools`: its errors, its key, run folders, summaries, and the example of configs/."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest

from experiments import run
from experiments.core import engines, execution, store
from experiments.core.config import expand, load
from experiments.core.environment import environment
from experiments.core.pool_options import Pool, Pools
from experiments.core.pools import PooledLLM
from experiments.simulation.cost import SHAPES
from experiments.studies.findings import simulated
from tests.experiments.core.summaries import run_files, simulated_run, simulated_run_at

CONFIGS = Path(__file__).parents[3] / "configs"
RAW = {
    "name": "pooled",
    "model": "nothing is loaded",
    "engine": {
        "max_num_seqs": 8,
        "max_model_len": 256,
        "max_num_batched_tokens": 64,
        "block_size": 8,
    },
    "cache_tokens": 1024,
    "workload": {
        "kind": "synthetic",
        "count": 40,
        "shared_prefix": 64,
        "prefixes": 6,
        "prompt": {"dist": "uniform", "low": 4, "high": 40},
        "output": {"dist": "uniform", "low": 1, "high": 9},
        "arrivals": {"process": "poisson", "rate": 60.0},
    },
    "sampling": {"temperature": 0.0, "ignore_eos": True},
    "simulate": {"chip": "h200", "model": "llama-3-8b"},
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


def test_the_pools_may_have_different_chips_meshes_and_budgets():
    options = {
        "simulate": FOUR,
        "cache_tokens": 2048,
        "max_num_seqs": 4,
        "max_num_batched_tokens": 128,
    }
    (point,) = expand({**RAW, "pools": {"prefill": options}}, folder=Path())
    llm = engines.simulated(point.experiment)
    first, second = (engine.config for engine in llm.engines)
    assert (first.num_blocks, first.max_num_seqs, first.max_num_batched_tokens) == (256, 4, 128)
    assert (second.num_blocks, second.max_num_seqs, second.max_num_batched_tokens) == (128, 8, 64)
    fast = simulated_run_at(point)
    slow = simulated_run({**RAW, "pools": {}})
    assert fast.summary["ttft_s"]["mean"] < slow.summary["ttft_s"]["mean"]
    blocks = {step.replica: step.num_blocks for step in fast.steps}
    assert blocks == {0: 256, 1: 128}


def test_clients_of_a_closed_loop_send_when_their_last_request_has_ended():
    workload = {**RAW["workload"], "arrivals": {"process": "closed_loop", "clients": 3}}
    measurement = simulated_run({**RAW, "workload": workload})
    assert measurement.failed is None
    ends = sorted(request.arrival + (request.e2e or 0.0) for request in measurement.requests)
    assert [request.arrival for request in measurement.requests] == pytest.approx(
        [0.0] * 3 + ends[:37]
    )


def test_branches_go_to_one_engine():
    measurement = simulated_run(
        {**RAW, "sampling": {"temperature": 0.8, "ignore_eos": True, "n": 3}}
    )
    assert measurement.failed is None
    moved = [request.transfers for request in measurement.requests if request.max_tokens > 1]
    assert {len(transfers) for transfers in moved} == {3}
    assert {len({transfer.replica for transfer in transfers}) for transfers in moved} == {1}


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
    (tmp_path / "one.yaml").write_text(json.dumps(raw), encoding="utf-8")
    assert (
        run.main([str(tmp_path / "one.yaml"), "--out", str(tmp_path / "runs"), "--quiet"]) == status
    )
    assert ("error: model: " in capsys.readouterr().err) == (status == 2)


def test_a_study_and_a_command_measure_the_same(tmp_path):
    line = json.loads((run_files(tmp_path, RAW) / "runs.jsonl").read_text())
    ((_, (summary,)),) = simulated(tmp_path / "one.yaml")
    assert line["metrics"] == json.loads(json.dumps(summary))


MINE = "from pagedjax.routing import Router\nLAST = Router('last', lambda state, request: state.replicas[-1])\n"


def test_a_run_records_transfers_and_runs_again(tmp_path):
    (tmp_path / "mine.py").write_text(MINE, encoding="utf-8")
    pools = {**RAW["pools"], "decode": {"count": 3, "router": "mine.py:LAST"}}
    (folder,) = run_files(tmp_path, {**RAW, "pools": pools}).glob("*/0")
    requests = store.read_requests(folder)
    assert {request.replica for request in requests} == {0, 1}
    assert {transfer.replica for request in requests for transfer in request.transfers} == {4}
    assert {
        json.loads(line)["replica"] for line in (folder / "steps.jsonl").read_text().splitlines()
    } == {0, 1, 4}
    assert (folder / "decode_router.py").read_text() == MINE
    (repeated,) = load(folder / "config.yaml")
    assert repeated.experiment.pools == Pools(
        Pool(2), Pool(3, f"{folder / 'decode_router.py'}:LAST"), link_gb_s=50.0, latency_s=0.001
    )
    recorded = requests
    remeasured = simulated_run_at(repeated).requests
    assert [request.replica for request in recorded] == [request.replica for request in remeasured]
    assert recorded[0].transfers[0].adopted == pytest.approx(
        remeasured[0].transfers[0].adopted, abs=1e-6
    )


@pytest.mark.parametrize(
    ("pools", "cache_tokens"),
    [
        (
            {"prefill": {"max_num_seqs": 2, "max_num_batched_tokens": 128, "cache_tokens": 256}},
            1024,
        ),
        ({"prefill": {"simulate": {"chip": "h200", "model": "llama-3-8b"}}}, None),
        ({"decode": {"count": 2, "cache_tokens": 512, "simulate": FOUR}}, None),
    ],
)
def test_a_run_of_unequal_pools_runs_again(tmp_path, pools: dict, cache_tokens: int | None):
    """Without cache_tokens, the memory of each pool's chip decides how many blocks it has."""
    raw = {
        **RAW,
        "simulate": {"chip": "a10g", "model": "llama-3-8b"},
        "pools": pools,
        "cache_tokens": cache_tokens,
    }
    (point,) = expand({**raw, "engine": {**RAW["engine"], "max_num_seqs": 512}}, folder=Path())
    files, summary = execution.measure_run(
        engines.Run(point, 0, 0), engines.simulated_engines(), environment(device=False)
    )
    for name, text in files.items():
        (tmp_path / name).write_text(text, encoding="utf-8")
    (repeated,) = load(tmp_path / "config.yaml")
    assert repeated.key == point.key
    assert simulated_run_at(repeated).summary == summary["metrics"]
    llm = engines.simulated(point.experiment)
    assert isinstance(llm, PooledLLM)
    facts = json.loads(files["env.json"])
    configs = {"prefill": llm.prefill.engine.config, "decode": llm.decode.engine.config}
    assert configs["prefill"] != configs["decode"]
    for name, config in configs.items():
        assert facts["engine"][name] == json.loads(json.dumps(dataclasses.asdict(config)))
        chip = pools.get(name, {}).get("simulate", raw["simulate"])["chip"]
        assert facts["simulate"][name]["chip"] == chip


def test_runs_without_pools_have_no_transfers_in_their_files(tmp_path):
    (folder,) = run_files(tmp_path, {**RAW, "pools": None}).glob("*/0")
    assert "transfers" not in json.loads((folder / "requests.jsonl").read_text().splitlines()[0])


def test_points_without_pools_keep_their_key_and_others_have_their_own(tmp_path):
    (tmp_path / "mine.py").write_text(MINE, encoding="utf-8")
    changes = [{"pools": None}]
    changes += [
        {"pools": options}
        for options in ({}, {"link_gb_s": 5}, {"latency_s": 0.1}, {"decode": {"count": 2}})
    ]
    changes += [
        {"pools": {"prefill": {"router": name}}} for name in ("round_robin", "mine.py:LAST")
    ]
    changes += [{"pools": {"decode": {name: 64}}} for name in ("cache_tokens", "max_num_seqs")]
    changes += [{"pools": {"decode": {"simulate": {"step_s": 0.1, "model": "llama-3-8b"}}}}]
    keys = [expand({**RAW, **change}, folder=tmp_path)[0].key for change in changes]
    without = {key: value for key, value in RAW.items() if key != "pools"}
    assert expand(without, folder=Path())[0].key == keys[0]
    assert len(set(keys)) == len(changes)
    (tmp_path / "mine.py").write_text(MINE + "# changed\n", encoding="utf-8")
    assert expand({**RAW, **changes[6]}, folder=tmp_path)[0].key != keys[6]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"pools": {"prefill": {"count": 0}}}, "pools.prefill.count is 0; it must be at least 1"),
        ({"pools": {"decode": {"number": 2}}}, "unknown key pools.decode.'number'"),
        (
            {"pools": {"link_gb_s": 0}},
            "pools.link_gb_s is 0.0; it must be above 0, or null for no time",
        ),
        ({"pools": {"latency_s": -1}}, "pools.latency_s is -1.0; it must be at least 0 seconds"),
        (
            {"pools": {"decode": {"router": "prefixes"}}},
            "pools.decode.router is 'prefixes'; write one of round_robin",
        ),
        (
            {"pools": {"decode": {"router": "bad.py:A"}}},
            "pools.decode.router is '.*', whose file raises ZeroDivision",
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
            {"pools": {"decode": {"cache_tokens": 5}}},
            r"pools.decode: cache_tokens is 5; it must be a multiple",
        ),
        ({"pools": {"decode": {"max_num_seqs": 0}}}, r"pools.decode: max_num_seqs is 0"),
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
def test_wrong_sections_are_reported(tmp_path, change: dict, message: str):
    (tmp_path / "bad.py").write_text("1 / 0", encoding="utf-8")
    with pytest.raises(ValueError, match=message):
        expand({**RAW, **change}, folder=tmp_path)


def test_a_pool_that_does_not_fit_its_chip_is_named():
    large = {"simulate": {"chip": "a100-40g", "model": "llama-3-8b"}, "cache_tokens": 8 * 10**6}
    (point,) = expand({**RAW, "pools": {"decode": large}}, folder=Path())
    with pytest.raises(
        ValueError,
        match=r"pools.decode: weights of .* lower num_blocks, or use more or larger chips",
    ):
        engines.simulated(point.experiment)


def test_engines_for_prompts_bound_the_gaps_on_the_example():
    mixed, apart = (
        simulated_run_at(
            point._replace(
                experiment=dataclasses.replace(
                    point.experiment,
                    workload=dataclasses.replace(point.experiment.workload, count=60),
                )
            )
        ).summary
        for point in load(CONFIGS / "pools.yaml")
    )
    assert apart["itl_s"]["p99"] < mixed["itl_s"]["p99"] / 3
    assert apart["output_tokens"] == mixed["output_tokens"]
