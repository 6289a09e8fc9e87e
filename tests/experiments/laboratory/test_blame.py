"""`blame`: who delayed whom, and that the shares of a delay add up to it."""

from __future__ import annotations

import json
import random
from itertools import permutations
from pathlib import Path

import pytest

from experiments import blame
from experiments.laboratory import past
from experiments.laboratory.blame import Audit, caused, suffered
from pagedjax.host.event_log import Commit, Submit
from pagedjax.host.policies import FCFS
from pagedjax.host.scheduler import SchedulerConfig
from pagedjax.host.types import Finished, Request
from tests.experiments.laboratory import simulated, world

CONFIG = SchedulerConfig(
    block_size=4, num_blocks=24, max_num_batched_tokens=12, max_num_seqs=4, max_model_len=32
)


def arrivals(users: str = "abc", heavy: str = "b", count: int = 15) -> list[world.Arrival]:
    """Requests of some users, one of whom sends long ones at once."""
    draw = random.Random(5)
    requests = []
    for i in range(count):
        user = users[i % len(users)]
        size = 16 if user == heavy else 2
        at = 0 if user == heavy else i
        request = Request(f"r{i}", size, size, user=user, service_class=f"class {user}")
        requests.append(world.Arrival(at, request, family=draw.choice([None, 0])))
    return requests


def record(path: Path, *, timed: bool = False, users: str = "abc") -> Path:
    requests = arrivals(users)
    if not timed:  # a recording without times has no idle time
        requests = [arrival._replace(at=0) for arrival in requests]
    world.drive(path, CONFIG, FCFS, sorted(requests), timed=timed)
    return path


def total_seconds(path: Path) -> float:
    """The sum over all requests of the times from submission to end, by the recording alone."""
    total = 0.0
    for recorded in past.read(path).entries:
        if isinstance(recorded.entry, Submit):
            total -= recorded.at
        elif isinstance(recorded.entry, Commit):
            ends = [event for event in recorded.entry.events if isinstance(event, Finished)]
            total += recorded.at * len(ends)
    return total


@pytest.mark.parametrize("timed", [False, True])
def test_the_shares_of_a_delay_add_up_to_it_and_the_heavy_user_causes_most(
    tmp_path: Path, timed: bool
):
    """The delay is by recordings of a scheduler that runs with all, and with each user alone."""
    path = record(tmp_path / "run.jsonl", timed=timed)
    audit = Audit(past.read(path), "user")
    shares = audit.exact_shares().shares
    total = total_seconds(path)
    for user in "abc":
        alone = [arrival for arrival in arrivals() if arrival.request.user == user]
        if not timed:
            alone = [arrival._replace(at=0) for arrival in alone]
        world.drive(tmp_path / "alone.jsonl", CONFIG, FCFS, sorted(alone), timed=timed)
        total -= total_seconds(tmp_path / "alone.jsonl")
    assert total > 0
    assert sum(shares.values()) == pytest.approx(total)
    for user, delay in audit.delays().items():
        assert suffered(shares, user) == pytest.approx(delay)
    assert max("abc", key=lambda user: caused(shares, user)) == "b"
    matrix, cases = audit.without()
    assert max("abc", key=lambda user: caused(matrix, user)) == "b"
    assert cases[0].causer == "b"


def test_exact_shares_are_the_mean_over_all_orders(tmp_path: Path):
    audit = Audit(past.read(record(tmp_path / "run.jsonl", users="abcd")), "user")
    shares = audit.exact_shares().shares
    other_users = "acd"
    orders = list(permutations(other_users))
    for causer in other_users:
        added = 0.0
        for order in orders:
            before = frozenset([*order[: order.index(causer)], "b"])
            with_causer = audit.totals(before | {causer})["b"]
            added += with_causer - audit.totals(before)["b"]
        assert shares[causer, "b"] == pytest.approx(added / len(orders))
    assert audit.num_runs == 2**4 - 1


def test_sampled_shares_add_up_to_the_delays(tmp_path: Path):
    users = "abcdefgh"
    audit = Audit(past.read(record(tmp_path / "run.jsonl", users=users)), "user")
    sampled = audit.sampled_shares(permutations=4, seed=1)
    assert sampled.permutations == 4
    for user, delay in audit.delays().items():
        assert suffered(sampled.shares, user) == pytest.approx(delay)
    assert max(users, key=lambda user: caused(sampled.shares, user)) == "b"
    assert sampled == audit.sampled_shares(permutations=4, seed=1)
    assert sampled.error["b"] > 0


def test_the_command_prints_tables_and_writes_the_worst_cases(tmp_path: Path, capsys):
    path = tmp_path / "run.jsonl"
    requests = simulated.requests(random.Random(2), 12)
    simulated.record(path, simulated.engine(max_num_seqs=2), requests)
    report = tmp_path / "blame.json"
    cases = tmp_path / "cases"
    words = [str(path), "--record", str(cases), "--json", str(report)]
    assert blame.main(words) == 0
    text = capsys.readouterr().out
    assert "its median error is" in text
    assert "total delay" in text
    assert f"pagedjax view {cases}/all.jsonl {cases}/without-" in text
    values = json.loads(report.read_text())
    assert values["unit"] == "s"
    assert sum(values["delays"].values()) == pytest.approx(
        sum(sum(row.values()) for row in values["shares"].values())
    )
    assert blame.main([str(path), "--steps", "--by", "request", "--json", str(report)]) == 0
    values = json.loads(report.read_text())
    assert values["unit"] == "steps"
    assert "shares" not in values
    assert len(values["without"]) == 12


def test_what_cannot_be_blamed_has_exit_status_2(tmp_path: Path, capsys):
    path = record(tmp_path / "run.jsonl")
    nobody = tmp_path / "nobody.jsonl"
    world.drive(nobody, CONFIG, FCFS, [world.Arrival(0, Request("a", 4, 4))])
    for words, message in [
        ([str(nobody)], r"has 1 group by user ((none))"),
        ([str(path), "--by", "request", "--most-runs", "3"], "15 groups by request take 16 runs"),
        ([str(path), "--permutations", "1"], "permutations is 1; it must be at least 2"),
        ([str(tmp_path / "no.jsonl")], "there is no file"),
        ([str(path), "--json", str(tmp_path / "no" / "blame.json")], "has no folder"),
        ([str(path), "--record", str(path)], "which is a file; name a folder"),
    ]:
        assert blame.main(words) == 2
        assert message in capsys.readouterr().err
