"""The tools around the kernels: compiling for chips that are not present, tuning on one that is,
and timing.
"""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest

from pallas_kernels import aot, aot_linear, aot_states, aot_tpu, bundles, timing, tune
from pallas_kernels.linear import pallas_tpu as linear_tpu
from pallas_kernels.linear.pallas_gpu import dense_sizes
from pallas_kernels.linear.pallas_gpu.layout import SMALLEST
from pallas_kernels.paged_attention import paged_attention
from pallas_kernels.paged_attention.pallas_gpu import implementation as pallas_gpu
from pallas_kernels.paged_attention.pallas_tpu import implementation as pallas_tpu
from pallas_kernels.shared.device import device_kind
from pallas_kernels.states.pallas_tpu import implementation as states_tpu
from pallas_kernels.tiles import TPUS, Tiles, TpuTiles
from tests.refusals import refused

pytestmark = pytest.mark.few_optimisations
ROOT = Path(__file__).parents[2]

needs_kernels = pytest.mark.skipif(
    jax.__version_info__ < pallas_gpu.JAX_NEEDED, reason="the kernels need JAX 0.11"
)
needs_compiler = pytest.mark.skipif(
    bool(aot.what_is_missing()),
    reason="JAX's CUDA plugin or ptxas is not installed; CI installs both for the command",
)
needs_libtpu = pytest.mark.skipif(
    bool(aot_tpu.what_is_missing()),
    reason="libtpu is not installed; CI installs it for the command",
)


REPORT = """ptxas info    : 0 bytes gmem
ptxas info    : Compiling entry function 'body_mosaic_gpu_kernel' for 'sm_90a'
ptxas info    : Function properties for body_mosaic_gpu_kernel
    0 bytes stack frame, {stores} bytes spill stores, {loads} bytes spill loads
ptxas info    : Used 93 registers, used 16 barriers, 1 bytes smem
"""


def test_a_kernel_on_a_mesh_finds_the_kind_of_its_device():
    """Tiles are chosen by it, also where the chip is not here and the first device is a CPU."""
    h200 = jax.sharding.AbstractDevice("NVIDIA H200", 132, "gpu")
    auto = (jax.sharding.AxisType.Auto,)  # newer versions of JAX have explicit axes by default
    mesh = jax.sharding.AbstractMesh((2,), ("x",), axis_types=auto, abstract_device=h200)
    kinds = []
    spec = jax.sharding.PartitionSpec("x")

    def body(x):
        kinds.append(device_kind())
        return x

    jax.eval_shape(jax.shard_map(body, mesh=mesh, in_specs=spec, out_specs=spec), jnp.zeros(2))
    assert kinds == ["NVIDIA H200"]
    assert device_kind() == jax.devices()[0].device_kind


SERIALISED = """ptxas info    : (C7513) Potential Performance Loss: wgmma.mma_async instructions are
 serialized due to non wgmma instructions defining input registers of a wgmma between start and end
 of the pipeline stage in the function 'body_mosaic_gpu_kernel'
""".replace("\n ", " ")


def test_registers_spills_and_serialised_products_are_read_from_the_report_of_ptxas():
    report = REPORT.format(stores=0, loads=0)
    assert aot.read_ptxas(report) == (93, 0, False)
    assert aot.read_ptxas(SERIALISED + report) == (93, 0, True)
    assert aot.read_ptxas(REPORT.format(stores=8, loads=12)) == (93, 20, False)
    with refused("ptxas reported no kernel"):
        aot.read_ptxas("ptxas info    : 0 bytes gmem")


