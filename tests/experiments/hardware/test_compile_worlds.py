"""The scheduler on arrays lowers for chips that are not here, and compiles with their compilers."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import jax
import pytest

from experiments.hardware import compile_worlds
from experiments.twin import policies
from experiments.twin.environment import Environment
from experiments.twin.rollout import returns
from pallas_kernels import aot_tpu

needs_compiler = pytest.mark.skipif(
    bool(aot_tpu.what_is_missing()),
    reason="libtpu is not installed; CI installs it for the commands",
)


@pytest.mark.parametrize("platform", ["tpu", "cuda"])
def test_worlds_lower_for_a_chip(platform):
    """To StableHLO without a call of the host, so that a device runs whole episodes alone."""
    program, shapes = compile_worlds.episodes(requests=8, worlds=16)
    exported = jax.export.export(jax.jit(program), platforms=[platform])(*shapes)
    assert exported.platforms == (platform,)
    (result,) = exported.out_avals
    assert (result.shape, result.dtype.name) == ((16,), "float32")
    text = exported.mlir_module()
    assert "stablehlo.while" in text
    assert "callback" not in text


def test_worlds_under_a_policy_that_evicts_lower_for_chips():
    world = Environment(8)
    params = world.default_params
    decide = policies.without_parameters(policies.find("mlfq"))
    program = jax.jit(lambda keys: returns(world, decide, None, params, keys))
    keys = jax.eval_shape(lambda: jax.random.split(jax.random.key(0), 16))
    exported = jax.export.export(program, platforms=["tpu", "cuda"])(keys)
    assert exported.platforms == ("tpu", "cuda")
    assert "callback" not in exported.mlir_module()


@needs_compiler
@pytest.mark.slow
def test_worlds_compile_for_a_tpu():
    command = [sys.executable, "-m", "experiments.hardware.compile_worlds"]
    options = ["--target", "v5e", "--worlds", "64", "--requests", "16"]
    root = Path(__file__).parents[3]
    process = subprocess.run(
        [*command, *options], cwd=root, env=os.environ, capture_output=True, text=True
    )
    assert process.returncode == 0, process.stderr
    assert "64 worlds of 16 requests: compiled for one v5e" in process.stdout


def test_a_missing_compiler_is_named(monkeypatch, capsys):
    monkeypatch.setattr(compile_worlds.compilers, "what_is_missing", lambda target: "no compiler")
    assert compile_worlds.main(["--target", "v5e"]) == 2
    assert "error: no compiler" in capsys.readouterr().err
