"""How the engine sizes its cache, and what it chooses when nothing was said."""

from __future__ import annotations

from typing import Any

import chex
import jax
import jax.numpy as jnp
import pytest

from pagedjax import EngineConfig, SamplingParams
from pagedjax.device import cache, memory
from pagedjax.device.sampling import prompt_logprobs_bytes
from pagedjax.engine.pack import Sources
from pagedjax.engine.resolve import resolve
from pagedjax.engine.runtime import blank_batch
from tests.refusals import refused

SMOLLM2 = {"layers": 30, "kv_heads": 3, "head_dim": 64}
TINYLLAMA = {"layers": 22, "kv_heads": 4, "head_dim": 64}


def kv_bytes(**sizes: Any) -> int:
    """Bytes of the keys and values of a block."""
    return cache.block_bytes(**sizes) - cache.TOKEN_BYTES * sizes["block_size"]


def test_bytes_of_a_block_are_those_of_the_lectures():
    assert kv_bytes(**SMOLLM2, block_size=1, dtype="float32") == 46_080
    assert kv_bytes(**TINYLLAMA, block_size=1, dtype="bfloat16") == 22 * 1024
    assert kv_bytes(**TINYLLAMA, block_size=16, dtype="bfloat16") / 2**20 == 0.34375


@pytest.mark.parametrize("dtype", ["float32", "uint16", "uint8"])
def test_bytes_are_counted_without_an_allocation(dtype):
    """An engine sizes its cache from shapes alone."""
    sizes = {"layers": 3, "kv_heads": 2, "head_dim": 64, "block_size": 16, "dtype": dtype}
    for row in (None, 128):
        shapes = jax.eval_shape(lambda row=row: cache.init(blocks=2**20, row=row, **sizes))
        chex.assert_type([*shapes.k, *shapes.v], jnp.dtype(dtype))
        chex.assert_tree_shape_prefix(shapes, (2**20 + 1,))
        chex.assert_trees_all_equal_shapes_and_dtypes(shapes.k, shapes.v)
        total = sum(a.size * a.dtype.itemsize for a in jax.tree.leaves(shapes))
        assert total == (2**20 + 1) * cache.block_bytes(row=row, **sizes)


GIB = 2**30


def device(free: int, limit: int | None = None, total: int = 2**50) -> memory.DeviceMemory:
    return memory.DeviceMemory("a device", total, free, limit)


def test_swap_space_of_nothing_holds_no_block():
    assert memory.host_blocks(0, 100) == memory.host_blocks(99 / GIB, 100) == 0
    assert memory.host_blocks(100 / GIB, 100) == 1


def test_blocks_fill_the_fraction_and_leave_room_for_a_step_and_the_trash_block():
    assert memory.blocks_that_fit(100, 0.5, device(1000)) == 4
    assert memory.blocks_that_fit(100, 0.5, device(1000), activations=1) == 3
    assert memory.blocks_that_fit(100, 0.5, device(1000), activations=300) == 1
    for memory_of_device, activations in (
        (device(300), 0),
        (device(1000), 301),
        (device(1000), 9999),
    ):
        with refused("raise memory_fraction or lower block_size or max_num_batched_tokens"):
            memory.blocks_that_fit(100, 0.5, memory_of_device, activations)


def test_a_default_cache_stays_below_the_devices_limit():
    memory_of_device = device(2**49, memory.CPU_LIMIT)
    blocks = memory.CPU_LIMIT // 2**20 - 1
    assert memory.blocks_that_fit(2**20, 0.5, memory_of_device) == blocks
    # a step's share is beside it
    assert memory.blocks_that_fit(2**20, 0.5, memory_of_device, activations=2**40) == blocks


def test_a_device_that_does_not_tell_needs_a_number_of_blocks():
    memory_of_device = device(0, total=0)
    with refused("a device does not report its memory; set num_blocks"):
        memory.blocks_that_fit(100, 0.5, memory_of_device)
    memory.check_fit(10**9, 100, memory_of_device)


def test_a_number_of_blocks_that_does_not_fit_is_refused_with_one_that_does():
    memory.check_fit(9, 100, device(1000))
    with refused(
        r"^num_blocks is 10: .*a device has 0\.00 MiB free; lower num_blocks to at most 9"
    ):
        memory.check_fit(10, 100, device(1000))
    with refused("lower num_blocks to at most 4"):
        memory.check_fit(9, 100, device(1000), activations=500)
    with refused("free; free some memory, or lower max_num_batched_tokens"):
        memory.check_fit(1, 100, device(1000), activations=900)


def report_of(memory_of_device: memory.DeviceMemory, **values) -> memory.MemoryReport:
    sizes = {
        "weights": 2 * GIB,
        "activations": GIB // 2,
        "num_blocks": 1023,
        "block_size": 16,
        "block_bytes": 2**20,
    }
    return memory.report(
        memory_of_device, **{**sizes, "max_model_len": 100, "swap_space_gib": 0.5, **values}
    )


