"""Tiny random Llama models on disk, as Hugging Face directories and as GGUF files, written without
torch.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import ml_dtypes
import numpy as np
from safetensors.numpy import save_file

from pagedjax.text.tokenizer import byte_alphabet

# ids 0, 1, 2: unknown, BOS, EOS and padding
SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{{'<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n'}}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
# Byte pairs that are most frequent in a text about a cat, a house and the rain.
MERGES = (
    "h e,t he,Ġ the,Ġ s,i n,Ġ a,a t,c at,l l,ll s,n d,Ġ cat,Ġ he,Ġ o,Ġa nd,Ġs e,Ġs he,a in,a r,ar s,"
    "d o,do w,e ;,h o,ho u,hou s,hous e;,in dow,r ain,r e,the r,w indow,Ġ house;,Ġ in,Ġ rain,"
    "Ġ window,Ġa re,Ġhe ars,Ġo n,Ġo ther,Ġse a,Ġse lls,Ġshe lls,Ġthe n"
)


def tiny_llama(
    folder: Path,
    *,
    layers: int = 2,
    heads: int = 4,
    kv_heads: int = 2,
    head_dim: int = 16,
    hidden: int = 64,
    intermediate: int = 96,
    vocab: int = 320,
    tied: bool = True,
    qkv_bias: bool = False,
    o_bias: bool = False,
    rope_theta: float = 10000.0,
    rope_scaling: dict[str, Any] | None = None,
    max_len: int = 512,
    dtype: Literal["float32", "bfloat16", "float16"] = "float32",
    shards: int = 1,
    seed: int = 0,
) -> Path:
    """Write config.json, generation_config.json, weights in `shards` files, and the tokenizer;
    returns the folder.

    qkv_bias without o_bias is a bias as in Qwen2 ("qkv_bias" in the config). Both together are
    transformers' attention_bias. rope_scaling: as in config.json; see `llama3_scaling`. The same
    arguments give the same bytes.
    """
    folder.mkdir(parents=True, exist_ok=True)
    config: dict[str, Any] = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": hidden,
        "intermediate_size": intermediate,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": head_dim,
        "vocab_size": vocab,
        "rms_norm_eps": 1e-5,
        "rope_theta": rope_theta,
        "rope_scaling": rope_scaling,
        "max_position_embeddings": max_len,
        "tie_word_embeddings": tied,
        "attention_bias": qkv_bias and o_bias,  # transformers' key means all four projections
        **({"qkv_bias": True} if qkv_bias and not o_bias else {}),
        "hidden_act": "silu",
        "bos_token_id": 1,
        "eos_token_id": 2,
        "pad_token_id": 2,
        "torch_dtype": dtype,
    }
    write_json(folder / "config.json", config)
    write_json(folder / "generation_config.json", {"eos_token_id": [2, 0]})
    tensors = tiny_tensors(config, qkv_bias=qkv_bias, seed=seed)
    save_shards(
        folder,
        {name: x.astype(getattr(ml_dtypes, dtype, dtype)) for name, x in tensors.items()},
        shards,
    )
    write_tokenizer(folder, vocab)
    return folder


def llama3_scaling() -> dict[str, Any]:
    """A "llama3" rope_scaling whose three ranges all occur within 512 positions and heads of 16."""
    return {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    }


def tiny_tensors(config: dict[str, Any], *, qkv_bias: bool, seed: int) -> dict[str, np.ndarray]:
    """Float32 tensors by Hugging Face name, scaled so that activations stay near 1 and logits
    differ.
    """
    rng = np.random.default_rng(seed)
    hidden = config["hidden_size"]
    inner = config["intermediate_size"]
    vocab = config["vocab_size"]
    q = config["num_attention_heads"] * config["head_dim"]
    kv = config["num_key_value_heads"] * config["head_dim"]

    def matrix(rows: int, columns: int) -> np.ndarray:
        return (rng.standard_normal((rows, columns)) / np.sqrt(columns)).astype(np.float32)

    def vector(size: int, mean: float) -> np.ndarray:
        return (mean + 0.1 * rng.standard_normal(size)).astype(np.float32)

    tensors = {"model.embed_tokens.weight": matrix(vocab, hidden) * 8}
    for i in range(config["num_hidden_layers"]):
        layer = {
            "q_proj": (q, hidden),
            "k_proj": (kv, hidden),
            "v_proj": (kv, hidden),
            "o_proj": (hidden, q),
        }
        for name, shape in layer.items():
            tensors[f"model.layers.{i}.self_attn.{name}.weight"] = matrix(*shape)
            has_bias = config["attention_bias"] if name == "o_proj" else qkv_bias
            if has_bias:
                tensors[f"model.layers.{i}.self_attn.{name}.bias"] = vector(shape[0], 0.0)
        for name, shape in {
            "gate_proj": (inner, hidden),
            "up_proj": (inner, hidden),
            "down_proj": (hidden, inner),
        }.items():
            tensors[f"model.layers.{i}.mlp.{name}.weight"] = matrix(*shape)
        for name in ("input_layernorm", "post_attention_layernorm"):
            tensors[f"model.layers.{i}.{name}.weight"] = vector(hidden, 1.0)
    tensors["model.norm.weight"] = vector(hidden, 1.0)
    if not config["tie_word_embeddings"]:
        tensors["lm_head.weight"] = matrix(vocab, hidden) * 2
    return tensors


def save_shards(folder: Path, tensors: dict[str, np.ndarray], shards: int) -> None:
    """model.safetensors, or numbered shards with their index."""
    if shards == 1:
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
        return
    names = sorted(tensors)
    weight_map = {}
    for index in range(shards):
        file = f"model-{index + 1:05d}-of-{shards:05d}.safetensors"
        part = names[index::shards]
        save_file({name: tensors[name] for name in part}, folder / file, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(part, file)
    write_json(folder / "model.safetensors.index.json", {"metadata": {}, "weight_map": weight_map})


def tiny_vocab(vocab: int) -> tuple[list[str], list[tuple[str, str]]]:
    """(tokens in id order, merges) of a byte-level BPE with at most `vocab` tokens."""
    letters = {byte: char for char, byte in byte_alphabet().items()}
    assert vocab >= len(SPECIAL) + 256, (
        f"vocab is {vocab}; 259 are the special tokens and the bytes"
    )
    pairs = MERGES.split(",")[: vocab - len(SPECIAL) - 256]
    letters_of_bytes = [letters[byte] for byte in range(256)]
    tokens = [*SPECIAL, *letters_of_bytes, *(pair.replace(" ", "") for pair in pairs)]
    return tokens, [tuple(pair.split(" ")) for pair in pairs]  # type: ignore[misc]


def write_tokenizer(folder: Path, vocab: int) -> None:
    """tokenizer.json and tokenizer_config.json: SmolLM2's kind of tokenizer, with few merges."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    tokens, merges = tiny_vocab(vocab)
    backend = Tokenizer(
        models.BPE(vocab={token: i for i, token in enumerate(tokens)}, merges=merges)
    )
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False),
        ]
    )
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(
        [AddedToken(token, normalized=False, special=True) for token in SPECIAL]
    )
    backend.save(str(folder / "tokenizer.json"))
    names = dict(zip(("unk_token", "bos_token", "eos_token"), SPECIAL, strict=True)) | {
        "pad_token": SPECIAL[2]
    }
    write_json(folder / "tokenizer_config.json", {**names, "chat_template": CHAT_TEMPLATE})


