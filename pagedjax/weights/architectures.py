"""What is known of the files of each supported architecture: the defaults of its config.json, the
names of its tensors, and how a GGUF file describes it.

To add an architecture, write its module in device/models, and add its `Family` here.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from difflib import get_close_matches
from importlib import import_module
from typing import TYPE_CHECKING, Any, NamedTuple

from pagedjax.weights import gguf_architectures, quantized
from pagedjax.weights.gguf_architectures import CAPS, GGUF

if TYPE_CHECKING:
    from pagedjax.device.models.decoder import DecoderConfig
    from pagedjax.device.models.param_table import ParamSource


SIZES = (
    "hidden_size",
    "num_hidden_layers",
    "num_attention_heads",
    "vocab_size",
    "max_position_embeddings",
)


class Architecture(NamedTuple):
    """Facts about the config.json and the tensors of an architecture.

    defaults: values that transformers uses for keys that config.json lacks.
    nullable: keys for which null is a value. For other keys null means the default.
    required: config keys that must be present and be positive integers.
    renamed: the architecture's own keys -> the usual keys.
    prefix: of the tensor names of some files; it is removed.
    layer_types: the kinds of layers that config.json may name.
    starts: other beginnings of tensor names, which some files have -> the usual beginnings.
    gguf: how GGUF files describe the architecture; None: they are not supported.
    """

    defaults: Mapping[str, Any]
    nullable: tuple[str, ...] = ()
    required: tuple[str, ...] = (*SIZES, "intermediate_size")
    renamed: Mapping[str, str] = {}
    prefix: str = ""
    layer_types: tuple[str, ...] = ("full_attention", "sliding_attention")
    starts: Mapping[str, str] = {}
    gguf: GGUF | None = None

    def tensor_name(self, name: str) -> str:
        """The usual name of a stored tensor, without the prefix."""
        return renamed_start(name.removeprefix(self.prefix), self.starts)


def renamed_start(name: str, starts: Mapping[str, str]) -> str:
    """The name with its usual beginning. starts: other beginning -> usual one; the first one that
    the name has is replaced.
    """
    for start, usual in starts.items():
        if name.startswith(start):
            return usual + name.removeprefix(start)
    return name


class Family(NamedTuple):
    """How models of one `model_type` are read. The option `model_family` names a family of your own
    (docs/design/models.md).

    model_type: of config.json.
    from_hf: config.json's keys, with the architecture's defaults -> the shape of the decoder.
    param_table: which tensors make which parameter.
    architecture: facts about config.json and the names of tensors.
    ignored: patterns of tensors that are not parameters: "*" matches anything, and "{layers}" is
        the number of layers.
    """

    model_type: str
    from_hf: Callable[[dict[str, Any]], DecoderConfig]
    param_table: Callable[[DecoderConfig], Sequence[ParamSource]]
    architecture: Architecture = Architecture({})
    ignored: Sequence[str] = ()


# --- defaults of transformers' config classes -----------------------------------------------------

LLAMA_DEFAULTS = {
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "rope_scaling": None,
    "tie_word_embeddings": False,
    "attention_bias": False,
    "mlp_bias": False,
    "hidden_act": "silu",
}
QWEN_DEFAULTS = {"use_sliding_window": False, "sliding_window": 4096, "max_window_layers": 28}
GEMMA_DEFAULTS = {
    "rms_norm_eps": 1e-6,
    "rope_scaling": None,
    "tie_word_embeddings": True,
    "attention_bias": False,
    "hidden_activation": "gelu_pytorch_tanh",
    "head_dim": 256,
    "num_key_value_heads": 4,
    "query_pre_attn_scalar": 256,
    "sliding_window": 4096,
}
GEMMA4_DEFAULTS = {
    "rms_norm_eps": 1e-6,
    "rope_theta": 1e6,
    "rope_local_base_freq": 10000.0,
    # the second one where a config says nothing of rotations
    "partial_rotary_factor": 1.0,
    "rope_scaling": {"rope_type": "proportional", "partial_rotary_factor": 0.25},
    "tie_word_embeddings": True,
    "attention_bias": False,
    "hidden_activation": "gelu_pytorch_tanh",
    "head_dim": 256,
    "global_head_dim": 512,
    "num_key_value_heads": 4,
    "attention_k_eq_v": False,
    "num_kv_shared_layers": 0,
    "final_logit_softcapping": None,
}
OLMO_DEFAULTS = LLAMA_DEFAULTS | {"rms_norm_eps": 1e-5}
QWEN_MOE_DEFAULTS = {
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
    "norm_topk_prob": False,
}
GLM_DEFAULTS = LLAMA_DEFAULTS | {
    "rms_norm_eps": 1.5625e-7,
    "attention_bias": True,
    "partial_rotary_factor": 0.5,
    "head_dim": 128,
    "num_key_value_heads": 2,
}
DEEPSEEK_DEFAULTS = LLAMA_DEFAULTS | {
    "kv_lora_rank": 512,
    "q_lora_rank": 1536,
    "qk_rope_head_dim": 64,
    "qk_nope_head_dim": 128,
    "v_head_dim": 128,
    "n_group": None,
    "topk_group": None,
    "rope_interleave": True,
}
DEEPSEEK_V2_DEFAULTS = DEEPSEEK_DEFAULTS | {
    "first_k_dense_replace": 0,
    "n_routed_experts": 64,
    "n_shared_experts": 2,
    "moe_intermediate_size": 1407,
    "norm_topk_prob": False,
    "routed_scaling_factor": 1.0,
    "topk_method": "greedy",
}
DEEPSEEK_V3_DEFAULTS = DEEPSEEK_DEFAULTS | {
    "first_k_dense_replace": 3,
    "n_routed_experts": 256,
    "num_experts_per_tok": 8,
    "n_shared_experts": 1,
    "moe_intermediate_size": 2048,
    "n_group": 8,
    "topk_group": 4,
    "norm_topk_prob": True,
    "routed_scaling_factor": 2.5,
}
QWEN_HYBRID_DEFAULTS = LLAMA_DEFAULTS | {
    "head_dim": 256,
    "partial_rotary_factor": 0.25,
    "linear_conv_kernel_dim": 4,
    "full_attention_interval": 4,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
}
QWEN_HYBRID_MOE_DEFAULTS = QWEN_HYBRID_DEFAULTS | {
    "num_key_value_heads": 2,
    "moe_intermediate_size": 512,
    "shared_expert_intermediate_size": 512,
}
QWEN_HYBRID_LAYERS = "full_attention", "linear_attention"
MTP = ("mtp.*",)  # layers that predict several tokens
QUERY_RANK = ("q_lora_rank",)  # null: queries are made of the layer's input
MORE_LAYERS = ("model.layers.{layers}.*",)  # a layer that predicts several tokens


def _built_in(
    model_type: str, module: str, architecture: Architecture, ignored: Sequence[str] = ()
) -> Family:
    """A family whose functions are in a module of `pagedjax.device.models`.

    That module imports jax. It is imported when one of its functions is called, so that the headers
    of files are read without jax.
    """

    def models() -> Any:
        return import_module(f"pagedjax.device.models.{module}")

    def from_hf(config: dict[str, Any]) -> DecoderConfig:
        return replace(models().from_hf(config), family=model_type)

    def param_table(config: DecoderConfig) -> Sequence[ParamSource]:
        return models().param_table(config)

    return Family(model_type, from_hf, param_table, architecture, ignored)


_BUILT_IN = (
    _built_in("llama", "llama", Architecture(LLAMA_DEFAULTS, gguf=gguf_architectures.LLAMA)),
    _built_in(
        "mistral",
        "llama",
        Architecture(
            LLAMA_DEFAULTS | {"sliding_window": 4096, "num_key_value_heads": 8},
            nullable=("sliding_window",),
        ),
    ),
    _built_in(
        "qwen2",
        "llama",
        Architecture(
            LLAMA_DEFAULTS | QWEN_DEFAULTS,
            nullable=("sliding_window",),
            gguf=gguf_architectures.QWEN2,
        ),
    ),
    _built_in(
        "qwen3",
        "llama",
        Architecture(
            LLAMA_DEFAULTS | QWEN_DEFAULTS | {"head_dim": 128},
            nullable=("sliding_window",),
            gguf=gguf_architectures.QWEN3,
        ),
    ),
    _built_in(
        "mixtral",
        "llama",
        Architecture(
            LLAMA_DEFAULTS
            | {"rms_norm_eps": 1e-5, "rope_theta": 1e6, "num_key_value_heads": 8}
            | {"num_local_experts": 8, "num_experts_per_tok": 2, "sliding_window": None},
            nullable=("sliding_window",),
        ),
    ),
    _built_in(
        "qwen3_moe",
        "llama",
        Architecture(
            LLAMA_DEFAULTS
            | QWEN_DEFAULTS
            | QWEN_MOE_DEFAULTS
            | {"max_window_layers": 0, "num_key_value_heads": 4}
            | {"num_experts": 128, "num_experts_per_tok": 8, "moe_intermediate_size": 768},
            nullable=("sliding_window",),
            renamed={"num_local_experts": "num_experts"},
        ),
    ),
    _built_in(
        "qwen2_moe",
        "llama",
        Architecture(
            LLAMA_DEFAULTS
            | QWEN_DEFAULTS
            | QWEN_MOE_DEFAULTS
            | {"num_key_value_heads": 16, "qkv_bias": True}
            | {"num_experts": 60, "num_experts_per_tok": 4, "moe_intermediate_size": 1408}
            | {"shared_expert_intermediate_size": 5632},
            nullable=("sliding_window",),
        ),
    ),
    _built_in(
        "gemma2",
        "gemma",
        Architecture(
            GEMMA_DEFAULTS
            | {"rope_theta": 10000.0}
            | {"attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0},
            nullable=CAPS,
            gguf=gguf_architectures.GEMMA2,
        ),
    ),
    _built_in(
        "gemma3_text",
        "gemma",
        Architecture(
            GEMMA_DEFAULTS
            | {"rope_theta": 1e6, "rope_local_base_freq": 10000.0, "sliding_window_pattern": 6}
            | {"attn_logit_softcapping": None, "final_logit_softcapping": None},
            nullable=CAPS,
            gguf=gguf_architectures.GEMMA3,
        ),
    ),
    _built_in(
        "gemma4_text",
        "gemma4",
        Architecture(
            GEMMA4_DEFAULTS
            | {"sliding_window": 512, "hidden_size_per_layer_input": 256}
            | {"enable_moe_block": False, "use_bidirectional_attention": None},
            nullable=("final_logit_softcapping", "use_bidirectional_attention"),
        ),
    ),
    _built_in(
        "gemma4_unified_text",
        "gemma4",
        Architecture(
            GEMMA4_DEFAULTS | {"sliding_window": 1024, "use_bidirectional_attention": "vision"},
            nullable=("final_logit_softcapping", "use_bidirectional_attention"),
        ),
    ),
    _built_in(
        "lfm2",
        "lfm2",
        Architecture(
            {
                "norm_eps": 1e-5,
                "rope_theta": 1e6,
                "tie_word_embeddings": True,
                "num_key_value_heads": 8,
                "conv_L_cache": 3,
                "conv_bias": False,
                "block_multiple_of": 256,
                "block_ffn_dim_multiplier": 1.0,
                "block_auto_adjust_ff_dim": True,
            },
            renamed={"block_ff_dim": "intermediate_size", "tie_embedding": "tie_word_embeddings"},
            layer_types=("full_attention", "conv"),
        ),
    ),
    _built_in(
        "gpt2",
        "gpt2",
        Architecture(
            {
                "layer_norm_epsilon": 1e-5,
                "tie_word_embeddings": True,
                "activation_function": "gelu_new",
            },
            required=SIZES,
            renamed={
                "n_embd": "hidden_size",
                "n_layer": "num_hidden_layers",
                "n_head": "num_attention_heads",
                "n_positions": "max_position_embeddings",
                "n_inner": "intermediate_size",
            },
            prefix="transformer.",
        ),
        # causal masks that older checkpoints stored
        ignored=("h.*.attn.bias", "h.*.attn.masked_bias"),
    ),
    _built_in(
        "qwen3_5_text",
        "qwen3_5",
        Architecture(
            QWEN_HYBRID_DEFAULTS | {"num_key_value_heads": 4}, layer_types=QWEN_HYBRID_LAYERS
        ),
        ignored=MTP,
    ),
    _built_in(
        "qwen3_5_moe_text",
        "qwen3_5",
        Architecture(
            QWEN_HYBRID_MOE_DEFAULTS | {"num_experts": 256, "num_experts_per_tok": 8},
            required=SIZES,
            layer_types=QWEN_HYBRID_LAYERS,
        ),
        ignored=MTP,
    ),
    _built_in(
        "qwen3_next",
        "qwen3_next",
        Architecture(
            QWEN_HYBRID_MOE_DEFAULTS
            | QWEN_MOE_DEFAULTS
            | {"num_experts": 512, "num_experts_per_tok": 10, "norm_topk_prob": True},
            layer_types=QWEN_HYBRID_LAYERS,
        ),
        ignored=MTP,
    ),
    _built_in(
        "granitemoehybrid",
        "granite_hybrid",
        Architecture(
            LLAMA_DEFAULTS
            | {"embedding_multiplier": 1.0, "attention_multiplier": 1.0}
            | {"residual_multiplier": 1.0, "logits_scaling": 1.0}
            | {"num_local_experts": 8, "num_experts_per_tok": 2, "shared_intermediate_size": 1024}
            | {"position_embedding_type": None, "time_step_limit": [0.0, float("inf")]}
            | {"mamba_n_heads": 128, "mamba_n_groups": 1, "mamba_d_state": 256}
            | {"mamba_d_head": "auto", "mamba_d_conv": 4, "mamba_expand": 2}
            | {"mamba_conv_bias": True, "mamba_proj_bias": False},
            renamed={"layers_block_type": "layer_types"},
            layer_types=("full_attention", "linear_attention", "attention", "mamba"),
        ),
    ),
    _built_in(
        "smollm3",
        "smollm3",
        Architecture(
            LLAMA_DEFAULTS
            | {"rope_theta": 2e6, "tie_word_embeddings": True, "num_key_value_heads": 4}
            | {"no_rope_layers": None, "no_rope_layer_interval": 4}
            | {"use_sliding_window": False, "sliding_window": None},
            nullable=("sliding_window",),
        ),
    ),
    _built_in(
        "phi3",
        "phi3",
        Architecture(
            LLAMA_DEFAULTS
            | {"rms_norm_eps": 1e-5, "partial_rotary_factor": 1.0, "sliding_window": None}
            | {"original_max_position_embeddings": 4096},
            nullable=("sliding_window",),
            gguf=gguf_architectures.PHI3,
        ),
    ),
    _built_in(
        "granite",
        "granite",
        Architecture(
            LLAMA_DEFAULTS
            | {"embedding_multiplier": 1.0, "attention_multiplier": 1.0}
            | {"residual_multiplier": 1.0, "logits_scaling": 1.0}
        ),
    ),
    _built_in(
        "granitemoe",
        "granite",
        Architecture(
            LLAMA_DEFAULTS
            | {"embedding_multiplier": 1.0, "attention_multiplier": 1.0}
            | {"residual_multiplier": 1.0, "logits_scaling": 1.0}
            | {"num_local_experts": 8, "num_experts_per_tok": 2}
        ),
    ),
    _built_in("olmo2", "olmo", Architecture(OLMO_DEFAULTS)),
    _built_in(
        "olmo3",
        "olmo",
        Architecture(
            OLMO_DEFAULTS
            | {"rope_theta": 500000.0, "rope_local_base_freq": None, "sliding_window": 4096},
            nullable=("sliding_window",),
        ),
    ),
    _built_in(
        "exaone4",
        "olmo",
        Architecture(
            LLAMA_DEFAULTS
            | {"rms_norm_eps": 1e-5, "num_key_value_heads": 32}
            | {"sliding_window": 4096, "sliding_window_pattern": 4},
            nullable=("sliding_window",),
        ),
    ),
    _built_in("deepseek_v2", "deepseek", Architecture(DEEPSEEK_V2_DEFAULTS, nullable=QUERY_RANK)),
    *[
        _built_in(
            name,
            "deepseek",
            Architecture(DEEPSEEK_V3_DEFAULTS, nullable=QUERY_RANK),
            ignored=MORE_LAYERS,
        )
        for name in ("deepseek_v3", "kimi_k2")
    ],
    _built_in("glm", "glm", Architecture(GLM_DEFAULTS)),
    _built_in("glm4", "glm", Architecture(GLM_DEFAULTS)),
    _built_in(
        "glm4_moe",
        "glm_moe",
        Architecture(
            LLAMA_DEFAULTS
            | {"rms_norm_eps": 1e-5, "partial_rotary_factor": 0.5, "num_key_value_heads": 8}
            | {"use_qk_norm": False, "first_k_dense_replace": 1}
            | {"n_routed_experts": 128, "num_experts_per_tok": 8, "moe_intermediate_size": 1408}
            | {"n_shared_experts": 1, "n_group": 1, "topk_group": 1}
            | {"norm_topk_prob": True, "routed_scaling_factor": 1.0},
        ),
        ignored=MORE_LAYERS,
    ),
    _built_in(
        "gpt_oss",
        "gpt_oss",
        Architecture(
            LLAMA_DEFAULTS
            | {"rms_norm_eps": 1e-5, "rope_theta": 150000.0, "attention_bias": True}
            | {"num_key_value_heads": 8, "head_dim": 64, "sliding_window": 128}
            | {"num_local_experts": 128, "num_experts_per_tok": 4}
            | {"swiglu_alpha": 1.702, "swiglu_limit": 7.0}
            | {
                "rope_scaling": {
                    "rope_type": "yarn",
                    "factor": 32.0,
                    "beta_fast": 32.0,
                    "beta_slow": 1.0,
                    "truncate": False,
                    "original_max_position_embeddings": 4096,
                }
            },
            nullable=("sliding_window",),
            renamed={"num_experts": "num_local_experts"},
        ),
    ),
    _built_in(
        "gpt_neox",
        "gpt_neox",
        Architecture(
            {
                "layer_norm_eps": 1e-5,
                "rope_theta": 10000.0,
                "rope_scaling": None,
                "partial_rotary_factor": 0.25,
                "tie_word_embeddings": False,
                "attention_bias": True,
                "use_parallel_residual": True,
                "hidden_act": "gelu",
            },
            renamed={"rotary_pct": "partial_rotary_factor", "rotary_emb_base": "rope_theta"},
            starts={"lm_head.": "embed_out."},
        ),
        # causal masks that older checkpoints stored
        ignored=("*.attention.bias", "*.attention.masked_bias"),
    ),
)
FAMILIES = {family.model_type: family for family in _BUILT_IN}


# --- models of several parts ----------------------------------------------------------------------


class Composite(NamedTuple):
    """A model of text and images, or of sounds too. Only its text model is read.

    text: the `model_type` of the text model if text_config does not name one.
    defaults: the values that transformers uses for other keys that text_config lacks.
    """

    text: str
    defaults: Mapping[str, Any]


GEMMA4_SIZES = {
    "vocab_size": 262_144,
    "hidden_size": 2304,
    "intermediate_size": 9216,
    "num_hidden_layers": 30,
    "num_attention_heads": 8,
}
COMPOSITES = {
    "gemma3": Composite(
        "gemma3_text",
        {
            "vocab_size": 262_208,
            "hidden_size": 2304,
            "intermediate_size": 9216,
            "num_hidden_layers": 26,
            "num_attention_heads": 8,
            "max_position_embeddings": 131_072,
        },
    ),
    "gemma4": Composite("gemma4_text", GEMMA4_SIZES | {"max_position_embeddings": 131_072}),
    "gemma4_unified": Composite(
        "gemma4_unified_text", GEMMA4_SIZES | {"max_position_embeddings": 262_144}
    ),
    "mistral3": Composite("mistral", {}),
    "qwen3_5": Composite("qwen3_5_text", {}),
    "qwen3_5_moe": Composite("qwen3_5_moe_text", {}),
}
# beginnings of the names of text tensors: in files of composites -> in files of text models
TEXT_STARTS = {
    "language_model.model.": "model.",
    "language_model.lm_head.": "lm_head.",
    "model.language_model.": "model.",
}
OTHER_PARTS = (
    "vision_tower",
    "multi_modal_projector",
    "visual",
    "embed_vision",
    "audio_tower",
    "embed_audio",
)
IMAGE_STARTS = tuple(f"{prefix}{part}." for prefix in ("", "model.") for part in OTHER_PARTS)
# keys beside text_config, in the config of the composite, that hold for its text model
SHARED_KEYS = "eos_token_id", "tie_word_embeddings", "quantization_config"


def is_composite(config: Mapping[str, Any]) -> bool:
    """Whether a config.json describes a model of text and images whose text model can be read."""
    model_type = config.get("model_type")
    return isinstance(model_type, str) and model_type in COMPOSITES


def text_part(config: Mapping[str, Any], source: Any) -> Mapping[str, Any]:
    """The config of the text model, of a composite; any other config as it is."""
    if not is_composite(config):
        return config
    composite = COMPOSITES[config["model_type"]]
    text = config.get("text_config")
    if not isinstance(text, Mapping):
        raise ValueError(
            f"{source}: model_type is {config['model_type']!r} and text_config is {text!r:.40}; it "
            "must be an object, the config of the text model"
        )
    shared = {key: config[key] for key in SHARED_KEYS if config.get(key) is not None}
    return {"model_type": composite.text, **composite.defaults, **text, **shared}


# --- what other families have ---------------------------------------------------------------------

# Keys that change what a model computes, but not the shapes of its tensors. A family that does not
# read such a key would give wrong answers without an error. By key, the values that change nothing.
NEUTRAL: dict[str, tuple[Any, ...]] = {
    "partial_rotary_factor": (1, 1.0),
    "rotary_pct": (1, 1.0),
    "no_rope_layers": ([],),
    "rope_interleave": (False,),
    "rope_interleaved": (False,),
    "attention_multiplier": (),
    "embedding_multiplier": (1, 1.0),
    "residual_multiplier": (1, 1.0),
    "logits_scaling": (1, 1.0),
    "logit_scale": (1, 1.0),
    "scale_emb": (1, 1.0),
    "scale_depth": (),
    "query_pre_attn_scalar": (),
    "attn_logit_softcapping": (0,),
    "final_logit_softcapping": (0,),
    "clip_qkv": (),
    "alibi": (False,),
    "use_alibi": (False,),
    "use_parallel_residual": (False,),
    "parallel_attn": (False,),
    "attention_chunk_size": (),
    "num_kv_shared_layers": (0,),
    "swiglu_limit": (),
    "routed_scaling_factor": (1, 1.0),
    "use_bidirectional_attention": (False,),
    "is_causal": (True,),
}


def _check_read(
    config: Mapping[str, Any], source: Any, family: Family | None, architecture: Architecture
) -> None:
    """Raises ValueError for a key that changes what a model computes, if the family does not read
    it. A built-in family reads the keys of its architecture's defaults.
    """
    keys = NEUTRAL
    if family is not None:
        # A family of one's own may read any key. But one that was written before this key came here
        # does not know it.
        keys = {"partial_rotary_factor": NEUTRAL["partial_rotary_factor"]}
    for key, neutral in keys.items():
        value = config.get(key)
        if value is None or value in neutral or key in architecture.defaults:
            continue
        defaults = {name: reader.architecture.defaults for name, reader in FAMILIES.items()}
        readers = [name for name, read_keys in defaults.items() if key in read_keys]
        nearest = f"families that do: {', '.join(readers)}" if readers else "no family here does"
        raise ValueError(
            f"{source}: {key} is {value!r:.40}, which {config['model_type']} does not read; "
            f"{nearest}; a family of your own reads it if it is one of its Architecture's defaults"
        )


# --- any architecture -----------------------------------------------------------------------------


def normalised(
    config: Mapping[str, Any], source: Any, family: Family | None = None
) -> dict[str, Any]:
    """The config with defaults for missing keys. `rope_parameters` (transformers 5) is split into
    theta and scaling.

    Args:
        source: where the config is from, for errors.
        family: the user's own family, which must be that of the config; None: one of FAMILIES.

    Raises:
        ValueError: an unsupported model_type, a missing key or a value of the wrong type. The
            message begins with `source`.
    """
    if family is None or family.model_type != config.get("model_type"):
        config = text_part(config, source)
    try:
        return _normalised(config, source, family, _architecture(config, source, family))
    except (TypeError, AttributeError, ZeroDivisionError) as error:
        raise ValueError(
            f"{source}: a value has the wrong type ({error}); fetch the model again"
        ) from error


def _architecture(config: Mapping[str, Any], source: Any, family: Family | None) -> Architecture:
    model_type = config.get("model_type")
    if family is not None:
        if model_type != family.model_type:
            raise ValueError(
                f"{source}: model_type is {model_type!r}, and the given model_family reads "
                f"{family.model_type!r}; give the family of this model, or leave model_family out"
            )
        return family.architecture
    if not isinstance(model_type, str) or model_type not in FAMILIES:
        supported = f"supported: {', '.join([*FAMILIES, *COMPOSITES])}"
        if near := get_close_matches(str(model_type), [*FAMILIES, *COMPOSITES]):
            supported += f"; the nearest name: {near[0]}"
        remedy = "a family of your own is given as model_family (docs/design/models.md)"
        raise ValueError(f"{source}: model_type is {model_type!r}; {supported}; {remedy}")
    return FAMILIES[model_type].architecture


def _normalised(
    config: Mapping[str, Any], source: Any, family: Family | None, architecture: Architecture
) -> dict[str, Any]:
    if config.get("quantization_config"):
        quantized.check(config["quantization_config"], source)

    result = {architecture.renamed.get(key, key): value for key, value in config.items()}
    rope = {**(result.pop("rope_parameters", None) or {})}
    if "full_attention" in rope:  # one entry for each type of layer
        sliding = rope.get("sliding_attention", {})
        rope = {**rope["full_attention"]}
        if sliding.get("rope_type", "default") != "default":
            raise ValueError(
                f"{source}: sliding_attention has rope scaling ({sliding}); only full_attention "
                "may have it"
            )
        local_theta = sliding.get("rope_theta", result.get("rope_local_base_freq"))
        result["rope_local_base_freq"] = local_theta
    result["rope_theta"] = rope.pop("rope_theta", result.get("rope_theta"))
    scaling = {**(rope or result.get("rope_scaling") or {})}
    rotated_part = scaling.pop("partial_rotary_factor", None)
    if rotated_part is not None:
        result["partial_rotary_factor"] = rotated_part
    if scaling:
        kind = scaling.get("rope_type") or scaling.get("type") or "default"
        scaling["rope_type"] = "longrope" if kind == "su" else kind  # its name in older files
        scaling.pop("type", None)
    # if an architecture scales by default, the type "default" says that this model does not scale
    is_scaled = architecture.defaults.get("rope_scaling") or scaling.get("rope_type") != "default"
    result["rope_scaling"] = scaling if scaling and is_scaled else None
    present = {k: v for k, v in result.items() if v is not None or k in architecture.nullable}
    result = {**architecture.defaults, **present}
    _check_read(result, source, family, architecture)
    _check_layer_types(result, source, family, architecture)

    for name in architecture.required:
        value = result.get(name)
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise ValueError(f"{source}: {name} is {value!r}; it must be an integer of at least 1")
    heads = result["num_attention_heads"]
    result.setdefault("num_key_value_heads", heads)
    result.setdefault("head_dim", result["hidden_size"] // heads)
    if heads % result["num_key_value_heads"]:
        raise ValueError(
            f"{source}: {heads} query heads are not a multiple of {result['num_key_value_heads']} "
            "KV heads"
        )
    return result


def _check_layer_types(
    config: Mapping[str, Any], source: Any, family: Family | None, architecture: Architecture
) -> None:
    """Raises ValueError for layers of a kind that a built-in family does not have."""
    types = config.get("layer_types")
    if family is not None or not types:
        return
    kinds = architecture.layer_types
    if absent := [name for name in types if name not in kinds]:
        raise ValueError(
            f"{source}: layer_types has {absent[0]!r}; layers of {config['model_type']} are of "
            f"{' or '.join(kinds)} here"
        )
    if len(types) != config.get("num_hidden_layers"):
        raise ValueError(
            f"{source}: layer_types has {len(types)} entries, and num_hidden_layers is "
            f"{config.get('num_hidden_layers')!r}; give one for each layer"
        )
