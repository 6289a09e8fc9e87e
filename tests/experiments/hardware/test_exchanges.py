"""Exchanges of compiled steps: read from real programs, compared with what must be there, and timed
by hand.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest

from experiments.hardware import compile_step, exchanges, hlo
from experiments.hardware.exchanges import Collective, RequiredExchange, differences, required
from experiments.simulation.collectives import Network
from pagedjax import LLM
from pagedjax.device.batch import StepShape
from pagedjax.device.models import split
from pagedjax.options.config import MeshConfig

TORUS = Network(1e9, neighbours=True, devices=64, hop=1e-6)
SWITCH = Network(1e9, neighbours=False, devices=8)
T = 64
R = 24
CONFIG = {
    "max_num_seqs": R,
    "max_num_batched_tokens": T,
    "token_buckets": (T,),
    "block_size": 4,
    "num_blocks": 50,
}
COLUMNS = 43  # token, log-probability, rank, and 20 of each of the best
SUM = Collective("all-reduce", "f32[8,4]", 32, 128)
LOGITS = Collective("all-to-all", "f32[5,4]", 20, 80)
REQUIRED = (RequiredExchange("all-reduce", 32, 3), RequiredExchange("all-to-all", 20))
COLLECTIVES = Counter({SUM: 3, LOGITS: 1})


# From the programs of two compilers, shortened: Llama 3 8B, one layer on 8 x v5e, and parts of two
# layers on 8 x H100.
V5E = """
%branch (arg: (bf16[4096,64])) -> s32[64,42] {
  %arg = (bf16[4096,64]{1,0:T(8,128)(2,1)S(1)}) parameter(0)
  %convert_bitcast_fusion = f32[16032,8,8]{0,2,1:T(8,128)S(1)} fusion(%arg), kind=kOutput, calls=%other
  %all_to_all.41 = f32[16032,8,8]{0,2,1:T(8,128)S(1)} all-to-all(%convert_bitcast_fusion), channel_id=1, \
replica_groups={{0,1,2,3,4,5,6,7}}, dimensions={1}
  %pad_add_fusion = s32[8,42]{1,0:T(8,128)S(1)} fusion(%all_to_all.41), kind=kLoop, calls=%other
  ROOT %all-gather.8 = s32[64,42]{1,0:T(8,128)S(1)} all-gather(%pad_add_fusion), channel_id=1, \
replica_groups={{0,1,2,3,4,5,6,7}}, dimensions={0}, use_global_device_ids=true
}
%none (arg.1: (bf16[4096,64])) -> s32[64,42] {
  ROOT %zeros = s32[64,42]{1,0:T(8,128)S(1)} constant({...})
}
%other (in: f32[]) -> f32[] {
  ROOT %in = f32[]{:T(128)} parameter(0)
}
ENTRY %main.108_spmd (x: bf16[4096,64]) -> s32[64,43] {
  %x = bf16[4096,64]{0,1:T(8,128)(2,1)S(1)} parameter(0)
  %psum.23 = bf16[4096,64]{0,1:T(8,128)(2,1)S(1)} all-reduce(%x), channel_id=1, \
replica_groups={{0,1,2,3,4,5,6,7}}, use_global_device_ids=true, to_apply=%region_2.3, \
backend_config={"collective_algorithm_config":{"emitter":"RotatedPincerEmitter", \
"strategy":"UniDirection1DRingStrategy","debug":"\\nUniDirection1DRingStrategy{colors:2 phases:1 cores:{8},{8}}"}}
  %fusion.63 = f32[4096,64]{0,1:T(8,128)S(1)} fusion(%psum.23), kind=kOutput, calls=%other
  %psum.24 = bf16[4096,64]{0,1:T(8,128)(2,1)S(1)} all-reduce(%fusion.63), channel_id=1, \
replica_groups={{0,1,2,3,4,5,6,7}}, use_global_device_ids=true, to_apply=%region_23.24
  %fusion.57 = f32[4096,64]{0,1:T(8,128)S(1)} fusion(%psum.24), kind=kOutput, calls=%other
  %psum.25 = bf16[4096,64]{0,1:T(8,128)(2,1)S(1)} all-reduce(%fusion.57), channel_id=1, \
replica_groups={{0,1,2,3,4,5,6,7}}, use_global_device_ids=true, to_apply=%region_25.26
  %convert_bitcast_fusion.1 = f32[16032,8,8]{0,2,1:T(8,128)S(1)} fusion(%psum.25), kind=kOutput, calls=%other
  %all_to_all.51 = f32[16032,8,8]{0,2,1:T(8,128)S(1)} all-to-all(%convert_bitcast_fusion.1), channel_id=1, \
replica_groups={{0,1,2,3,4,5,6,7}}, dimensions={1}
  %concatenate.71 = s32[8,43]{1,0:T(8,128)S(1)} fusion(%all_to_all.51), kind=kLoop, calls=%other
  %tuple.192 = (bf16[4096,64]{1,0:T(8,128)(2,1)S(1)}) tuple(%psum.25)
  %conditional.13 = s32[64,42]{1,0:T(8,128)S(1)} conditional(%x, %tuple.192, %tuple.192), \
branch_computations={%none, %branch}
  ROOT %all-gather.9 = s32[64,43]{1,0:T(8,128)S(1)} all-gather(%concatenate.71), channel_id=1, \
replica_groups={{0,1,2,3,4,5,6,7}}, dimensions={0}, use_global_device_ids=true
}
"""
H100 = """
ENTRY %main.108_spmd (x: bf16[512,4096]) -> bf16[16032,64] {
  %bitcast.707.0 = bf16[512,4096]{0,1} parameter(0)
  %all-reduce-start = ((bf16[512,4096]{0,1}), bf16[512,4096]{0,1}) all-reduce-start(%bitcast.707.0), channel_id=1, \
replica_groups=mesh['expert'=1,'tensor'=8] {'expert','tensor'}, to_apply=%region_0.1, \
output_to_operand_aliasing={{1}: (0, {})}
  %all-reduce-done = bf16[512,4096]{0,1} all-reduce-done(%all-reduce-start)
  %gemm_fusion_dot_general.51 = f32[4096,512]{1,0} custom-call(%all-reduce-done)
  %psum.40.2 = f32[4096,512]{1,0} all-reduce(%gemm_fusion_dot_general.51), channel_id=1, \
replica_groups=mesh['expert'=1,'tensor'=8] {'expert','tensor'}, use_global_device_ids=true, to_apply=%region_23.24
  %bitcast.717.0 = bf16[16032,64]{0,1} custom-call(%psum.40.2)
  %all-to-all-start.1 = ((bf16[16032,64]{0,1}), bf16[16032,64]{0,1}) all-to-all-start(%bitcast.717.0), channel_id=1, \
replica_groups=mesh['expert'=1,'tensor'=8] {'expert','tensor'}, dimensions={1}
  ROOT %all-to-all-done.1 = bf16[16032,64]{0,1} all-to-all-done(%all-to-all-start.1)
}
"""


def test_the_program_of_a_tpu_is_read():
    """It rounds the sums of layers in the exchange itself."""
    collectives = exchanges.collectives_of(hlo.parse(V5E), 8)
    logits = 16032 * 64
    assert collectives == Counter(
        {
            Collective("all-reduce", "bf16[4096,64]", 4096 * 64, 2 * 4096 * 64): 1,
            Collective("all-reduce", "f32[4096,64], rounded to bf16", 4096 * 64, 4 * 4096 * 64): 2,
            Collective("all-to-all", "f32[16032,8,8]", logits, 4 * logits): 1,
            Collective("all-gather", "s32[8,43]", 64 * 43, 4 * 64 * 43): 1,
            Collective("all-to-all", "f32[16032,8,8]", logits, 4 * logits, branch=True): 1,
            Collective("all-gather", "s32[8,42]", 64 * 42, 4 * 64 * 42, branch=True): 1,
        }
    )
    assert exchanges.rings(hlo.parse(V5E)) == {"UniDirection1DRingStrategy, 2 colors, 1 phases": 1}
    model = compile_step.config_of("llama-3-8b", "bfloat16", 1)
    part = split.device_config(model, MeshConfig(tensor=8))
    # this program is of a version in which log-probabilities of prompts were a branch of each step
    of_steps = {place: n for place, n in collectives.items() if not place.branch}
    assert differences(of_steps, required(model, part, 8, 64, 64, COLUMNS)) == []


def test_the_program_of_a_gpu_is_read():
    """Its exchanges are started and waited for, and it converts logits after the exchange."""
    assert exchanges.collectives_of(hlo.parse(H100), 8) == Counter(
        {
            Collective("all-reduce", "bf16[512,4096]", 4096 * 512, 2 * 4096 * 512): 1,
            Collective("all-reduce", "f32[4096,512]", 4096 * 512, 4 * 4096 * 512): 1,
            Collective("all-to-all", "bf16[16032,64]", 16032 * 64, 2 * 16032 * 64): 1,
        }
    )
    halves = H100.replace("{'expert','tensor'}, use", "{'expert'}, use")
    assert "all-reduce of 1 devices" in {
        collective.kind for collective in exchanges.collectives_of(hlo.parse(halves), 8)
    }


@pytest.mark.slow
@pytest.mark.default_cases("mesh0")
@pytest.mark.parametrize("mesh", [{"tensor": 2}, {"tensor": 4}, {"tensor": 3}])
def test_a_compiled_step_has_the_exchanges_that_it_must_have(tiny, mesh):
    """Also where heads, vocabulary and rows do not divide."""
    engine = LLM(tiny, progress=False, mesh=mesh, **CONFIG).engine
    n = mesh["tensor"]
    model = engine.model
    program = hlo.parse(engine.runtime.programs[StepShape(T, R)].as_text())
    collectives = exchanges.collectives_of(program, n)
    required_exchanges = required(model.config, model.part, n, T, R, COLUMNS)
    assert differences(collectives, required_exchanges) == []
    wider = required(
        replace(model.config, hidden=model.config.hidden + 1), model.part, n, T, R, COLUMNS
    )
    assert [difference.wrong for difference in differences(collectives, wider)] == [True]


@pytest.mark.parametrize(
    ("collectives", "texts"),
    [
        (COLLECTIVES, []),
        (
            COLLECTIVES - Counter({SUM: 1}),
            ["all-reduce: 64 numbers (2 of f32[8,4]) in place of 96 in 3 exchanges"],
        ),
        (
            COLLECTIVES + Counter({Collective("collective-permute", "s32[7]", 7, 28): 2}),
            ["collective-permute: 14 numbers (2 of s32[7])"],
        ),
        (
            Counter({SUM: 3}),
            ["all-to-all: 0 numbers (none) in place of 20 in 1 exchanges"],
        ),
        (
            Counter({SUM: 3, LOGITS._replace(branch=True): 1}),
            [
                "all-to-all: 0 numbers (none) in place of 20",
                "all-to-all in a branch: 20 numbers (1 of f32[5,4]) in place of 0",
            ],
        ),
    ],
)
def test_other_exchanges_are_wrong(collectives, texts):
    problems = differences(collectives, REQUIRED)
    assert len(problems) == len(texts)
    for problem, text in zip(problems, texts, strict=True):
        assert problem.wrong
        assert problem.text.startswith(text)


@pytest.mark.parametrize(
    "sums",
    [
        Counter({SUM: 1, Collective("all-reduce", "f32[8,4] x 2", 64, 256): 1}),  # combined
        Counter({SUM: 2, Collective("all-reduce", "f32[4,4]", 16, 64): 2}),  # split
    ],
)
def test_combined_and_split_exchanges_are_named_and_not_wrong(sums):
    (difference,) = differences(sums, REQUIRED[:1])
    assert not difference.wrong
    assert (
        difference.text
        == f"all-reduce: {sums.total()} instructions for 3 exchanges of the same numbers"
    )


def test_the_time_of_exchanges_is_that_of_their_bytes_and_hops():
    """By hand, for 4 devices: a sum sends 2 x 3/4 of its bytes over two links, and waits for 2 x 2
    hops.
    """
    sums = Counter({SUM: 3})
    assert exchanges.seconds(sums, 4, TORUS) == pytest.approx(3 * (1.5 * 128 / 2e9 + 4e-6))
    # each of 4 devices sends a quarter to three others, at distances 1, 2 and 1; in a loop of 8
    # turns
    looped = Counter({LOGITS._replace(times=8): 1})
    assert exchanges.seconds(looped, 4, TORUS) == pytest.approx(8 * (80 / 4 * 4 / 2e9 + 2e-6))
    assert exchanges.seconds(sums, 4, SWITCH) == pytest.approx(3 * 1.5 * 128 / 1e9)


def test_layers_that_are_not_compiled_count_with_two_sums_each(tiny_llm):
    model = tiny_llm.engine.model.config
    seconds = 1.5 * 4 * model.hidden * 10 / 1e9
    assert exchanges.seconds_of_layers(model, 5, 4, 10, SWITCH) == pytest.approx(2 * 5 * seconds)


@pytest.mark.parametrize(
    ("attributes", "size"),
    [
        (", replica_groups={{0,1,2,3}}, use_global_device_ids=true", 4),
        (", replica_groups={{0,1},{2,3}}", 2),
        (", replica_groups=[2,4]<=[8]", 4),
        (", replica_groups={}", 8),
        (", replica_groups=mesh['expert'=2,'tensor'=4] {'expert','tensor'}, dimensions={0}", 8),
        (", replica_groups=mesh['expert'=2,'tensor'=4] {'tensor'}", 4),
        (", channel_id=1", 8),
    ],
)
def test_devices_of_an_exchange_are_read(attributes, size):
    assert exchanges.group_size(attributes, 8) == size
