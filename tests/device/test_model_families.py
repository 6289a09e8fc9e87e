"""Every architecture against transformers (torch on a CPU, float32): small, with random weights, of
the real shape.
"""

from __future__ import annotations

from copy import deepcopy
from pathlib import Path
from typing import Any

import chex
import jax
import numpy as np
import pytest
from flax import nnx

from pagedjax import LLM, SamplingParams, load_model
from pagedjax.device import cache
from pagedjax.device.models import Decoder, Model, for_context
from pagedjax.device.models.decoder import Block, DecoderConfig
from pagedjax.device.score import score
from pagedjax.weights.architectures import FAMILIES, normalised
from pagedjax.weights.convert import convert
from tests import quick_compiler
from tests.device.test_llama import CHUNKED, PROMPTS, all_logits, chosen
from tests.refusals import refused
from tests.weights.tiny import llama3_scaling, write_tokenizer

BODY: dict[str, Any] = {
    "vocab_size": 320,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
GPT2 = {
    "vocab_size": 320,
    "n_embd": 64,
    "n_layer": 3,
    "n_head": 4,
    "n_positions": 256,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
FINAL = ("model.norm.weight", "transformer.ln_f.weight", "gpt_neox.final_layer_norm.weight")
NEOX = {
    "vocab_size": 320,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "max_position_embeddings": 256,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
# of which every range is within the prompts
YARN = {"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 32}
# chunks of more than 6 tokens are expanded; the factor of scores is not 1
LATENTS = {
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 4,
    "v_head_dim": 6,
    "num_key_value_heads": 4,
}
DEEPSEEK_YARN = YARN | {"mscale": 0.7, "mscale_all_dim": 1.0}
QWEN_HYBRID = BODY | {
    "num_hidden_layers": 4,
    "head_dim": 32,
    "linear_conv_kernel_dim": 3,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 12,
    "linear_value_head_dim": 20,
    "moe_intermediate_size": 24,
    "shared_expert_intermediate_size": 40,
}
# heads of two sizes; two layers that see all tokens have parts of one page
GEMMA_4 = BODY | {
    "num_hidden_layers": 5,
    "layer_types": ["sliding_attention", "full_attention"] * 2 + ["full_attention"],
    "num_key_value_heads": 4,
    "head_dim": 16,
    "num_global_key_value_heads": 1,
    "global_head_dim": 32,
    "attention_k_eq_v": True,
    "sliding_window": 16,
    "hidden_size_per_layer_input": 0,
    "final_logit_softcapping": 10.0,
}
LONGROPE = {
    "rope_type": "longrope",
    "short_factor": [1.0, 1.1, 1.3, 1.6, 2.0, 3.0],
    "long_factor": [1.0, 1.5, 3.0, 5.0, 7.0, 9.0],
}
# name: (model_type, what its configuration says); windows are shorter than the prompts
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "GPT-2": ("gpt2", GPT2),
    "GPT-2, untied, exact GELU, a narrow MLP": (
        "gpt2",
        GPT2 | {"tie_word_embeddings": False, "activation_function": "gelu", "n_inner": 80},
    ),
    "Llama 2": ("llama", BODY),
    "Llama 3": (
        "llama",
        BODY | {"rope_scaling": llama3_scaling(), "rope_theta": 500000.0, "head_dim": 32},
    ),
    "Mistral": ("mistral", BODY | {"sliding_window": 24, "head_dim": 32}),
    "Qwen2": ("qwen2", BODY | {"tie_word_embeddings": True}),
    "Qwen2, windows from layer 1": (
        "qwen2",
        BODY | {"use_sliding_window": True, "sliding_window": 16, "max_window_layers": 1},
    ),
    "Qwen3": ("qwen3", BODY | {"head_dim": 32}),
    "Gemma 2": (
        "gemma2",
        BODY | {"head_dim": 32, "sliding_window": 16, "query_pre_attn_scalar": 24},
    ),
    "Gemma 2, caps that bind": (
        "gemma2",
        BODY
        | {
            "head_dim": 16,
            "attn_logit_softcapping": 1.0,
            "final_logit_softcapping": 10.0,
            "sliding_window": 40,
        },
    ),
    "Gemma 3": (
        "gemma3_text",
        BODY
        | {
            "head_dim": 32,
            "sliding_window": 16,
            "num_hidden_layers": 7,
            "query_pre_attn_scalar": 24,
        },
    ),
    "Gemma 3, stretched where it sees all": (
        "gemma3_text",
        BODY
        | {"head_dim": 32, "sliding_window": 16, "num_hidden_layers": 2}
        | {"layer_types": ["sliding_attention", "full_attention"]}
        | {
            "rope_parameters": {
                "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
                "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
            }
        },
    ),
    "Gemma 4": ("gemma4_text", GEMMA_4),
    "Gemma 4, wide heads, biases, stretched": (
        "gemma4_text",
        GEMMA_4
        | {"num_key_value_heads": 2, "global_head_dim": 48, "attention_k_eq_v": False}
        | {"attention_bias": True, "tie_word_embeddings": False, "final_logit_softcapping": None}
        | {
            "rope_parameters": {
                "sliding_attention": {"rope_type": "default", "rope_theta": 5000.0},
                "full_attention": {
                    "rope_type": "proportional",
                    "rope_theta": 1e5,
                    "partial_rotary_factor": 0.75,
                    "factor": 4.0,
                },
            }
        },
    ),
    "Gemma 4 unified, equal heads": (
        "gemma4_unified_text",
        {key: value for key, value in GEMMA_4.items() if key != "hidden_size_per_layer_input"}
        | {"num_hidden_layers": 2, "layer_types": None, "global_head_dim": 16}
        | {"num_global_key_value_heads": None, "attention_k_eq_v": False},
    ),
    "LFM2": (
        "lfm2",
        BODY
        | {"num_hidden_layers": 4, "layer_types": ["conv", "full_attention", "conv", "conv"]}
        | {"block_auto_adjust_ff_dim": False},
    ),
    "LFM2, biases, an MLP of an adjusted width": (
        "lfm2",
        BODY
        | {"num_hidden_layers": 3, "layer_types": ["full_attention", "conv", "full_attention"]}
        | {"conv_bias": True, "conv_L_cache": 4, "block_multiple_of": 32},
    ),
    "Qwen3.5": (
        "qwen3_5_text",
        BODY
        | {"num_hidden_layers": 4, "head_dim": 32, "linear_conv_kernel_dim": 3}
        | {"linear_num_key_heads": 2, "linear_num_value_heads": 4}
        | {"linear_key_head_dim": 12, "linear_value_head_dim": 20},
    ),
    "Qwen3.5, the delta rule behind attention": (
        "qwen3_5_text",
        BODY
        | {"num_hidden_layers": 2, "head_dim": 16, "tie_word_embeddings": True}
        | {"layer_types": ["full_attention", "linear_attention"]}
        | {"linear_num_key_heads": 3, "linear_num_value_heads": 3}
        | {"linear_key_head_dim": 16, "linear_value_head_dim": 16},
    ),
    "Qwen3.5 MoE": (
        "qwen3_5_moe_text",
        QWEN_HYBRID | {"num_experts": 6, "num_experts_per_tok": 3},
    ),
    "Qwen3-Next": (
        "qwen3_next",
        QWEN_HYBRID | {"num_experts": 6, "num_experts_per_tok": 2, "mlp_only_layers": [1]},
    ),
    "Qwen3-Next, experts in every second layer": (
        "qwen3_next",
        QWEN_HYBRID
        | {"num_hidden_layers": 2, "layer_types": ["full_attention", "linear_attention"]}
        | {"num_experts": 5, "num_experts_per_tok": 2, "decoder_sparse_step": 2}
        | {"norm_topk_prob": False, "linear_num_key_heads": 4},
    ),
    "Granite 4 Hybrid": (
        "granitemoehybrid",
        BODY
        | {"num_hidden_layers": 3, "num_local_experts": 0, "shared_intermediate_size": 96}
        | {"layer_types": ["linear_attention", "full_attention", "linear_attention"]}
        | {"mamba_n_heads": 8, "mamba_n_groups": 2, "mamba_d_state": 12, "mamba_d_conv": 3}
        | {"embedding_multiplier": 3.0, "residual_multiplier": 0.7, "logits_scaling": 1.5}
        | {"attention_multiplier": 0.3},
    ),
    "Granite 4 Hybrid, rotated, biases, limits": (
        "granitemoehybrid",
        BODY
        | {"num_hidden_layers": 2, "num_local_experts": 0, "shared_intermediate_size": 80}
        | {"layer_types": ["full_attention", "linear_attention"]}
        | {"mamba_n_heads": 4, "mamba_n_groups": 1, "mamba_d_state": 8}
        | {"mamba_proj_bias": True, "time_step_limit": [0.01, 0.5]}
        | {"position_embedding_type": "rope", "tie_word_embeddings": True},
    ),
    "Granite 4 Hybrid with experts": (
        "granitemoehybrid",
        BODY
        | {"num_hidden_layers": 2, "shared_intermediate_size": 72, "intermediate_size": 40}
        | {"layer_types": ["linear_attention", "full_attention"]}
        | {"num_local_experts": 6, "num_experts_per_tok": 3, "residual_multiplier": 0.7}
        | {"mamba_n_heads": 8, "mamba_n_groups": 2, "mamba_d_state": 12, "mamba_d_conv": 3}
        | {"attention_multiplier": 0.3, "tie_word_embeddings": True},
    ),
    "Granite 3 MoE": (
        "granitemoe",
        BODY
        | {"intermediate_size": 40, "num_local_experts": 6, "num_experts_per_tok": 3}
        | {"embedding_multiplier": 3.0, "attention_multiplier": 0.1}
        | {"residual_multiplier": 0.6, "logits_scaling": 3.0},
    ),
    "Mixtral": ("mixtral", BODY | {"num_local_experts": 5, "num_experts_per_tok": 2}),
    "Qwen3-MoE": (
        "qwen3_moe",
        BODY
        | {"head_dim": 32, "num_experts": 6, "num_experts_per_tok": 3, "moe_intermediate_size": 40}
        | {"norm_topk_prob": True, "mlp_only_layers": [1]},
    ),
    "DeepSeek V2": (
        "deepseek_v2",
        BODY
        | LATENTS
        | {"q_lora_rank": None, "rope_scaling": DEEPSEEK_YARN, "first_k_dense_replace": 1}
        | {"n_routed_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 40},
    ),
    "DeepSeek V2, groups": (
        "deepseek_v2",
        BODY
        | LATENTS
        | {"q_lora_rank": 24, "topk_method": "group_limited_greedy", "n_group": 4}
        | {"topk_group": 2, "n_routed_experts": 12, "num_experts_per_tok": 3}
        | {"moe_intermediate_size": 24, "routed_scaling_factor": 3.0},
    ),
    "DeepSeek V3": (
        "deepseek_v3",
        BODY
        | LATENTS
        | {"q_lora_rank": 24, "first_k_dense_replace": 1, "rms_norm_eps": 1e-3}
        | {"n_routed_experts": 12, "n_group": 4, "topk_group": 2, "num_experts_per_tok": 3}
        | {"moe_intermediate_size": 40, "n_shared_experts": 2},
    ),
    "Moonlight, dense": (
        "deepseek_v3",
        BODY | LATENTS | {"q_lora_rank": None, "first_k_dense_replace": 3, "qk_nope_head_dim": 24},
    ),
    "Qwen2-MoE": (
        "qwen2_moe",
        BODY
        | {"num_experts": 6, "num_experts_per_tok": 3, "moe_intermediate_size": 40}
        | {"shared_expert_intermediate_size": 56, "mlp_only_layers": [1]},
    ),
    "Qwen2-MoE, windows": (
        "qwen2_moe",
        BODY
        | {"use_sliding_window": True, "sliding_window": 16, "max_window_layers": 2}
        | {"num_experts": 5, "num_experts_per_tok": 2, "moe_intermediate_size": 40}
        | {"shared_expert_intermediate_size": 40, "norm_topk_prob": True, "qkv_bias": False}
        | {"tie_word_embeddings": True},
    ),
    "GLM-4.5": (
        "glm4_moe",
        BODY
        | {"head_dim": 16, "n_routed_experts": 12, "n_group": 4, "topk_group": 2}
        | {"num_experts_per_tok": 3, "moe_intermediate_size": 40, "n_shared_experts": 2}
        | {"routed_scaling_factor": 1.8, "use_qk_norm": True, "attention_bias": True},
    ),
    "GLM-4.5 without groups": (
        "glm4_moe",
        BODY
        | {"head_dim": 32, "n_routed_experts": 6, "num_experts_per_tok": 2}
        | {"moe_intermediate_size": 48, "first_k_dense_replace": 2, "norm_topk_prob": False},
    ),
    "GPT-OSS": (
        "gpt_oss",
        BODY
        | {"head_dim": 32, "sliding_window": 16, "intermediate_size": 40}
        | {"num_local_experts": 6, "num_experts_per_tok": 3, "swiglu_limit": 1.5}
        | {"rope_scaling": YARN | {"truncate": False, "beta_fast": 8.0}},
    ),
    "GPT-OSS without windows, biases or scaling": (
        "gpt_oss",
        BODY
        | {"head_dim": 16, "num_hidden_layers": 2, "layer_types": ["full_attention"] * 2}
        | {"num_local_experts": 4, "num_experts_per_tok": 2, "attention_bias": False}
        | {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0}}
        | {"tie_word_embeddings": True},
    ),
    "SmolLM3": ("smollm3", BODY | {"num_hidden_layers": 4, "rope_scaling": YARN}),
    "SmolLM3, windows": (
        "smollm3",
        BODY
        | {"use_sliding_window": True, "sliding_window": 16}
        | {"no_rope_layers": [1, 0, 1], "tie_word_embeddings": False},
    ),
    "Phi-3": ("phi3", BODY | {"sliding_window": 24}),
    "Phi-4-mini": (
        "phi3",
        BODY
        | {"partial_rotary_factor": 0.75, "tie_word_embeddings": True}
        | {"rope_scaling": LONGROPE, "original_max_position_embeddings": 256},
    ),
    "GPT-NeoX": ("gpt_neox", NEOX | {"rotary_pct": 0.25}),
    "GPT-NeoX, one after the other, no biases": (
        "gpt_neox",
        NEOX
        | {"rotary_pct": 0.5, "rotary_emb_base": 5000, "hidden_act": "gelu_new"}
        | {"use_parallel_residual": False, "attention_bias": False},
    ),
    "Granite 3": (
        "granite",
        BODY
        | {"embedding_multiplier": 3.0, "attention_multiplier": 0.1}
        | {"residual_multiplier": 0.6, "logits_scaling": 3.0},
    ),
    "OLMo 2": ("olmo2", BODY),
    "OLMo 3": (
        "olmo3",
        BODY
        | {"num_hidden_layers": 4, "sliding_window": 16, "rope_scaling": YARN}
        | {"rope_theta": 500000.0},
    ),
    "GLM-4 of 2024": ("glm", BODY | {"head_dim": 32}),
    "GLM-4": ("glm4", BODY | {"head_dim": 16, "partial_rotary_factor": 0.25}),
    "EXAONE 4": (
        "exaone4",
        BODY | {"num_hidden_layers": 4, "sliding_window": 16, "sliding_window_pattern": 2},
    ),
    "EXAONE 4 without windows": (
        "exaone4",
        BODY | {"sliding_window": None, "layer_types": ["full_attention"] * 3},
    ),
}
# The programs of a mesh take the most time, and what a mesh splits is the same for the others.
ON_A_MESH = (
    "Gemma 4",
    "Qwen3-Next",
    "Granite 4 Hybrid with experts",
    "Qwen3.5",
    "LFM2",
    "Granite 4 Hybrid",
    "GPT-2",
    "Qwen3",
    "Gemma 3",
    "Mixtral",
    "Qwen3-MoE",
    "DeepSeek V2",
    "DeepSeek V3",
    "Qwen2-MoE",
    "GLM-4.5",
    "GPT-OSS",
    "Phi-4-mini",
    "GPT-NeoX",
    "Granite 3",
    "OLMo 2",
    "GLM-4",
)
CONVERTED = (
    "Gemma 4",
    "Gemma 4, wide heads, biases, stretched",
    "Qwen3-Next",
    "Qwen3.5 MoE",
    "Granite 4 Hybrid with experts",
    "Granite 3 MoE",
    "Gemma 3, stretched where it sees all",
    "SmolLM3",
    "Phi-4-mini",
    "GPT-NeoX",
    "Granite 3",
    "OLMo 3",
    "GLM-4",
    "EXAONE 4",
    "Qwen3.5",
    "LFM2",
    "Granite 4 Hybrid",
    "DeepSeek V2",
    "DeepSeek V3",
    "Qwen2-MoE",
    "GLM-4.5",
    "GPT-OSS",
)
WITHOUT_ATTENTION = (  # in some of their layers; those of few layers
    "LFM2, biases, an MLP of an adjusted width",
    "Qwen3.5, the delta rule behind attention",
    "Qwen3-Next, experts in every second layer",
    "Granite 4 Hybrid, rotated, biases, limits",
    "Granite 4 Hybrid with experts",
)
IN_16_BITS = (
    "Gemma 4",
    "Qwen3-Next",  # of Qwen3.5 MoE, 16 bits choose other experts for some tokens, as of groups of V3
    "Granite 4 Hybrid with experts",
    "Llama 2",
    "SmolLM3",
    "Phi-4-mini",
    "GPT-NeoX",
    "Granite 3",
    "OLMo 3",
    "GLM-4",
    "Qwen3.5",
    "LFM2",
    "Granite 4 Hybrid",
    "DeepSeek V2",
    "Moonlight, dense",  # with the groups of V3, 16 bits choose other experts for some tokens
    "Qwen2-MoE",
    "GLM-4.5",
    "GPT-OSS",
)


def config_of(name: str, **changes: Any) -> DecoderConfig:
    """The configuration of a case, with other settings."""
    model_type, hf = CASES[name]
    return FAMILIES[model_type].from_hf(
        normalised({**hf, **changes, "model_type": model_type}, name)
    )


@pytest.fixture(scope="module", params=CASES)
def saved(request, tmp_path_factory) -> tuple[Path, Any]:
    """(a folder as transformers saves it, transformers' model)."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    model_type, settings = CASES[request.param]
    torch.manual_seed(0)
    config = AutoConfig.for_model(model_type, **deepcopy(settings))  # it writes into them
    theirs = AutoModelForCausalLM.from_config(
        config, attn_implementation="eager", dtype=torch.float32
    ).eval()
    with torch.no_grad():  # logits that differ, biases and norms that matter
        for name, parameter in theirs.named_parameters():
            if parameter.ndim > 1:
                parameter.normal_(
                    0, 0.5 if "embed" in name or "wte" in name else parameter.shape[-1] ** -0.5
                )
            elif name in FINAL:  # of both signs, or a tied model would say its last token again
                adds_one = model_type in ("gemma2", "gemma3_text")
                parameter.normal_(-1.0 if adds_one else 0.0)
            elif name.endswith("sinks"):  # below scores, among them and above
                parameter.normal_(0.0, 2.0)
            else:
                parameter.add_(0.1 * torch.randn_like(parameter))
        for name, buffer in theirs.named_buffers():
            if name.endswith("e_score_correction_bias"):  # they decide
                buffer.normal_(0, 0.3)
            elif name.endswith("layer_scalar"):
                buffer.uniform_(0.5, 1.5)
    folder = tmp_path_factory.mktemp("saved") / request.param
    theirs.save_pretrained(folder)
    write_tokenizer(folder, 320)
    return folder, theirs


def their_logits(theirs: Any, prompt: np.ndarray) -> np.ndarray:
    import torch

    with torch.no_grad():
        return theirs(torch.from_numpy(np.asarray(prompt))[None]).logits[0].numpy()


@pytest.mark.oracle
def test_ragged_chunks_give_the_logits_of_transformers(saved):
    folder, theirs = saved
    model = load_model(folder).model
    atol = 2e-4 if any(kind.mixer for kind in model.config.kinds) else 1e-4  # a state is a long sum
    for got, prompt in zip(all_logits(model, CHUNKED), PROMPTS, strict=True):
        expected = their_logits(theirs, prompt)
        assert np.ptp(expected) > 1, "the logits hardly differ: the comparison is blind"
        chex.assert_trees_all_close(got, expected, atol=atol, rtol=0)


@pytest.mark.oracle
@pytest.mark.parametrize("saved", CONVERTED, indirect=True)
def test_transformers_reads_what_convert_writes(saved, tmp_path):
    """Through Orbax: tensors in the order of files, and keys of config.json that transformers
    knows.
    """
    import torch
    from transformers import AutoModelForCausalLM

    folder, theirs = saved
    orbax = convert(folder, tmp_path / "orbax", "orbax")
    back = convert(orbax, tmp_path / "back", "safetensors")
    restored = AutoModelForCausalLM.from_pretrained(
        back, attn_implementation="eager", dtype=torch.float32
    )
    for prompt in PROMPTS[:2]:
        # sums of torch depend on where its memory begins
        chex.assert_trees_all_close(
            their_logits(restored, prompt), their_logits(theirs, prompt), atol=1e-5
        )


@pytest.mark.oracle
@pytest.mark.parametrize("saved", WITHOUT_ATTENTION, indirect=True)
def test_whole_sequences_have_the_scores_and_gradients_of_transformers(saved, tmp_path):
    """The gradients of all parameters, which a file has as it has parameters."""
    import torch

    folder, theirs = saved
    tokens = np.random.default_rng(8).integers(3, 320, (2, 90))  # more than a block of a state
    weights = np.linspace(0.5, 1.5, tokens.size, dtype=np.float32).reshape(tokens.shape)
    weights[:, 0] = 0
    ids = torch.from_numpy(tokens)
    logprobs = torch.log_softmax(theirs(ids, use_cache=False).logits[:, :-1], -1)
    chosen_logprobs = logprobs.gather(-1, ids[:, 1:, None])[..., 0]
    theirs.zero_grad()
    (chosen_logprobs * torch.from_numpy(weights[:, 1:])).sum().backward()
    of_gradients = deepcopy(theirs)
    with torch.no_grad():
        for copy, parameter in zip(of_gradients.parameters(), theirs.parameters(), strict=True):
            copy.copy_(torch.zeros(()) if parameter.grad is None else parameter.grad)
    theirs.zero_grad()
    of_gradients.save_pretrained(tmp_path / "gradients")
    write_tokenizer(tmp_path / "gradients", 320)

    def parts(model: Model) -> Any:
        return nnx.split(nnx.merge(model.graphdef, model.params), nnx.Param, ...)

    graphdef, params, constants = parts(load_model(folder, linear_impl="xla").model)

    def total(params: Any) -> Any:
        scored = score(nnx.merge(graphdef, params, constants), tokens)
        return (scored * weights).sum(), scored

    with quick_compiler.all_quickly():
        (_, scored), gradient = jax.jit(jax.value_and_grad(total, has_aux=True))(params)
    expected = np.pad(chosen_logprobs.detach().numpy(), ((0, 0), (1, 0)))
    chex.assert_trees_all_close(scored, expected, atol=3e-4, rtol=0)
    their_gradient = parts(load_model(tmp_path / "gradients", linear_impl="xla").model)[1]
    scale = jax.tree.map(lambda x: np.abs(x).max(), their_gradient)
    assert min(jax.tree.leaves(scale)) > 0.01, "a parameter hardly matters"
    by_scale = [
        jax.tree.map(lambda x, s: np.asarray(x) / s, tree, scale)
        for tree in (gradient, their_gradient)
    ]
    chex.assert_trees_all_close(*by_scale, atol=2e-3, rtol=0)


@pytest.mark.oracle
@pytest.mark.parametrize("saved", ON_A_MESH, indirect=True)
def test_log_probabilities_on_a_mesh_are_those_of_transformers(saved):
    """Four devices: of some models two of them have the same key head, and widths and vocabularies
    do not divide.
    """
    import torch

    folder, theirs = saved
    heads = load_model(folder).model.config.heads
    engine = {
        "max_num_batched_tokens": 32,
        "max_num_seqs": 8,
        "token_buckets": (32,),
        "block_size": 8,
    }
    llm = LLM(folder, progress=False, mesh={"tensor": min(4, heads)}, **engine)
    prompts = [np.asarray(prompt).tolist() for prompt in PROMPTS]
    params = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=0)
    for output, prompt in zip(llm.generate(prompts, params), prompts, strict=True):
        expected = torch.log_softmax(
            torch.from_numpy(their_logits(theirs, np.asarray(prompt))), -1
        ).numpy()
        logprobs = chosen(prompt[1:], output.prompt_logprobs[1:])  # type: ignore[index]
        expected = expected[np.arange(len(prompt) - 1), prompt[1:]]
        chex.assert_trees_all_close(logprobs, expected, atol=1e-4)


@pytest.mark.oracle
@pytest.mark.parametrize(
    ("model_type", "tied"),
    [("gemma3", True), ("gemma4", True), ("mistral3", True), ("mistral3", False)],
)
def test_the_text_of_a_model_of_text_and_images_gives_its_logits(model_type, tied, tmp_path):
    import torch
    from transformers import AutoConfig, AutoModelForImageTextToText

    names = {"gemma3": "Gemma 3", "gemma4": "Gemma 4", "mistral3": "Mistral"}
    text_type, settings = CASES[names[model_type]]
    vision = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1}
    vision |= {"num_attention_heads": 2, "image_size": 28, "patch_size": 14}
    if model_type == "mistral3":
        vision |= {"model_type": "pixtral", "head_dim": 8}
    if model_type == "gemma4":
        vision |= {"num_key_value_heads": 2, "head_dim": 8, "position_embedding_size": 64}
    torch.manual_seed(0)
    config = AutoConfig.for_model(
        model_type,
        text_config=settings | {"model_type": text_type},
        vision_config=vision,
        tie_word_embeddings=tied,
    )
    theirs = AutoModelForImageTextToText.from_config(
        config, attn_implementation="eager", dtype=torch.float32
    ).eval()
    with torch.no_grad():
        for name, parameter in theirs.named_parameters():
            if parameter.ndim > 1:
                parameter.normal_(0, 0.5 if "embed" in name else parameter.shape[-1] ** -0.5)
            elif name == "model.language_model.norm.weight":
                parameter.normal_(-1.0 if model_type == "gemma3" else 0.0)
            elif "language_model" in name:
                parameter.add_(0.1 * torch.randn_like(parameter))
    theirs.save_pretrained(tmp_path / "both")
    write_tokenizer(tmp_path / "both", 320)
    model = load_model(tmp_path / "both").model
    for got, prompt in zip(all_logits(model, CHUNKED), PROMPTS, strict=True):
        expected = their_logits(theirs, prompt)
        assert np.ptp(expected) > 1, "the logits hardly differ: the comparison is blind"
        chex.assert_trees_all_close(got, expected, atol=1e-4, rtol=0)


@pytest.mark.oracle
def test_longrope_of_long_and_short_texts_is_that_of_transformers(tmp_path):
    """transformers chooses by the text's length, and an engine by its longest text."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    settings = BODY | {"rope_scaling": LONGROPE, "partial_rotary_factor": 0.75}
    settings |= {"original_max_position_embeddings": 32}
    torch.manual_seed(0)
    theirs = AutoModelForCausalLM.from_config(
        AutoConfig.for_model("phi3", **settings), attn_implementation="eager", dtype=torch.float32
    ).eval()
    with torch.no_grad():
        for parameter in theirs.parameters():
            if parameter.ndim > 1:
                parameter.normal_(0, parameter.shape[-1] ** -0.5)
    theirs.save_pretrained(tmp_path / "phi")
    write_tokenizer(tmp_path / "phi", 320)
    model = load_model(tmp_path / "phi").model
    long, short = all_logits(model, CHUNKED), all_logits(for_context(model, 32), CHUNKED)
    for row, prompt in enumerate(PROMPTS):
        expected = their_logits(theirs, prompt)
        is_long = len(prompt) > 32
        right, wrong = (long, short) if is_long else (short, long)
        chex.assert_trees_all_close(right[row], expected, atol=1e-4, rtol=0)
        if len(prompt) > 1:
            assert np.abs(wrong[row] - expected).max() > 0.01


@pytest.mark.oracle
@pytest.mark.parametrize("saved", IN_16_BITS, indirect=True)
def test_logits_in_16_bits_are_as_close_to_32_bits_as_those_of_transformers(saved):
    import torch

    folder, theirs = saved
    prompt = PROMPTS[0]
    expected = their_logits(theirs, prompt)
    short = deepcopy(theirs).to(torch.bfloat16)
    with torch.no_grad():
        rounded = short(torch.from_numpy(np.asarray(prompt))[None]).logits[0].float().numpy()
    logits = all_logits(load_model(folder, dtype="bfloat16").model, CHUNKED)[0]
    their_error = np.abs(rounded - expected)
    error = np.abs(logits - expected)
    assert error.mean() < 1.2 * their_error.mean()
    assert error.max() < 1.5 * their_error.max()


# --- real models, without their weights -----------------------------------------------------------


def shape(
    layers: int, hidden: int, inner: int, heads: int, kv_heads: int, vocab: int, **settings: Any
) -> dict[str, Any]:
    return {
        "num_hidden_layers": layers,
        "hidden_size": hidden,
        "intermediate_size": inner,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "vocab_size": vocab,
        "max_position_embeddings": 1024,
        **settings,
    }


def gpt2_shape(layers: int, hidden: int, heads: int) -> dict[str, Any]:
    return {
        "vocab_size": 50257,
        "n_positions": 1024,
        "n_layer": layers,
        "n_embd": hidden,
        "n_head": heads,
    }


OSS = {"head_dim": 64, "num_local_experts": 32, "num_experts_per_tok": 4}
MOE = {"head_dim": 128, "num_experts": 128, "num_experts_per_tok": 8, "moe_intermediate_size": 768}
DEEPSEEK_V2_LITE = {
    "q_lora_rank": None,
    "first_k_dense_replace": 1,
    "n_routed_experts": 64,
    "n_shared_experts": 2,
    "num_experts_per_tok": 6,
    "moe_intermediate_size": 1408,
}
# name: (model_type, its config.json, parameters as published, bytes of keys and values a token in
# 16 bit)
REAL = {
    "gpt2": ("gpt2", gpt2_shape(12, 768, 12), 124_439_808, 36_864),
    "gpt2-xl": ("gpt2", gpt2_shape(48, 1600, 25), 1_557_611_200, 307_200),
    "TinyLlama-1.1B": ("llama", shape(22, 2048, 5632, 32, 4, 32000), 1_100_048_384, 22 * 1024),
    "SmolLM2-135M": (
        "llama",
        shape(30, 576, 1536, 9, 3, 49152, tie_word_embeddings=True),
        134_515_008,
        23_040,
    ),
    "Llama-3-8B": ("llama", shape(32, 4096, 14336, 32, 8, 128256), 8_030_261_248, 131_072),
    "Mistral-7B-v0.1": ("mistral", shape(32, 4096, 14336, 32, 8, 32000), 7_241_732_096, 131_072),
    "Qwen2-0.5B": (
        "qwen2",
        shape(24, 896, 4864, 14, 2, 151936, tie_word_embeddings=True),
        494_032_768,
        12_288,
    ),
    "Qwen3-0.6B": (
        "qwen3",
        shape(28, 1024, 3072, 16, 8, 151936, tie_word_embeddings=True),
        596_049_920,
        114_688,
    ),
    "Gemma-2-2B": ("gemma2", shape(26, 2304, 9216, 8, 4, 256000), 2_614_341_888, 106_496),
    "Gemma-3-1B": ("gemma3_text", shape(26, 1152, 6912, 4, 1, 262144), 999_885_952, 26_624),
    "Gemma-4-31B, the text": (
        "gemma4",
        {
            "text_config": shape(
                60,
                5376,
                21504,
                32,
                16,
                262144,
                num_global_key_value_heads=4,
                attention_k_eq_v=True,
                hidden_size_per_layer_input=0,
                sliding_window=1024,
            )
        },
        30_697_345_340,
        50 * 16_384 + 10 * 8192,
    ),
    "Mixtral-8x7B": ("mixtral", shape(32, 4096, 14336, 32, 8, 32000), 46_702_792_704, 131_072),
    "Gemma-3-4B, the text": (
        "gemma3",
        {
            "text_config": {
                "model_type": "gemma3_text",
                "hidden_size": 2560,
                "intermediate_size": 10240,
                "num_hidden_layers": 34,
                "sliding_window": 1024,
                "rope_scaling": {"rope_type": "linear", "factor": 8.0},
            }
        },
        3_880_263_168,
        139_264,
    ),
    "SmolLM3-3B": ("smollm3", shape(36, 2048, 11008, 16, 4, 128256), 3_075_098_624, 73_728),
    "Phi-3-mini": ("phi3", shape(32, 3072, 8192, 32, 32, 32064), 3_821_079_552, 393_216),
    "Phi-4-mini": (
        "phi3",
        shape(32, 3072, 8192, 24, 8, 200064, tie_word_embeddings=True, partial_rotary_factor=0.75),
        3_836_021_760,
        131_072,
    ),
    "Pythia-70M": (
        "gpt_neox",
        shape(6, 512, 2048, 8, 8, 50304, rotary_pct=0.25),
        70_426_624,
        12_288,
    ),
    "Granite-3.0-2B": (
        "granite",
        shape(40, 2048, 8192, 32, 8, 49155, tie_word_embeddings=True),
        2_533_531_648,
        81_920,
    ),
    "OLMo-2-7B": ("olmo2", shape(32, 4096, 11008, 32, 32, 100352), 7_298_617_344, 524_288),
    "OLMo-3-7B": ("olmo3", shape(32, 4096, 11008, 32, 32, 100278), 7_298_011_136, 524_288),
    "GLM-4-9B of 2024": ("glm", shape(40, 4096, 13696, 32, 2, 151552), 9_399_951_360, 40_960),
    "GLM-4-9B": ("glm4", shape(40, 4096, 13696, 32, 2, 151552), 9_400_279_040, 40_960),
    "EXAONE-4.0-1.2B": (
        "exaone4",
        shape(30, 2048, 4096, 32, 8, 102400, tie_word_embeddings=True, sliding_window=None),
        1_279_391_488,
        61_440,
    ),
    "DeepSeek-V2-Lite": (
        "deepseek_v2",
        shape(27, 2048, 10944, 16, 16, 102400, **DEEPSEEK_V2_LITE),
        15_706_484_224,
        27 * 1152,
    ),
    "DeepSeek-V3": (
        "deepseek_v3",
        shape(61, 7168, 18432, 128, 128, 129280),
        671_026_419_200,
        61 * 1152,
    ),
    "Qwen1.5-MoE-A2.7B": (
        "qwen2_moe",
        shape(24, 2048, 5632, 16, 16, 151936),
        14_315_784_192,
        196_608,
    ),
    "gpt-oss-20b": ("gpt_oss", shape(24, 2880, 2880, 64, 8, 201088, **OSS), 20_914_757_184, 49_152),
    "Qwen3-30B-A3B": (
        "qwen3_moe",
        shape(48, 2048, 6144, 32, 4, 151936, **MOE),
        30_532_122_624,
        98_304,
    ),
}


@pytest.mark.parametrize("name", REAL)
def test_real_models_have_their_published_size_and_cache(name):
    """Among them the lectures' numbers: 307 kB of cache a position of gpt2-xl, 22 KiB a token of
    TinyLlama.
    """
    model_type, settings, parameters, cached = REAL[name]
    config = normalised({"model_type": model_type, **settings}, name)
    family = FAMILIES[config["model_type"]]
    c = family.from_hf(config)
    assert sum(int(np.prod(entry.shape)) for entry in family.param_table(c)) == parameters
    of_layers = [c.of_kind(kind) for kind in c.kinds]
    sizes = [cache.BlockSizes(1, x.kv_heads, x.head_dim, "bfloat16", x.head_dim) for x in of_layers]
    slot = cache.block_bytes(
        layers=c.layers,
        layer_pages=[Block.pages(c, *pair) for pair in zip(c.kinds, sizes, strict=True)],
        **(sizes[0]._asdict()),
    )
    assert slot - cache.TOKEN_BYTES == cached


@pytest.mark.default_cases(
    "gpt2", "Pythia-70M", "Qwen2-0.5B", "Gemma-3-1B", "DeepSeek-V2-Lite", "gpt-oss-20b"
)
@pytest.mark.parametrize("name", REAL)
def test_real_models_have_the_parameters_of_their_table(name):
    """Else the sizes above would be those of another model. test_plain_families.py has small models
    of other families.
    """
    model_type, settings, *_ = REAL[name]
    config = normalised({"model_type": model_type, **settings}, name)
    family = FAMILIES[config["model_type"]]
    c = family.from_hf(config)
    _, params, _ = nnx.split(nnx.eval_shape(lambda: Decoder(c, "bfloat16")), nnx.Param, ...)
    shapes = {".".join(map(str, path)): leaf.shape for path, leaf in nnx.to_flat_state(params)}
    assert shapes == {".".join(entry.path): entry.shape for entry in family.param_table(c)}


# whose default number of key heads is that of the query heads, or that of a published model
AS_MANY_KEYS = ("llama", "qwen2", "qwen3", "exaone4", "qwen2_moe", "deepseek_v3", "kimi_k2")


@pytest.mark.parametrize("model_type", FAMILIES)
def test_what_a_config_leaves_out_is_what_transformers_assumes(model_type):
    """A config.json of sizes alone, and the same with all that transformers' own class adds to
    it.
    """
    from transformers import AutoConfig

    sizes = shape(4, 64, 96, 8, 4, 320)
    if model_type == "gpt2":
        sizes = gpt2_shape(4, 64, 8)
    elif model_type not in AS_MANY_KEYS:
        del sizes["num_key_value_heads"]
    if model_type == "deepseek_v2":  # null in its class
        sizes["num_experts_per_tok"] = 6
    if model_type == "gemma4_text":  # whose default is not supported
        sizes["hidden_size_per_layer_input"] = 0
    class_name = {"kimi_k2": "deepseek_v3"}.get(model_type, model_type)  # its config is that of V3
    full = AutoConfig.for_model(class_name, **sizes).to_dict()
    if full.get("head_dim") == 4096 // 32:
        # of Llama's and Mistral's classes: computed from their own default sizes
        full.pop("head_dim")
    from_sizes, from_full = (
        normalised({**c, "model_type": model_type}, "x") for c in (sizes, full)
    )
    from_hf = FAMILIES[model_type].from_hf
    assert from_hf(from_sizes) == from_hf(from_full)


def test_an_unknown_architecture_is_refused_with_those_that_are_known():
    with refused("model_type is 'bert'; supported: llama, mistral, qwen2, qwen3, mixtral"):
        normalised({"model_type": "bert"}, "config.json")


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        (
            "gpt2",
            {"activation_function": "relu"},
            "activation_function is 'relu'; it must be one of 'gelu_new'",
        ),
        (
            "gpt2",
            {"scale_attn_by_inverse_layer_idx": True},
            "scale_attn_by_inverse_layer_idx is True",
        ),
        (
            "Gemma-2-2B",
            {"hidden_activation": "relu"},
            "hidden_activation is 'relu'; Gemma uses 'gelu_pytorch_tanh'",
        ),
        (
            "Gemma-2-2B",
            {"attention_bias": True},
            "attention_bias or use_bidirectional_attention is true",
        ),
        (
            "Qwen3-0.6B",
            {"hidden_act": "gelu"},
            "hidden_act is 'gelu'; qwen3 uses 'silu'",
        ),
        ("TinyLlama-1.1B", {"mlp_bias": True}, "mlp_bias is true"),
    ],
)
def test_a_config_that_cannot_be_honoured_is_refused(name, change, message):
    model_type, settings, _, _ = REAL[name]
    config = normalised({"model_type": model_type, **settings, **change}, name)
    with refused(message):
        FAMILIES[model_type].from_hf(config)


def test_a_window_that_is_null_is_no_window_and_one_left_out_is_the_default():
    for settings, window in (({}, 4096), ({"sliding_window": None}, None)):
        config = normalised(
            {"model_type": "mistral", **shape(2, 64, 96, 4, 2, 320), **settings}, "x"
        )
        assert {kind.window for kind in FAMILIES["mistral"].from_hf(config).kinds} == {window}


def test_a_gemma_names_the_stretched_context_itself():
    stretched = config_of("Gemma 3", rope_scaling={"rope_type": "linear", "factor": 8.0})
    assert stretched.max_len == BODY["max_position_embeddings"]


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        (
            "Granite 4 Hybrid with experts",
            {"num_experts_per_tok": 7},
            "a token uses 7 of 6 experts",
        ),
        ("Granite 4 Hybrid", {"mamba_n_groups": 3}, "mamba_n_heads 8 is not a multiple of"),
        ("Granite 4 Hybrid", {"mamba_n_heads": 7}, "mamba_n_heads 7 times mamba_d_head"),
        (
            "Granite 4 Hybrid",
            {"position_embedding_type": "alibi"},
            "position_embedding_type is 'alibi'; it must be 'rope', 'nope' or null",
        ),
        ("Qwen3.5", {"linear_num_value_heads": 3}, "linear_num_value_heads 3 is not a multiple"),
        ("Qwen3.5", {"attention_bias": True}, "attention_bias is true; qwen3_5_text here has no"),
        ("DeepSeek V3", {"attention_bias": True}, "attention_bias is true; deepseek_v3 here has"),
        ("DeepSeek V3", {"rope_interleave": False}, "rope_interleave is false; deepseek_v3 here"),
        ("DeepSeek V2", {"rope_interleave": False}, "rope_interleave is false; deepseek_v2 here"),
        ("DeepSeek V3", {"kv_lora_rank": 0}, "kv_lora_rank is 0; it must be an integer of at"),
        ("DeepSeek V3", {"q_lora_rank": 0}, "q_lora_rank is 0; .* of at least 1, or null"),
        ("DeepSeek V3", {"qk_rope_head_dim": 7}, "7 of the 7 numbers of a head are rotated"),
        ("DeepSeek V3", {"scoring_func": "softmax"}, "the router of deepseek_v3 has 'sigmoid'"),
        ("DeepSeek V2", {"norm_topk_prob": True}, "norm_topk_prob is true, which the authors'"),
    ],
)
def test_a_hybrid_or_deepseek_that_cannot_be_honoured_is_refused(name, change, message):
    with refused(message):
        config_of(name, **change)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"hidden_size_per_layer_input": 256},
            r"hidden_size_per_layer_input is 256; embeddings of each layer \(Gemma 4 E2B and E4B\) "
            "are not supported yet. Dense models of Gemma 4 with hidden_size_per_layer_input = 0",
        ),
        ({"num_kv_shared_layers": 2}, "num_kv_shared_layers is 2; layers that read the keys of"),
        (
            {"enable_moe_block": True},
            r"enable_moe_block is True; experts beside an MLP \(Gemma 4 26B",
        ),
        ({"use_bidirectional_attention": "all"}, "use_bidirectional_attention is 'all'; text is"),
        ({"hidden_activation": "relu"}, "hidden_activation is 'relu'; Gemma uses"),
        (
            {"rope_parameters": {"full_attention": {"rope_type": "yarn", "factor": 2.0}}},
            "the rotation of full_attention has rope_type 'yarn'; Gemma 4 here has 'default', or",
        ),
        (
            {"per_layer_config": {"1": {"head_dim": 24}}},
            "per_layer_config gives layer 3 .*'head_dim': 16.* layers of one type have the same",
        ),
        (
            {"per_layer_config": {"1": {"intermediate_size": 24}}},
            "per_layer_config gives layer 1 intermediate_size = 24; here it may have head_dim and",
        ),
        (
            {"per_layer_config": {"5": {"head_dim": 24}}},
            "per_layer_config is {'5': .*}; it must have an object for each of some layers, whose "
            "numbers are 0 to 4",
        ),
        ({"num_global_key_value_heads": 3}, r"kinds\[1\] has 4 query heads and 3 key heads"),
        ({"global_head_dim": 6}, "0 of the 6 numbers of a head are rotated; both must be even"),
    ],
)
def test_a_gemma_4_that_cannot_be_honoured_is_refused(change, message):
    with refused(message):
        config_of("Gemma 4", **change)


def test_a_gemma_4_without_a_size_of_its_embeddings_has_the_refused_default():
    settings = {k: v for k, v in GEMMA_4.items() if k != "hidden_size_per_layer_input"}
    config = normalised(settings | {"model_type": "gemma4_text"}, "x")
    with refused("hidden_size_per_layer_input is 256"):
        FAMILIES["gemma4_text"].from_hf(config)
