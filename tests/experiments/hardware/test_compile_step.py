"""Steps compiled for chips that are not here: sizes, errors and checks without a compiler, and with
one where it is.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections import Counter
from pathlib import Path

import chex
import jax
import pytest

from experiments.bench.random_llama import SHAPES, random_stored_model
from experiments.hardware import compile_step, compiled, compilers, exchanges, hlo
from experiments.hardware.compiled import Plan
from experiments.hardware.compilers import TARGETS, Target
from pagedjax.device import memory
from pagedjax.device.placement import make_placement
from pagedjax.engine import programs
from pagedjax.options.config import MeshConfig
from pallas_kernels import aot, aot_tpu

needs_compiler = pytest.mark.skipif(
    bool(aot_tpu.what_is_missing()),
    reason="libtpu is not installed; CI installs it for the commands",
)
CPU = Target("cpu", "cpu", 4 * memory.GIB, "xla", "tpu-v5e")
PLAN = Plan(tokens=64, rows=24, block_size=4, length=64, fraction=0.5)


# --- topologies -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("target", "n", "topology"),
    [
        ("v5e", 8, "v5e:2x4"),
        ("v5e", 9, "v5e:4x4"),
        ("v4", 8, "v4:2x2x1"),
        ("tpu7x", 8, "tpu7x:2x2x1"),
        ("h100", 8, "1x1x8"),
        ("h200", 1, "1x1x1"),
    ],
)
def test_the_default_topology_is_the_smallest_that_is_enough(target, n, topology):
    assert compilers.topology_of(compilers.target(target), n) == topology
    assert compilers.size(compilers.target(target), topology) >= n


@pytest.mark.parametrize(
    ("target", "n", "topology", "message"),
    [
        (
            "v5e",
            16,
            "v5e:2x4",
            r"the mesh has 16 devices, and the topology v5e:2x4 8; use a smaller --mesh, .* v5e:4x4",
        ),
        ("h200", 8, "v5e:2x4", r"--topology is 'v5e:2x4'; for h200 write 1x1x8"),
        ("v6e", 1000, None, r"no default topology of v6e has so many; give --topology"),
    ],
)
def test_a_wrong_topology_is_refused(target, n, topology, message):
    with pytest.raises(ValueError, match=message):
        compilers.topology_of(compilers.target(target), n, topology)


@pytest.mark.parametrize("name", TARGETS)
def test_every_target_has_memory_and_links(name):
    target = compilers.target(name)
    assert target.memory > 10e9
    assert target.network(1) is None
    assert target.network(8) is not None


# --- shapes ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("weights", ["bfloat16", "int8"])
@pytest.mark.parametrize("n", [2, 4, 3])
def test_a_model_of_shapes_has_the_bytes_of_one_devices_part(weights, n):
    config = compile_step.config_of("small", weights)
    placement = make_placement(config, MeshConfig(tensor=n), None, jax.devices())
    model = compiled.on_mesh(placement)
    assert (
        memory.nbytes(model.leaves) == compiled.room(placement.part, CPU, PLAN, "a device").weights
    )
    assert {len(x.sharding.device_set) for x in model.leaves} == {n}


@pytest.mark.parametrize("products", ["pallas_gpu", "pallas_tpu", "xla"])
def test_stored_matrices_of_shapes_have_the_bytes_of_an_engines(products):
    """In the layout of their implementation; the embedding and the head are floats."""
    name = "small"
    shapes = compiled.on_one_device(compile_step.config_of(name, "int4_128", products=products))
    model = random_stored_model(SHAPES[name], "bfloat16", "int4_128", products)
    chex.assert_trees_all_equal_shapes_and_dtypes(shapes.leaves, model.leaves)
    assert memory.nbytes(shapes.leaves) == memory.nbytes(model.leaves)
    sizes = SHAPES[name]
    hidden = sizes["hidden_size"]
    heads = sizes["num_attention_heads"] + 2 * sizes["num_key_value_heads"]
    rows = heads * hidden // sizes["num_attention_heads"] + hidden
    numbers = sizes["num_hidden_layers"] * hidden * (rows + 3 * sizes["intermediate_size"])
    in_blocks = sum(x.nbytes for x in model.leaves if x.dtype in ("int32", "uint8"))
    assert numbers * 17 // 32 <= in_blocks < 2.2 * numbers * 17 // 32  # padded inputs


@pytest.fixture(scope="module")
def step():
    """A step of a small model's layer on four virtual devices, from shapes alone."""
    config = compile_step.config_of("small", "bfloat16", 1)
    placement = make_placement(config, MeshConfig(tensor=4), None, jax.devices())
    with pytest.MonkeyPatch.context() as patch:
        # the options of tests (quick_compiler.py), with which a program is compiled faster
        patch.setattr(compiled, "compiler_options", programs.compiler_options)
        model = compiled.on_mesh(placement)
        return compiled.compile_step(model, CPU, PLAN, blocks=50, device=jax.devices()[0])


