"""An engine on the TPU kernels: interpreted as ordinary XLA, it gives the tokens it gives elsewhere; its whole step is
compiled for TPUs that are not here, where libtpu is (CI brings it; `experiments.hardware.on_tpu` is the command)."""

from __future__ import annotations

import os
import subprocess
import sys
from collections import Counter
from functools import partial
from pathlib import Path

import numpy as np
import pytest

from experiments.hardware import on_tpu
from pagedjax import LLM, SamplingParams
from pagedjax.device import attention, cache
from pagedjax.engine import resolve
from pallas_kernels import aot_tpu
from pallas_kernels.paged_attention import IMPLS
from pallas_kernels.paged_attention.pallas_tpu import implementation as pallas_tpu

needs_compiler = pytest.mark.skipif(
    bool(aot_tpu.what_is_missing()), reason="libtpu is not here; CI brings it for the commands themselves"
)


@pytest.fixture
def on_a_tpu(monkeypatch):
    """A CPU that takes itself for a TPU: the kernels are interpreted."""
    monkeypatch.setattr(pallas_tpu, "obstacle", lambda device: "")
    monkeypatch.setitem(IMPLS, "pallas_tpu", partial(pallas_tpu.paged_attention, interpret=True))
    monkeypatch.setattr(pallas_tpu, "write", partial(pallas_tpu.write, interpret=True))


def greedy(model, prompts, tokens: int, impl: str, **config) -> list[list[int]]:
    llm = LLM(model, attention_impl=impl, progress=False, max_model_len=64, **config)
    params = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True)
    return [list(out.outputs[0].token_ids) for out in llm.generate(prompts, params, use_tqdm=False)]


def test_an_engine_gives_the_same_tokens_through_them(tmp_path, on_a_tpu):
    """A small random model: chunks of prompts beside decodes, and so few blocks that some sequences are preempted."""
    from pagedjax import load_model
    from tests.weights.tiny import tiny_llama

    model = load_model(tiny_llama(tmp_path / "llama", tied=False, head_dim=64))
    rng = np.random.default_rng(0)
    prompts = [rng.integers(3, 300, n).tolist() for n in (1, 5, 21)]
    config = {"block_size": 8, "max_num_batched_tokens": 8, "max_num_seqs": 4, "token_buckets": (8,), "num_blocks": 8}
    expected = greedy(model, prompts, 12, "xla", **config)
    assert greedy(model, prompts, 12, "pallas_tpu", **config) == expected


def test_its_cache_has_rows_of_128_and_as_many_bytes(tiny_llm):
    model = tiny_llm.engine.model
    plain, wide = (resolve.block_shape(16, model, "bfloat16", impl) for impl in ("xla", "pallas_tpu"))
    assert cache.block_bytes(**plain) == cache.block_bytes(**wide)
    shapes = {name: cache.init(blocks=3, **shape).k[0].shape for name, shape in (("xla", plain), ("tpu", wide))}
    d = model.config.head_dim
    assert shapes["xla"] == (4, model.config.kv_heads, 16, d)
    assert shapes["tpu"] == (4, model.config.kv_heads, 16 * d // 128, 128)
    assert attention.page_row("pallas_tpu", 256) == 256


@pytest.mark.slow
def test_smollm2_keeps_its_goldens_through_them(smollm2, on_a_tpu):
    """Prompts in chunks beside decodes."""
    from tests.engine.test_goldens_engine import GOLDENS

    goldens = sorted(GOLDENS, key=lambda golden: len(golden["prompt_token_ids"]))[:6]
    prompts = [golden["prompt_token_ids"] for golden in goldens]
    config = {"block_size": 16, "max_num_batched_tokens": 16, "max_num_seqs": 4, "token_buckets": (16,)}
    found = greedy(smollm2, prompts, 24, "pallas_tpu", num_blocks=32, **config)
    assert found == [golden["token_ids"][:24] for golden in goldens]


# --- the whole step, compiled -----------------------------------------------------------------------------------------


def test_what_makes_a_whole_cache_array_is_counted():
    class Program:
        def as_text(self) -> str:
            return (
                "%p = bf16[9,2,8,128]{3,2,1,0} parameter(0)\n"
                "%c = bf16[9,2,8,128]{3,1,2,0:T(8,128)} copy(%p)\n"
                "%d = bf16[9,2,8,128]{3,2,1,0:T(8,128)S(1)} copy-done(%s)\n"
                "%e = bf16[4,2,8,128]{3,2,1,0} copy(%q)\n"
            )

    assert on_tpu.whole_arrays(Program(), 8) == Counter({"parameter": 1, "copy": 1, "copy-done": 1})


@needs_compiler
@pytest.mark.slow
@pytest.mark.parametrize("target", ["v5e", "v6e"])
@pytest.mark.parametrize("model", ["llama-3.2-1b", "llama-3-8b"])
def test_a_step_of_two_layers_compiles_in_place(target, model):
    done = command("--target", target, "--model", model, "--layers", "2", "--tokens", "64")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "the cache is updated in place" in done.stdout


def test_a_model_that_does_not_fit_is_named(capsys, monkeypatch):
    monkeypatch.setattr(aot_tpu, "what_is_missing", lambda: "")
    monkeypatch.setattr(aot_tpu, "prepare", lambda: None)
    assert on_tpu.main(["--target", "v5e", "--model", "llama-3-8b", "--fraction", "0.001"]) == 1
    assert "llama-3-8b in bfloat16, 512 tokens a step does not fit a v5e" in capsys.readouterr().err


def test_a_missing_compiler_is_named_with_the_command_that_brings_it(capsys, monkeypatch):
    monkeypatch.setattr(aot_tpu.importlib.util, "find_spec", lambda name: None)
    assert on_tpu.main(["--target", "v5e"]) == 2
    assert "libtpu is missing; pip install --no-deps --target DIR 'libtpu==0.0." in capsys.readouterr().err


def command(*arguments: str) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {"JAX_PLATFORMS": "cpu"}
    root = Path(__file__).parents[2]
    line = [sys.executable, "-m", "experiments.hardware.on_tpu", *arguments]
    return subprocess.run(line, cwd=root, capture_output=True, text=True, env=environment, timeout=900)
