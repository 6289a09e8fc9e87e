"""The benchmark of drafters, on a model of two layers."""

from __future__ import annotations

import pytest

from experiments.bench import speculation
from pagedjax import LLM
from tests.weights.tiny import tiny_llama

SMALL = {
    "max_num_seqs": 2,
    "max_num_batched_tokens": 32,
    "token_buckets": (8, 32),
    "num_blocks": 64,
}


def work(count: int = 2) -> speculation.Workload:
    return speculation.Workload("edit", [[5, 6, 7, 8] * 4] * count, [24] * count, {})


def test_workloads_have_the_shapes_that_they_say():
    edit, prose, w1 = speculation.workloads(
        lambda text: list(text.encode()), 320, 16, ("edit", "prose", "w1")
    )
    assert len(edit.prompts) == len(prose.prompts) == len(edit.lengths) == 4
    assert all(b"renamed to" in bytes(prompt) for prompt in edit.prompts)
    assert len(w1.prompts) == len(w1.lengths) == 64
    assert all(16 <= len(prompt) <= 256 for prompt in w1.prompts)
    assert all(16 <= length <= 128 for length in w1.lengths)


@pytest.mark.slow
def test_each_engine_has_a_row_and_the_plain_one_the_ratio_1(tiny):
    options = {"method": "ngram", "num_tokens": 3, "adaptive": False}
    engines = {
        "plain": LLM(tiny, progress=False, **SMALL),
        "ngram": LLM(tiny, progress=False, speculative=options, **SMALL),
    }
    plain, ngram = speculation.measure(work(), engines, rounds=2)
    assert (plain["engine"], plain["ratio"], plain["accepted"]) == ("plain", 1.0, None)
    assert ngram["least"] <= ngram["ratio"] <= ngram["most"]
    assert 0 <= ngram["accepted"] <= 1
    assert 1 <= ngram["tokens_a_step"] <= 4


@pytest.mark.slow
def test_other_tokens_than_those_of_the_plain_engine_fail_the_run(tiny, tmp_path):
    other_llm = LLM(tiny_llama(tmp_path / "other", tied=True), progress=False, **SMALL)
    with pytest.raises(RuntimeError, match="edit: other gave other tokens than the plain engine"):
        speculation.measure(
            work(), {"plain": LLM(tiny, progress=False, **SMALL), "other": other_llm}, rounds=1
        )
