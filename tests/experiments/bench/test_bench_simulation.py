"""The benchmark of simulated steps: it ends, runs what it says, and refuses what is not
simulated.
"""

from __future__ import annotations

import json

import pytest

from experiments.bench import simulation
from experiments.simulation.simulate import SimulatedEngine
from tests.experiments.core.test_decodes_together import RAW, StepCounts


def test_each_way_makes_its_steps(tmp_path):
    path = tmp_path / "small.json"
    path.write_text(json.dumps(RAW), encoding="utf-8")
    simulation.main([str(path), "--rounds", "1", "--json", str(tmp_path / "out.json")])
    report = json.loads((tmp_path / "out.json").read_text("utf-8"))
    assert list(report["seconds"]) == list(simulation.WAYS)
    assert list(report["shares"]) == ["together", "sums"]
    assert (report["requests"], report["sequences_per_step"] > 1) == (40, True)
    points = simulation.points_of(path, [])
    together = {}
    for way in simulation.WAYS:
        with pytest.MonkeyPatch.context() as patch:
            counts = StepCounts(patch)
            simulation.seconds(points[way], way)
            together[way] = counts.together
    assert together["one by one"] == 0
    assert together["together"] == together["sums"] > 0
    assert SimulatedEngine.next_step_times.__name__ == "next_step_times"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"simulate": None, "replicas": None},
            "is not simulated, or has pools; give a config with `simulate` and no `pools`",
        ),
        (
            {"replicas": {"count": 2, "changes": [{"at": 1.0, "fail": 1}]}},
            "lost tokens cannot be taken out of sums",
        ),
    ],
    ids=["measured", "fails"],
)
def test_a_config_that_cannot_run_in_every_way_is_refused(tmp_path, capsys, changes, message):
    path = tmp_path / "small.json"
    path.write_text(json.dumps({**RAW, **changes}), encoding="utf-8")
    with pytest.raises(SystemExit):
        simulation.main([str(path)])
    assert message in capsys.readouterr().err
