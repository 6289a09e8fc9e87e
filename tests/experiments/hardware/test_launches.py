"""Launches of a program as text, and its CUDA graphs as the compiler logs them."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest

from experiments.hardware import hlo, launches
from experiments.hardware.launches import Kind

GRAPH = "Creating command buffer thunk {}with the following thunks"  # as XLA logs it

PROGRAM = """HloModule jit_step

%add (p.1: f32[8,4]) -> f32[8,4] {
  %p.1 = f32[8,4]{1,0} parameter(0)
  ROOT %sum.1 = f32[8,4]{1,0} add(%p.1, %p.1)
}

%body (loop: (s32[], f32[8,4])) -> (s32[], f32[8,4]) {
  %loop = (s32[], f32[8,4]{1,0}) parameter(0)
  %item = f32[8,4]{1,0} get-tuple-element(%loop), index=1
  %loop_add_fusion.7 = f32[8,4]{1,0} fusion(%item), kind=kLoop, calls=%add
  ROOT %next = (s32[], f32[8,4]{1,0}) tuple(%item, %loop_add_fusion.7)
}

%end (loop.1: (s32[], f32[8,4])) -> pred[] {
  %loop.1 = (s32[], f32[8,4]{1,0}) parameter(0)
  ROOT %less.2 = pred[] fusion(%loop.1), kind=kLoop, calls=%add
}

%yes (x.1: f32[8,4]) -> f32[8,4] {
  %x.1 = f32[8,4]{1,0} parameter(0)
  ROOT %only_in_a_branch = f32[8,4]{1,0} fusion(%x.1), kind=kLoop, calls=%add
}

%no (x.2: f32[8,4]) -> f32[8,4] {
  ROOT %x.2 = f32[8,4]{1,0} parameter(0)
}

ENTRY %main (x: f32[8,4]) -> f32[8,4] {
  %x = f32[8,4]{1,0} parameter(0)
  %loop_add_fusion = f32[8,4]{1,0} fusion(%x), kind=kLoop, calls=%add
  %mpmd_map.3 = f32[8,4]{1,0} custom-call(%loop_add_fusion), custom_call_target="mosaic_gpu_v2", \
metadata={op_name="jit(step)/jit(paged_attention)/paged_decode/mpmd_map"}
  %walk = (s32[], f32[8,4]{1,0}) while(%mpmd_map.3), condition=%end, body=%body, \
backend_config={"known_trip_count":{"n":"3"}}
  %got = f32[8,4]{1,0} get-tuple-element(%walk), index=1
  %copy.12.remat3 = f32[8,4]{1,0} copy(%got)
  ROOT %cond.1.clone = f32[8,4]{1,0} conditional(%copy.12.remat3, %x, %x), branch_computations={%yes, %no}
}
"""


def test_launches_are_counted_by_kind_with_loops_and_without_branches():
    by_name = {kind.name: kind for kind in launches.kinds(hlo.parse(PROGRAM))}
    assert by_name["loop_add_fusion"] == Kind("loop_add_fusion", 1 + 3, 4 * 128, wide=4 * 128)
    assert by_name["paged_decode"] == Kind("paged_decode", 1, 128, wide=128)
    assert by_name["copy"] == Kind("copy", 1, 128, wide=128)
    assert "only_in_a_branch" not in by_name
    assert set(by_name) == {"loop_add_fusion", "paged_decode", "copy", "less"}
    assert by_name["less"].wide == 0
    assert "0.0 MiB of their results are float32" in launches.lines((by_name["less"],), 1)
    assert [kind.launches for kind in launches.kinds(hlo.parse(PROGRAM))] == sorted(
        (kind.launches for kind in by_name.values()), reverse=True
    )


LINE = (
    '  %custom.7 = f32[8]{0} custom-call(%x), custom_call_target="tpu_custom_call", metadata={NAME}'
)


@pytest.mark.parametrize(
    ("name", "kernel"),
    [
        ('op_name="jit(step)/jit(_linear)/linear_int4_128"', "linear_int4_128"),
        ('op_name="jit(step)/jit(_linear)"', "custom"),
        ("", "custom"),
    ],
)
def test_a_kernel_has_the_name_of_its_operation_or_of_its_instruction(name, kernel):
    text = f"ENTRY %main (x: f32[8]) -> f32[8] {{\n{LINE.replace('NAME', name)}\n}}"
    assert launches.kernels(hlo.parse(text)) == {kernel: 1}
    assert launches.kernels(hlo.parse(PROGRAM)) == {"paged_decode": 1}


@pytest.mark.parametrize("name", ["", "command_buffer_1 "], ids=["JAX 0.11", "JAX 0.12"])
@pytest.mark.parametrize(
    ("thunks", "loop"),
    [
        (["loop_add_fusion, walk, copy.12.remat3"], (True, 0, 0)),
        (["loop_add_fusion, mpmd_map.3", "loop_add_fusion.7"], (False, 1, 1)),
        (["loop_add_fusion.7, choice"], (False, 1, 0)),
        ([], (False, 0, 1)),
    ],
)
def test_the_loop_of_a_span_is_in_a_graph_or_the_hosts(thunks, loop, name):
    choice = (
        "  %choice = (f32[8,4]{1,0}) conditional(%item, %x, %x), branch_computations={%yes, %no}"
    )
    body_root = "  ROOT %next = "
    program = hlo.parse(PROGRAM.replace(body_root, f"{choice}\n{body_root}"))
    log = "\n".join(f"I pass.cc:564] {GRAPH.format(name)}: {names}" for names in thunks)
    turn = (Kind("loop_add_fusion", 1, 128, wide=128),)
    assert launches.loop(program, 3, log) == launches.Loop(turn, *loop)
    assert launches.loop(program, 4, log) is None
    assert launches.loop(program, 1, log) is None


def test_a_compiled_program_has_launches():
    text = jax.jit(lambda x: jnp.sin(x) @ x).lower(jnp.ones((64, 64))).compile().as_text()
    assert sum(kind.launches for kind in launches.kinds(hlo.parse(text))) >= 1


@pytest.mark.parametrize(
    ("log", "number"),
    [
        ("", None),
        ("I command_buffer_conversion_pass.cc:392] Thunk kind kWhile lowering is not enabled", 0),
        (
            f"I command_buffer_conversion_pass.cc:1] {GRAPH.format('')}: a, b\nother\n"
            f"I pass.cc] {GRAPH.format('command_buffer_1 ')}: c",
            2,
        ),
    ],
)
def test_graphs_are_counted_in_the_compilers_log(log, number):
    assert launches.graphs(log) == number