def test_a_report_adds_up():
    r = report_of(device(free=10 * GIB, total=16 * GIB))
    assert r.total == r.weights + r.other + r.free
    assert r.free == r.activations + r.cache + r.left
    assert (r.other, r.cache, r.left) == (4 * GIB, 1 * GIB, 8.5 * GIB)
    assert (r.device_blocks, r.host_blocks, r.tokens) == (1023, 512, 1023 * 16)
    assert r.sequences == 1023 // 7  # 100 tokens take 7 blocks of 16
    # weights that are a mapped file
    assert report_of(device(free=15 * GIB, total=16 * GIB)).other == 0


def test_a_report_prints_as_a_table():
    lines = str(report_of(device(free=10 * GIB, total=16 * GIB))).splitlines()
    assert len(lines) == 10
    assert lines[1] == "  device             16.00 GiB  10.00 GiB free before the cache"
    assert lines[6] == "  device blocks          1,023  of 16 tokens, 1 MiB each"
    table = str(report_of(device(free=0, total=0)))
    assert "unknown" in table
    assert not any(word in table for word in ("other", "left", "free"))


def test_memory_is_read_from_the_system():
    memory_of_cpu = memory.read(jax.devices("cpu")[0])
    assert 2**26 < memory_of_cpu.free < memory_of_cpu.total < 2**50
    assert memory_of_cpu.cache_limit == memory.CPU_LIMIT
    assert memory.read(jax.devices()[0], 4).cache_limit == memory.CPU_LIMIT // 4


def group(folder, limit, used, idle, files=("memory.max", "memory.current"), field="inactive_file"):
    folder.mkdir(parents=True, exist_ok=True)
    for file, text in zip(files, (limit, used), strict=True):
        (folder / file).write_text(f"{text}\n")
    (folder / "memory.stat").write_text(f"anon 5\n{field} {idle}\n")


def test_memory_of_a_container_is_what_its_control_groups_leave(tmp_path, monkeypatch):
    """/proc/meminfo shows the whole host there."""
    groups = tmp_path / "cgroup"
    own_groups = tmp_path / "own"
    monkeypatch.setattr(memory, "GROUPS", groups)
    monkeypatch.setattr(memory, "OWN_GROUPS", own_groups)
    host_memory = memory._system()
    assert list(memory._limits()) == [], "no control groups, as on other systems"
    own_groups.write_text("3:memory:/docker/a1\n0::/user.slice/my:job\n")
    group(groups, "max", 7, 0)
    assert list(memory._limits()) == []
    group(groups / "user.slice/my:job", 2**26, 2**24, 2**20)
    assert list(memory._limits()) == [(2**26, 2**26 - 2**24 + 2**20)]
    assert memory._system() == (2**26, 2**26 - 2**24 + 2**20) < host_memory
    group(groups / "user.slice", 2**26, 2**25, 0)
    assert memory._system() == (2**26, 2**25), (
        "what a group may have is also what those around it leave"
    )
    older = ("memory.limit_in_bytes", "memory.usage_in_bytes")
    group(groups / "memory/docker/a1", 2**25, 2**26, 2**21, older, "total_inactive_file")
    assert memory._system() == (2**25, 0)
    assert memory.read(jax.devices("cpu")[0]).free == 0


class FakeGpu:
    platform = "gpu"

    def __init__(self, stats):
        self.memory_stats = lambda: stats

    def __str__(self):
        return "gpu:0"


def test_memory_of_an_accelerator_is_what_jax_may_still_take():
    assert memory.read(FakeGpu({"bytes_limit": 100, "bytes_in_use": 30})) == (
        "gpu:0",
        100,
        70,
        None,
    )
    assert memory.read(FakeGpu(None)) == ("gpu:0", 0, 0, None)


def test_an_engine_reports_its_arrays_and_its_largest_step(tiny):
    from pagedjax import LLM

    sizes = {
        "max_num_seqs": 8,
        "max_num_batched_tokens": 64,
        "token_buckets": (8, 64),
        "num_blocks": 256,
    }
    # the programs of `tiny_llm`, but before the first step, as the report needs the largest one
    engine = LLM(tiny, progress=False, compilation="eager", **sizes).engine
    report = engine.memory
    assert report.weights == memory.nbytes(engine.model.params)
    assert report.cache == memory.nbytes(engine._state.cache) == 257 * report.block_bytes
    assert (report.device_blocks, report.tokens, report.sequences) == (256, 4096, 8)
    assert report.host_blocks == 0, "there is a swap space only for those who swap"
    peaks = {
        shape.tokens: memory.activations_peak(step)
        for shape, step in engine.runtime.programs.items()
    }
    more = prompt_logprobs_bytes(64, engine.model.config.vocab_size)
    # of this tiny model, sampling decides, which is the same for both
    assert report.activations - more == peaks[64] >= peaks[8] > 0
    params = SamplingParams(max_tokens=1, prompt_logprobs=1)
    engine.add("a", list(range(60)), params)
    engine.step()
    (program,) = engine.runtime.prompt_programs.values()
    assert peaks[64] <= memory.activations_peak(program) <= report.activations
    # at least the logits of its eight rows
    assert report.activations >= 8 * engine.model.config.vocab_size * 4


