"""The attention variants of docs/design/own-attention.md in an engine, against dense attention in
numpy.
"""

from __future__ import annotations

from pathlib import Path

import chex
import numpy as np
import pytest

from pagedjax import LLM, Taps
from pagedjax.device import attention
from pagedjax.weights import open_checkpoint
from tests.device.test_llama import chosen, plain_run, softmax
from tests.engine.runs import greedy
from tests.pallas_kernels.test_paged_attention import make, oracle, run, scatter
from tests.refusals import refused

pytestmark = pytest.mark.few_optimisations

PROMPTS = [np.random.default_rng(i).integers(3, 320, n).tolist() for i, n in enumerate((5, 40, 1))]
TAPS = Taps(hidden_states=(1, 2), attention={0: (0, 3), 1: 2})
SIZES = {
    "max_num_seqs": 4,
    "max_num_batched_tokens": 16,
    "token_buckets": (16,),
    "block_size": 4,
    "num_blocks": 64,
}


@pytest.fixture(scope="module")
def file(documented_file) -> Path:
    return documented_file("own-attention.md", "own_attention.py")


def plus_one(scores: np.ndarray, head: int) -> np.ndarray:
    return np.exp(scores) / (1 + np.exp(scores).sum(-1, keepdims=True))


def alibi(scores: np.ndarray, head: int) -> np.ndarray:
    distance = np.arange(len(scores))[:, None] - np.arange(len(scores))
    return softmax(scores - 2.0 ** (-8 * (head + 1) / 4) * distance, head)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "weigh"), [("PLUS_ONE", plus_one), ("ALIBI", alibi)])
def test_the_documented_variants_are_dense_attention_of_their_kind(tiny_folder, file, name, weigh):
    """Chunked prompts and decodes: log-probabilities, hidden states, and the weights themselves."""
    llm = LLM(
        tiny_folder, progress=False, compilation="lazy", attention_impl=f"{file}:{name}", **SIZES
    )
    params = greedy(5, logprobs=0, taps=TAPS)
    head = open_checkpoint(tiny_folder).tensors["lm_head.weight"].read().astype(np.float64)
    for prompt, output in zip(PROMPTS, llm.generate(PROMPTS, params), strict=True):
        branch = output.outputs[0]
        states, weights = plain_run(tiny_folder, np.array([*prompt, *branch.token_ids])[:-1], weigh)
        logits = states[-1][len(prompt) - 1 :] @ head.T
        logprobs = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
        assert tuple(logits.argmax(-1).tolist()) == branch.token_ids
        chex.assert_trees_all_close(
            chosen(branch.token_ids, branch.logprobs),
            logprobs.max(-1).astype(np.float32),
            atol=1e-4,
        )
        for i in TAPS.hidden_states:
            chex.assert_trees_all_close(
                branch.taps.hidden_states[i], states[i].astype(np.float32), atol=1e-4
            )
        for layer, heads in TAPS.attention:
            for j, tapped in enumerate(branch.taps.attention[layer]):
                at = len(prompt) + j
                expected = weights[layer][list(heads), at - 1, :at].astype(np.float32)
                chex.assert_trees_all_close(tapped, expected, atol=1e-5)


def test_the_documented_variants_read_windows_caps_and_padding(file):
    """A window and a soft cap in the kernel's contract, and NaN in slots that nobody sees."""
    case = scatter(make([(5, 7), (1, 2)], t=8, b=3, s=4), garbage=np.nan)
    case = case._replace(scale=0.3, window=3, soft_cap=2.0)
    result = run(case, attention.find(f"{file}:PLUS_ONE"))
    chex.assert_shape(result, case.q.shape)
    expected = oracle(case, weigh=lambda scores: plus_one(scores, 0))
    chex.assert_trees_all_close(result[:6], expected[:6], atol=1e-5)


def test_a_cache_that_the_documented_variants_do_not_read_is_refused(tiny_folder, file):
    with refused(r"own_attention.py:PLUS_ONE' reads no 8 bits; 'xla' has no such limit"):
        LLM(
            tiny_folder,
            progress=False,
            attention_impl=f"{file}:PLUS_ONE",
            kv_cache_dtype="float8_e4m3fn",
            **SIZES,
        )
