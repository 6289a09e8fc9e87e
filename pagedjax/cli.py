"""`pagedjax generate`, `convert` and `replay`: thin wrappers, nothing that the library does not do itself."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from typing import Any


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line. Returns the exit code; errors of the user are one line on stderr."""
    args = parser().parse_args(argv)
    try:
        return args.run(args)
    except (ValueError, FileNotFoundError) as error:
        print(f"pagedjax: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:  # the reader has gone, as in `| head`
        sys.stderr.close()
        return 0


def generate(args: argparse.Namespace) -> int:
    """Print a completion as it is generated."""
    from pagedjax import SamplingParams

    params = SamplingParams(  # checked before a model is loaded
        temperature=args.temperature,
        top_p=args.top_p,
        top_k=args.top_k,
        seed=args.seed,
        max_tokens=args.max_tokens,
        stop=tuple(args.stop),
    )
    from pagedjax import LLM

    llm = LLM(args.model, progress=sys.stderr.isatty(), **engine_options(args))
    prompt = args.prompt if args.prompt != "-" else sys.stdin.read()
    ids = llm.tokenizer.apply_chat_template([{"role": "user", "content": prompt}]) if args.chat else prompt
    if not args.chat and not args.only_new:
        print(prompt, end="", flush=True)
    for piece in llm.stream(ids, params):
        print(piece, end="", flush=True)
    print()
    return 0


def engine_options(args: argparse.Namespace) -> dict[str, Any]:
    """What `generate` asks of an engine: one request, and its first token soon."""
    return {
        "dtype": args.dtype,
        "weight_dtype": args.weight_dtype,
        "kv_cache_dtype": args.kv_cache_dtype,
        "block_size": args.block_size,
        "max_num_seqs": 1,
        "max_num_batched_tokens": args.budget,
        "max_model_len": args.max_model_len,
        "compilation": "lazy",  # it needs two or three of the buckets
        "token_buckets": tuple(sorted({2 if args.dtype == "bfloat16" else 1, min(32, args.budget), args.budget})),
    }


def convert(args: argparse.Namespace) -> int:
    """Write a model to a new folder, which `--model` and LLM(...) open: as Orbax's arrays, or for other programs."""
    from pagedjax.weights.convert import convert as write

    shard_bytes = int(args.shard_gb * 1e9)
    progress = sys.stderr.isatty()
    print(write(args.model, args.target, args.to, dtype=args.dtype, shard_bytes=shard_bytes, progress=progress))
    return 0


def replay(args: argparse.Namespace) -> int:
    from pagedjax import replay as log

    return log.main([args.file, *(["--policy", args.policy] if args.policy else [])])


def parser() -> argparse.ArgumentParser:
    from pagedjax import __version__

    words = argparse.ArgumentParser(prog="pagedjax", description="LLM inference in JAX with a paged KV cache")
    words.add_argument("--version", action="version", version=f"pagedjax {__version__}")
    commands = words.add_subparsers(required=True, metavar="command")

    one = commands.add_parser("generate", help="complete a prompt, streaming", description=generate.__doc__)
    one.add_argument("prompt", help="the text to continue; - reads standard input")
    one.add_argument("--model", default="smollm2-135m", help="directory, .gguf file, hub id or embedded model's name")
    one.add_argument("--chat", action="store_true", help="put the prompt into the model's chat template")
    one.add_argument("--only-new", action="store_true", help="do not repeat the prompt")
    one.add_argument("--max-tokens", type=int, default=128)
    one.add_argument("--temperature", type=float, default=0.0, help="0 is greedy (the default)")
    one.add_argument("--top-p", type=float, default=1.0)
    one.add_argument("--top-k", type=int, default=0)
    one.add_argument("--seed", type=int, default=0)
    one.add_argument("--stop", action="append", default=[], help="stop before this text; may be repeated")
    one.add_argument("--dtype", choices=("float32", "bfloat16", "float16"))
    one.add_argument("--weight-dtype", choices=("int8",), help="matrices in 8 bits, with a scale a row")
    one.add_argument("--kv-cache-dtype", help="of keys and values: that of --dtype (the default), or float8_e4m3fn")
    one.add_argument("--block-size", type=int, default=16)
    one.add_argument("--budget", type=int, default=512, help="tokens in a step at most")
    one.add_argument("--max-model-len", type=int, default=2048)
    one.set_defaults(run=generate)

    other = commands.add_parser("convert", help="write a model to a new folder", description=convert.__doc__)
    other.add_argument("model", help="directory, .gguf file, hub id or embedded model's name")
    other.add_argument("target", help="the folder to write; it must not exist, or be empty")
    other.add_argument("--to", choices=("orbax", "safetensors"), required=True)
    other.add_argument("--dtype", choices=("float32", "bfloat16", "float16"), help="the default is what is stored")
    other.add_argument("--shard-gb", type=float, default=5.0, help="GB of data in a safetensors file at most")
    other.set_defaults(run=convert)

    two = commands.add_parser("replay", help="verify a recorded run", description="Replay a recorded run.")
    two.add_argument("file", help="a JSONL file that Engine.record wrote")
    two.add_argument("--policy", help="of your own, that the run had: module:NAME or folder/file.py:NAME")
    two.set_defaults(run=replay)
    return words


if __name__ == "__main__":
    sys.exit(main())
