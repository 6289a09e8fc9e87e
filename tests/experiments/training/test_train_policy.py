"""Training of a scheduling policy: a run resumes bit for bit, learns, and writes what engines run."""

from __future__ import annotations

import dataclasses
import functools
import re
import shutil

import pytest

from experiments.training import train_policy
from experiments.training.policy_methods import METHODS
from experiments.training.train_policy import Setup
from pagedjax.host.policies import Policy
from pagedjax.options.own_values import own_value
from tests.refusals import refused

pytestmark = pytest.mark.few_optimisations

SMALL = Setup(steps=4, requests=12, pairs=2, worlds=2, held_out=8, units=3, rate=60.0, simulated=2)


@pytest.mark.default_cases("gradient")
@pytest.mark.parametrize("method", METHODS)
def test_a_stopped_run_goes_on_as_if_it_had_not_stopped(tmp_path, monkeypatch, method):
    setup = dataclasses.replace(SMALL, method=method)
    # compiled once; a process that goes on has the same programs
    monkeypatch.setattr(train_policy, "make_trainer", functools.cache(train_policy.make_trainer))
    lines: list[str] = []

    def say(line: str) -> None:
        lines.append(line)
        if len(lines) == 2:  # what a process leaves that is killed behind its first checkpoint
            shutil.copytree(tmp_path / "whole", tmp_path / "half")

    losses = train_policy.train(tmp_path / "whole", setup, 2, say=say)
    assert [loss["step"] for loss in losses] == [2, 4]
    assert not (tmp_path / "half" / "learned.py").exists()
    goes_on: list[str] = []
    assert train_policy.train(tmp_path / "half", setup, 2, say=goes_on.append) == losses
    assert goes_on[1] == lines[2], "the second half alone is computed"
    files = [tmp_path / name / "learned.py" for name in ("whole", "half")]
    assert files[0].read_text("utf-8") == files[1].read_text("utf-8")
    policy = own_value("policy", f"{files[0]}:POLICY", Policy, {})
    assert policy.bound == SMALL.patience
    with refused("holds another run: worlds is 1, there 2"):
        train_policy.train(tmp_path / "whole", dataclasses.replace(setup, worlds=1), 2)


@pytest.mark.slow_cases("evolution")  # study 029 has both
@pytest.mark.parametrize("method", METHODS)
def test_it_beats_first_come_and_the_shortest_prompt(method):
    """On episodes that it has not seen, by intervals that exclude no difference."""
    setup = Setup(steps=12, method=method, requests=32, worlds=16, held_out=128, rate=30.0)
    trainer = train_policy.make_trainer(setup)
    state = trainer.start
    for step in range(setup.steps):
        state, _ = trainer.update(state, step)
    comparison = train_policy.compared(trainer.held_out(state.params))
    assert comparison.over_fcfs.low > 0
    assert comparison.over_shortest.low > 0
    assert comparison.gap > 0.5


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--method", "guess"], "method is 'guess'; it must be one of 'evolution', 'gradient'"),
        (["--reward", "speed"], "reward is 'speed'; it must be one of 'latency'"),
        (["--num-blocks", "9"], "the longest request of 1600 tokens has 100 blocks of 16; raise"),
        (["--worlds", "0"], "--worlds is 0; it must be at least 1"),
        (["--sigma", "0"], "--sigma is 0.0; it must be above 0"),
        (["--chip", "abacus"], "chip is 'abacus'; it must be one of"),
    ],
)
def test_wrong_options_are_refused(tmp_path, capsys, options, message):
    try:
        status = train_policy.main(["--out", str(tmp_path / "run"), *options])
    except SystemExit as error:
        status = error.code
    assert status == 2
    assert re.search(message, capsys.readouterr().err)
    assert not (tmp_path / "run").exists()
