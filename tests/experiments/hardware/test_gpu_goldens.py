"""The check of a real model on a GPU, on a CPU: the model is right, and each kind of mistake is
found.
"""

from __future__ import annotations

import json
from typing import Any

import pytest

from experiments.hardware import gpu_goldens
from experiments.hardware.gpu_goldens import (
    GOLDENS,
    MAX_RATIO,
    differences,
    faults,
    forced_differences,
    greedy_differences,
    with_faults,
)
from pagedjax import LLM, SamplingParams

TOKENS = 6
REFERENCE = json.loads(GOLDENS.read_text(encoding="utf-8"))
SHORT = sorted(REFERENCE["prompts"], key=lambda prompt: len(prompt["prompt_token_ids"]))[:4]


@pytest.fixture(scope="module")
def goldens(tiny_llm) -> list[dict[str, Any]]:
    """Greedy continuations of a tiny model, as the reference has them of SmolLM2."""
    prompts = [[20 + 7 * i + j for j in range(3 + 2 * i)] for i in range(4)]
    params = SamplingParams(temperature=0, max_tokens=TOKENS, ignore_eos=True, logprobs=0)
    entries = []
    for i, out in enumerate(tiny_llm.generate(prompts, params, use_tqdm=False)):
        (branch,) = out.outputs
        logprobs = zip(branch.token_ids, branch.logprobs, strict=True)
        entries.append(
            {
                "name": f"prompt {i}",
                "prompt_token_ids": prompts[i],
                "token_ids": list(branch.token_ids),
                "logprobs": [entry[token].logprob for token, entry in logprobs],
                "margins": [1.0] * TOKENS,
            }
        )
    return entries


def report_of(llm, goldens):
    """The result of an engine on this CPU."""
    return {
        "dtype": "float32",
        "impl": "xla",
        "forced": forced_differences(llm, goldens, TOKENS),
        "decoded": greedy_differences(llm, goldens, TOKENS),
        "seconds": 1.0,
    }


def with_entry(golden, field, at, value):
    return {**golden, field: [*golden[field][:at], value, *golden[field][at + 1 :]]}


@pytest.mark.slow
def test_the_model_on_a_cpu_gives_identical_tokens(smollm2):
    sizes = {
        "max_num_seqs": 4,
        "max_num_batched_tokens": 32,
        "token_buckets": (32,),
        "num_blocks": 16,
    }
    llm = LLM(smollm2, block_size=16, max_model_len=32, progress=False, **sizes)
    report = report_of(llm, SHORT)
    assert report["decoded"]["identical"] == report["decoded"]["of"] == 4
    assert max(report["forced"]["largest"], report["decoded"]["largest"]) < 1e-3
    assert faults(report, None) == []


def test_a_wrong_log_probability_is_found(tiny_llm, goldens):
    wrong = with_entry(goldens[1], "logprobs", 3, goldens[1]["logprobs"][3] + 0.5)
    report = report_of(tiny_llm, [goldens[0], wrong])
    assert report["forced"]["largest"] == pytest.approx(0.5, abs=1e-3)
    assert report["forced"]["mean"] == pytest.approx(0.5 / (2 * TOKENS), abs=1e-3)
    assert any(
        "forced: the mean difference is 0.042; the limit is 0.0001" in fault
        for fault in faults(report, None)
    )


def test_another_token_is_wrong_unless_the_reference_has_a_near_tie(tiny_llm, goldens):
    wrong_token = (goldens[0]["token_ids"][2] + 1) % 300
    golden = with_entry(with_entry(goldens[0], "token_ids", 2, wrong_token), "margins", 2, 0.3)
    decoded = greedy_differences(tiny_llm, [golden], TOKENS)
    assert decoded["differ"] == [{"prompt": goldens[0]["name"], "at": 2, "margin": 0.3}]
    assert decoded["identical"] == 0
    assert decoded["largest"] < 1e-3, "what follows another token is not compared"
    result = {
        "dtype": "bfloat16",
        "impl": "pallas_gpu",
        "decoded": decoded,
        "forced": {"mean": 0.01, "largest": 0.1},
    }
    (fault,) = faults(result, None)
    assert "is another, and the reference's margin is 0.3, not below 0.2" in fault
    assert faults({**result, "forced": {"mean": 0.01, "largest": 0.16}}, None) == []


