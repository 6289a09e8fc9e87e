"""Exchanges of compiled steps: read from real programs, compared with what must be there, and timed by hand."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest

from experiments.hardware import exchanges, hlo
from experiments.hardware.exchanges import Found, Wanted, differences, wanted
from experiments.simulation.collectives import Network
from pagedjax import LLM
from pagedjax.device.batch import StepShape

TORUS = Network(1e9, neighbours=True, devices=64, hop=1e-6)
SWITCH = Network(1e9, neighbours=False, devices=8)
T, R = 64, 24
CONFIG = {"max_num_seqs": R, "max_num_batched_tokens": T, "token_buckets": (T,), "block_size": 4, "num_blocks": 50}
COLUMNS = 43, 42  # token, log-probability, rank and 20 of each of the best; a prompt token is known
SUM = Found("all-reduce", "f32[8,4]", 32, 128)
MUST = (Wanted("all-reduce", 32, 3), Wanted("all-to-all", 20, branch=True))
HAS = Counter({SUM: 3, Found("all-to-all", "f32[5,4]", 20, 80, times=8, branch=True): 1})


@pytest.mark.parametrize("mesh", [{"tensor": 2}, {"tensor": 4}, {"tensor": 3}])
def test_a_compiled_step_has_the_exchanges_that_it_must_have(tiny, mesh):
    """Also where heads, vocabulary and rows do not divide."""
    engine = LLM(tiny, progress=False, mesh=mesh, **CONFIG).engine
    n, model = mesh["tensor"], engine.model
    program = hlo.parse(engine.runtime.programs[StepShape(T, R)].as_text())
    found, must = exchanges.found(program, n), wanted(model.config, model.part, n, T, R, COLUMNS)
    assert differences(found, must) == []
    more = wanted(replace(model.config, hidden=model.config.hidden + 1), model.part, n, T, R, COLUMNS)
    assert [one.wrong for one in differences(found, more)] == [True]


def test_one_device_exchanges_nothing(tiny_llm):
    model = tiny_llm.engine.model
    assert wanted(model.config, model.part, 1, T, R, COLUMNS) == ()
    program = hlo.parse(tiny_llm.engine.runtime.programs[StepShape(64, 8)].as_text())
    assert exchanges.found(program, 1) == Counter()


@pytest.mark.parametrize(
    ("has", "texts"),
    [
        (HAS, []),
        (HAS - Counter({SUM: 1}), ["all-reduce: 64 numbers (2 of f32[8,4]) in place of 96 in 3 exchanges"]),
        (
            HAS + Counter({Found("collective-permute", "s32[7]", 7, 28): 2}),
            ["collective-permute: 14 numbers (2 of s32[7])"],
        ),
        (Counter({SUM: 3}), ["all-to-all in a branch: 0 numbers (none) in place of 20 in 1 exchanges"]),
        (
            Counter({one._replace(branch=False): count for one, count in HAS.items()}),
            ["all-to-all: 20 numbers (1 of f32[5,4]) in place of 0", "all-to-all in a branch: 0 numbers"],
        ),
    ],
)
def test_other_exchanges_are_wrong(has, texts):
    found = differences(has, MUST)
    assert len(found) == len(texts)
    for one, text in zip(found, texts, strict=True):
        assert one.wrong
        assert one.text.startswith(text)


@pytest.mark.parametrize(
    "sums",
    [
        Counter({SUM: 1, Found("all-reduce", "f32[8,4] x 2", 64, 256): 1}),  # combined
        Counter({SUM: 2, Found("all-reduce", "f32[4,4]", 16, 64): 2}),  # split
    ],
)
def test_combined_and_split_exchanges_are_named_and_not_wrong(sums):
    (one,) = differences(sums, MUST[:1])
    assert not one.wrong
    assert one.text == f"all-reduce: {sums.total()} instructions for 3 exchanges of the same numbers"


def test_the_time_of_exchanges_is_that_of_their_bytes_and_hops():
    """By hand, for 4 devices: a sum sends 2 x 3/4 of its bytes over two links, and waits for 2 x 2 hops."""
    assert exchanges.seconds(HAS, 4, TORUS) == pytest.approx(3 * (1.5 * 128 / 2e9 + 4e-6))
    # each of 4 devices sends a quarter to three others, at distances 1, 2 and 1; 8 turns
    assert exchanges.seconds(HAS, 4, TORUS, branch=True) == pytest.approx(8 * (80 / 4 * 4 / 2e9 + 2e-6))
    assert exchanges.seconds(HAS, 4, SWITCH) == pytest.approx(3 * 1.5 * 128 / 1e9)


def test_layers_that_are_not_compiled_count_with_two_sums_each(tiny_llm):
    model = tiny_llm.engine.model.config
    one = 1.5 * 4 * model.hidden * 10 / 1e9
    assert exchanges.seconds_of_layers(model, 5, 4, 10, SWITCH) == pytest.approx(2 * 5 * one)


def test_the_table_has_a_line_for_each_kind_with_its_bytes_and_time():
    assert exchanges.table(HAS + Counter({Found("send", "f32[2]", 2, 8): 1}), 4, SWITCH).splitlines() == [
        "     3 x all-reduce  f32[8,4]: 0.000 MiB, 0.001 ms",
        "     1 x send        f32[2]: 0.000 MiB, no estimate",
        "     8 x all-to-all  f32[5,4]: 0.001 MiB, 0.000 ms, only for prompt log-probabilities",
    ]


@pytest.mark.parametrize(
    ("attributes", "size"),
    [
        (", replica_groups={{0,1,2,3}}, use_global_device_ids=true", 4),
        (", replica_groups={{0,1},{2,3}}", 2),
        (", replica_groups=[2,4]<=[8]", 4),
        (", replica_groups={}", 8),
        (", channel_id=1", 8),
    ],
)
def test_devices_of_an_exchange_are_read(attributes, size):
    assert exchanges.group_size(attributes, 8) == size