def test_every_supported_gpu_shape_is_compiled():
    cases = list(aot.cases())
    assert len(set(cases)) == len(cases)
    for kernel in ("decode", "chunks", "overlapped"):
        kernel_cases = [case for case in cases if case.kernel == kernel]
        assert {(c.head_size, c.block_size) for c in kernel_cases} == {
            (d, s) for d in pallas_gpu.HEAD_SIZES for s in pallas_gpu.BLOCK_SIZES
        }
        assert {case.dtype for case in kernel_cases} == set(pallas_gpu.DTYPES)
        assert max(case.group for case in kernel_cases) == pallas_gpu.MAX_GROUP
        with_sinks = {(case.head_size, case.queries) for case in kernel_cases if case.sinks}
        assert with_sinks == {(case.head_size, case.queries) for case in kernel_cases}
    latents = [case for case in cases if case.kernel == "latents"]
    assert {case.block_size for case in latents} == set(pallas_gpu.BLOCK_SIZES)
    assert {case.dtype for case in latents} == set(pallas_gpu.DTYPES)
    assert {case.head_size for case in latents} == {pallas_gpu.LATENT[1]}
    assert {*aot.GPT_OSS, latents[0]} <= set(aot.quick(cases))


@pytest.mark.parametrize(
    ("change", "error"),
    [
        ({}, None),
        ({"spilled": 8}, "spills 8 bytes of registers to memory; use smaller tiles"),
        ({"serialised": True}, "ptxas lets each product (WGMMA) wait for the one before"),
    ],
)
def test_a_kernel_that_spills_or_is_serialised_fails(change, error, capsys, monkeypatch):
    good = aot.Compiled(93, 0, serialised=False, shared=1024, stages=2, seconds=1.0)
    monkeypatch.setattr(aot, "compile_case", lambda *args: good._replace(**change))
    case = aot.GPT_OSS[0]
    assert aot.report(case, aot.TARGETS["h200"], Tiles.read("h200"), True) is (error is None)
    assert json.loads(capsys.readouterr().out).get("error") == error


@pytest.mark.parametrize(
    ("products", "smallest"),
    [(aot_linear.gpu_products, SMALLEST), (aot_linear.tpu_products, linear_tpu.PIECE)],
    ids=["gpu", "tpu"],
)
def test_every_stored_format_is_compiled(products, smallest):
    cases = list(products())
    assert len(set(cases)) == len(cases)
    assert {case.weights for case in cases} == set(aot_linear.formats(smallest))
    quick = aot_linear.quick(cases)
    assert {case.weights for case in quick if case.count == 1} == set(aot_linear.OFTEN)
    assert [case.count for case in quick if case.count > 1] == [32]


def test_products_of_floats_are_compiled_with_every_width_of_a_tile():
    cases = list(aot_linear.float_products())
    assert len(set(map(str, cases))) == len(cases)
    widths = {case.outputs for case in cases if case.outputs}
    assert widths == set(dense_sizes.WIDTHS)
    for target in aot.TARGETS:
        tiles = Tiles.read(target)
        sizes = [case.sizes(tiles)[1] for case in cases]
        assert {(size.rows, size.gated, size.shares > 1) for size in sizes} == {
            *((rows, gated, False) for rows in (64, 128) for gated in (False, True)),
            *((rows, False, True) for rows in (64, 128)),
        }
        assert any(size.parts > size.shares for size in sizes)
    quick = aot_linear.quick_floats(cases)
    assert {(case.activation, case.residual) for case in quick} >= {
        (None, False),
        (None, True),
        ("silu", False),
    }


def test_the_roofline_of_a_product_counts_its_words_once():
    tiles = TpuTiles.read("v5e")
    product = aot_linear.Product("int4_128", 4096, 4096, tokens=16)
    estimate = aot_tpu.estimate_of_product(product, tiles)
    weight = 4096 * 4096 * 4.25 / 8
    assert estimate.nbytes == weight + 16 * 4096 * (2 + 4)
    assert estimate.flops == 2 * 16 * 4096 * 4096
    assert estimate.seconds == pytest.approx(estimate.nbytes / tiles.bandwidth)