def run(impl, mean, largest, dtype="bfloat16"):
    differ = {"mean": mean, "largest": largest}
    return {"dtype": dtype, "impl": impl, "forced": differ, "decoded": {**differ, "differ": []}}


def test_the_kernels_may_not_be_much_worse_than_xla():
    xla = run("xla", 0.01, 0.1)
    near = run("pallas_gpu", 0.015, 0.1)
    far = run("pallas_gpu", 0.021, 0.3)
    assert [result["wrong"] for result in with_faults([near, xla])] == [[], []]
    wrong = with_faults([far, xla])[0]["wrong"]
    assert f"forced: the largest difference is 0.3; XLA's allows {MAX_RATIO * 0.1:.2g}" in wrong
    assert with_faults([far])[0]["wrong"] == [], (
        "the limits of the dtype are all there is without a result of XLA"
    )
    assert with_faults([far, run("xla", 1e-4, 1e-3, "float16")])[0]["wrong"] == [], (
        "that of another dtype says nothing"
    )


def test_what_is_not_finite_or_failed_is_wrong():
    assert (
        differences([0.1, float("nan")])
        == differences([])
        == {"mean": float("inf"), "largest": float("inf")}
    )
    assert differences([0.1, -0.3]) == pytest.approx({"mean": 0.2, "largest": 0.3})
    infinite = run("pallas_gpu", float("inf"), float("inf"))
    assert any("the limit is" in fault for fault in faults(infinite, run("xla", 0.01, 0.1)))
    failed = {"dtype": "bfloat16", "impl": "xla", "failed": "ValueError: no memory"}
    assert with_faults([failed, run("pallas_gpu", 0.01, 0.1)])[0]["wrong"] == [
        "ValueError: no memory"
    ]


def test_results_are_written_as_they_come_and_a_failed_engine_is_wrong(tmp_path, monkeypatch):
    def results(function, jobs, processes, seconds):
        right = run("cpu", 0.01, 0.1)
        counts = {"identical": 3, "of": 4}
        yield jobs[1], {**right, "decoded": right["decoded"] | counts, "seconds": 1.0}
        assert len(json.loads(file.read_text())["runs"]) == 1
        yield jobs[0], RuntimeError("no memory")

    file = tmp_path / "goldens.json"
    monkeypatch.setattr(gpu_goldens, "results", results)
    options = ["--impls", "xla", "cpu", "--dtypes", "bfloat16", "--tokens", "3"]
    assert gpu_goldens.main([*options, "--json", str(file)]) == 1
    runs = json.loads(file.read_text())["runs"]
    assert [run["wrong"] for run in runs] == [[], ["RuntimeError: no memory"]]


def test_another_model_is_an_error(tmp_path, capsys):
    other_model = tmp_path / "other.gguf"
    other_model.write_bytes(b"another model")
    assert gpu_goldens.main(["--model", str(other_model)]) == 2
    assert "not that of the goldens, b179c9523d0e..." in capsys.readouterr().err
    assert gpu_goldens.main(["--model", str(tmp_path)]) == 2
    assert "which is no file; give the .gguf file of smollm2-135m" in capsys.readouterr().err
    with pytest.raises(SystemExit, match="2"):
        gpu_goldens.main(["--tokens", "65"])
    assert "--tokens is 65; the reference has 64" in capsys.readouterr().err


def test_the_reference_has_as_many_tokens_and_prompts_as_an_engine_is_made_for():
    assert {len(prompt["token_ids"]) for prompt in REFERENCE["prompts"]} == {gpu_goldens.TOKENS}
    assert len(REFERENCE["prompts"]) <= gpu_goldens.ROWS
