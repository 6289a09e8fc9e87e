"""The benchmark of serving, with a tiny model."""

from __future__ import annotations

import json

import pytest

from experiments.bench import server


@pytest.mark.slow
def test_each_way_makes_all_tokens(tiny_folder, tmp_path, monkeypatch):
    # fewer programs to compile
    small = {"max_num_batched_tokens": 64, "token_buckets": (64,), "max_num_seqs": 8}
    monkeypatch.setattr(server, "ENGINE", server.ENGINE | small)
    out = tmp_path / "out.json"
    server.main(
        ["--model", str(tiny_folder), "--requests", "3", "--rounds", "1", "--json", str(out)]
    )
    throughputs = json.loads(out.read_text())["output_tokens_per_s"]
    assert list(throughputs) == ["library", "whole", "streamed"]
    assert all(rate > 0 for (rate,) in throughputs.values())


def test_requests_are_reproducible_and_within_limits():
    first, repeated = (server.requests(30, 320) for _ in range(2))
    assert first == repeated
    assert all(16 <= len(prompt) <= 256 and 16 <= count <= 128 for prompt, count in first)
    assert all(17 <= token < 320 for prompt, _ in first for token in prompt)
