"""An engine on the TPU kernels: interpreted as ordinary XLA it gives the same tokens as plain XLA.

If libtpu is installed, as in CI, the whole step is compiled for TPUs (`python -m experiments.hardware.on_tpu`).
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections import Counter
from functools import partial
from pathlib import Path

import chex
import jax.numpy as jnp
import numpy as np
import pytest

from experiments.hardware import on_tpu
from pagedjax import LLM, SamplingParams
from pagedjax.device import attention, cache
from pagedjax.engine import resolve
from pallas_kernels import aot_tpu
from pallas_kernels.paged_attention import IMPLS

needs_compiler = pytest.mark.skipif(
    bool(aot_tpu.what_is_missing()), reason="libtpu is not installed; CI installs it for the commands"
)


@pytest.fixture
def on_a_tpu(monkeypatch):
    """An engine on a CPU accepts the TPU kernels and interprets them."""
    impl = IMPLS["pallas_tpu"]
    attend, write = (partial(call, interpret=True) for call in (impl.attend, impl.write))
    changed = impl._replace(attend=attend, write=write, obstacle=lambda device, **sizes: "")
    monkeypatch.setitem(IMPLS, "pallas_tpu", changed)


def greedy(model, prompts, tokens: int, impl: str, **config) -> list[list[int]]:
    llm = LLM(model, attention_impl=impl, progress=False, max_model_len=64, **config)
    params = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True)
    return [list(out.outputs[0].token_ids) for out in llm.generate(prompts, params, use_tqdm=False)]


def test_tokens_are_those_of_plain_xla(tmp_path, on_a_tpu):
    """A small random model: chunks of prompts beside decodes, and so few blocks that some sequences are preempted."""
    from pagedjax import load_model
    from tests.weights.tiny import tiny_llama

    model = load_model(tiny_llama(tmp_path / "llama", tied=False, head_dim=64))
    rng = np.random.default_rng(0)
    prompts = [rng.integers(3, 300, n).tolist() for n in (1, 5, 21)]
    config = {"block_size": 8, "max_num_batched_tokens": 8, "max_num_seqs": 4, "token_buckets": (8,), "num_blocks": 8}
    expected = greedy(model, prompts, 12, "xla", **config)
    assert greedy(model, prompts, 12, "pallas_tpu", **config) == expected


def test_cache_has_rows_of_128_and_the_same_bytes(tiny_llm):
    model = tiny_llm.engine.model
    plain, wide = (resolve.block_shape(16, model, "bfloat16", impl) for impl in ("xla", "pallas_tpu"))
    assert cache.block_bytes(**plain) == cache.block_bytes(**wide)
    xla, tpu = (cache.init(blocks=3, **shape) for shape in (plain, wide))
    d = model.config.head_dim
    dims = chex.Dimensions(P=4, K=model.config.kv_heads, S=16, D=d, R=16 * d // 128, L=128)
    chex.assert_shape([*xla.k, *xla.v], dims["PKSD"])
    chex.assert_shape([*tpu.k, *tpu.v], dims["PKRL"])
    chex.assert_type([*tpu.k, *tpu.v], jnp.bfloat16)
    assert attention.page_row("pallas_tpu", 256) == 256


@pytest.mark.slow
def test_smollm2_gives_its_golden_tokens(smollm2, on_a_tpu):
    """Prompts in chunks beside decodes."""
    from tests.engine.test_goldens_engine import GOLDENS

    goldens = sorted(GOLDENS, key=lambda golden: len(golden["prompt_token_ids"]))[:6]
    prompts = [golden["prompt_token_ids"] for golden in goldens]
    config = {"block_size": 16, "max_num_batched_tokens": 16, "max_num_seqs": 4, "token_buckets": (16,)}
    found = greedy(smollm2, prompts, 24, "pallas_tpu", num_blocks=32, **config)
    assert found == [golden["token_ids"][:24] for golden in goldens]


# --- the whole step, compiled -----------------------------------------------------------------------------------------


def test_instructions_that_make_a_whole_cache_array_are_counted():
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


def test_a_model_that_does_not_fit_is_an_error_with_its_name(capsys, monkeypatch):
    monkeypatch.setattr(aot_tpu, "what_is_missing", lambda: "")
    monkeypatch.setattr(aot_tpu, "prepare", lambda: None)
    assert on_tpu.main(["--target", "v5e", "--model", "llama-3-8b", "--fraction", "0.001"]) == 1
    assert "llama-3-8b in bfloat16, 512 tokens a step does not fit a v5e" in capsys.readouterr().err


def test_a_missing_compiler_is_an_error_with_the_command_that_installs_it(capsys, monkeypatch):
    monkeypatch.setattr(aot_tpu.importlib.util, "find_spec", lambda name: None)
    assert on_tpu.main(["--target", "v5e"]) == 2
    assert "libtpu is missing; pip install --no-deps --target DIR 'libtpu==0.0." in capsys.readouterr().err


def command(*arguments: str) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {"JAX_PLATFORMS": "cpu"}
    root = Path(__file__).parents[2]
    line = [sys.executable, "-m", "experiments.hardware.on_tpu", *arguments]
    return subprocess.run(line, cwd=root, capture_output=True, text=True, env=environment, timeout=900)
