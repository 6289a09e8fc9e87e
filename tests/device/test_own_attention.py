"""The attention variants of docs/design/own-attention.md in an engine, against dense attention in
numpy.
"""

from __future__ import annotations

from pathlib import Path

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pagedjax import LLM, SamplingParams, Taps
from pagedjax.device import attention
from pagedjax.weights import open_checkpoint
from pallas_kernels.paged_attention import paged_attention
from tests.device.test_llama import plain_run, softmax

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


@pytest.mark.default_cases("ALIBI-alibi")
@pytest.mark.parametrize(("name", "weigh"), [("PLUS_ONE", plus_one), ("ALIBI", alibi)])
def test_the_documented_variants_are_dense_attention_of_their_kind(tiny_folder, file, name, weigh):
    """Chunked prompts and decodes: log-probabilities, hidden states, and the weights themselves."""
    llm = LLM(
        tiny_folder, progress=False, compilation="lazy", attention_impl=f"{file}:{name}", **SIZES
    )
    params = SamplingParams(temperature=0, max_tokens=5, ignore_eos=True, logprobs=0, taps=TAPS)
    head = open_checkpoint(tiny_folder).tensors["lm_head.weight"].read().astype(np.float64)
    for prompt, output in zip(PROMPTS, llm.generate(PROMPTS, params, use_tqdm=False), strict=True):
        branch = output.outputs[0]
        states, weights = plain_run(tiny_folder, np.array([*prompt, *branch.token_ids])[:-1], weigh)
        dense_states = plain_run(tiny_folder, np.array([*prompt, *branch.token_ids])[:-1])[0]
        logits = states[-1][len(prompt) - 1 :] @ head.T
        logprobs = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
        assert tuple(logits.argmax(-1).tolist()) == branch.token_ids
        for entry, token, row in zip(branch.logprobs, branch.token_ids, logprobs, strict=True):
            chex.assert_trees_all_close(entry[token].logprob, row[token], atol=1e-4)
        for i in TAPS.hidden_states:
            chex.assert_trees_all_close(
                branch.taps.hidden_states[i], states[i].astype(np.float32), atol=1e-4
            )
            if len(prompt) > 1:
                assert np.abs(states[i] - dense_states[i]).max() > 0.01, (
                    "it hardly differs: the comparison is blind"
                )
        for layer, heads in TAPS.attention:
            for j, tapped in enumerate(branch.taps.attention[layer]):
                at = len(prompt) + j
                expected = weights[layer][list(heads), at - 1, :at].astype(np.float32)
                chex.assert_trees_all_close(tapped, expected, atol=1e-5)


def test_the_documented_variants_read_windows_caps_and_padding(file):
    """A window and a soft cap in the kernel's contract, and NaN in slots that nobody sees."""
    rng = np.random.default_rng(0)
    impl = attention.find(f"{file}:PLUS_ONE")
    q = rng.normal(size=(8, 4, 16)).astype(np.float32)
    pages = np.full((2, 6, 2, 4, 16), np.nan, np.float32)  # keys and values
    tables = np.array([[3, 1, 0], [5, 0, 0], [0, 0, 0]])
    lens = np.array([7, 2, 0])
    cu = np.array([0, 5, 6, 6])
    tokens_of_rows = {
        row: rng.normal(size=(2, lens[row], 2, 16)).astype(np.float32) for row in (0, 1)
    }
    for row, tokens in tokens_of_rows.items():
        for i in range(lens[row]):
            pages[:, tables[row, i // 4], :, i % 4] = tokens[:, i]
    arrays = [jnp.asarray(x) for x in (q, *pages)] + [
        jnp.asarray(x, jnp.int32) for x in (tables, lens, cu)
    ]
    options = {"scale": 0.3, "window": 3, "soft_cap": 2.0}
    result = jax.jit(lambda *a: paged_attention(*a, impl=impl, **options))(*arrays)
    chex.assert_shape(result, q.shape)
    for token in range(6):
        row, at = (0, 2 + token) if token < 5 else (1, 1)
        for head in range(4):
            keys, values = tokens_of_rows[row][:, max(at - 2, 0) : at + 1, head // 2]
            scores = 2.0 * np.tanh(0.3 * keys @ q[token, head] / 2.0)
            expected = plus_one(scores[None], head)[0] @ values
            chex.assert_trees_all_close(np.asarray(result[token, head]), expected, atol=1e-5)


def test_a_cache_that_the_documented_variants_do_not_read_is_refused(tiny_folder, file):
    with pytest.raises(
        ValueError, match=r"own_attention.py:PLUS_ONE' reads no 8 bits; 'xla' has no such limit"
    ):
        LLM(
            tiny_folder,
            progress=False,
            attention_impl=f"{file}:PLUS_ONE",
            kv_cache_dtype="float8_e4m3fn",
            **SIZES,
        )
