"""What benchmarks share: every run meets every place of a round, the warm-up is not counted, and
an option below its minimum is refused.
"""

from __future__ import annotations

import json

import pytest

from experiments.bench import adapters
from experiments.bench.harness import (
    Workload,
    at_least_1,
    bench_parser,
    cell,
    check_least,
    ratios,
    requests_of,
    run_rounds,
)
from tests.weights.tiny import tiny_llama


def test_the_warm_up_is_not_counted_and_the_order_changes():
    called: list[str] = []

    def run(name: str, seconds: float) -> float:
        called.append(name)
        return 100.0 if len(called) <= 2 else seconds

    times = run_rounds({"a": lambda: run("a", 2.0), "b": lambda: run("b", 4.0)}, 3)
    assert times == {"a": [2.0] * 3, "b": [4.0] * 3}
    assert called == ["a", "b", "b", "a", "a", "b", "b", "a"]


def test_a_share_is_of_the_same_round():
    result = ratios([1.0, 4.0, 9.0], [2.0, 4.0, 10.0])
    assert result == {"ratio": 0.9, "ratios": [0.5, 1.0, 0.9]}
    assert cell(result) == "0.900 (0.500 to 1.000)"


def test_requests_are_within_their_ranges_and_the_same_for_a_seed():
    prompts, params = requests_of(Workload(50, (3, 5), (1, 2)), vocab=20, seed=1)
    lengths = {len(prompt["prompt_token_ids"]) for prompt in prompts}
    assert lengths == {3, 4, 5}
    assert {request_params.max_tokens for request_params in params} == {1, 2}
    assert requests_of(Workload(50, (3, 5), (1, 2)), vocab=20, seed=1)[0] == prompts


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--rounds", "0"], "'0' is given; it must be an integer of at least 1"),
        (["--batches", "3", "1"], "--batches is 1; it must be at least 2"),
        (["--round", "1"], "unrecognized arguments: --round"),
    ],
)
def test_an_option_below_its_minimum_is_refused(words, message, capsys):
    parser = bench_parser("A benchmark.")
    parser.add_argument("--rounds", type=at_least_1, default=5)
    parser.add_argument("--batches", type=int, nargs="*", default=[])
    with pytest.raises(SystemExit, match="2"):
        check_least(parser, parser.parse_args(words), batches=2)
    assert message in capsys.readouterr().err


@pytest.mark.exhaustive  # it measures for a minute
def test_the_cost_of_adapters_is_a_share_for_each_rank(tmp_path, monkeypatch):
    monkeypatch.setattr(adapters, "WORKLOADS", {"few": Workload(9, (4, 8), (3, 3))})
    model = tiny_llama(tmp_path / "llama", tied=False)
    out = tmp_path / "out.json"
    adapters.main(["--model", str(model), "--ranks", "4", "--rounds", "2", "--json", str(out)])
    (workload,) = json.loads(out.read_text())["workloads"]
    assert set(workload["seconds"]) == {"without", "rank 4, no adapter", "rank 4, 8 adapters"}
    assert set(workload["shares"]) == {"rank 4, no adapter", "rank 4, 8 adapters"}
