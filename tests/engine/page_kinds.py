"""Models whose layers keep other pages than keys and values of one size, and the engines that must
give their tokens. test_page_contract.py says what holds for all of them; a new kind of layer is one
entry in `KINDS`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import chex
import numpy as np
from flax import nnx

from pagedjax import LLM, SamplingParams
from pagedjax.device.models import Model, assemble
from pagedjax.device.models.decoder import Decoder, DecoderConfig, LayerHeads, LayerKind
from pagedjax.device.models.latent import Latent
from pagedjax.device.models.mixers.gated_delta import GatedDelta
from pagedjax.device.models.mixers.mamba2 import Mamba2
from pagedjax.device.models.mixers.short_conv import ShortConv
from pagedjax.device.rope import Rope
from pagedjax.device.score import score
from pagedjax.host.replay import verify
from pagedjax.weights.tree import nested
from tests.device.test_llama import chosen
from tests.engine.runs import check_idle, greedy, small_llm

# requests and their answers -----------------------------------------------------------------------

PARAMS = SamplingParams(n=2, temperature=1.0, seed=3, max_tokens=16, ignore_eos=True, logprobs=0)


def prompts() -> list[list[int]]:
    """Prompts that share their first 14 tokens."""
    rng = np.random.default_rng(0)
    shared = rng.integers(3, 320, 14).tolist()
    return [shared + rng.integers(3, 320, n).tolist() for n in (1, 9, 5, 22)]


Branch = tuple[tuple[int, ...], float]  # the tokens, and their summed log-probability


def branches_of(outputs: list[Any]) -> list[Branch]:
    """The branches of all outputs."""
    branches = [branch for output in outputs for branch in output.outputs]
    return [(branch.token_ids, branch.cumulative_logprob) for branch in branches]


def tokens_of(llm: LLM, params: SamplingParams = PARAMS, rounds: int = 1) -> list[Branch]:
    """What an engine answers to the prompts. A later round finds prefixes in the cache."""
    outputs = [output for _ in range(rounds) for output in llm.generate(prompts(), params)]
    check_idle(llm.engine)
    return branches_of(outputs)


def check_same(results: list[Branch], expected: list[Branch]) -> None:
    for result, expected_result in zip(results, expected, strict=True):
        assert result[0] == expected_result[0]
        chex.assert_trees_all_close(result[1], expected_result[1], atol=1e-3)


def check_moves(recording: Path) -> None:
    """A replay gives the same bytes, and blocks were copied, and moved to the host and back."""
    assert verify(recording).identical
    text = recording.read_text()
    for moved in ("swap_out", "swap_in", "copies"):
        assert f'"{moved}":[[' in text, moved


def check_scores(model: Model, llm: LLM, texts: list[list[int]]) -> None:
    """Scores of whole texts, some of which are padded, are log-probabilities of an engine of the
    model.
    """
    outputs = llm.generate(texts, greedy(6, logprobs=0, prompt_logprobs=0))
    tokens = np.full((len(texts), max(map(len, texts)) + 6), 7)
    expected = np.zeros(tokens.shape, np.float32)
    lengths = []
    for i, output in enumerate(outputs):
        branch = output.outputs[0]
        text = [*output.prompt_token_ids, *branch.token_ids]
        assert output.prompt_logprobs
        entries = [*output.prompt_logprobs[1:], *(branch.logprobs or ())]
        tokens[i, : len(text)] = text
        expected[i, 1 : len(text)] = chosen(text[1:], entries)
        lengths.append(len(text))
    scored = score(nnx.merge(model.graphdef, model.params), tokens, np.array(lengths))
    chex.assert_trees_all_close(scored, expected, rtol=0, atol=2e-4)


# engines ------------------------------------------------------------------------------------------

# sizes at which models of all kinds copy blocks, and preempt branches: chunks end within blocks, and
# of 16 blocks the longest sequence needs 13
SCARCE = {"block_size": 4, "max_num_batched_tokens": 10, "num_blocks": 16}
SWAPPED: dict[str, Any] = SCARCE | {"preemption": "swap", "swap_space_gib": 0.05}
ENGINES: dict[str, dict[str, Any]] = {
    "swapped": SWAPPED,
    "recomputed": SCARCE,
    "blocks of a token": {"block_size": 1, "max_num_batched_tokens": 9},
    "plain XLA": {"block_size": 8, "attention_impl": "xla", "max_num_batched_tokens": 32},
    "kernels of a TPU": {
        "block_size": 8,
        "attention_impl": "pallas_tpu",
        "max_num_batched_tokens": 8,
        "token_buckets": (8,),
    },
    "kernels of a TPU on two devices": {
        "block_size": 8,
        "attention_impl": "pallas_tpu",
        "mesh": {"tensor": 2},
        "max_num_batched_tokens": 8,
        "token_buckets": (8,),
    },
    "all blocks kept": {"block_size": 4, "free_window_blocks": False},
    "drafts": {
        "block_size": 8,
        "speculative": {"method": "ngram", "num_tokens": 3},
        "max_num_batched_tokens": 32,
    },
    "no lookahead": {"block_size": 8, "lookahead": 0},
    "a baseline": {"mixed_steps": False, "max_num_batched_tokens": 32},
    "two devices": {"block_size": 8, "mesh": {"tensor": 2}},
    "three devices, heads of zeros": {"block_size": 8, "mesh": {"tensor": 3}},
    # with a drafter of the device, which the test adds
    "a draft model": {"block_size": 4, "max_num_batched_tokens": 24, "num_blocks": 20},
    "a draft head": {"block_size": 8, "max_num_batched_tokens": 32},
}

# models -------------------------------------------------------------------------------------------

# 32 numbers of keys a token in layers with a window, 16 in three others and 48 in one: pages have
# 96, which are 3, 6 or 2 parts
WINDOW = LayerKind(window=9, rope=1)
SHARED = LayerKind(heads=LayerHeads(4, 1, 16, shared_values=True))
WIDE = LayerKind(heads=LayerHeads(2, 1, 48))
LATENT = Latent(rank=16, rotated=8, key=4, value=6, query_rank=20)
DELTA = GatedDelta(length=3, heads=4, key_heads=2, key_dim=8, value_dim=12)
MAMBA = Mamba2(length=4, heads=4, key_heads=2, key_dim=6, value_dim=8)
MIXED = (
    LayerKind(mixer=ShortConv(3)),
    LayerKind(),
    LayerKind(mixer=DELTA),
    LayerKind(mixer=MAMBA),
)


def with_heads(config: DecoderConfig) -> DecoderConfig:
    """Layers with heads of three sizes, as Gemma 4 has of two."""
    return replace(
        config,
        kinds=(WINDOW, SHARED, WINDOW, SHARED, WINDOW, WIDE, WINDOW, SHARED),
        heads=4,
        kv_heads=4,
        head_dim=8,
        ropes=(Rope(1000.0, rotated=12), Rope(100.0, rotated=8)),
        attn_scale=0.3,
        qk_norm="head",
        v_norm=True,
        layer_scales=True,
    )


def with_latents(config: DecoderConfig) -> DecoderConfig:
    """Layers that keep one row a token, as those of DeepSeek."""
    return replace(config, latent=LATENT, kv_heads=1, head_dim=LATENT.row, attn_scale=0.0)


def with_mixers(config: DecoderConfig) -> DecoderConfig:
    """One layer of attention, and layers with states, of all kinds."""
    return replace(config, kinds=MIXED)


def random_parameters(config: DecoderConfig) -> dict[str, Any]:
    """Numbers of a size that keeps activations near 1."""
    state = nnx.state(nnx.eval_shape(lambda: Decoder(config, "float32")), nnx.Param)
    rng = np.random.default_rng(0)

    def drawn(shape: tuple[int, ...]) -> np.ndarray:
        numbers = rng.standard_normal(shape).astype(np.float32)
        return numbers / np.sqrt(shape[-1]) if len(shape) > 1 else 1 + 0.3 * numbers

    leaves = nnx.to_flat_state(state)
    return nested({".".join(map(str, path)): drawn(leaf.shape) for path, leaf in leaves})


# kinds --------------------------------------------------------------------------------------------

PLAIN = {"enable_prefix_caching": False, "block_size": 16, "max_num_batched_tokens": 128}
REFERENCE = PLAIN | {"attention_impl": "reference"}
SLOW_RUN = ("swapped", "recomputed", "a draft model")


class PageKind(NamedTuple):
    """A kind of pages.

    config_of: (sizes of the tiny model) -> those of a model with such layers.
    plain: options of the engine whose answers are right: whole prompts, and nothing is shared.
    slow: names of the engines that the slow runs compare with it.
    exhaustive: those that are compared by hand alone.
    refused: by name, options that such a model cannot have, and the text of the error.
    refused_drafter: the error of such a draft model, and of a draft head for such a model; None:
        they can be.
    bytes_in_8_bits: of a block of 16 tokens with pages of 8 bits; None: they are refused.
    """

    config_of: Callable[[DecoderConfig], DecoderConfig]
    plain: Mapping[str, Any]
    slow: tuple[str, ...]
    exhaustive: tuple[str, ...]
    refused: Mapping[str, tuple[dict[str, Any], str]]
    refused_drafter: tuple[str, str] | None = None
    bytes_in_8_bits: int | None = None


KINDS = {
    "heads": PageKind(
        with_heads,
        REFERENCE,
        slow=(*SLOW_RUN, "all blocks kept", "a baseline", "three devices, heads of zeros"),
        # other kinds have them
        exhaustive=("blocks of a token", "drafts", "no lookahead", "plain XLA"),
        refused={
            "a KV policy": (
                {"kv_policy": {"name": "streaming", "sinks": 4, "window": 60}},
                "heads of several sizes, and kv_policy is 'streaming', which reads one size",
            ),
            "a kernel for GPUs": (
                {"attention_impl": "pallas_gpu"},
                "attention_impl 'pallas_gpu' runs on platform 'gpu'",
            ),
        },
        refused_drafter=(
            "the draft model has layers with heads of several sizes, .*method='ngram'",
            "the model has layers with heads of several sizes, and a draft head is for",
        ),
        bytes_in_8_bits=16 * 2 * (2 * 2 * 96 + 4),  # two groups of two pages, and the token ids
    ),
    "latents": PageKind(
        with_latents,
        REFERENCE,
        slow=("swapped", "recomputed", "drafts", "plain XLA", "kernels of a TPU on two devices"),
        exhaustive=(
            "a baseline",
            "a draft model",
            "blocks of a token",
            "kernels of a TPU",
            "no lookahead",
            "three devices, heads of zeros",
        ),
        refused={
            "equal bits": (
                {"batch_invariant": True},
                r"the model keeps latents \(rows of 24 numbers\), whose results may depend on a "
                "chunk's",
            ),
            "selected blocks": (
                {"kv_policy": {"name": "quest", "tokens": 32}},
                "of which no blocks are selected yet, and kv_policy is 'quest'",
            ),
            "a kernel for GPUs": (
                {"attention_impl": "pallas_gpu"},
                "attention_impl 'pallas_gpu' runs on platform 'gpu'",
            ),
        },
        refused_drafter=(
            "the draft model keeps latents .* use one with usual attention",
            "a draft head is for models with usual .* or a draft model that has usual",
        ),
        bytes_in_8_bits=16 * (2 * LATENT.row + 4),  # a row in each of two layers, and the token ids
    ),
    "mixers": PageKind(
        with_mixers,
        PLAIN,
        slow=(*SLOW_RUN, "blocks of a token", "two devices", "a draft head"),
        exhaustive=("all blocks kept", "drafts", "no lookahead"),
        refused={
            "a baseline": ({"mixed_steps": False}, "a baseline keeps every block in one table"),
            "a KV policy": (
                {"kv_policy": "streaming"},
                "whose pages a kv_policy cannot thin out",
            ),
            "8 bits": (
                {"kv_cache_dtype": "float8_e4m3fn"},
                "whose pages would not become smaller",
            ),
            "equal bits": (
                {"batch_invariant": True},
                "whose bits may depend on the shapes of a step",
            ),
        },
    ),
}


class Subject:
    """A model with pages of a kind, and what its engines must answer. Each part is made when a test
    first needs it.
    """

    def __init__(self, name: str, tiny: Any) -> None:
        self.kind = KINDS[name]
        self._tiny = tiny

    @cached_property
    def loaded(self) -> Any:
        """The tiny model's tokenizer and sizes, with random layers of the kind."""
        config = self.kind.config_of(self._tiny.model.config)
        model = assemble(config, random_parameters(config), "float32")
        return replace(self._tiny, model=model)

    @cached_property
    def plain(self) -> LLM:
        return small_llm(self.loaded, **self.kind.plain)

    @cached_property
    def expected(self) -> list[Branch]:
        return tokens_of(self.plain)
