"""transformers' continuous batching as a peer of the engine on a GPU, here on a CPU with a tiny
model.
"""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys

import pytest

from experiments.bench.random_llama import SHAPES
from experiments.hardware import gpu_peers
from experiments.hardware.gpu_engine import requests_of

pytestmark = pytest.mark.oracle


@pytest.fixture(scope="module")
def model():
    pytest.importorskip("torch")
    return gpu_peers.llama("small", "float32")


def test_every_request_has_its_own_length(model):
    vocabulary = SHAPES["small"]["vocab_size"]
    requests = requests_of(count=3, shortest=4, longest=9, vocabulary=vocabulary)
    report = gpu_peers.serve(model, requests, seconds=60)
    assert report["output_tokens"] == sum(tokens for _, tokens in requests)
    assert report["output_tokens_per_s"] == pytest.approx(
        report["output_tokens"] / report["seconds"]
    )


def test_a_peer_that_is_too_slow_is_an_error(model):
    requests = requests_of(count=2, shortest=4, longest=9, vocabulary=1000)
    with pytest.raises(
        RuntimeError, match=r"2 of 2 requests were not done after 0 s, and the time is over; raise"
    ):
        gpu_peers.serve(model, requests, seconds=0.0)


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
    (run,) = json.loads((tmp_path / "peers.json").read_text("utf-8"))["runs"]
    assert run["engine"] == "transformers, continuous batching"
    assert run["seconds"] > 0
