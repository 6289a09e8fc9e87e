"""`diff`: the first difference of two recordings, and the fewest requests that show it."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest

from experiments import diff
from experiments.laboratory import differences, past, shrink
from experiments.simulation.simulate import Guess
from pagedjax.host.policies import FCFS, POLICIES
from pagedjax.host.scheduler import SchedulerConfig
from pagedjax.host.types import Request
from pagedjax.options.params import SamplingParams
from tests.experiments.laboratory import faults, simulated, world

CONFIG = SchedulerConfig(
    block_size=4, num_blocks=9, max_num_batched_tokens=16, max_num_seqs=4, max_model_len=32
)
POLICY_FILE = "tests/experiments/laboratory/faults.py"
ALL = {**POLICIES, "wrong_victim": faults.WRONG_VICTIM, "wrong_order": faults.WRONG_ORDER}
SIZES = [60, pytest.param(500, marks=pytest.mark.slow)]


def many(count: int) -> list[world.Arrival]:
    """Requests of which a late one is rare."""
    draw = random.Random(7)
    arrivals = []
    for i in range(count):
        priority = faults.RARE if i == count * 2 // 3 else 0
        request = Request(f"r{i}", draw.randint(2, 14), draw.randint(2, 14), priority=priority)
        arrivals.append(world.Arrival(3 * i, request))
    return arrivals


@pytest.fixture
def pair(tmp_path: Path) -> tuple[Path, Path]:
    return tmp_path / "a.jsonl", tmp_path / "b.jsonl"


def shrunk(a: Path, b: Path, tmp_path: Path, *options: str) -> dict:
    """Runs the command with --shrink, and again on what it wrote -> its result."""
    out = [str(tmp_path / name) for name in ("small_a.jsonl", "small_b.jsonl")]
    report = tmp_path / "report.json"
    words = [str(a), str(b), "--shrink", *out, "--json", str(report), *options]
    assert diff.main(words) == 1
    result = json.loads(report.read_text())
    small = tmp_path / "small.json"
    assert diff.main([*out, "--json", str(small), *options]) == 1
    assert json.loads(small.read_text())["kind"] == result["kind"]
    return result


@pytest.mark.parametrize("count", SIZES)
@pytest.mark.parametrize(
    ("policy", "kind"), [(faults.WRONG_VICTIM, "preempted"), (faults.WRONG_ORDER, "admitted")]
)
def test_a_wrong_policy_is_shown_by_at_most_four_requests(
    pair: tuple[Path, Path], tmp_path: Path, policy, kind: str, count: int
):
    a, b = pair
    world.drive(a, CONFIG, FCFS, many(count), timed=True)
    world.drive(b, CONFIG, policy, many(count), timed=True)
    result = shrunk(a, b, tmp_path, "--recorded-policy", f"{POLICY_FILE}:{policy.name.upper()}")
    assert result["kind"] == kind
    assert f"the policy is fcfs in A and {policy.name} in B" in result["causes"]
    requests = result["shrunk"]["requests"]
    assert len(requests) <= 4
    assert f"r{count * 2 // 3}" in requests


@pytest.mark.parametrize("count", SIZES)
def test_a_changed_draft_is_shown_by_at_most_four_requests(
    pair: tuple[Path, Path], tmp_path: Path, count: int
):
    rare = count // 2
    arrivals = simulated.requests(random.Random(3), count)
    arrivals[rare][1]["params"] = SamplingParams(max_tokens=20, ignore_eos=True)

    def guesses(changed: bool):
        def guess(seq, length: int, limit: int) -> Guess:
            drafts = 2 if seq.arrival == rare and seq.num_output > 2 and changed else limit
            return Guess(drafts, min(drafts, seq.arrival % 3))

        return guess

    for path, changed in zip(pair, (False, True), strict=True):
        engine = simulated.engine(
            drafting=True, guesses=guesses(changed), seconds=lambda work: 0.1, max_num_seqs=3
        )
        simulated.record(path, engine, arrivals)
    result = shrunk(*pair, tmp_path)
    assert result["kind"] == "counts"
    assert "drafts in A and 2 in B" in result["causes"][0]
    assert len(result["shrunk"]["requests"]) <= 4


def test_equal_runs_have_exit_status_0(pair: tuple[Path, Path], capsys):
    for path in pair:
        world.drive(path, CONFIG, FCFS, many(5), timed=path == pair[0])
    assert diff.main([str(path) for path in pair]) == 0
    assert "equal:" in capsys.readouterr().out


def test_the_first_input_that_differs_is_named(pair: tuple[Path, Path], capsys):
    arrivals = many(6)
    longer = arrivals[2].request._replace(prompt_len=15)
    world.drive(pair[0], CONFIG, FCFS, arrivals)
    world.drive(pair[1], CONFIG, FCFS, [*arrivals[:2], arrivals[2]._replace(request=longer)])
    assert diff.main([str(path) for path in pair]) == 1
    text = capsys.readouterr().out
    assert "request 'r2' has prompt_len" in text
    assert "is the first that decides differently" in text
    assert "blocks free" in text


def test_a_run_that_ends_before_is_equal_up_to_there(pair: tuple[Path, Path], capsys):
    world.drive(pair[0], CONFIG, FCFS, many(5))
    pair[1].write_text("".join(pair[0].read_text().splitlines(keepends=True)[:9]))
    assert diff.main([str(path) for path in pair]) == 1
    assert "where B ends" in capsys.readouterr().out


def test_other_tokens_are_a_difference_without_a_decision(pair: tuple[Path, Path]):
    requests = [[world.Arrival(0, Request(name, 4, 6))] for name in "aa"]
    for path, arrivals in zip(pair, requests, strict=True):
        world.drive(path, CONFIG, FCFS, arrivals)
    text = pair[1].read_text()
    token = world.number(0, 0)
    old = f'"token_ids":[{token}]'
    pair[1].write_text(
        text.replace(f'"sampled":[{token}]', '"sampled":[50]', 1).replace(
            old, '"token_ids":[50]', 1
        )
    )
    result = differences.difference(*map(past.read, pair))
    assert not result.kind
    assert result.causes == (f"step 0 samples {token} for 'a' in A and 50 in B",)


def test_what_cannot_be_compared_has_exit_status_2(pair: tuple[Path, Path], tmp_path, capsys):
    a, b = map(str, pair)
    world.drive(pair[0], CONFIG, FCFS, many(3))
    world.drive(pair[1], CONFIG, FCFS, many(4))
    out = [str(tmp_path / "x"), str(tmp_path / "y")]
    for words, message in [
        ([a, str(tmp_path / "no.jsonl")], "there is no file"),
        ([a, b, "--shrink", *out], "A has 3 requests and B has 4"),
        ([a, b, "--shrink", str(tmp_path), "y"], "is a folder"),
        ([a, b, "--shrink", a, out[1]], "is the recording that is read, and would be overwritten"),
        ([a, b, "--json", str(tmp_path / "no" / "diff.json")], "has no folder"),
    ]:
        assert diff.main(words) == 2
        assert message in capsys.readouterr().err
    pair[1].write_text(pair[0].read_text().replace('"counts":[', '"counts":[9,', 1))
    assert diff.main([a, b]) == 2
    assert "does not replay" in capsys.readouterr().err


def test_delta_debugging_leaves_a_set_of_which_no_item_can_be_left_out():
    tries = []

    def shows(items) -> bool:
        tries.append(items)
        return {3, 60, 61} <= set(items)

    assert shrink.ddmin(range(100), shows) == [3, 60, 61]
    assert len(tries) < 100
    assert shrink.ddmin([1], lambda items: True) == [1]