def test_an_old_jax_is_an_error_with_the_needed_version(capsys, monkeypatch):
    monkeypatch.setattr(jax, "__version_info__", (0, 10, 2))
    assert aot.main(["--target", "h200"]) == 2
    assert "it takes 0.11 or newer" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("target", "remedy"),
    [
        ("h100", f"pip install --no-deps jax-cuda13-plugin=={jax.__version__}"),
        ("v5e", "libtpu is missing; pip install --no-deps --target DIR 'libtpu==0.0."),
    ],
)
def test_a_missing_compiler_is_an_error_with_the_command_that_installs_it(
    target, remedy, capsys, monkeypatch
):
    monkeypatch.setattr(jax, "__version_info__", pallas_gpu.JAX_NEEDED)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert aot.main(["--target", target]) == 2
    assert remedy in capsys.readouterr().err


@pytest.mark.parametrize("target", ["h200", "v5e"])
def test_compiling_for_a_chip_starts_no_device(target):
    """JAX reads JAX_PLATFORMS when it is imported, and its plugin fails to start a GPU without
    cuDNN.
    """
    program = f"""
import jax
from pallas_kernels import aot, aot_tpu
def seen(*_, **__):
    print("platforms:", jax.config.jax_platforms)
    raise ValueError
aot.what_is_missing = aot_tpu.what_is_missing = lambda: ""
aot.compile_case = aot_tpu.compile_case = seen
raise SystemExit(aot.main(["--target", "{target}", "--quick"]))
"""
    environment = {name: value for name, value in os.environ.items() if name != "JAX_PLATFORMS"}
    child = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, env=environment, capture_output=True, text=True
    )
    assert {line for line in child.stdout.splitlines() if line.startswith("platforms")} == {
        "platforms: cpu"
    }, child.stderr


def compile_kernels(target: str, *options: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "pallas_kernels.aot", "--target", target, "--quick", *options]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True)


@needs_compiler
def test_tiles_beyond_shared_memory_are_reported():
    fits, does_not = (
        compile_kernels("h200", "--only", "decode", "--stages", stages) for stages in "29"
    )
    assert fits.returncode == 0, fits.stdout + fits.stderr
    assert does_not.returncode == 1
    assert "FAILED: does not compile" in does_not.stdout
    assert "exceeds available shared memory" in does_not.stdout


def test_tuning_on_another_device_is_an_error(capsys):
    assert tune.main(["--name", "h200"]) == 2
    assert "runs on platform 'gpu' and not on 'cpu'" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("name", "kind", "wrong"),
    [
        ("h200", "NVIDIA H200", ""),
        ("h100", "NVIDIA H100 80GB HBM3", ""),
        (
            "h100",
            "NVIDIA H200",
            "--name is 'h100', and the GPU is 'NVIDIA H200'; give a part of its name in lower case",
        ),
        ("H200", "NVIDIA H200", "--name is 'H200'"),
        ("", "NVIDIA H200", "--name is ''"),
    ],
)
def test_tiles_have_the_name_of_their_device(name, kind, wrong):
    complaint = tune.wrong_name(name, kind)
    assert complaint.startswith(wrong) if wrong else complaint == ""


def test_written_tiles_are_read_back(tmp_path, monkeypatch):
    tiles = Tiles.read("h200")
    fields = json.loads(tune.as_json(tiles, "a note"))
    assert fields.pop("note") == "a note"
    for key in ("decode_tile", "product_parts"):
        fields[key] = tuple((int(size), value) for size, value in fields[key].items())
    assert Tiles(**fields) == tiles


@needs_kernels
def test_candidates_fit_and_include_the_present_tiles():
    from pallas_kernels.paged_attention.pallas_gpu import chunks, decode

    start = Tiles.read("h200")
    for d in pallas_gpu.HEAD_SIZES:
        candidates = list(tune.decode_candidates(start, d))
        assert start in candidates
        assert all(decode.shared_bytes(d, 4, 2, tiles) <= tune.SHARED for tiles in candidates)
    assert start in tune.chunk_candidates(start)
    assert start in tune.split_candidates(start)
    assert all(
        chunks.shared_bytes(128, 2, tiles) <= tune.SHARED for tiles in tune.chunk_candidates(start)
    )


