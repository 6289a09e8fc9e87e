"""The peers of the engine on a GPU, here on a CPU with a tiny model."""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
import time

import pytest

from experiments.bench.random_llama import SHAPES
from experiments.hardware import gpu_peers, torch_loop
from experiments.hardware.gpu_engine import requests_of

pytestmark = pytest.mark.oracle


@pytest.fixture(scope="module")
def model():
    pytest.importorskip("torch")
    return gpu_peers.llama("small", "float32")


def test_every_request_has_its_own_length(model):
    vocabulary = SHAPES["small"]["vocab_size"]
    requests = requests_of(count=3, shortest=4, longest=9, vocabulary=vocabulary)
    report = gpu_peers.serve(model, requests, time.perf_counter() + 60)
    assert report["output_tokens"] == sum(tokens for _, tokens in requests)
    assert report["output_tokens_per_s"] == pytest.approx(
        report["output_tokens"] / report["seconds"]
    )


def test_the_loop_gives_the_tokens_of_transformers(model, monkeypatch):
    """More rows than are computed together, and several lengths of the cache."""
    import torch

    monkeypatch.setattr(torch_loop, "PROMPT_ROWS", 2)
    monkeypatch.setattr(torch_loop, "SPACING", 8)
    requests = requests_of(
        count=5, shortest=4, longest=19, vocabulary=SHAPES["small"]["vocab_size"]
    )
    run, cache_bytes = torch_loop.generate(model, requests, temperature=0.0)
    expected = [
        model.generate(
            torch.tensor([prompt]), max_new_tokens=count, do_sample=False, eos_token_id=None
        )[0, len(prompt) :].tolist()
        for prompt, count in requests
    ]
    end = time.perf_counter() + 60
    assert run(end) == expected
    assert run(end) == expected, "the second run has the tokens of the first"
    shape = SHAPES["small"]
    longest = max(len(prompt) + count for prompt, count in requests)
    longest += -longest % torch_loop.ALIGNED
    numbers = 2 * shape["num_hidden_layers"] * shape["num_key_value_heads"] * 5 * longest
    assert cache_bytes == 4 * numbers * model.config.head_dim


def test_the_loop_draws_by_the_temperature(model):
    import torch

    loop = torch_loop.Loop.of(model, 4000, 1, temperature=0.6)
    torch.manual_seed(0)
    hidden = 5 * torch.randn(1, model.config.hidden_size)
    with torch.inference_mode():
        weights = torch.softmax(model.lm_head(hidden).float() / 0.6, -1)[0]
        tokens = loop._sampled(hidden.expand(4000, -1))
    likely = weights > 0.01
    assert likely.sum() >= 3
    shares = torch.bincount(tokens, minlength=len(weights)) / 4000
    # four standard deviations of a share
    assert ((shares - weights)[likely].abs() < 4 * (weights[likely] / 4000).sqrt()).all()


def test_a_peer_that_is_too_slow_is_an_error(model, monkeypatch):
    requests = requests_of(count=2, shortest=4, longest=9, vocabulary=1000)
    monkeypatch.setattr(torch_loop, "SYNCHRONISED", 2)
    with pytest.raises(RuntimeError, match=r"step 2 of \d of the loop was not done when the time"):
        gpu_peers.serve_in_loop(model, requests, time.perf_counter())
    with pytest.raises(
        RuntimeError, match=r"2 of 2 requests were not done after 0 s, and the time is over; raise"
    ):
        gpu_peers.serve(model, requests, time.perf_counter())


def test_the_rehearsal_writes_its_figures_and_leaves_the_memory_to_others(tmp_path):
    """transformers sizes its cache by the memory of the whole machine: several GB for a model of 1
    MB.
    """
    pytest.importorskip("torch")
    command = [
        sys.executable,
        "-m",
        "experiments.hardware.gpu_peers",
        "--rehearse",
        "--json",
        tmp_path / "peers.json",
    ]
    limit = 4 << 30  # bytes of address space; torch itself takes 1.5e9
    child = subprocess.run(
        command,
        env=os.environ | {"OMP_NUM_THREADS": "2", "MALLOC_ARENA_MAX": "2"},
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_AS, (limit, limit)),
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert child.returncode == 0, child.stderr
    runs = json.loads((tmp_path / "peers.json").read_text("utf-8"))["runs"]
    names = [run["engine"] for run in runs]
    assert names == ["a loop in torch", "transformers, continuous batching"]
    assert all(run["seconds"] > 0 for run in runs)
    assert runs[0]["output_tokens"] == runs[1]["output_tokens"]
