"""The commands of `pagedjax`: options of the command line, and calls of the library."""

# argparse stays: with tyro or typer the options are as many lines, `--help` takes 0.25 s instead of
# 0.1 s, and an error is a box of several lines instead of one line.

from __future__ import annotations

import argparse
import dataclasses
import importlib.util
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

from pagedjax.commands import experiments, options


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line. Returns the exit code. An error of the user is one line on stderr."""
    words = sys.argv[1:] if argv is None else list(argv)
    try:
        if words and words[0] in experiments.COMMANDS:  # commands with parsers of their own
            return experiments.main(words[0], words[1:])
        args = parser().parse_args(words)
        return args.run(args)
    except BrokenPipeError:  # the reader has closed the pipe, as `head` does
        sys.stderr.close()
        return 0
    except (ValueError, OSError) as error:
        print(f"pagedjax: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130


def generate(args: argparse.Namespace) -> int:
    """Print a completion as it is generated."""
    params = sampling(args, stop=tuple(args.stop))
    join(args)
    from pagedjax import LLM

    llm = LLM(args.model, **start_options(args), **engine_options(args))
    if llm.follows:
        return follow(llm)
    text = args.prompt if args.prompt != "-" else sys.stdin.read()
    prompt = text
    if args.chat:
        prompt = llm.tokenizer.apply_chat_template([{"role": "user", "content": text}])
    elif not args.only_new:
        print(text, end="", flush=True)
    for piece in llm.stream(prompt, params):
        print(piece, end="", flush=True)
    print()
    return 0


def sampling(args: argparse.Namespace, stop: tuple[str, ...] = ()) -> Any:
    """The sampling parameters. They are checked before a model is loaded."""
    from pagedjax import SamplingParams

    return SamplingParams(
        temperature=args.temperature,
        top_p=args.top_p,
        top_k=args.top_k,
        seed=args.seed,
        max_tokens=args.max_tokens,
        stop=stop,
    )


def join(args: argparse.Namespace) -> Any:
    """Connect this process with the others of its engine -> its group; None without others."""
    from pagedjax.engine.processes import config

    typed = {
        "coordinator": args.coordinator,
        "processes": args.processes,
        "process": args.process,
        "timeout": args.process_timeout,
    }
    if config.read(**typed) is None:
        return None
    from pagedjax.engine.processes.join import join as connect

    return connect(**typed)


def follow(llm: Any) -> int:
    """Compute this process's part of the requests of process 0, until process 0 ends."""
    print(llm.engine.group, file=sys.stderr, flush=True)
    llm.follow()
    return 0


def process_options(parser: argparse.ArgumentParser) -> None:
    """Add the options that `join` reads."""
    group = parser.add_argument_group(
        "several processes",
        "Start the same command in each. Under Slurm, Open MPI or a JobSet none is needed.",
    )
    group.add_argument(
        "--coordinator", metavar="HOST:PORT", help="of process 0, that all can reach"
    )
    group.add_argument(
        "--processes", type=int, metavar="N", help="how many there are; 1 ignores a launcher"
    )
    group.add_argument(
        "--process", type=int, metavar="I", help="which one this is; 0 takes the requests"
    )
    group.add_argument(
        "--process-timeout",
        type=float,
        metavar="SECONDS",
        help="without progress, after which all processes end; default 120",
    )


