"""The benchmark of random weights, at a size where it is a test."""

from __future__ import annotations

import json

from experiments import bench_random_llama


def test_engines_run_on_random_weights(tmp_path, capsys):
    out = tmp_path / "figures.json"
    sizes = ["--seqs", "3", "--context", "20", "--tokens", "4", "--budget", "16", "--dtype", "float32"]
    arguments = ["--shape", "small", "--impls", "xla", "pallas_gpu", *sizes, "--json", str(out), "--bandwidth", "1e10"]
    assert bench_random_llama.main(arguments) == 1, "there is no GPU, and that is said"
    runs = json.loads(out.read_text())["runs"]
    assert runs["xla"]["decode_step"] > 0
    assert runs["xla"]["compilations"] == 0
    assert "runs on platform 'gpu' and not on 'cpu'" in runs["pallas_gpu"]["error"]
    assert "xla" in capsys.readouterr().out
