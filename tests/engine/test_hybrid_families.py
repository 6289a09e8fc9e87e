"""Qwen3-Next and Qwen3.5 MoE in engines: whole answers are those of transformers, however prompts
are cut, and wherever sequences are stopped and found again.

Logits of chunks are compared in tests/device/test_model_families.py and test_plain_families.py.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import chex
import numpy as np
import pytest

from pagedjax.host.replay import replay
from tests.engine.page_kinds import prompts
from tests.engine.runs import answers, check_idle, greedy, logprobs_of, small_llm
from tests.weights.test_family_files import HYBRIDS
from tests.weights.tiny_families import write_family

pytestmark = pytest.mark.few_optimisations

PARAMS = greedy(12, logprobs=0)
SMALL: dict[str, Any] = {"max_num_seqs": 4, "num_blocks": 60, "max_model_len": 48}
SWAPPED = {"preemption": "swap", "swap_space_gib": 0.05}
# two rows for four requests, whose turns are short: running ones are evicted for those that wait
TURNS = {"policy": {"name": "mlfq", "quantum": 3}, "max_num_seqs": 2}
CASES: dict[str, dict[str, Any]] = {
    "cut prompts, recomputed": {"block_size": 4, "max_num_batched_tokens": 13, **TURNS},
    "swapped": {"block_size": 4, "max_num_batched_tokens": 24, **TURNS, **SWAPPED},
    "blocks of a token": {"block_size": 1, "max_num_batched_tokens": 9, "num_blocks": 300},
    "blocks of 16": {"block_size": 16},
    "drafts": {"block_size": 8, "speculative": {"method": "ngram", "num_tokens": 3}},
    "no lookahead": {"block_size": 8, "lookahead": 0},
}


# (prompt, tokens of the answer) -> (tokens that it should have, their log-probabilities)
Expected = Callable[[tuple[int, ...], tuple[int, ...]], tuple[list[int], np.ndarray]]


@pytest.fixture(scope="module", params=HYBRIDS)
def folder(request, tmp_path_factory) -> Path:
    return write_family(tmp_path_factory.mktemp("hybrid") / "model", HYBRIDS[request.param], seed=3)


def check_answers(folder: Path, case: str, expected: Expected, tmp_path: Path) -> None:
    """Compares two rounds of the prompts, of which the second finds prefixes of the first."""
    llm = small_llm(folder, **SMALL | CASES[case])
    size = llm.engine.scheduler_state.config.block_size
    recording = tmp_path / "run.jsonl"
    llm.engine.record(recording)
    for number in range(2):
        outputs = llm.generate(prompts(), PARAMS)
        if number:  # of 36 tokens; the last one is computed again
            assert outputs[3].num_cached_tokens == 35 // size * size
        for prompt, output in zip(prompts(), outputs, strict=True):
            answer = output.outputs[0]
            tokens, logprobs = expected(tuple(prompt), tuple(answer.token_ids))
            assert list(answer.token_ids) == tokens
            chex.assert_trees_all_close(logprobs_of(answer), logprobs, atol=5e-4)
    llm.engine.record(None)
    check_idle(llm.engine)
    plans = [transition.plan for transition in replay(recording) if transition.plan]
    assert any(plan.preempted for plan in plans) == ("policy" in CASES[case])
    assert any(plan.swapped for plan in plans) == ("preemption" in CASES[case])


@pytest.fixture(scope="module")
def theirs(folder) -> Expected:
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(
        folder, attn_implementation="eager", dtype=torch.float32
    ).eval()

    @cache
    def expected(prompt: tuple[int, ...], tokens: tuple[int, ...]) -> tuple[list[int], np.ndarray]:
        """The likeliest token at each place of the answer, and the log-probability of it."""
        with torch.no_grad():
            logits = model(torch.tensor([[*prompt, *tokens[:-1]]])).logits[0, len(prompt) - 1 :]
        logprobs, likeliest = torch.log_softmax(logits.double(), -1).max(-1)
        return likeliest.tolist(), logprobs.numpy()

    return expected


@pytest.mark.oracle
@pytest.mark.parametrize("case", CASES)
def test_answers_are_those_of_transformers(folder, theirs, case, tmp_path):
    check_answers(folder, case, theirs, tmp_path)


@pytest.mark.slow  # test_page_contract.py has a quick one of such layers
def test_answers_do_not_depend_on_cuts_and_preemption(tmp_path):
    folder = write_family(tmp_path / "model", HYBRIDS["qwen3_next"], seed=3)
    alone = small_llm(folder, **SMALL, enable_prefix_caching=False)
    of_prompt = {
        tuple(prompt): (list(answer.token_ids), logprobs_of(answer))
        for prompt, answer in zip(prompts(), answers(alone, prompts(), PARAMS), strict=True)
    }
    check_answers(folder, "cut prompts, recomputed", lambda prompt, _: of_prompt[prompt], tmp_path)