def replica_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of `serve` for several engines."""
    group = parser.add_argument_group(
        "replicas", "Several engines behind one address, on Ray; needs the extra ray."
    )
    group.add_argument("--replicas", type=int, metavar="N", help="how many engines")
    group.add_argument(
        "--autoscaling",
        type=options.mapping("max_replicas=4,target_ongoing_requests=32"),
        metavar="NAME=VALUE,...",
        help="or a JSON object: Ray Serve's AutoscalingConfig, such as "
        "max_replicas=4,target_ongoing_requests=32",
    )
    group.add_argument(
        "--replica-resources",
        type=options.mapping("num_gpus=2"),
        metavar="NAME=VALUE,...",
        help="or a JSON object: what one replica asks Ray for, such as num_gpus=2; default: its "
        "mesh's devices, or a CPU",
    )
    group.add_argument(
        "--router",
        type=options.own_name,
        metavar="NAME",
        help="which replica gets a request: round_robin, least_loaded, prefix (the default), or "
        "file.py:NAME",
    )
    group.add_argument(
        "--known-blocks",
        type=int,
        metavar="N",
        help="hashes that the router remembers of each replica; best its number of blocks; "
        "default 65536",
    )
    group.add_argument(
        "--record-routing", metavar="FILE", help="record each assignment, for `pagedjax replay`"
    )
    group.add_argument(
        "--ray-address",
        metavar="ADDRESS",
        help="HOST:PORT of a Ray cluster, or auto; default: Ray starts on this machine",
    )


def start_options(args: argparse.Namespace) -> dict[str, Any]:
    """How LLM(...) starts; no option of the engine."""
    return {"progress": sys.stderr.isatty(), "compilation_cache": args.compilation_cache}


def engine_options(args: argparse.Namespace) -> dict[str, Any]:
    """The options of the engine of `generate` and `chat`: one request, its first token early."""
    budget = args.max_num_batched_tokens
    # The fewest tokens of a step; in 16 bit on a CPU they are 2 (engine/resolve.py)
    smallest = 1 if args.dtype in (None, "float32") else 2
    return {
        "dtype": args.dtype,
        "weight_dtype": args.weight_dtype,
        "kv_cache_dtype": args.kv_cache_dtype,
        "mesh": args.mesh,
        "block_size": args.block_size,
        "max_num_seqs": 1,
        "max_num_batched_tokens": budget,
        "max_model_len": args.max_model_len,
        "compilation": "lazy",  # one request needs two or three of the buckets
        "token_buckets": tuple(sorted({smallest, min(32, budget), budget})),
    }


def chat(args: argparse.Namespace) -> int:
    """Talk with a chat model in the terminal. /help lists its commands."""
    params = sampling(args)
    join(args)
    from pagedjax import LLM
    from pagedjax.commands import chat as loop

    llm = LLM(args.model, **start_options(args), enable_prefix_caching=True, **engine_options(args))
    if llm.follows:
        return follow(llm)
    loop.chat(llm, params, system=args.system)
    return 0


def convert(args: argparse.Namespace) -> int:
    """Write a model to a new folder that `--model` and LLM(...) open, in Orbax's format or as
    safetensors."""
    from pagedjax.weights.convert import convert as write

    importance = None
    if args.calibration is not None:
        from pagedjax.commands import calibration
        from pagedjax.weights.convert import check_free

        if not (args.weights or "").startswith("int4"):
            raise ValueError(
                f"--calibration is given, and --weights is {args.weights}; a text chooses the scales "
                "of 4 bits: use int4-g128, int4-g64 or int4-g32, or leave it out"
            )
        check_free(Path(args.target).expanduser())
        importance = calibration.mean_squares(args.model, args.calibration, args.model_family)
    folder = write(
        args.model,
        args.target,
        args.to,
        dtype=args.dtype,
        weights=args.weights,
        importance=importance,
        model_family=args.model_family,
        shard_bytes=int(args.shard_gb * 1e9),
        progress=sys.stderr.isatty(),
        report=partial(print, file=sys.stderr),
    )
    print(folder)
    return 0


def replay(args: argparse.Namespace) -> int:
    """Verify a recorded run of an engine, or the recorded assignments of a router."""
    from pagedjax.host import replay
    from pagedjax.options.own_names import name_in_one_line

    replay.check_file(args.file)
    with open(args.file, "rb") as lines:
        if next(lines, b"").startswith(b'{"routing":'):
            return _replay_routing(args)
    policy = name_in_one_line("policy", args.policy)
    return replay.main([args.file, *(["--policy", policy] if policy else [])])


def _replay_routing(args: argparse.Namespace) -> int:
    from pagedjax import routing
    from pagedjax.routing import recording

    router = routing.find(args.policy) if args.policy else None
    with open(args.file, encoding="utf-8") as lines:
        _, count = recording.replay(lines, router)
    print(f"{args.file}: {count} assignments, all as recorded")
    return 0


def check(args: argparse.Namespace) -> int:
    """Search all interleavings of a few requests for a run in which a policy breaks what it should
    keep: every request ends, and what the policy promises."""
    from pagedjax.commands import check as command

    return command.main(args)


def view(args: argparse.Namespace) -> int:
    """Write a recorded run, or two on one time axis, as one HTML page that opens in any browser, and
    print where."""
    from pagedjax import viewer
    from pagedjax.host.replay import ReplayError
    from pagedjax.viewer.pair import different_names

    paths = [path for path in (args.file, args.second) if path]
    policies = _policies_of_runs(args.policy or (), len(paths))
    runs = []
    errors = []
    for path, policies_of_run in zip(paths, policies, strict=True):
        try:
            runs.append(viewer.read(path, policies_of_run))
        except ReplayError as error:
            errors.append(str(error))
    if errors:
        remedy = "; give one --policy for each recording, in their order"
        raise ReplayError("; ".join(errors) + (remedy if len(errors) > 1 else ""))
    decode = _decoder(args.model) if args.model else None
    if len(runs) == 1:
        return _write(args, ".html", viewer.page(runs[0], decode=decode))
    names = different_names(*paths)
    run, second = (run._replace(name=name) for run, name in zip(runs, names, strict=True))
    ending = f"-{Path(names[1]).with_suffix('').as_posix().replace('/', '-')}.html"
    return _write(args, ending, viewer.page(run, second=second, decode=decode))


def _policies_of_runs(names: Sequence[Any], num_runs: int) -> list[dict[str, Any]]:
    """The policies that each recording may name, by their names. If two policies have one name and
    different parameters, each recording gets its own.

    Raises:
        ValueError: there are more names than recordings.
    """
    if len(names) > num_runs:
        raise ValueError(
            f"--policy is given {len(names)} times, and there are {num_runs} recordings; give it "
            "at most once for each"
        )
    policies_by_name = [_policies(name) for name in names]
    all_policies = _policies(None)
    for policies in policies_by_name:
        all_policies |= policies
    num_without_own = num_runs - len(policies_by_name)
    policies_of_runs = [*policies_by_name, *[{}] * num_without_own]
    return [all_policies | policies for policies in policies_of_runs]


def trace(args: argparse.Namespace) -> int:
    """Write a recorded run as trace-event JSON, for Perfetto, and print where."""
    import json

    from pagedjax import viewer

    events = viewer.trace(viewer.read(args.file, _policies(args.policy)))
    return _write(args, ".trace.json", json.dumps(events, separators=(",", ":")))


def _policies(name: str | None) -> dict[str, Any]:
    """The shipped policies, and the policy of that name if one is given, by their names."""
    from pagedjax.host.replay import with_own

    return with_own([name] if name else [])


def _decoder(model: str) -> Any:
    """The function from token ids to text of a model's tokenizer. The weights are not loaded."""
    from pagedjax.weights.tokenizer_files import open_tokenizer

    return partial(open_tokenizer(model).decode, skip_special_tokens=False)


