"""The commands around the GPU kernels: compiling without a GPU, and tuning on one."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import jax
import pytest

from pallas_kernels import aot, timing, tune
from pallas_kernels.paged_attention import gpu, paged_attention
from pallas_kernels.tiles import Tiles

needs_kernels = pytest.mark.skipif(jax.__version_info__ < gpu.JAX_NEEDED, reason="the kernels need JAX 0.11")
needs_compiler = pytest.mark.skipif(
    bool(aot.what_is_missing()),
    reason="JAX's CUDA plugin or ptxas is not here; CI brings both for the command itself",
)

REPORT = """ptxas info    : 0 bytes gmem
ptxas info    : Compiling entry function 'body_mosaic_gpu_kernel' for 'sm_90a'
ptxas info    : Function properties for body_mosaic_gpu_kernel
    0 bytes stack frame, {stores} bytes spill stores, {loads} bytes spill loads
ptxas info    : Used 93 registers, used 16 barriers, 1 bytes smem
"""


def test_registers_and_spills_are_read_from_the_compilers_report():
    assert aot.read_ptxas(REPORT.format(stores=0, loads=0)) == (93, 0)
    assert aot.read_ptxas(REPORT.format(stores=8, loads=12)) == (93, 20)


def test_a_report_without_a_kernel_is_not_taken_for_a_good_one():
    with pytest.raises(ValueError, match="ptxas reported no kernel"):
        aot.read_ptxas("ptxas info    : 0 bytes gmem")


def test_every_claimed_shape_is_compiled():
    cases = list(aot.cases())
    assert len(set(cases)) == len(cases)
    for kernel in ("decode", "chunks"):
        mine = [case for case in cases if case.kernel == kernel]
        assert {(c.head_size, c.block_size) for c in mine} == {(d, s) for d in gpu.HEAD_SIZES for s in gpu.BLOCK_SIZES}
        assert {case.dtype for case in mine} == set(gpu.DTYPES)
        assert max(case.group for case in mine) == gpu.MAX_GROUP


def test_a_machine_that_cannot_compile_is_told_what_is_missing(capsys, monkeypatch):
    monkeypatch.setattr(jax, "__version_info__", (0, 10, 2))
    assert aot.main(["--target", "h200"]) == 2
    assert "it takes 0.11 or newer" in capsys.readouterr().err


def test_a_missing_plugin_is_named_with_the_command_that_brings_it(capsys, monkeypatch):
    monkeypatch.setattr(jax, "__version_info__", gpu.JAX_NEEDED)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert aot.main(["--target", "h100"]) == 2
    assert f"pip install --no-deps jax-cuda13-plugin=={jax.__version__}" in capsys.readouterr().err


@needs_compiler
def test_a_tile_that_does_not_fit_fails_with_a_sentence():
    command = [sys.executable, "-m", "pallas_kernels.aot", "--target", "h200", "--only", "decode", "--quick"]
    root = Path(__file__).parents[1]
    fits, does_not = (
        subprocess.run([*command, "--stages", stages], cwd=root, capture_output=True, text=True) for stages in "29"
    )
    assert fits.returncode == 0, fits.stdout + fits.stderr
    assert does_not.returncode == 1
    assert "FAILED: does not compile" in does_not.stdout
    assert "exceeds available shared memory" in does_not.stdout


def test_tuning_needs_the_device(capsys):
    assert tune.main(["--name", "h200"]) == 2
    assert "runs on platform 'gpu' and not on 'cpu'" in capsys.readouterr().err


def test_what_a_tuner_writes_is_what_is_read(tmp_path, monkeypatch):
    tiles = Tiles.read("h200")
    fields = json.loads(tune.as_json(tiles, "a note"))
    assert fields.pop("note") == "a note"
    fields["decode_tile"] = tuple((int(d), tile) for d, tile in fields["decode_tile"].items())
    assert Tiles(**fields) == tiles


@needs_kernels
def test_candidates_fit_and_the_present_tiles_are_among_them():
    from pallas_kernels.paged_attention import gpu_chunks, gpu_decode

    start = Tiles.read("h200")
    for d in gpu.HEAD_SIZES:
        found = list(tune.decode_candidates(start, d))
        assert start in found
        assert all(gpu_decode.shared_bytes(d, 4, 2, one) <= tune.SHARED for one in found)
    assert start in tune.chunk_candidates(start)
    assert start in tune.split_candidates(start)
    assert all(gpu_chunks.shared_bytes(128, 2, one) <= tune.SHARED for one in tune.chunk_candidates(start))


def test_the_fastest_candidate_wins_and_one_that_fails_does_not_stop_the_rest(capsys, monkeypatch):
    start = Tiles.read("h200")
    speeds = {128: 3.0, 256: None, 512: 1.0, 1024: 2.0, 2048: 4.0}

    def seconds(shape, tiles):
        if speeds[tiles.min_split] is None:
            raise RuntimeError("out of registers")
        return speeds[tiles.min_split]

    monkeypatch.setattr(tune, "seconds", seconds)
    assert tune.best("splits", tune.split_candidates(start), tune.TYPICAL).min_split == 512
    assert "out of registers" in capsys.readouterr().out
    monkeypatch.setattr(tune, "seconds", lambda *_: 1 / 0)
    with pytest.raises(SystemExit, match="no candidate of splits runs"):
        tune.best("splits", tune.split_candidates(start), tune.TYPICAL)


def test_a_measurement_has_pages_of_its_own_for_every_row():
    shape = timing.Shape(rows=5, queries=3, context=40, heads=2, group=3, d=64, s=16)
    made = timing.inputs(shape, seed=1)
    assert sorted(made.block_tables.ravel().tolist()) == list(range(1, 16))  # page 0 is nobody's
    out = paged_attention(*made, scale=0.125, impl="reference")
    assert out.shape == made.q.shape == (15, 6, 64)
    assert shape.cache_bytes == 5 * 40 * (made.k_pages[0, :, 0].nbytes + made.v_pages[0, :, 0].nbytes)
    assert shape.flops == 5 * (38 + 39 + 40) * 6 * 4 * 64
