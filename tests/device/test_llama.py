"""The Llama family against a plain numpy implementation, and live against transformers (marker
`oracle`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import chex
import jax
import numpy as np
import pytest
from flax import nnx

from pagedjax import LLM, SamplingParams, load_model
from pagedjax.device import attention
from pagedjax.device.batch import Batch
from pagedjax.device.extras import GroupTables
from pagedjax.device.models import Model, llama
from pagedjax.device.rope import rope_frequencies
from pagedjax.engine.geometry import geometry
from pagedjax.options.config import EngineConfig
from pagedjax.weights import open_checkpoint
from tests.refusals import refused
from tests.weights.tiny import llama3_scaling, tiny_llama

pytestmark = pytest.mark.few_optimisations

SHAPES: dict[str, dict[str, Any]] = {
    "grouped heads, tied": {},
    "one key head, untied, wide heads": {
        "kv_heads": 1,
        "head_dim": 32,
        "tied": False,
        "layers": 1,
        "seed": 1,
    },
    "every head its own, llama3 rope": {
        "heads": 3,
        "hidden": 96,
        "kv_heads": 3,
        "rope_theta": 500000.0,
        "rope_scaling": llama3_scaling(),
        "layers": 1,
        "seed": 2,
    },
    "four biases, linear rope": {
        "qkv_bias": True,
        "o_bias": True,
        "rope_scaling": {"rope_type": "linear", "factor": 3.0},
        "layers": 1,
        "seed": 3,
    },
    "biases of q, k and v alone": {"qkv_bias": True, "layers": 1, "seed": 4},
}
LENGTHS = (70, 9, 33, 1)
PROMPTS = [np.random.default_rng(i).integers(0, 320, n) for i, n in enumerate(LENGTHS)]
# Steps of (sequence, tokens): chunks of several prompts, decodes beside them, one chunk of more
# than 64 tokens.
CHUNKED = [[(0, 11), (1, 9)], [(0, 1), (2, 20), (3, 1)], [(2, 12), (0, 57)], [(2, 1), (0, 1)]]
T = 72
S = 8
M = 10


def all_logits(
    model: Model, steps: Sequence[Sequence[tuple[int, int]]], impl: str = "reference"
) -> list[np.ndarray]:
    """The logits after every token of PROMPTS, computed through the cache in these steps.

    Args:
        impl: of attention. "reference" is compiled in a third of the time of "xla".
    """
    b = len(PROMPTS)
    config = EngineConfig(block_size=S, max_model_len=M * S)
    shape = geometry(config, model, model.dtype, impl)
    kv = shape.new_cache(b * M, model, impl)
    blocks = np.random.default_rng(0).permutation(b * M * shape.groups) + 1
    tables = blocks.reshape(shape.groups, b, M).astype(np.int32)
    computed = [0] * b
    logits_of_rows = [[] for _ in PROMPTS]
    run = partial(_run, model.graphdef, impl)
    for step in steps:
        batch, *of_groups = [lay_out(step, computed, PROMPTS, table, T) for table in tables]
        layout = shape.layouts.model
        if layout:
            slots = tuple([group_batch.slots for group_batch in of_groups])
            block_tables = tuple([group_batch.block_tables for group_batch in of_groups])
            batch = batch._replace(extras=(GroupTables(layout, slots, block_tables),))
        kv, logits = run(model.params, kv, batch)
        ends = np.cumsum([count for _, count in step])
        parts = np.split(np.asarray(logits, np.float32), ends)
        for (row, count), part in zip(step, parts, strict=False):
            logits_of_rows[row].append(part)
            computed[row] += count
    assert tuple(computed) == LENGTHS
    return [np.concatenate(parts) for parts in logits_of_rows]


@partial(jax.jit, static_argnums=(0, 1))
def _run(graphdef, impl, params, kv, batch):
    model = nnx.merge(graphdef, params)
    kv, hidden, _ = model.hidden(kv, batch, attention.attend(impl, model.config.attn_scale))
    return kv, model.logits(hidden)


def lay_out(step, computed, prompts, tables, t: int, s: int = S) -> Batch:
    """The rows of a step, (row, tokens), in blocks of s tokens; the others are padding."""
    tokens, positions, slots = np.zeros((3, t), np.int32)
    block_tables = np.zeros_like(tables)
    seq_lens = np.zeros(len(prompts), np.int32)
    cu_q_lens = np.zeros(len(prompts) + 1, np.int32)
    at = 0
    for i, (row, count) in enumerate(step):
        columns = slice(at, at + count)
        span = computed[row] + np.arange(count)
        tokens[columns] = prompts[row][span]
        positions[columns] = span
        slots[columns] = tables[row][span // s] * s + span % s
        block_tables[i] = tables[row]
        seq_lens[i] = computed[row] + count
        at += count
        cu_q_lens[i + 1 :] = at
    unused = np.zeros(0, np.int32)
    return Batch(
        tokens, positions, slots, block_tables, seq_lens, cu_q_lens, unused, unused, unused, None
    )  # type: ignore[arg-type]


def chosen(tokens: Any, entries: Any) -> np.ndarray:
    """The log-probabilities that an engine gave to these tokens."""
    pairs = zip(tokens, entries, strict=True)
    return np.array([entry[token].logprob for token, entry in pairs], np.float32)


# --- the definition in numpy ----------------------------------------------------------------------


def plain_llama(folder: Path, tokens: np.ndarray) -> np.ndarray:
    """[n, V] logits in float64."""
    checkpoint = open_checkpoint(folder)
    head = "model.embed_tokens" if checkpoint.config["tie_word_embeddings"] else "lm_head"
    return (
        plain_hidden(folder, tokens)
        @ checkpoint.tensors[f"{head}.weight"].read().astype(np.float64).T
    )


def plain_hidden(folder: Path, tokens: np.ndarray) -> np.ndarray:
    """[n, H] hidden states after the last norm in float64."""
    return plain_run(folder, tokens)[0][-1]


def softmax(scores: np.ndarray, head: int) -> np.ndarray:
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    return weights / weights.sum(-1, keepdims=True)


def plain_run(
    folder: Path, tokens: np.ndarray, weigh: Callable[[np.ndarray, int], np.ndarray] = softmax
) -> tuple[list[np.ndarray], list[np.ndarray]]:
    """All hidden states [n, H], as transformers counts them, and the weights of attention [N, n, n]
    of each layer.

    In float64: no cache, no batch, the tensors by their Hugging Face names.

    Args:
        weigh: (scores [n, n] with -inf for tokens behind the query, head) -> weights.
    """
    checkpoint = open_checkpoint(folder)
    c = checkpoint.config
    w = {name: tensor.read().astype(np.float64) for name, tensor in checkpoint.tensors.items()}

    def linear(x, name):
        return x @ w[f"{name}.weight"].T + w.get(f"{name}.bias", 0.0)

    def norm(x, name):
        scale = np.sqrt((x * x).mean(-1, keepdims=True) + c["rms_norm_eps"])
        return x / scale * w[f"{name}.weight"]

    x = w["model.embed_tokens.weight"][tokens]
    states = [x]
    all_weights = []
    for i in range(c["num_hidden_layers"]):
        layer = f"model.layers.{i}"
        y = norm(x, f"{layer}.input_layernorm")
        q, k, v = (linear(y, f"{layer}.self_attn.{p}_proj") for p in "qkv")
        y, weights = plain_attention(q, k, v, c, weigh)
        x = x + linear(y, f"{layer}.self_attn.o_proj")
        y = norm(x, f"{layer}.post_attention_layernorm")
        gate = linear(y, f"{layer}.mlp.gate_proj")
        x = x + linear(
            gate / (1 + np.exp(-gate)) * linear(y, f"{layer}.mlp.up_proj"), f"{layer}.mlp.down_proj"
        )
        states.append(x)
        all_weights.append(weights)
    return [*states[:-1], norm(x, "model.norm")], all_weights


def plain_attention(
    q: np.ndarray,
    k: np.ndarray,
    v: np.ndarray,
    c: Mapping[str, Any],
    weigh: Callable[[np.ndarray, int], np.ndarray],
) -> tuple[np.ndarray, np.ndarray]:
    """Returns ([n, N D], the weights [N, n, n])."""
    n = len(q)
    size = c["head_dim"]
    group = c["num_attention_heads"] // c["num_key_value_heads"]
    q, k, v = (a.reshape(n, -1, size) for a in (q, k, v))
    q = plain_rope(q, c)
    k = plain_rope(k, c)
    out = np.zeros_like(q)
    all_weights = np.zeros((q.shape[1], n, n))
    for head in range(q.shape[1]):
        scores = q[:, head] @ k[:, head // group].T / np.sqrt(size)
        scores[np.triu_indices(n, 1)] = -np.inf
        all_weights[head] = weigh(scores, head)
        out[:, head] = all_weights[head] @ v[:, head // group]
    return out.reshape(n, -1), all_weights


def plain_rope(x: np.ndarray, c: Mapping[str, Any]) -> np.ndarray:
    """Returns x as of Su et al. 2021, on halves: each pair as a complex number, turned by position
    times frequency.
    """
    half = c["head_dim"] // 2
    wavelengths = 2 * np.pi * c["rope_theta"] ** (np.arange(half) / half)
    scaling = c["rope_scaling"] or {}
    if scaling.get("rope_type") == "linear":
        wavelengths = wavelengths * scaling["factor"]
    # long waves stretched, short ones kept, a ramp in frequency between
    if scaling.get("rope_type") == "llama3":
        turns = scaling["original_max_position_embeddings"] / wavelengths
        low = scaling["low_freq_factor"]
        high = scaling["high_freq_factor"]
        unscaled = np.clip((turns - low) / (high - low), 0, 1)
        wavelengths = 1 / (
            unscaled / wavelengths + (1 - unscaled) / (wavelengths * scaling["factor"])
        )
    turned = np.exp(2j * np.pi * np.arange(len(x))[:, None] / wavelengths)[:, None]
    z = (x[..., :half] + 1j * x[..., half:]) * turned
    return np.concatenate([z.real, z.imag], axis=-1)


@pytest.fixture(scope="module", params=SHAPES)
def folder(request, tmp_path_factory) -> Path:
    return tiny_llama(tmp_path_factory.mktemp("llama") / "model", **SHAPES[request.param])


def test_ragged_chunks_through_the_cache_give_the_logits_of_plain_numpy(folder):
    chunked = all_logits(load_model(folder).model, CHUNKED)
    for got, prompt in zip(chunked, PROMPTS, strict=True):
        expected = plain_llama(folder, prompt)
        assert np.ptp(expected) > 5, "the logits hardly differ: the comparison is blind"
        chex.assert_trees_all_close(got, expected, atol=1e-4, rtol=0)


@pytest.mark.parametrize(
    ("dtype", "bits"), [("bfloat16", 8), pytest.param("float16", 11, marks=pytest.mark.slow)]
)
def test_half_precision_is_as_near_as_its_bits(tiny, tiny_folder, dtype, bits):
    model = load_model(tiny_folder, dtype=dtype).model
    assert {str(a.dtype) for a in jax.tree.leaves(nnx.filter_state(model.params, nnx.Param))} == {
        dtype
    }
    for got, expected in zip(
        all_logits(model, CHUNKED), all_logits(tiny.model, CHUNKED), strict=True
    ):
        error = np.sqrt(np.mean((got - expected) ** 2)) / np.sqrt(np.mean(expected**2))
        assert 2.0 ** -(bits + 6) < error < 4 * 2.0**-bits


# --- configurations -------------------------------------------------------------------------------

TINYLLAMA = {
    "hidden_size": 2048,
    "intermediate_size": 5632,
    "num_hidden_layers": 22,
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
    "vocab_size": 32000,
    "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-5,
}


def test_the_table_names_every_tensor_of_a_checkpoint_once(folder):
    config = open_checkpoint(folder)
    names = [
        name for entry in llama.param_table(llama.from_hf(config.config)) for name in entry.sources
    ]
    assert sorted(names) == sorted(config.tensors)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"num_key_value_heads": 5}, "heads 32 is not a multiple of num_key_value_heads 5"),
        ({"hidden_size": None}, "hidden_size"),
    ],
)
def test_a_config_this_file_cannot_honour_is_refused(change, message):
    config = {key: value for key, value in (TINYLLAMA | change).items() if value is not None}
    with refused(message):
        llama.from_hf(config)


@pytest.mark.parametrize(
    ("scaling", "length"),
    [
        (None, 2048),
        ({"rope_type": "linear", "factor": 4.0}, 8192),
        ({"rope_type": "linear", "factor": 2.5}, 5120),
        ({"rope_type": "linear", "factor": 4.0, "original_max_position_embeddings": 512}, 2048),
        ({"rope_type": "linear", "factor": 4.0, "original_max_position_embeddings": 2048}, 8192),
        (llama3_scaling(), 2048),
        ({"rope_type": "yarn", "factor": 4.0}, 8192),
        ({"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 512}, 2048),
        ({"rope_type": "yarn", "original_max_position_embeddings": 512}, 2048),
        ({"rope_type": "freqs", "factors": [1.0] * 32}, 2048),
    ],
)
def test_scaling_stretches_the_longest_context(scaling, length):
    assert llama.from_hf(TINYLLAMA | {"rope_scaling": scaling}).max_len == length


@pytest.mark.slow
def test_log_probabilities_in_a_stretched_context_are_those_of_plain_numpy(tmp_path):
    linear = {"rope_type": "linear", "factor": 4.0}
    folder = tiny_llama(tmp_path / "llama", layers=1, tied=False, max_len=64, rope_scaling=linear)
    sizes = {"max_num_seqs": 1, "max_num_batched_tokens": 200, "token_buckets": (200,)}
    llm = LLM(load_model(folder, linear_impl="xla"), progress=False, num_blocks=16, **sizes)
    assert llm.engine.config.max_model_len == 256
    prompt = np.random.default_rng(0).integers(3, 320, 200)
    params = SamplingParams(temperature=0.0, max_tokens=1, prompt_logprobs=0)
    (output,) = llm.generate([prompt.tolist()], params)
    logprobs = chosen(prompt[1:], output.prompt_logprobs[1:])
    logits = plain_llama(folder, prompt)
    logp = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
    expected = logp[np.arange(199), prompt[1:]]
    np.testing.assert_allclose(logprobs, expected, atol=2e-4)


def test_explicit_divisors_are_those_of_the_scaling_they_spell_out():
    """A GGUF file carries "llama3" scaling as one divisor a frequency."""
    plain, scaled = (np.array(rope_frequencies(16, 1e4, s)) for s in (None, llama3_scaling()))
    assert len(set((plain / scaled).round(6))) >= 3, "kept, blended and stretched frequencies"
    spelled = rope_frequencies(
        16, 1e4, {"rope_type": "freqs", "factors": (plain / scaled).tolist()}
    )
    np.testing.assert_allclose(spelled, scaled, rtol=1e-12)


def test_experts_are_in_every_nth_layer_counted_from_one():
    """As in transformers: `(layer_idx + 1) % decoder_sparse_step == 0`, and not in
    `mlp_only_layers`.
    """
    config = {"num_hidden_layers": 6, "decoder_sparse_step": 2, "mlp_only_layers": [3]}
    sparse = [kind.sparse for kind in llama._kinds(config, "qwen3_moe")]
    assert sparse == [i in (1, 5) for i in range(6)]