def _write(args: argparse.Namespace, ending: str, text: str) -> int:
    """Write a file next to the recording, or to the path of -o, but never over a recording."""
    source = Path(args.file)
    target = Path(args.output) if args.output else source.with_name(source.stem + ending)
    recordings = [path for path in (args.file, getattr(args, "second", None)) if path]
    if target.resolve() in [Path(path).resolve() for path in recordings]:
        raise ValueError(f"{target} is the recording itself; name another file with -o")
    if target.is_dir() or not target.parent.is_dir():
        raise ValueError(
            f"{target} cannot be written: it is a folder, or its folder does not exist; name a "
            "file with -o"
        )
    target.write_text(text, "utf-8")
    print(target)
    return 0


def serve(args: argparse.Namespace) -> int:
    """Serve a model to OpenAI's clients. On SIGTERM and Ctrl-C, unfinished requests are completed
    first."""
    from pagedjax.options.config import EngineConfig

    require("serve", "fastapi", "uvicorn", "prometheus_client")
    names = [field.name for field in dataclasses.fields(EngineConfig)]
    engine = {name: getattr(args, name) for name in names if getattr(args, name) is not None}
    if runs_on_ray(args):
        require("ray", "ray")
        from pagedjax.server.ray import command as cluster

        return cluster.main(args, engine)
    join(args)
    from pagedjax.server import serve, supervisor

    command = supervisor if args.restarts else serve
    return command.main(args, engine)


def runs_on_ray(args: argparse.Namespace) -> bool:
    """Whether Ray runs the server.

    Raises:
        ValueError: there is one engine, and an option that needs --replicas.
    """
    if args.replicas is not None or args.autoscaling is not None:
        return True
    for name in ("replica_resources", "router", "known_blocks", "record_routing", "ray_address"):
        if getattr(args, name) is not None:
            flag = f"--{name.replace('_', '-')}"
            raise ValueError(
                f"{flag} is given, and there is one engine; add --replicas N, or leave it out"
            )
    return False


def bench_serve(args: argparse.Namespace) -> int:
    """Send requests to an OpenAI-compatible server at planned times, and print its latencies."""
    require("serve", "httpx")
    from pagedjax.server.load_client import bench_serve

    return bench_serve.main(args)