def test_the_fastest_candidate_is_chosen_and_failing_ones_are_skipped(capsys, monkeypatch):
    start = Tiles.read("h200")
    speeds = {128: 3.0, 256: None, 512: 1.0, 1024: 2.0, 2048: 4.0}

    def program(shape, rehearse, tiles):
        return RuntimeError("out of registers") if speeds[tiles.min_split] is None else tiles

    monkeypatch.setattr(tune, "inputs", lambda shape, seed: seed)
    monkeypatch.setattr(tune, "program", program)
    monkeypatch.setattr(
        tune, "device_times", lambda tiles, *_: timing.Times(speeds[tiles.min_split], 0.0)
    )
    assert tune.best("splits", tune.split_candidates(start), tune.TYPICAL).min_split == 512
    assert "out of registers" in capsys.readouterr().out
    monkeypatch.setattr(tune, "device_times", lambda *_: 1 / 0)
    with pytest.raises(SystemExit, match="no candidate of splits runs"):
        tune.best("splits", tune.split_candidates(start), tune.TYPICAL)


@needs_kernels
def test_a_tuning_that_is_stopped_leaves_the_numbers_so_far(tmp_path, monkeypatch):
    def program(shape, rehearse, tiles):
        if shape.queries > 1:
            raise KeyboardInterrupt
        return tiles

    tiles_before = Tiles.read("h200")
    start = Tiles.of("cpu")
    file = tmp_path / "tune.json"
    monkeypatch.setattr(tune, "program", program)
    time = lambda tiles, *_: timing.Times(tiles.decode_stages + tiles.min_split / 1000, 0.0)  # noqa: E731
    monkeypatch.setattr(tune, "device_times", time)
    with pytest.raises(KeyboardInterrupt):
        tune.main(["--name", "h200", "--rehearse", "--json", str(file)])
    fields = json.loads(file.read_text(encoding="utf-8"))
    assert (fields["decode_stages"], fields["min_split"]) == (2, 128)
    assert fields["chunk_stages"] == start.chunk_stages
    assert Tiles.read("h200") == tiles_before, "a rehearsal writes no tiles"


def test_times_are_those_of_one_call_and_a_cpu_has_no_busy_time():
    program = jax.jit(lambda arrays: [row + 1 for row in arrays])
    times = timing.device_times(program, [jnp.ones(3), jnp.zeros(3)], rounds=2)
    assert times[0] is None
    assert 0 < times[1] < 10


def test_inputs_of_a_measurement_have_separate_pages_for_every_row():
    shape = timing.Shape(rows=5, queries=3, context=40, heads=2, group=3, d=64, s=16)
    arrays = timing.inputs(shape, seed=1)
    assert sorted(arrays.block_tables.ravel().tolist()) == list(range(1, 16))  # page 0 is unused
    assert paged_attention(*arrays, scale=0.125, impl="reference").shape == (15, 6, 64)
    token = arrays.k_pages[0, :, 0].nbytes + arrays.v_pages[0, :, 0].nbytes
    assert shape.cache_bytes == 5 * 40 * token
    assert shape.flops == 5 * (38 + 39 + 40) * 6 * 4 * 64


# --- TPUs -----------------------------------------------------------------------------------------