SMALL = {"max_num_seqs": 2, "max_num_batched_tokens": 8, "token_buckets": (8,), "max_model_len": 64}
# the largest step is compiled before the cache is made
MEASURED = {**SMALL, "compilation": "eager"}


def limited(monkeypatch, free: int) -> None:
    monkeypatch.setattr(memory, "_system", lambda: (2**40, free))


@pytest.mark.slow
def test_where_memory_binds_the_measured_step_has_its_place_beside_the_cache(tiny, monkeypatch):
    from pagedjax import LLM

    # compiles the copy of blocks too, which all engines share
    LLM(tiny, progress=False, **MEASURED)
    engine = LLM(tiny, progress=False, **MEASURED).engine
    compiled = engine.startup["compilations"]
    peak = engine.memory.activations
    block = engine.memory.block_bytes
    # all that two sequences of 64 tokens can use: the step had room anyway
    assert engine.config.num_blocks == 8
    (shape,) = engine.runtime.shapes.steps
    blanks = engine.runtime.blanks
    batch = blank_batch(engine.runtime.shapes, shape, blanks, engine.runtime.chain, Sources())
    inputs = memory.nbytes(blanks) + memory.nbytes(batch)  # those that stay there, and a step's own
    limited(monkeypatch, peak + inputs + 5 * block)
    engine = LLM(tiny, progress=False, memory_fraction=1.0, **MEASURED).engine
    assert engine.config.num_blocks == engine.memory.device_blocks == 4
    # the number of blocks does not change what a step needs
    assert engine.memory.activations == peak
    assert engine.memory.left == 0
    assert memory.nbytes(engine._state.cache) == 5 * block
    assert engine.startup["compilations"] > compiled, "the measured program was for a larger cache"


@pytest.mark.slow
def test_an_engine_that_cannot_fit_says_so_before_it_takes_memory(tiny, monkeypatch):
    from pagedjax import LLM

    limited(monkeypatch, 10 * 2**20)
    with refused(r"^num_blocks is 1000000: .*the system has 10\.00 MiB free; lower num_blocks to"):
        LLM(tiny, progress=False, num_blocks=10**6, **SMALL)
    limited(monkeypatch, 2**17)  # enough for the cache and not for a step beside it
    with refused("free; free some memory, or lower max_num_batched_tokens"):
        LLM(tiny, progress=False, num_blocks=1, attention_impl="xla", **MEASURED)
    with refused("raise memory_fraction or lower block_size or max_num_batched_tokens"):
        LLM(tiny, progress=False, attention_impl="xla", **MEASURED)


def test_the_report_is_printed_with_the_progress_and_beside_the_output(tiny, capsys):
    from pagedjax import LLM

    llm = LLM(tiny, num_blocks=8, **SMALL)
    printed = capsys.readouterr()
    assert str(llm.engine.memory) in printed.err
    assert printed.out == ""
    LLM(tiny, num_blocks=8, progress=False, **SMALL)
    assert "memory of" not in capsys.readouterr().err


def test_resolve_leaves_nothing_open(tiny):
    resolved = resolve(
        EngineConfig(max_num_batched_tokens=100, max_num_seqs=4, block_size=16), tiny.model
    )
    # four sequences of the model's 512 tokens; memory would hold more
    assert resolved.num_blocks == 4 * 32
    assert resolved.max_model_len == 512
    assert resolved.token_buckets == (1, 2, 4, 8, 16, 32, 64, 100)
    assert (resolved.dtype, resolved.attention_impl) == ("float32", "cpu")


def test_xla_has_no_product_of_one_row_in_16_bit_on_a_cpu(tiny_folder):
    from pagedjax import load_model

    packed = load_model(tiny_folder, dtype="bfloat16", linear_impl="cpu").model
    assert resolve(EngineConfig(max_num_batched_tokens=8), packed).token_buckets == (1, 2, 4, 8)
    model = load_model(tiny_folder, dtype="bfloat16", linear_impl="xla").model
    assert resolve(EngineConfig(max_num_batched_tokens=8), model).token_buckets == (2, 4, 8)
    assert resolve(EngineConfig(max_num_batched_tokens=1, max_num_seqs=1), model).token_buckets == (
        2,
    )
    with refused("the smallest step is 2 tokens"):
        resolve(EngineConfig(max_num_batched_tokens=8, token_buckets=(1, 8)), model)


@pytest.mark.slow
def test_a_lone_sequence_in_16_bit_gets_a_second_row_of_xlas_logits_on_a_cpu(tiny_folder):
    from pagedjax import LLM

    options = {
        "linear_impl": "xla",
        "max_num_seqs": 1,
        "max_num_batched_tokens": 4,
        "num_blocks": 8,
    }
    llm = LLM(tiny_folder, dtype="bfloat16", **options, progress=False)
    assert [llm.engine.runtime.shapes.rows(t) for t in llm.engine.config.token_buckets] == [2, 2]
    assert len(llm.generate([[5, 6, 7]], use_tqdm=False)[0].outputs[0].token_ids) > 0