def require(extra: str, *modules: str) -> None:
    """Check that modules are installed; `extra` is the extra that installs them.

    Raises:
        ValueError: a module is missing.
    """
    missing = [module for module in modules if importlib.util.find_spec(module) is None]
    if missing:
        raise ValueError(
            f"this needs {', '.join(missing)}, which the extra installs: pip install "
            f"'pagedjax[{extra}]'"
        )


def parser() -> options.Parser:
    """The parser of the command line, with one parser for each command."""
    from pagedjax import __version__

    root = options.Parser(prog="pagedjax", description="LLM inference in JAX with a paged KV cache")
    root.add_argument("--version", action="version", version=f"pagedjax {__version__}")
    commands = root.add_subparsers(required=True, metavar="command")
    generate_parser(commands)
    chat_parser(commands)
    convert_parser(commands)
    serve_parser(commands)
    replay_parser(commands)
    check_parser(commands)
    view_parser(commands)
    trace_parser(commands)
    bench_parser(commands)
    for name, text in experiments.COMMANDS.items():
        commands.add_parser(name, help=text, description=text, add_help=False)
    return root


def generate_parser(commands: argparse._SubParsersAction) -> None:
    parser = commands.add_parser(
        "generate", help="complete a prompt, streaming", description=generate.__doc__
    )
    parser.add_argument("prompt", help="the text to continue; - reads standard input")
    parser.add_argument(
        "--model",
        default="smollm2-135m",
        help="directory, .gguf file, hub id or embedded model's name",
    )
    parser.add_argument(
        "--chat", action="store_true", help="put the prompt into the model's chat template"
    )
    parser.add_argument("--only-new", action="store_true", help="do not repeat the prompt")
    parser.add_argument("--max-tokens", type=int, default=128)
    parser.add_argument("--temperature", type=float, default=0.0, help="0 is greedy (the default)")
    parser.add_argument("--top-p", type=float, default=1.0)
    parser.add_argument("--top-k", type=int, default=0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--stop", action="append", default=[], help="stop before this text; may be repeated"
    )
    _add_engine_options(parser)
    parser.set_defaults(run=generate)


def chat_parser(commands: argparse._SubParsersAction) -> None:
    parser = commands.add_parser("chat", help="talk with a chat model", description=chat.__doc__)
    parser.add_argument(
        "--model",
        default="smollm2-135m",
        help="directory, .gguf file, hub id or embedded model's name",
    )
    parser.add_argument(
        "--system", help="the system text; replaces the one in the model's template"
    )
    parser.add_argument("--max-tokens", type=int, default=512, help="tokens of one answer at most")
    parser.add_argument(
        "--temperature", type=float, default=0.7, help="0 is greedy; the default is 0.7"
    )
    parser.add_argument("--top-p", type=float, default=0.95)
    parser.add_argument("--top-k", type=int, default=0)
    parser.add_argument("--seed", type=int, default=0)
    _add_engine_options(parser)
    parser.set_defaults(run=chat)


def convert_parser(commands: argparse._SubParsersAction) -> None:
    parser = commands.add_parser(
        "convert", help="write a model to a new folder", description=convert.__doc__
    )
    parser.add_argument("model", help="directory, .gguf file, hub id or embedded model's name")
    parser.add_argument("target", help="the folder to write; it must not exist, or be empty")
    parser.add_argument("--to", choices=("orbax", "safetensors"), required=True)
    parser.add_argument(
        "--dtype", choices=("float32", "bfloat16", "float16"), help="the default is what is stored"
    )
    parser.add_argument(
        "--weights",
        choices=("int4-g128", "int4-g64", "int4-g32", "int8", "fp8"),
        help="matrices in fewer bits, rounded without calibration, as compressed-tensors has them "
        "(safetensors)",
    )
    parser.add_argument(
        "--calibration",
        type=Path,
        metavar="FILE.txt",
        help="a text; with int4, errors count by the sizes of the activations that it causes",
    )
    parser.add_argument(
        "--model-family", metavar="FILE.py:NAME", help="of a model whose family is one of your own"
    )
    parser.add_argument(
        "--shard-gb", type=float, default=5.0, help="GB of data in a safetensors file at most"
    )
    parser.set_defaults(run=convert)


