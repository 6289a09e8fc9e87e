"""The sections of a simulated run: each changes the key of its point, and a run's folder has all
that the run needs to be measured again.
"""

from __future__ import annotations

from typing import Any

import pytest

from experiments.core import engines, execution, store
from experiments.core.config import expand, load
from experiments.core.environment import environment
from tests.experiments.core.summaries import BASE, changed_workload, simulated_run_at

ROUTER = """
from pagedjax.routing import Router
LAST = Router('last', lambda state, request: state.replicas[-1])
"""
FOUR = {"chip": "h100", "mesh": {"tensor": 4}, "model": "llama-3-8b"}
CHANGES = [{"at": 0.05, "join": 1}, {"at": 0.1, "fail": 2}]
OF_A10G = {"simulate": {"chip": "a10g", "model": "llama-3-8b"}}
# without cache_tokens, the memory of each pool's chip decides how many blocks it has
BY_MEMORY = {**OF_A10G, "cache_tokens": None}
SMALL = {"max_num_seqs": 2, "max_num_batched_tokens": 128, "cache_tokens": 256}


@pytest.mark.parametrize(
    "sections",
    [
        {"replicas": {"count": 2, "router": "own.py:LAST"}},
        {"replicas": {"count": 2, "changes": CHANGES}},
        {"pools": {"decode": {"count": 3, "router": "own.py:LAST"}}},
        {**OF_A10G, "pools": {"prefill": SMALL}},
        {**BY_MEMORY, "pools": {"prefill": {"simulate": {**OF_A10G["simulate"], "chip": "h200"}}}},
        {**BY_MEMORY, "pools": {"decode": {"count": 2, "cache_tokens": 512, "simulate": FOUR}}},
        {"records": "sums", "workload": changed_workload(shared_prefix=64, prefixes=6)},
    ],
    ids=["router", "changes", "pool's router", "small pool", "chips", "meshes", "sums"],
)
def test_a_run_runs_again_from_its_folder(tmp_path, sections: dict[str, Any]):
    (tmp_path / "own.py").write_text(ROUTER, encoding="utf-8")
    (point,) = expand({**BASE, **sections}, folder=tmp_path)
    run = engines.Run(point, 0, 0)
    files, summary = execution.measure_run(
        run, engines.simulated_engines(), environment(device=False)
    )
    (tmp_path / "own.py").unlink()
    folder = tmp_path / "run"
    store.write_run(folder, files)
    (repeated,) = load(folder / "config.yaml")
    if "pools" in sections:  # others are written with the options that were chosen
        assert repeated.key == point.key
    measured = simulated_run_at(repeated)
    assert measured.summary == summary["metrics"]
    assert [request.replica for request in store.read_requests(folder)] == [
        request.replica for request in measured.requests
    ]


@pytest.mark.parametrize(
    ("section", "neutral", "changing"),
    [
        (
            "replicas",
            [None],
            [{}, {"count": 2}, {"router": "least_loaded"}, {"count": 2, "changes": CHANGES}],
        ),
        (
            "pools",
            [None],
            [
                {},
                {"link_gb_s": 5},
                {"latency_s": 0.1},
                {"decode": {"count": 2}},
                {"prefill": {"router": "round_robin"}},
                {"prefill": {"router": "own.py:LAST"}},
                {"decode": {"cache_tokens": 64}},
                {"decode": {"max_num_seqs": 64}},
                {"decode": {"simulate": {"step_s": 0.1, "model": "llama-3-8b"}}},
            ],
        ),
        ("records", ["full"], ["sums"]),
    ],
)
def test_a_point_without_a_section_keeps_its_key(tmp_path, section, neutral, changing):
    def key(**sections: Any) -> str:
        return expand({**BASE, **sections}, folder=tmp_path)[0].key

    (tmp_path / "own.py").write_text(ROUTER, encoding="utf-8")
    assert {key(**{section: value}) for value in neutral} == {key()}
    keys = {key(**{section: value}) for value in changing}
    assert len(keys | {key()}) == len(changing) + 1
    (tmp_path / "own.py").write_text(ROUTER + "# changed\n", encoding="utf-8")
    changed_keys = {key(**{section: value}) for value in changing} - keys
    assert len(changed_keys) == ("own.py" in str(changing))
