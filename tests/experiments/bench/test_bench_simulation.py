"""The benchmark of simulated steps: it ends, runs what it says, and refuses what is not simulated."""

from __future__ import annotations

import json

import pytest

from experiments.bench import simulation
from experiments.simulation.simulate import SimulatedEngine
from tests.experiments.core.test_decodes_together import RAW, Counting


def test_each_way_makes_its_steps(tmp_path, capsys):
    path = tmp_path / "small.json"
    path.write_text(json.dumps(RAW), encoding="utf-8")
    simulation.main([str(path), "--rounds", "1", "--json", str(tmp_path / "out.json")])
    kept = json.loads((tmp_path / "out.json").read_text("utf-8"))
    assert list(kept["seconds"]) == list(simulation.WAYS)
    assert list(kept["shares"]) == ["together", "sums"]
    assert "times as fast" in capsys.readouterr().out
    (point,) = simulation.config.load(path)
    together = {}
    for way in simulation.WAYS:
        with pytest.MonkeyPatch.context() as patch:
            counted = Counting(patch)
            simulation.seconds(point, way)
            together[way] = counted.together
    assert together["one by one"] == 0
    assert together["together"] == together["sums"] > 0
    assert SimulatedEngine.ahead.__name__ == "ahead"


@pytest.mark.parametrize("changes", [{"simulate": None, "replicas": None}])
def test_a_measured_config_is_refused(tmp_path, capsys, changes):
    path = tmp_path / "small.json"
    kept = {name: value for name, value in ({**RAW, "model": "smollm2-135m"} | changes).items() if value is not None}
    path.write_text(json.dumps(kept), encoding="utf-8")
    with pytest.raises(SystemExit):
        simulation.main([str(path)])
    assert "is not simulated, or has pools; give a config with `simulate` and no `pools`" in capsys.readouterr().err