def serve_parser(commands: argparse._SubParsersAction) -> None:
    parser = commands.add_parser(
        "serve", help="serve a model to OpenAI's clients", description=serve.__doc__
    )
    parser.add_argument(
        "model", nargs="?", default="smollm2-135m", help="directory, .gguf file, hub id or name"
    )
    parser.add_argument(
        "--host",
        default="127.0.0.1",
        help="the address to listen on; default 127.0.0.1; 0.0.0.0 is all",
    )
    parser.add_argument(
        "--port", type=int, default=8000, help="default 8000; 0 chooses a free port and prints it"
    )
    parser.add_argument(
        "--served-model-name", help="in requests and answers; the default is the folder's name"
    )
    parser.add_argument(
        "--api-key-file", help="a file with the key that clients must send as a bearer token"
    )
    parser.add_argument(
        "--max-queue",
        type=int,
        default=256,
        help="requests that may wait; others are answered 429; default 256",
    )
    parser.add_argument(
        "--max-body-mib",
        type=options.mebibytes,
        default=8.0,
        help="of a request; more is answered 413; default 8",
    )
    parser.add_argument(
        "--allow-origin",
        action="append",
        default=[],
        help="origin of web pages that may connect; * is all",
    )
    parser.add_argument(
        "--drain-seconds",
        type=options.seconds,
        default=60,
        help="for unfinished requests at a stop; default 60",
    )
    parser.add_argument(
        "--restarts",
        type=options.whole_number,
        default=0,
        metavar="N",
        help="run the engine in a process of its own, start it again up to N times in a row if it "
        "ends, and go on with its requests; default 0: in this process",
    )
    parser.add_argument(
        "--min-priority",
        type=int,
        default=0,
        metavar="N",
        help="the lowest number (most urgent) of clients; default 0",
    )
    parser.add_argument(
        "--max-priority",
        type=int,
        default=0,
        metavar="N",
        help="the highest number (least urgent) of clients; default 0",
    )
    parser.add_argument(
        "--allow-user",
        action="store_true",
        help="the policies fair and vtc share by the field user of requests",
    )
    parser.add_argument(
        "--allow-service-fields",
        action="store_true",
        help="requests may have predicted, service_class and deadline, which policies read",
    )
    parser.add_argument(
        "--tool-call-parser",
        choices=("hermes", "llama3_json", "mistral"),
        help="how the model writes calls of tools; the default is found in its chat template",
    )
    parser.add_argument(
        "--lora-modules",
        nargs="+",
        action="extend",
        default=[],
        type=options.named_folder,
        metavar="NAME=FOLDER",
        help="adapters, which requests name as their model; needs --enable-lora",
    )
    parser.add_argument(
        "--allow-runtime-lora-updating",
        action="store_true",
        help="clients may load adapters, from any folder that this process can read, and unload "
        "them",
    )
    parser.add_argument(
        "--lecture-endpoints",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="serve vllmini's /generate and /result (the default, except with --restarts)",
    )
    parser.add_argument(
        "--result-seconds",
        type=float,
        default=300.0,
        help="how long /result keeps a text; default 300",
    )
    parser.add_argument(
        "--record", metavar="FILE", help="record the run, for `pagedjax view`, `trace` and `replay`"
    )
    parser.add_argument(
        "--log-level", choices=("debug", "info", "warning", "error"), default="info"
    )
    _add_cache_option(parser)
    options.add_engine_options(
        parser,
        compilation="the default is background; with drafts or in several processes it is eager",
    )
    process_options(parser)
    replica_options(parser)
    parser.set_defaults(run=serve)


def replay_parser(commands: argparse._SubParsersAction) -> None:
    parser = commands.add_parser(
        "replay", help="verify a recorded run", description="Replay a recorded run."
    )
    parser.add_argument(
        "file", help="a JSONL file of Engine.record, or of `pagedjax serve --record-routing`"
    )
    parser.add_argument(
        "--policy",
        type=options.own_name,
        metavar="NAME",
        help="the run's policy or router, if it is not built in: module:NAME or "
        "folder/file.py:NAME",
    )
    parser.set_defaults(run=replay)


