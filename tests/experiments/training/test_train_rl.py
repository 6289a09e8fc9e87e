"""RL on sums: the two policies are one in exact mode, and a stopped run resumes to the same
bits.
"""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import strategies as st

from experiments.training import train_rl
from experiments.training.rl_setup import RLSetup
from experiments.training.rl_task import Sum, number_in, reward, sums
from experiments.training.setup import Setup
from experiments.training.train_rl import Rollouts
from pagedjax import LLM, load_model
from tests import drawn
from tests.experiments.training.models import parameters, stored, write_initial

pytest.importorskip("llvmlite")

SMALL = Setup(vocab=300, layers=1, hidden=32, heads=4, kv_heads=2, context=32)
SETUP = RLSetup(steps=4, sums=4, group=4, rate=3e-3)


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    return write_initial(tmp_path_factory.mktemp("rl") / "model", SMALL)


@pytest.fixture(scope="module")
def complete_run(model, tmp_path_factory) -> tuple[Path, list[Any]]:
    """A run without interruption."""
    out = tmp_path_factory.mktemp("runs") / "whole"
    return out, train_rl.train(model, out, SETUP, 2, say=lambda _: None)


def test_the_policies_are_one_in_exact_mode(complete_run, model):
    out, log = complete_run
    assert [entry["step"] for entry in log] == [1, 2, 3, 4]
    assert {entry["kl"] for entry in log} == {0.0}
    assert {entry["largest_difference"] for entry in log} == {0.0}
    assert json.loads((out / "log.json").read_text()) == log
    assert (out / "reward.svg").read_text().startswith("<?xml")
    before = stored(model)
    written = load_model(out / "model", dtype="float32", linear_impl="xla")
    after = parameters(written)
    assert all((after[name] != x).any() for name, x in before.items() if name != "angles"), (
        "all parameters learn"
    )
    assert written.tokenizer.encode("1+1=")


@pytest.mark.slow
def test_the_divergence_is_measured_without_exact_mode(model, tmp_path):
    log = train_rl.train(
        model, tmp_path / "run", replace(SETUP, steps=2, exact=False), 1, say=lambda _: None
    )
    assert all(0 <= entry["kl"] < 1e-6 for entry in log)
    assert all(entry["largest_difference"] < 1e-4 for entry in log)


class Stops(Exception):
    pass


@pytest.mark.slow
def test_a_stopped_run_resumes_to_the_same_bits(complete_run, model, tmp_path, monkeypatch):
    out, log = complete_run
    original = train_rl.roll_out

    def roll_out(llm: LLM, setup: RLSetup, step: int) -> Rollouts:
        if step == 3:
            raise Stops
        return original(llm, setup, step)

    with monkeypatch.context() as patched:
        patched.setattr(train_rl, "roll_out", roll_out)
        with pytest.raises(Stops):
            train_rl.train(model, tmp_path / "run", SETUP, 2, say=lambda _: None)
    assert train_rl.train(model, tmp_path / "run", SETUP, 2, say=lambda _: None) == log
    chex.assert_trees_all_equal(stored(tmp_path / "run" / "model"), stored(out / "model"))
    messages: list[str] = []
    assert train_rl.train(model, tmp_path / "run", SETUP, 2, say=messages.append) == log, (
        "a run that has ended"
    )
    assert len(messages) == 1
    with pytest.raises(ValueError, match=r"holds another run: rate is 0.1, there 0.003"):
        train_rl.train(model, tmp_path / "run", replace(SETUP, rate=0.1), 2)


# --- parts ----------------------------------------------------------------------------------------


@drawn.given(
    25,
    100,
    rewards=st.lists(st.floats(0, 1, width=32), min_size=6, max_size=6),
    seed=st.integers(0, 99),
    clip=st.sampled_from([0.1, 0.5]),
)
def test_the_loss_is_that_of_the_papers(rewards, seed, clip):
    """Written out in numpy."""
    rng = np.random.default_rng(seed)
    chances, old = rng.normal(-2, 0.5, (2, 6, 5)).astype(np.float32)
    answer = rng.random((6, 5)) < 0.6
    answer[0, 0] = True
    rollouts = Rollouts(None, None, answer, old, np.array(rewards, np.float32))
    groups = np.array(rewards, np.float64).reshape(2, 3)
    deviations = np.sqrt(groups.var(axis=1, keepdims=True) + 1e-4)
    gains = ((groups - groups.mean(axis=1, keepdims=True)) / deviations).reshape(6, 1)
    rates = np.exp(chances.astype(np.float64) - old)
    terms = np.minimum(rates * gains, np.clip(rates, 1 - clip, 1 + clip) * gains)[answer]
    loss = train_rl.loss(jnp.asarray(chances), rollouts, RLSetup(group=3, clip=clip))
    chex.assert_shape(loss, ())
    chex.assert_trees_all_close(float(loss), -np.mean(terms), rtol=1e-3, atol=1e-3)


def test_the_divergence_is_that_of_two_distributions():
    """Its mean over many draws, against the sum over the vocabulary."""
    rng = np.random.default_rng(0)
    trained, served = (jax.nn.log_softmax(jnp.asarray(rng.normal(0, 0.3, 8))) for _ in range(2))
    shares = np.exp(np.asarray(served, np.float64))
    drawn = rng.choice(8, (1, 200_000), p=shares / shares.sum())
    rollouts = Rollouts(None, None, np.ones(drawn.shape, bool), served[drawn], None)
    divergence = train_rl.divergence(trained[drawn], rollouts)
    chex.assert_trees_all_close(
        divergence["kl"], (jnp.exp(served) * (served - trained)).sum(), rtol=0.03
    )
    chex.assert_trees_all_close(
        divergence["largest_difference"], jnp.abs(trained - served).max(), rtol=1e-6
    )
    of_itself = train_rl.divergence(served[drawn], rollouts)
    assert (float(of_itself["kl"]), float(of_itself["largest_difference"])) == (0, 0)


@pytest.mark.parametrize(
    ("text", "number", "worth"),
    [
        ("7", 7, 1),
        (" 7\n", 7, 1),
        ("8", 8, 0.5),
        ("5 ", 5, 1 / 3),
        ("x", None, 0),
        ("", None, 0),
        ("77", 77, 1 / 71),
    ],
)
def test_rewards_can_be_checked(text, number, worth):
    assert number_in(text) == number
    assert reward(Sum(3, 4), text) == worth


def test_sums_depend_on_seed_and_step_alone():
    assert sums(0, 3, 5, 9) == sums(0, 3, 5, 9) != sums(0, 4, 5, 9)
    drawn = sums(1, 0, 400, 4)
    assert {question.a for question in drawn} == {question.b for question in drawn} == set(range(5))
    assert Sum(3, 1).prompt == "3+1="


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--group", "1"], "--group is 1; it must be at least 2"),
        (["--largest", "1000"], "--largest is 1000; it must be at most 999"),
        (["--rate", "0"], "--rate is 0.0; it must be above 0 and below 1"),
    ],
)
def test_wrong_options_are_refused(tmp_path, capsys, options, message):
    with pytest.raises(SystemExit):
        train_rl.main(["--model", str(tmp_path), "--out", str(tmp_path / "out"), *options])
    assert re.search(message, capsys.readouterr().err)
