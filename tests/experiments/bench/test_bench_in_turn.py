"""Engines in turn: every run meets every place of a round, the warm-up is not counted, and the
commands end.
"""

from __future__ import annotations

import json

import pytest

from experiments.bench import adapters, batch_invariance
from experiments.bench.in_turn import Workload, cell, requests_of, rounds, share
from tests.weights.tiny import tiny_llama


def test_the_warm_up_is_not_counted_and_the_order_changes():
    called: list[str] = []

    def run(name: str, seconds: float) -> float:
        called.append(name)
        return 100.0 if len(called) <= 2 else seconds

    times = rounds({"a": lambda: run("a", 2.0), "b": lambda: run("b", 4.0)}, 3)
    assert times == {"a": [2.0] * 3, "b": [4.0] * 3}
    assert called == ["a", "b", "b", "a", "a", "b", "b", "a"]


def test_a_share_is_of_the_same_round():
    result = share({"base": [1.0, 4.0, 9.0], "other": [2.0, 4.0, 10.0]}, "base", "other")
    assert result == {"ratio": 0.9, "ratios": [0.5, 1.0, 0.9]}
    assert cell(result) == "0.900 (0.500 to 1.000)"


def test_requests_are_within_their_ranges_and_the_same_for_a_seed():
    prompts, params = requests_of(Workload(50, (3, 5), (1, 2)), vocab=20, seed=1)
    lengths = {len(prompt["prompt_token_ids"]) for prompt in prompts}
    assert lengths == {3, 4, 5}
    assert {request_params.max_tokens for request_params in params} == {1, 2}
    assert requests_of(Workload(50, (3, 5), (1, 2)), vocab=20, seed=1)[0] == prompts


@pytest.mark.parametrize("words", [["--rounds", "0"], ["--rounds", "many"]])
@pytest.mark.parametrize("command", [adapters, batch_invariance])
def test_a_count_below_1_is_refused(command, words, capsys):
    with pytest.raises(SystemExit):
        command.main(words)
    assert f"{words[1]!r} is given; it must be an integer of at least 1" in capsys.readouterr().err


@pytest.mark.exhaustive  # it measures for a minute
def test_the_cost_of_adapters_is_a_share_for_each_rank(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(adapters, "WORKLOADS", {"few": Workload(9, (4, 8), (3, 3))})
    model = tiny_llama(tmp_path / "llama", tied=False)
    out = tmp_path / "out.json"
    adapters.main(["--model", str(model), "--ranks", "4", "--rounds", "2", "--json", str(out)])
    (workload,) = json.loads(out.read_text())["workloads"]
    assert set(workload["seconds"]) == {"without", "rank 4, no adapter", "rank 4, 8 adapters"}
    assert set(workload["shares"]) == {"rank 4, no adapter", "rank 4, 8 adapters"}
    assert all(len(times) == 2 for times in workload["seconds"].values())
    assert "| few | rank 4, 8 adapters |" in capsys.readouterr().out
