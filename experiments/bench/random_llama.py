"""How fast is each attention implementation in an engine, on a Llama of random weights, on this
device?

    python -m experiments.bench.random_llama                                    # TinyLlama-1.1B's shape
    python -m experiments.bench.random_llama --impls pallas_gpu xla --seqs 64 --context 2048 --json out.json

No checkpoint is needed. Each implementation gets its own engine and the same requests: prompts of
`--context` random tokens, then `--tokens` greedy ones. Printed are the seconds of the prompt steps,
the median decode step and, with `--bandwidth` (bytes/s), the share of that bandwidth at which the
step reads parameters, keys and values. Greedy tokens of random weights check nothing. The benchmark
checks that the engine's steps run and compile nothing on the way.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from functools import partial
from pathlib import Path
from typing import Any, get_args

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from experiments.core.environment import environment
from pagedjax import Engine, EngineConfig, SamplingParams
from pagedjax.config import DType
from pagedjax.device.models import Decoder, Model, llama
from pagedjax.device.models.decoder import angle_tables

SHAPES = {
    "tinyllama-1.1b": {
        "hidden_size": 2048,
        "intermediate_size": 5632,
        "num_hidden_layers": 22,
        "vocab_size": 32000,
    }
    | {"num_attention_heads": 32, "num_key_value_heads": 4, "max_position_embeddings": 8192},
    "llama-3.2-1b": {
        "hidden_size": 2048,
        "intermediate_size": 8192,
        "num_hidden_layers": 16,
        "vocab_size": 128256,
    }
    | {
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "max_position_embeddings": 8192,
        "tie_word_embeddings": True,
    },
    "small": {
        "hidden_size": 256,
        "intermediate_size": 512,
        "num_hidden_layers": 2,
        "vocab_size": 1000,
    }
    | {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 1024},
}


def random_model(shape: dict[str, Any], dtype: str, seed: int = 0) -> Model:
    """A Llama with normal parameters (standard deviation 0.02); norms are ones."""
    config = llama.from_hf(shape)
    graphdef, state = nnx.split(nnx.eval_shape(lambda: Decoder(config, dtype)))
    flat, tree = jax.tree.flatten(state)
    shapes = tuple((leaf.shape, leaf.dtype) for leaf in flat)
    state = jax.tree.unflatten(tree, _parameters(jax.random.key(seed), shapes))
    state["angles"].set_value(jnp.asarray(angle_tables(config)))
    return Model(config, graphdef, state, dtype)


@partial(jax.jit, static_argnums=1)  # one program, and not some for each shape
def _parameters(key: jax.Array, shapes: tuple[tuple[tuple[int, ...], Any], ...]) -> list[jax.Array]:
    def fill(key: jax.Array, shape: tuple[int, ...], dtype: Any) -> jax.Array:
        if len(shape) == 1:
            return jnp.ones(shape, dtype)
        return 0.02 * jax.random.normal(key, shape, dtype)

    keys = jax.random.split(key, len(shapes))
    return [
        fill(leaf_key, shape, dtype) for leaf_key, (shape, dtype) in zip(keys, shapes, strict=True)
    ]


def run(engine: Engine, seqs: int, context: int, tokens: int) -> dict[str, Any]:
    """Serve `seqs` requests at once.

    Returns the seconds of prompts and of the median decode step.
    """
    vocab = engine.model.config.vocab_size
    rng = np.random.default_rng(0)
    params = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True)
    for i in range(seqs):
        engine.add(str(i), rng.integers(0, vocab, context).tolist(), params)
    prompts = 0.0
    decodes = []
    compiled = 0
    while engine.has_work:
        result = engine.step()
        assert result is not None
        compiled += result.compilations
        seconds = result.device_seconds + result.host_seconds
        if len(result.plan.seqs) == seqs and max(result.plan.counts) == 1:
            decodes.append(seconds)
        else:
            prompts += seconds
    if not decodes:
        raise ValueError(
            f"no step decoded all {seqs} sequences and nothing else; raise --tokens or --budget"
        )
    return {
        "prompt_seconds": prompts,
        "decode_step": statistics.median(decodes),
        "compilations": compiled,
    }


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--shape", choices=sorted(SHAPES), default="tinyllama-1.1b")
    parser.add_argument("--impls", nargs="+", default=["pallas_gpu", "xla"])
    parser.add_argument("--dtype", choices=get_args(DType), default="bfloat16")
    parser.add_argument("--seqs", type=int, default=64)
    parser.add_argument("--context", type=int, default=1024)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--budget", type=int, default=2048)
    parser.add_argument(
        "--bandwidth", type=float, help="bytes/s of the device (see hardware.gpu_attention)"
    )
    parser.add_argument("--json", help="write the figures to this file")
    args = parser.parse_args(argv)
    minima = {"seqs": 1, "context": 1, "tokens": 2, "budget": 1}  # the first token is not a decode
    for name, minimum in minima.items():
        value = getattr(args, name)
        if value < minimum:
            parser.error(f"--{name} is {value}; it must be at least {minimum}")
    model = random_model(SHAPES[args.shape], args.dtype)
    c = model.config
    figures: dict[str, Any] = {"where": environment(), **vars(args), "runs": {}}
    failed = 0
    for impl in args.impls:
        try:
            config = EngineConfig(
                # EngineConfig checks the name
                attention_impl=impl,  # pyright: ignore[reportArgumentType]
                dtype=args.dtype,
                max_num_seqs=args.seqs,
                max_num_batched_tokens=args.budget,
                max_model_len=args.context + args.tokens,
                token_buckets=tuple(sorted({args.seqs, args.budget})),
            )
            times = run(Engine(model, config), args.seqs, args.context, args.tokens)
        except ValueError as error:
            failed += 1
            figures["runs"][impl] = {"error": str(error)}
            print(f"{impl:12} {error}", file=sys.stderr)
            continue
        keys = 2 * c.layers * c.kv_heads * c.head_dim * jnp.dtype(args.dtype).itemsize
        read = (
            sum(a.nbytes for a in jax.tree.leaves(model.params))
            + args.seqs * (args.context + args.tokens / 2) * keys
        )
        share = (
            f", {read / times['decode_step'] / args.bandwidth:.0%} of the bandwidth"
            if args.bandwidth
            else ""
        )
        figures["runs"][impl] = {**times, "bytes_a_step": read}
        print(
            f"{impl:12} prompts {times['prompt_seconds']:.2f} s, "
            f"decode step {1e3 * times['decode_step']:.2f} ms{share}, "
            f"{times['compilations']} compilations on the way",
            flush=True,
        )
    if args.json:
        Path(args.json).write_text(json.dumps(figures, indent=1), encoding="utf-8")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