def check_parser(commands: argparse._SubParsersAction) -> None:
    parser = commands.add_parser(
        "check", help="does every request end under a policy?", description=check.__doc__
    )
    parser.add_argument(
        "policy",
        type=options.own_name,
        metavar="POLICY",
        help="a shipped policy, module:NAME or folder/file.py:NAME, with parameters as "
        "name=mine.py:NAME,worth=64",
    )
    parser.add_argument(
        "--requests",
        type=options.at_least_1,
        default=3,
        metavar="N",
        help="unfinished requests at one time; default 3",
    )
    parser.add_argument(
        "--blocks",
        type=options.at_least_1,
        default=6,
        metavar="N",
        help="blocks of the cache; default 6",
    )
    parser.add_argument(
        "--seconds",
        type=options.at_least_1,
        default=60,
        metavar="N",
        help="the search ends then, and says that it is not exhausted; default 60",
    )
    parser.add_argument(
        "--bound",
        type=options.whole_number,
        metavar="N",
        help="later requests that may enter before one; default: the `bound` of the policy",
    )
    parser.add_argument(
        "--urgent-first",
        action="store_true",
        help="no later and less urgent request may be preferred; default: the `urgent_first` of the policy",
    )
    parser.add_argument(
        "--discards",
        type=options.whole_number,
        metavar="N",
        help="how often computed tokens of a request may be thrown away while a later one runs on; "
        "default 1, and 8 for a policy that evicts",
    )
    parser.add_argument(
        "--record",
        metavar="FILE",
        help="write a counterexample, for `pagedjax replay`, `view` and `trace`",
    )
    parser.set_defaults(run=check)


def view_parser(commands: argparse._SubParsersAction) -> None:
    parser = commands.add_parser(
        "view", help="show a recorded run as a page", description=view.__doc__
    )
    parser.add_argument("file", help="a JSONL file of Engine.record")
    parser.add_argument(
        "second", nargs="?", help="another run of the same prompts, to be shown beside the first"
    )
    parser.add_argument(
        "-o",
        "--output",
        help="the page; the default is the recording's name with .html, of two a-b.html",
    )
    parser.add_argument(
        "--model",
        help="show text, by this model's tokenizer: directory, .gguf file, hub id or name",
    )
    parser.add_argument(
        "--policy",
        action="append",
        type=options.own_name,
        metavar="NAME",
        help="a run's policy, if it is not built in: module:NAME or folder/file.py:NAME; of two "
        "runs perhaps one each, in their order",
    )
    parser.set_defaults(run=view)


def trace_parser(commands: argparse._SubParsersAction) -> None:
    parser = commands.add_parser(
        "trace", help="a recorded run for Perfetto", description=trace.__doc__
    )
    parser.add_argument(
        "file", help="a JSONL file of Engine.record; with times=True it has real times"
    )
    parser.add_argument(
        "-o", "--output", help="the trace; the default is the recording's name with .trace.json"
    )
    parser.add_argument(
        "--policy",
        type=options.own_name,
        metavar="NAME",
        help="the run's policy, if it is not built in: module:NAME or folder/file.py:NAME",
    )
    parser.set_defaults(run=trace)


def bench_parser(commands: argparse._SubParsersAction) -> None:
    bench = commands.add_parser("bench", help="measure", description="Measure a running server.")
    bench_serve_parser(bench.add_subparsers(required=True, metavar="what"))


def bench_serve_parser(commands: argparse._SubParsersAction) -> None:
    from pagedjax.server.load_client.bench_serve import add_options

    parser = commands.add_parser(
        "serve", help="load a running server", description=bench_serve.__doc__
    )
    add_options(parser)
    parser.set_defaults(run=bench_serve)


def _add_cache_option(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--compilation-cache",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="keep compiled programs on disk",
    )


def _add_engine_options(parser: argparse.ArgumentParser) -> None:
    """Add the options that `start_options` and `engine_options` read."""
    from pagedjax.options.config import AS_STORED, STORED_FORMATS

    _add_cache_option(parser)
    parser.add_argument("--dtype", choices=("float32", "bfloat16", "float16"))
    parser.add_argument(
        "--weight-dtype",
        choices=(*STORED_FORMATS, AS_STORED),
        help="matrices in 8 bits, with a scale a row; or as a checkpoint stores them",
    )
    parser.add_argument(
        "--kv-cache-dtype",
        help="of keys and values: that of --dtype (the default), or float8_e4m3fn",
    )
    parser.add_argument(
        "--mesh", type=options.mapping(options.MESH), metavar="AXIS=N,...", help="devices: tensor=4"
    )
    parser.add_argument("--block-size", type=int, default=16)
    parser.add_argument(
        "--max-num-batched-tokens",
        "--budget",
        type=options.at_least_1,
        default=512,
        help="tokens of a step at most",
    )
    parser.add_argument("--max-model-len", type=int, default=2048)
    process_options(parser)


if __name__ == "__main__":
    sys.exit(main())