def write_json(path: Path, value: Any) -> None:
    path.write_text(json.dumps(value, indent=1), encoding="utf-8")


# --- GGUF -----------------------------------------------------------------------------------------

GGUF_PARTS = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


def gguf_name(name: str) -> str:
    top = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}
    stem, _, kind = name.rpartition(".")
    if stem in top:
        return f"{top[stem]}.{kind}"
    _, _, layer, part = stem.split(".", 3)
    return f"blk.{layer}.{GGUF_PARTS[part]}.{kind}"


def llama_cpp_permute(x: np.ndarray, heads: int) -> np.ndarray:
    """Row i of a head's first half and row i of its second half become neighbours, as llama.cpp's
    converter does.
    """
    halves = x.reshape(heads, 2, -1, *x.shape[1:])
    return halves.swapaxes(1, 2).reshape(x.shape)


def write_gguf(writer: Any) -> None:
    """Write what a GGUFWriter of the gguf package was given."""
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def tiny_gguf(
    path: Path,
    folder: Path,
    *,
    matrices: str | Mapping[str, str] = "F32",
    freq_factors: list[float] | None = None,
    extra: dict[str, Any] | None = None,
    drop: tuple[str, ...] = (),
    tensors_in_a_part: int = 0,
) -> Path:
    """Write the model of a `tiny_llama` folder like llama.cpp's converter.

    matrices: how the matrices are stored ("F32", "F16", "BF16", "Q8_0", "Q4_1" ...); or that by a
        part of their Hugging Face names, and "" for the others.
    extra: metadata to add or replace, ints as uint32; drop: metadata keys to leave out.
    tensors_in_a_part: more are written to further files, with llama.cpp's names of parts; 0: one
        file.
    """
    from gguf import GGUFValueType, GGUFWriter
    from gguf.constants import GGMLQuantizationType
    from gguf.quants import quantize
    from safetensors.numpy import load_file

    config = json.loads((folder / "config.json").read_text())
    tokens, merges = tiny_vocab(config["vocab_size"])
    tokens += [f"[PAD{i}]" for i in range(len(tokens), config["vocab_size"])]
    metadata: dict[str, Any] = {
        "llama.block_count": config["num_hidden_layers"],
        "llama.context_length": config["max_position_embeddings"],
        "llama.embedding_length": config["hidden_size"],
        "llama.feed_forward_length": config["intermediate_size"],
        "llama.attention.head_count": config["num_attention_heads"],
        "llama.attention.head_count_kv": config["num_key_value_heads"],
        "llama.attention.key_length": config["head_dim"],
        "llama.attention.value_length": config["head_dim"],
        "llama.rope.dimension_count": config["head_dim"],
        "llama.rope.freq_base": float(config["rope_theta"]),
        "llama.attention.layer_norm_rms_epsilon": config["rms_norm_eps"],
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "smollm",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [3] * 3 + [1] * (len(tokens) - 3),
        "tokenizer.ggml.merges": [" ".join(pair) for pair in merges],
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.add_bos_token": False,
        "tokenizer.chat_template": CHAT_TEMPLATE,
    }
    writer = GGUFWriter(path, "llama", split_max_tensors=tensors_in_a_part)
    for key, value in {**metadata, **(extra or {})}.items():
        if key in drop:
            continue
        if isinstance(value, list):
            writer.add_array(key, value)
        else:
            kinds = {bool: "BOOL", int: "UINT32", float: "FLOAT32", str: "STRING"}
            writer.add_key_value(key, value, GGUFValueType[kinds[type(value)]])

    by_part = {"": matrices} if isinstance(matrices, str) else matrices
    for file in sorted(folder.glob("*.safetensors")):
        for name, x in load_file(file).items():
            x = x.astype(np.float32)
            for part, heads in (
                ("q_proj", "num_attention_heads"),
                ("k_proj", "num_key_value_heads"),
            ):
                if f".{part}." in name:
                    x = llama_cpp_permute(x, config[heads])
            encoding = next(
                (by_part[part] for part in by_part if part and part in name), by_part[""]
            )
            if x.ndim == 2 and encoding != "F32":
                kind = GGMLQuantizationType[encoding]
                writer.add_tensor(gguf_name(name), quantize(x, kind), raw_dtype=kind)
            else:
                writer.add_tensor(gguf_name(name), x)
    if freq_factors is not None:
        writer.add_tensor("rope_freqs.weight", np.asarray(freq_factors, np.float32))
    write_gguf(writer)
    return path