@pytest.mark.slow
def test_a_step_from_shapes_exchanges_what_it_must(step):
    assert [
        difference.text
        for difference in exchanges.differences(step.collectives, step.required)
        if difference.wrong
    ] == []
    sums = [exchange.times for exchange in step.required if exchange.kind == "all-reduce"]
    assert sums == [1, 2]
    assert step.aliased == step.cache


@pytest.mark.slow
def test_what_must_not_be_in_a_step_is_named(step):
    clean = step._replace(copies=Counter({"parameter": 4, "scatter": 4}))
    assert compile_step.faults(clean) == []
    assert compile_step.faults(clean._replace(copies=Counter({"copy": 2, "tuple": 1}))) == [
        "whole cache arrays are made by 2 x copy"
    ]
    (text,) = compile_step.faults(clean._replace(aliased=step.cache - 1))
    assert text.endswith(f" of {step.cache:,} bytes of the cache are updated in place")
    assert compile_step.faults(clean._replace(logits_copies=3)) == [
        "the logits of rows without options are copied 3 times"
    ]
    rotated = clean._replace(copies=Counter(), kernels=Counter({"rotated_write": 2}))
    assert compile_step.faults(rotated, 2) == []
    for wrong in (rotated._replace(kernels=Counter()), rotated._replace(copies=clean.copies)):
        (text,) = compile_step.faults(wrong, 2)
        assert text.startswith("2 layers rotate and write by one kernel, and it runs ")
    (text,) = compile_step.faults(clean._replace(required=step.required[1:]))
    assert text.startswith("all-reduce: ")


def test_instructions_that_make_a_whole_cache_array_are_counted():
    program = hlo.parse(
        """
%put (a: bf16[9,2,8,128], b: bf16[1]) -> bf16[9,2,8,128] {
  %a = bf16[9,2,8,128]{3,2,1,0} parameter(0)
  %b = bf16[1]{0} parameter(1)
  ROOT %s = bf16[9,2,8,128]{3,2,1,0} scatter(%a, %b)
}
ENTRY %main (p: bf16[9,2,8,128], q: bf16[4,2,8,128]) -> bf16[9,2,8,128] {
  %p = bf16[9,2,8,128]{3,2,1,0} parameter(0)
  %q = bf16[4,2,8,128]{3,2,1,0} parameter(1)
  %c = bf16[9,2,8,128]{3,1,2,0:T(8,128)} copy(%p)
  %d = (bf16[18,8,128]{2,1,0:T(8,128)S(1)}, u32[]{:S(2)}) copy-start(%c)
  %e = bf16[4,2,8,128]{3,2,1,0} copy(%q)
  ROOT %f = bf16[9,2,8,128]{3,2,1,0} fusion(%p, %q), kind=kInput, calls=%put
}
"""
    )
    counts = compiled.whole_arrays(program, 2 * 9 * 2 * 8 * 128)
    assert counts == Counter({"parameter": 1, "copy": 1, "copy-start": 1, "scatter": 1})


def test_copies_of_logits_are_counted_where_no_row_has_options():
    """Not in a fusion, which copies nothing, nor in the last of three branches."""
    program = hlo.parse(
        """
%copied (a: f32[4,300]) -> f32[4,300] {
  %a = f32[4,300]{1,0} parameter(0)
  ROOT %b = f32[4,300]{1,0} copy(%a)
}
%best (c: f32[4,300]) -> s32[4] {
  %c = f32[4,300]{1,0} parameter(0)
  %d = f32[4,300]{1,0} fusion(%c), kind=kLoop, calls=%copied
  ROOT %e = s32[4]{0} custom-call(%d)
}
%general (f: f32[4,300]) -> s32[4] {
  %f = f32[4,300]{1,0} parameter(0)
  %g = f32[4,300]{1,0} conditional(s32[] %f, %f), branch_computations={%copied, %copied}
  ROOT %h = s32[4]{0} custom-call(%g)
}
ENTRY %main (p: f32[4,300]) -> s32[4] {
  %p = f32[4,300]{1,0} parameter(0)
  %q = s32[4]{0} copy(%p)
  ROOT %r = s32[4]{0} conditional(%p, %p), branch_computations={%best, %best, %general}
}
"""
    )
    assert compiled.logits_copies(program, 4, 300) == 0
    assert compiled.logits_copies(program._replace(entry="general"), 4, 300) == 2