def test_every_supported_tpu_shape_is_compiled():
    cases = list(aot_tpu.cases())
    assert len(set(cases)) == len(cases)
    claimed = {
        (d, s, dtype)
        for d in pallas_tpu.HEAD_SIZES
        for s in pallas_tpu.BLOCK_SIZES
        for dtype in pallas_tpu.DTYPES
    }
    assert {(case.head_size, case.block_size, case.dtype) for case in cases} >= claimed
    latents = [case for case in cases if case.rank]
    assert {(case.block_size, case.dtype) for case in latents} == {
        (s, dtype) for s in pallas_tpu.BLOCK_SIZES for dtype in pallas_tpu.DTYPES
    }
    assert {(case.rank, case.head_size) for case in latents} == {pallas_tpu.LATENT}
    assert max(case.group for case in latents) == pallas_tpu.MAX_LATENT_HEADS
    assert {case.group for case in aot_tpu.quick(latents)} == {16, 128}
    assert set(aot_tpu.TOPOLOGIES) == set(TPUS)


def test_every_kind_of_states_is_compiled():
    cases = list(aot_states.cases())
    assert len(set(cases)) == len(cases)
    assert {case.dtype for case in cases} == set(states_tpu.DTYPES)
    kinds = {(case.value_dim, case.delta) for case in cases}
    assert kinds == {(d, delta) for d in states_tpu.VALUE_DIMS for delta in (True, False)}
    for case in cases:
        page = case.page, case.dtype, case.block_size
        assert states_tpu.shape_obstacle(case.shape, *page) == ""
        assert case.fits(TpuTiles.read("v5e"))
    assert {case.delta for case in aot_states.quick(cases)} == {True, False}
    # a decode reads the state, of 1 MiB, and a prompt writes it once a block of 16 tokens
    qwen = cases[0]
    estimates = aot_tpu.estimates_of_states(qwen, TpuTiles.read("v5e"))
    assert 1 < estimates["decode"].nbytes / (aot_tpu.ROWS * 2**20) < 2
    assert estimates["chunks"].nbytes > aot_tpu.PROMPT / 16 * 2**20


def test_bundles_and_memory_are_read_from_the_dump_of_libtpu(tmp_path):
    analysis = (
        "Schedule analysis:\n\ttotal scheduled bundles:    848\n\tempty scheduled bundles:    43\n"
    )
    original = "x = [vmem, size = 0x9000, scoped, tag = 'a']\n[vmem, size = 0xc0000, scoped]\n[smem, size = 0x10]\n"
    name = "17-paged_attention_decode.1"
    (tmp_path / f"{name}-00-original.txt").write_text(original)
    (tmp_path / f"{name}-01-schedule-analysis_final_bundles.txt").write_text(analysis)
    (tmp_path / f"{name}-02-final_bundles.txt").write_text(SCHEDULE)
    assert aot_tpu.read_dump(tmp_path, "decode") == aot_tpu.Kernel(848, 0x9000 + 0xC0000)
    trips = bundles.Trips(steps=8, pages=16, heads=2)
    assert aot_tpu.read_dump(tmp_path, "decode", trips).row == bundles.of_a_row(SCHEDULE, trips)
    with refused("no schedule of the kernel 'chunks'"):
        aot_tpu.read_dump(tmp_path, "chunks")


SCHEDULE = """
   0    : {} /* Start region 1 */
 0x1 LB: > { %s0 = smov 0 } /* Start region 10 */
 0x2 LB: >> { %v0 = vmov 0 } /* Start region 20 :: Start region 21 */
 0x3 LB: >>> { %s1 = sld [smem:[#allocation7]] } /* Start region 30 */
 0x4 LB: >>>> { %6 = dma.hbm_to_vmem [thread:$0] %s4 } /* Start region 40 */
 0x5   : >>>> { %256 = sbr.rel (!%p253) target = $region40 }
 0x6   :  {}
 0x7   : >>> { %634 = sbr.rel (%p631) target = $region98 }
 0x8 LB: >>>> { %v1 = vsel %v0 } /* Start region 50 */
 0x9   : >>>> { %257 = sbr.rel (!%p254) target = $region50 }
 0xa PF: >>> { %s9 = smov 0 } /* Start/End empty region 98 */
 0xb LB: >>>> { %1187 = vmatpush.bf16.xpose.msra.mxu1 %v2983 } /* Start region 60 */
 0xc   : >>>> { %258 = sbr.rel (!%p255) target = $region60 }
 0xd PF: >>> { %259 = sbr.rel (!%p256) target = $region30 }
 0xe LB: >>> { %v4 = vst %v3 } /* Start region 70 */
 0xf   : >>> { %260 = sbr.rel (!%p257) target = $region70 }
0x10 PF: >> { %261 = sbr.rel (!%p258) target = $region20 }
0x11 PF: > { %262 = sbr.rel (!%p259) target = $region10 }
"""


