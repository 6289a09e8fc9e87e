"""A router that keeps something between calls is refused."""

from __future__ import annotations

import random

import pytest

from experiments.core import config
from pagedjax.options.purity import Impure
from pagedjax.routing import LEAST_LOADED, ROUTERS, Router, lightest, purity

TURNS: list[int] = []


def in_turn(state, request):
    TURNS.append(1)
    return state.replicas[len(TURNS) % len(state.replicas)]


def by_chance(state, request):
    return random.choice(state.replicas)


def fails(state, request):
    raise KeyError(request.user)


@pytest.mark.parametrize(
    ("choose", "message"),
    [
        (in_turn, r"returned 'replica \d' and then 'replica \d' for the same arguments"),
        (
            lambda state, request: (TURNS.append(1), lightest(state, state.turn))[1],
            "changes the global TURNS, so that equal runs would differ",
        ),
        (by_chance, r"returned 'replica \d' and then 'replica \d' for"),
    ],
    ids=["turn", "append", "random"],
)
def test_a_router_that_keeps_something_between_calls_is_refused(choose, message):
    random.seed(0)
    with pytest.raises(Impure, match=f"^choose of the router 'mine' {message}"):
        purity.check(LEAST_LOADED._replace(name="mine", choose=choose))


@pytest.mark.parametrize("router", [*ROUTERS.values(), Router("fails", fails)])
def test_others_are_not(router):
    purity.check(router)


def test_an_experiment_refuses_it_before_anything_runs(tmp_path):
    (tmp_path / "leaky.py").write_text(
        "from pagedjax.routing import Router\n"
        "SEEN = []\n"
        "LEAKY = Router('leaky', lambda state, request: (SEEN.append(1), state.replicas[0])[1])\n"
    )
    (tmp_path / "leaky.yaml").write_text(
        "name: leaky\n"
        "replicas: {count: 2, router: 'leaky.py:LEAKY'}\n"
        "workload: {kind: synthetic, count: 2, prompt: {dist: fixed, value: 8}, "
        "output: {dist: fixed, value: 8}}\n"
        "simulate: {chip: h100, model: llama-3-8b}\n"
        "sampling: {ignore_eos: true}\n"
    )
    with pytest.raises(
        ValueError,
        match=r"^replicas\.router is '.*leaky\.py:LEAKY': choose of the router 'leaky' changes the "
        "global SEEN, so that",
    ):
        config.load(tmp_path / "leaky.yaml")