def test_large_copies_are_counted_by_shape_and_place():
    program = hlo.parse(
        """
%yes (x.1: f32[8,4]) -> f32[8,4] {
  %x.1 = f32[8,4]{1,0} parameter(0)
  ROOT %in_branch = f32[8,4]{1,0} copy(%x.1)
}
%no (x.2: f32[8,4]) -> f32[8,4] {
  ROOT %x.2 = f32[8,4]{1,0} parameter(0)
}
ENTRY %main (x: f32[8,4]) -> f32[8,4] {
  %x = f32[8,4]{1,0} parameter(0)
  %large = f32[2,8,4]{2,1,0} copy(%x)
  %small = f32[8]{0} copy(%x)
  ROOT %c = f32[8,4]{1,0} conditional(%x, %x, %x), branch_computations={%yes, %no}
}
"""
    )
    counts = compiled.large_copies(program, 4 * 8 * 4)
    assert counts == Counter({"f32[8,4] in a branch": 1, "f32[2,8,4]": 1})


@pytest.mark.slow
def test_a_span_from_shapes_is_in_place_and_stands_beside_one_step():
    model = compiled.on_one_device(compile_step.config_of("small", "bfloat16", 1))
    plan = PLAN._replace(tokens=PLAN.rows, span=4)
    span, single = (
        compiled.compile_step(model, CPU, sizes, blocks=50, device=jax.devices()[0])
        for sizes in (plan, plan._replace(span=1))
    )
    assert span is not None
    assert single is not None
    assert span.aliased == span.cache
    text = compile_step.span_lines(span, single, plan)
    assert text.startswith("a span of 4 steps, beside one step:")
    assert f"{memory.size(single.activations)} for one step" in text


@pytest.mark.slow
def test_layers_that_are_not_compiled_are_in_the_report(step):
    config = compile_step.config_of("small", "bfloat16")
    target = compilers.target("v5e")
    room = compiled.room(config, CPU, PLAN, "a device")
    memory_report = compile_step.memory_lines(room, step, 9, PLAN, (1, 8))
    assert "extrapolated from 1 compiled layers to 8" in memory_report
    network = target.network(4)
    assert network is not None
    seconds = exchanges.seconds(step.collectives, 4, network)
    seconds += exchanges.seconds_of_layers(config, 7, 4, PLAN.tokens, network)
    report = compile_step.exchange_lines(step, config, target, PLAN, 4, 7)
    assert f"; {1e3 * seconds:.2f} ms with 7 more layers" in report


# --- the command ----------------------------------------------------------------------------------


@pytest.fixture
def no_compiler(monkeypatch):
    """The command believes that a compiler is there; what it refuses before it compiles needs
    none.
    """
    monkeypatch.setattr(aot_tpu, "what_is_missing", lambda: "")
    monkeypatch.setattr(aot_tpu, "prepare", lambda: None)


@pytest.mark.parametrize("mesh", [(), ("--mesh", "tensor=2")])
def test_a_model_that_does_not_fit_is_an_error_with_its_name(capsys, no_compiler, mesh):
    large = ["--model", "llama-3-8b", "--fraction", "0.0001"]
    assert compile_step.main(["--target", "v5e", *large, *mesh]) == 1
    devices = "2 x v5e" if mesh else "one v5e"
    errors = capsys.readouterr().err
    assert f"llama-3-8b in bfloat16, 512 tokens a step, on {devices}: it does not fit" in errors
    assert "smaller: --weights int8 or int4_128, or a larger --mesh" in errors