def test_bundles_of_a_row_are_counted_as_often_as_its_loops_turn():
    """Two bundles around the steps; a step has 3, its copies 4 a page, its products 2; the results
    2; no clearing.
    """
    count = bundles.of_a_row(SCHEDULE, bundles.Trips(steps=8, pages=16, heads=3))
    assert count == 2 + 8 * (3 + 16 * 4 + 3 * 2) + 3 * 2
    assert (
        bundles.of_a_row(SCHEDULE.replace("target = $region30", ""), bundles.Trips(8, 16, 3)) == 0
    )
    with refused("no loop with products"):
        bundles.of_a_row(
            SCHEDULE.replace("mxu", "xyz").replace("vmatpush", "v"), bundles.Trips(1, 1, 1)
        )


def test_too_little_vmem_is_an_error_with_the_setting_to_lower():
    text = "RESOURCE_EXHAUSTED: E1001: x\nScoped allocation with size 20.00M and limit 14.00M exceeded scoped vmem limit"
    reason = aot_tpu.failure_text(RuntimeError(text))
    assert "needs 20.00M of VMEM and vmem_limit is 14.00M" in reason
    assert "lower decode_step" in reason
    assert aot_tpu.failure_text(TypeError("no")) == "does not compile: TypeError: no"


def test_a_roofline_counts_bytes_and_operations():
    tiles = TpuTiles.read("v5e")
    case = aot_tpu.Case(8, 4, 128, 16)
    estimates = aot_tpu.estimates(case, tiles)
    cache = 64 * 1024 * 2 * 8 * 128 * 2
    queries = 64 * 2 * 32 * 128 * 2
    assert estimates["decode"].nbytes == cache + queries
    assert estimates["decode"].seconds == pytest.approx(
        estimates["decode"].nbytes / tiles.bandwidth
    )
    assert estimates["short4"].nbytes == cache + 4 * queries
    assert estimates["short4"].flops == 64 * 4 * 32 * 128 * (1021 + 1022 + 1023 + 1024)
    assert estimates["chunks"].flops == 4 * 32 * 128 * sum(range(1, 2049))
    windowed = aot_tpu.estimates(aot_tpu.Case(8, 4, 128, 16, options=(("window", 256),)), tiles)
    assert windowed["decode"].nbytes == cache / 4 + queries


def test_a_roofline_of_latents_counts_a_row_once_with_its_padding():
    tiles = TpuTiles.read("v5e")
    case = aot_tpu.Case(1, 128, 576, 16, rank=512)
    estimates = aot_tpu.estimates(case, tiles)
    queries = 64 * 128 * (640 + 512) * 2
    assert estimates["decode"].nbytes == 64 * 1024 * 640 * 2 + queries
    assert estimates["decode"].flops == 64 * 1024 * 128 * 2 * (640 + 512)
    assert estimates["write"].nbytes == 64 * 8 * 640 * 2 * 2
    assert "short8" not in aot_tpu.sizes(case, tiles)


@needs_libtpu
def test_rings_beyond_vmem_are_reported():
    child = compile_kernels("v5e", "--stages", "99")
    assert child.returncode == 1
    assert "FAILED: needs " in child.stdout
    assert "of VMEM and vmem_limit is 14" in child.stdout
