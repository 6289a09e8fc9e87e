"""Programs as text: instructions, how often they run, and what of it is an array in memory."""

from __future__ import annotations

import pytest

from experiments.hardware import hlo
from experiments.hardware.hlo import Array

PROGRAM = """HloModule jit_step, is_scheduled=true, entry_computation_layout={(f32[8,4]{1,0})->f32[8,4]{1,0}}

FileNames
1 "a file (with a parenthesis"

%region_0.1 (a.1: f32[], b.1: f32[]) -> f32[] {
  %a.1 = f32[]{:T(128)} parameter(0)
  %b.1 = f32[]{:T(128)} parameter(1)
  ROOT %sum.1 = f32[]{:T(128)} add(%a.1, %b.1)
}

%fused_computation (p.1: f32[8,4], p.2: f32[4]) -> f32[8,4] {
  %p.1 = f32[8,4]{1,0:T(8,128)} parameter(0)
  %p.2 = f32[4]{0:T(128)} parameter(1)
  %put = f32[8,4]{1,0:T(8,128)} scatter(%p.1, %p.2), to_apply=%region_0.1
  ROOT %same = f32[8,4]{1,0:T(8,128)} bitcast(%put)
}

%body (loop: (s32[], f32[8,4])) -> (s32[], f32[8,4]) {
  %loop = (s32[]{:T(128)}, f32[8,4]{1,0:T(8,128)}) parameter(0)
  ROOT %next = (s32[]{:T(128)}, /*index=1*/f32[8,4]{1,0:T(8,128)S(1)}) tuple(%loop)
}

%end (loop.1: (s32[], f32[8,4])) -> pred[] {
  ROOT %less = pred[]{:T(512)} compare(%loop.1), direction=LT
}

%yes (x.1: f32[8,4]) -> f32[8,4] {
  %walk = (s32[]{:T(128)}, f32[8,4]{1,0}) while(%x.1), condition=%end, body=%body, \
backend_config={"known_trip_count":{"n":"8"},"flag":"a } b"}
  ROOT %got = f32[8,4]{1,0:T(8,128)} get-tuple-element(%walk), index=1, metadata={op_name="jit(f)/get(x)"}
}

%no (x.2: f32[8,4]) -> f32[8,4] {
  ROOT %x.2 = f32[8,4]{1,0:T(8,128)} parameter(0)
}

ENTRY %main.5 (x: f32[8,4]) -> f32[8,4] {
  %x = f32[8,4]{1,0:T(8,128)} parameter(0), sharding={devices=[8,1]<=[8]}
  %fusion = f32[8,4]{1,0:T(8,128)} fusion(%x, %x), kind=kCustom, calls=%fused_computation
  %started = (f32[8,4]{1,0}, u32[]{:S(2)}) copy-start(%fusion)
  %ended = f32[8,4]{1,0} copy-done(%started)
  ROOT %chosen = f32[8,4]{1,0:T(8,128)} conditional(%ended, %x, %x), branch_computations={%yes, %no}
}
"""


@pytest.fixture(scope="module")
def program():
    return hlo.parse(PROGRAM)


def test_computations_and_the_entry_are_found(program):
    assert program.entry == "main.5"
    assert set(program.computations) == {
        "region_0.1",
        "fused_computation",
        "body",
        "end",
        "yes",
        "no",
        "main.5",
    }


def test_an_instruction_has_its_arrays_operands_and_attributes(program):
    walk = program.computations["yes"][0]
    assert (walk.name, walk.opcode, walk.operands) == ("walk", "while", ("x.1",))
    assert walk.results == (Array("s32", ()), Array("f32", (8, 4)))
    assert hlo.called_computations(walk) == ("end", "body")
    assert program.results["next"] == (Array("s32", ()), Array("f32", (8, 4)))
    assert [instruction.root for instruction in program.computations["yes"]] == [False, True]


def test_bytes_of_an_array():
    shapes = "(f32[2,3]{1,0}, bf16[5]{0}, pred[7]{0}, s4[3]{0}, f8e4m3fn[2]{0}, s64[], token[])"
    assert [array.nbytes for array in hlo.arrays(shapes)] == [24, 10, 7, 3, 2, 8]


def test_what_runs_is_counted_by_loops_branches_and_fusions(program):
    sites = {site.instruction.name: site[1:] for site in hlo.sites(program)}
    assert sites["fusion"] == (1, False, False)
    assert sites["put"] == (1, False, True), "in a fusion"
    assert sites["got"] == (1, True, False), "in a branch"
    assert sites["next"] == (8, True, False), "in a loop of 8 turns in a branch"
    assert "sum.1" not in sites, "a function of scalars"


def test_a_loop_of_unknown_length_counts_once():
    text = PROGRAM.replace('"known_trip_count":{"n":"8"},', "")
    assert {site.times for site in hlo.sites(hlo.parse(text))} == {1}


def test_the_root_of_a_fusion_is_found_behind_bitcasts(program):
    assert hlo.root(program, "fused_computation").opcode == "scatter"


def test_other_text_is_refused():
    with pytest.raises(ValueError, match="it has no ENTRY; it begins with 'module @jit_f'"):
        hlo.parse("module @jit_f")