def test_a_wrong_mesh_is_an_error(capsys):
    with pytest.raises(SystemExit):
        compile_step.main(["--target", "v5e", "--mesh", "tensor"])
    assert "'tensor' is no mesh; write tensor=8" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--layers", "17"], "--layers is 17; llama-3.2-1b has 16, and one is the least"),
        (["--mesh", "tensor=64"], "the mesh has 64 devices, and the model 32 heads"),
        (["--mesh", "expert=2"], "mesh.expert is 2, and the model has no experts"),
        (
            ["--target", "h100", "--mesh", "tensor=16"],
            "the links of h100 connect at most 8 chips",
        ),
        (
            ["--linear", "pallas_gpu"],
            "which is for other chips than v5e; use 'xla' or 'pallas_tpu'",
        ),
        (
            ["--linear", "pallas_tpu", "--weights", "int8", "--mesh", "tensor=2"],
            "--linear is 'pallas_tpu', which is for one device; leave --mesh out",
        ),
        (
            ["--linear", "pallas_tpu"],
            "multiplies matrices in words, .* and the model's are bfloat16; choose other --weights",
        ),
        (
            ["--attention", "pallas_gpu_fused"],
            "which is for other chips than v5e; use 'xla', or a name that begins with 'pallas_tpu'",
        ),
        (["--loops", "host"], "--loops is 'host', which is for a --span on a GPU"),
        (["--span", "8", "--mesh", "tensor=2"], "--span is 8, which is for one device"),
        (["--span", "8", "--tokens", "512"], "--tokens is 512 and --rows 64; a span has one"),
    ],
)
def test_what_cannot_be_compiled_is_refused(capsys, arguments, message):
    assert compile_step.main(["--target", "v5e", *arguments]) == 2
    assert re.search(message, capsys.readouterr().err)


def test_a_missing_compiler_is_an_error_with_the_command_that_installs_it(capsys, monkeypatch):
    monkeypatch.setattr(aot_tpu.importlib.util, "find_spec", lambda name: None)
    assert compile_step.main(["--target", "v5e", "--mesh", "tensor=8"]) == 2
    assert (
        "libtpu is missing; pip install --no-deps --target DIR 'libtpu==0.0."
        in capsys.readouterr().err
    )


@needs_compiler
@pytest.mark.slow
@pytest.mark.parametrize(
    ("target", "model", "mesh"),
    [
        ("v5e", "llama-3.2-1b", ()),
        ("v5e", "llama-3-8b", ()),
        ("v6e", "llama-3.2-1b", ()),
        ("v6e", "llama-3-8b", ()),
        ("v5e", "llama-3-8b", ("--mesh", "tensor=8")),
    ],
)
def test_a_step_compiles_in_place(target, model, mesh):
    sizes = ["--layers", "1" if mesh else "2", "--tokens", "64"]
    module = [sys.executable, "-m", "experiments.hardware.compile_step"]
    child = subprocess.run(
        [*module, "--target", target, "--model", model, *sizes, *mesh],
        cwd=Path(__file__).parents[3],
        capture_output=True,
        text=True,
        env=os.environ | {"JAX_PLATFORMS": "cpu"},
        timeout=900,
    )
    assert child.returncode == 0, child.stdout + child.stderr
    assert "the cache is updated in place" in child.stdout
    assert ("exchanges of 8 devices" in child.stdout) == bool(mesh)


@pytest.mark.skipif(bool(aot.what_is_missing()), reason="JAX's CUDA compiler is not installed")
@pytest.mark.slow
def test_a_kernel_that_rotates_and_writes_takes_launches_out_of_every_layer():
    """A decode of 256 rows, with products of cuBLAS, as a GPU has them: those of XLA's own kernels
    end with a sum, which is a launch more before this kernel.
    """

    def launches(*options: str) -> int:
        command = ["--target", "h200", "--model", "llama-3.2-1b", "--layers", "3", *options]
        child = subprocess.run(
            [sys.executable, "-m", "experiments.hardware.compile_step", *command],
            cwd=Path(__file__).parents[3],
            capture_output=True,
            text=True,
            env=os.environ | {"XLA_FLAGS": "--xla_gpu_enable_triton_gemm=false"},
            timeout=900,
        )
        assert child.returncode == 0, child.stdout + child.stderr
        (count,) = re.findall(r"(\d+) launches outside of branches", child.stdout)
        return int(count)

    sizes = "--tokens", "256", "--rows", "256"
    # two launches in each layer but the last; two slices and the angles are launches of their own
    assert launches(*sizes) - launches(*sizes, "--attention", "pallas_gpu_fused") == 3
