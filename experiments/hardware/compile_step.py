r"""Does an engine's whole step compile for chips that are not here, and how many blocks fit in it?

    python -m experiments.hardware.compile_step --target v5e               # Llama 3.2 1B's shape
    python -m experiments.hardware.compile_step --target v5e --model llama-3-8b --weights int8
    python -m experiments.hardware.compile_step --target h200 --model llama-3-8b --layers 2 \
        --weights int4_128 --linear pallas_gpu --tokens 64
    python -m experiments.hardware.compile_step --target v5e --model llama-3-8b --mesh tensor=8 \
        --layers 2
    python -m experiments.hardware.compile_step --target h200 --model llama-3-70b --mesh tensor=8
    python -m experiments.hardware.compile_step --target h200 --model tinyllama-1.1b --span 8

A TPU needs libtpu, which contains the compiler; a GPU needs JAX 0.11 with its CUDA plugin, and
ptxas. Model, attention through the chip's kernel, and sampling are one program, as in an engine;
parameters and cache are shapes and take no memory here. Nothing is executed.

The command prints the memory report of one device of such an engine, the collectives of the
compiled program, and the time that they take on the chip's links, by a roofline
(experiments/simulation/collectives.py). It fails if the compiler refuses the step, if the cache is
not updated in place, if a cache array is copied whole, if logits are copied, if `--attention` has a
kernel that rotates and writes and a layer does not run it, or if the devices exchange anything but
what a step must (exchanges.py).

For a GPU it prints too what the host launches (launches.py). If `--tokens` is at most `--rows`, the
step is one of decodes alone.

`--span 8` compiles 8 decode steps as one program (pagedjax/device/span.py), and one step beside it:
it prints how a GPU's host runs the loop, and the launches, the copies and the memory of both
programs. `--loops` chooses how: "graph", as an engine does, has the loop in the CUDA graph; for
"host" the host launches a turn's graph again and again; "unrolled" repeats the turn within the
graph.

`--layers` compiles a step of fewer layers. The report's weights and cache are then those of all
layers, because they grow linearly with the layers. The step's own memory is that of the compiled
layers.
"""

from __future__ import annotations

import argparse
import sys

import jax

from experiments.bench.harness import at_least_1
from experiments.bench.random_llama import SHAPES, WEIGHTS, with_weights
from experiments.hardware import compilers, exchanges, launches
from experiments.hardware.compiled import (
    DTYPE,
    LOOPS,
    Plan,
    Room,
    Step,
    compile_fitting,
    compile_step,
    on_mesh,
    on_one_device,
    room,
)
from experiments.hardware.compilers import TARGETS, Target
from pagedjax.device import attention, formats, linear, memory
from pagedjax.device.models import llama, split
from pagedjax.device.models.decoder import DecoderConfig
from pagedjax.device.placement import make_placement
from pagedjax.options.config import MeshConfig, from_dict

LLAMA_3 = {"vocab_size": 128256, "num_key_value_heads": 8, "max_position_embeddings": 8192}
MODELS = SHAPES | {
    "llama-3-8b": LLAMA_3
    | {
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
    },
    "llama-3-70b": LLAMA_3
    | {
        "hidden_size": 8192,
        "intermediate_size": 28672,
        "num_hidden_layers": 80,
        "num_attention_heads": 64,
    },
}
ROTATED_WRITE = "rotated_write"  # the kernel of pallas_kernels/kv_write/pallas_gpu.py
# instructions that may have a cache array as result: an in-place kernel or scatter, or an
# instruction that moves nothing
HARMLESS = {"parameter", "get-tuple-element", "bitcast", "tuple", "custom-call", "scatter", "while"}


def faults(step: Step, rotated_writes: int = 0) -> list[str]:
    """What must not be in a step, as sentences.

    rotated_writes: how often it must rotate, and write keys and values, by one kernel; 0: it has
        no such kernel.
    """
    sentences = [
        f"whole cache arrays are made by {count} x {kind}"
        for kind, count in sorted(step.copies.items())
        if kind not in HARMLESS
    ]
    if step.aliased < step.cache:
        sentences.append(
            f"only {step.aliased:,} of {step.cache:,} bytes of the cache are updated in place"
        )
    if step.logits_copies:
        sentences.append(
            f"the logits of rows without options are copied {step.logits_copies} times"
        )
    if rotated_writes and (step.kernels[ROTATED_WRITE] < rotated_writes or step.copies["scatter"]):
        sentences.append(
            f"{rotated_writes} layers rotate and write by one kernel, and it runs "
            f"{step.kernels[ROTATED_WRITE]} times, beside {step.copies['scatter']} scatters"
        )
    differences = exchanges.differences(step.collectives, step.required)
    return sentences + [difference.text for difference in differences if difference.wrong]


def memory_lines(
    device_room: Room, step: Step, fit: int, plan: Plan, layers: tuple[int, int]
) -> str:
    """The memory of one device, as lines.

    Args:
        fit: the number of blocks that fit.
        layers: how many the compiled step has, and how many the model has.
    """
    report = memory.report(
        device_room.device,
        weights=device_room.weights,
        activations=step.activations,
        num_blocks=min(fit, device_room.useful),
        block_size=plan.block_size,
        block_bytes=device_room.block,
        max_model_len=plan.length,
        swap_space_gib=0,
    )
    lines = [
        str(report),
        f"{fit:,} blocks fit, and {plan.rows} sequences of {plan.length:,} tokens "
        f"can use {device_room.useful:,}",
        f"the compiled step has {memory.size(step.arguments)} of arguments as the compiler lays "
        f"them out, and {memory.size(step.code)} of code, which the report leaves out",
    ]
    if layers[0] < layers[1]:
        lines.append(
            f"extrapolated from {layers[0]} compiled layers to {layers[1]}: weights and cache grow "
            f"linearly with the layers; activations are those of {layers[0]} layers, "
            "and a TPU's grow a little with them"
        )
    return "\n".join(lines)


def exchange_lines(
    step: Step, model: DecoderConfig, target: Target, plan: Plan, n: int, layers_left: int
) -> str:
    """The exchanges of a step, as lines; "" for one device.

    layers_left: how many layers of the model were not compiled.
    """
    network = target.network(n)
    if network is None:
        return ""
    lines = [f"exchanges of {n} devices:", exchanges.table(step.collectives, n, network)]
    for difference in exchanges.differences(step.collectives, step.required):
        if not difference.wrong:
            lines.append(f"  combined or split by the compiler: {difference.text}")
    lines += [
        f"  {count} of them by the compiler's {ring}" for ring, count in sorted(step.rings.items())
    ]
    time = exchanges.seconds(step.collectives, n, network)
    sentence = f"  {1e3 * time:.2f} ms in every step on the links of {target.chip}, by a roofline"
    if layers_left:
        time += exchanges.seconds_of_layers(model, layers_left, n, plan.tokens, network)
        sentence += f"; {1e3 * time:.2f} ms with {layers_left} more layers"
    if not network.hop:
        sentence += "; a lower bound, hops take no time"
    return "\n".join([*lines, sentence])


def span_lines(span: Step, single: Step, plan: Plan) -> str:
    """A program of several steps beside that of one step, as lines."""
    lines = [f"a span of {plan.span} steps, beside one step:"]
    if span.loop is not None:
        launches_of = (
            sum(kind.launches for kind in kinds) for kinds in (span.loop.kinds, single.kinds)
        )
        lines += [
            f"  {loop_sentence(span.loop)}",
            "  {} launches in each step; {} in one step".format(*launches_of),
        ]
    elif span.kinds:
        lines.append("  the compiler has made no loop of it")
    lines += [
        f"  copies as large as the logits: {copies_text(span)} in each step; "
        f"{copies_text(single)} in one step",
        f"  {memory.size(span.activations)} of memory beside the arguments; "
        f"{memory.size(single.activations)} for one step",
    ]
    return "\n".join(lines)


def copies_text(step: Step) -> str:
    """The large copies of a step."""
    texts = [f"{count} x {name}" for name, count in sorted(step.large.items())]
    return ", ".join(texts) or "none"


def loop_sentence(loop: launches.Loop) -> str:
    """Who runs the loop of a span."""
    if loop.in_graph:
        return "its loop is in a CUDA graph, which the host launches once"
    graphs = f"{loop.graphs} CUDA graph{'' if loop.graphs == 1 else 's'}"
    waits = f"waits for {loop.waits} condition{'' if loop.waits == 1 else 's'} on the device"
    return f"the host runs its loop: in each step it launches {graphs} and {waits}"


def compile_step_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--target", choices=TARGETS, required=True)
    parser.add_argument(
        "--mesh", type=mesh_of, metavar="tensor=8[,expert=N]", help="devices that share the model"
    )
    parser.add_argument(
        "--topology",
        help="such as v5e:2x4, or 1x1x8 for GPUs (default: the smallest that is enough)",
    )
    parser.add_argument("--model", choices=sorted(MODELS), default="llama-3.2-1b")
    parser.add_argument(
        "--weights",
        choices=(DTYPE, *WEIGHTS),
        default=DTYPE,
        help=f"the format of matrices (default {DTYPE})",
    )
    parser.add_argument(
        "--linear",
        choices=("xla", "pallas_gpu", "pallas_tpu"),
        default="xla",
        help="the implementation of products (default xla)",
    )
    parser.add_argument(
        "--attention",
        choices=tuple(attention.IMPLS),
        help="the implementation of attention (default pallas_gpu or pallas_tpu, by the target)",
    )
    parser.add_argument(
        "--tokens", type=int, help="of the largest step (default 512; of a span, --rows)"
    )
    parser.add_argument("--rows", type=int, default=64, help="sequences of a step (default 64)")
    parser.add_argument("--block-size", type=int, default=16)
    parser.add_argument(
        "--length", type=int, default=8192, help="tokens of a sequence at most (default 8192)"
    )
    parser.add_argument(
        "--fraction", type=float, default=0.9, help="of the memory beside the weights (default 0.9)"
    )
    parser.add_argument(
        "--layers", type=int, help="fewer layers than the model has, to compile faster"
    )
    parser.add_argument(
        "--span", type=at_least_1, default=1, help="decode steps in one program (default 1)"
    )
    parser.add_argument(
        "--loops",
        choices=tuple(LOOPS),
        default="graph",
        help="how a GPU runs the loop of a span (default graph)",
    )
    return parser


def mesh_of(text: str) -> MeshConfig:
    """The sizes of a mesh, from its axes: "tensor=8" or "tensor=4,expert=2"."""
    pairs = [part.partition("=") for part in text.split(",")]
    if not all(name and value.isdecimal() for name, _, value in pairs):
        raise argparse.ArgumentTypeError(
            f"{text!r} is no mesh; write tensor=8, or tensor=4,expert=2"
        )
    try:
        return from_dict(MeshConfig, {name: int(value) for name, _, value in pairs}, where="mesh.")
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def config_of(
    model: str, weights: str, layers: int | None = None, products: str = "xla"
) -> DecoderConfig:
    """The configuration of a model, with fewer layers if `layers` is given.

    Args:
        weights: as in `with_weights`.
        products: the implementation of products.

    Raises:
        ValueError: `layers` is more than the model has, or less than one.
    """
    shape = MODELS[model]
    if layers is not None and not 1 <= layers <= shape["num_hidden_layers"]:
        raise ValueError(
            f"--layers is {layers}; {model} has {shape['num_hidden_layers']}, and one is the least"
        )
    if layers:
        shape = shape | {"num_hidden_layers": layers}
    return with_weights(llama.from_hf(shape), weights, products)


def check_products(config: DecoderConfig, target: Target, mesh: MeshConfig | None) -> None:
    """Raises ValueError if the model's implementation of products cannot serve it on the target."""
    name = config.linear
    if name not in ("xla", target.impl):
        raise ValueError(
            f"--linear is {name!r}, which is for other chips than {target.name}; use 'xla' or "
            f"{target.impl!r}"
        )
    if name != "xla" and mesh is not None:
        raise ValueError(f"--linear is {name!r}, which is for one device; leave --mesh out")
    obstacle = linear.find(name).model_obstacle(formats.dtypes_of(config.stored, DTYPE))
    if obstacle:
        raise ValueError(f"--linear {name!r} {obstacle}; choose other --weights, or 'xla'")


def with_attention(target: Target, name: str | None) -> Target:
    """The target with another implementation of attention; None: its own.

    Raises:
        ValueError: the implementation is for other chips.
    """
    if name not in (None, "xla") and not name.startswith(target.impl):
        raise ValueError(
            f"--attention is {name!r}, which is for other chips than {target.name}; use 'xla', or a "
            f"name that begins with {target.impl!r}"
        )
    return target._replace(impl=name or target.impl)


def check_span(args: argparse.Namespace, target: Target) -> None:
    """Raises ValueError if the options of a span do not fit together."""
    if args.loops != "graph" and (target.platform != "cuda" or args.span == 1):
        raise ValueError(f"--loops is {args.loops!r}, which is for a --span on a GPU")
    if args.span == 1:
        return
    if args.mesh is not None:
        raise ValueError(f"--span is {args.span}, which is for one device; leave --mesh out")
    if args.tokens is not None and args.tokens > args.rows:
        raise ValueError(
            f"--tokens is {args.tokens} and --rows {args.rows}; a span has one token of each row, "
            "so leave --tokens out"
        )


def main(argv: list[str] | None = None) -> int:
    args = compile_step_parser().parse_args(argv)
    target = compilers.target(args.target)
    mesh = args.mesh or MeshConfig()
    try:
        check_span(args, target)
        compiled = config_of(args.model, args.weights, args.layers, args.linear)
        full = config_of(args.model, args.weights, products=args.linear)
        check_products(full, target, args.mesh)
        target = with_attention(target, args.attention)
        topology = compilers.topology_of(target, mesh.size, args.topology)
        target.network(mesh.size)  # refuses a mesh with more devices than its links connect
        part = full
        if args.mesh:
            split.check(full, args.mesh)
            part = split.device_config(full, mesh)
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    missing = compilers.what_is_missing(target)
    if missing:
        print(f"error: {missing}", file=sys.stderr)
        return 2
    compilers.prepare(target)
    if target.platform == "cuda":
        launches.log_graphs()
    return compile_and_report(args, target, topology, compiled, full, part)


def compile_and_report(
    args: argparse.Namespace,
    target: Target,
    topology: str,
    compiled: DecoderConfig,
    full: DecoderConfig,
    part: DecoderConfig,
) -> int:
    """Compile the step and print its report. Returns the exit code of the command.

    Args:
        compiled: the model with the layers that are compiled.
        full: the model with all layers.
        part: what one device has of `full`.
    """
    tokens = args.tokens or (512 if args.span == 1 else args.rows)
    sizes = (tokens, args.rows, args.block_size, args.length, args.fraction)
    plan = Plan(*sizes, span=args.span, loops=args.loops)
    n = args.mesh.size if args.mesh else 1
    chips = f"{n} x {args.target}" if args.mesh else f"one {args.target}"
    weights = args.weights
    if args.linear != "xla":
        weights += f" for {args.linear}"
    name = f"{args.model} in {weights}, {plan.tokens} tokens a step"
    if plan.span > 1:
        name += f", {plan.span} steps"
    left_out = full.layers - compiled.layers
    if left_out:
        name += f", {compiled.layers} of {full.layers} layers"
    try:
        device_room = room(part, target, plan, f"one of {chips}" if args.mesh else chips)
        device_room.blocks(0)  # refuses a model that is too large before anything is compiled
        devices = compilers.devices(target, topology)
        placement = make_placement(compiled, args.mesh, None, devices) if args.mesh else None
        model = on_mesh(placement) if placement else on_one_device(compiled)
        step, fit = compile_fitting(
            model, target, plan, device_room, devices[0], all_layers=not left_out
        )
        single = None
        if plan.span > 1:
            usable = min(fit, device_room.useful)
            single = compile_step(model, target, plan._replace(span=1), usable, devices[0])
    except ValueError as error:
        print(f"error: {name}, on {chips}: {error}", file=sys.stderr)
        return 1
    rotates = attention.find(target.impl).rotate_and_write is not None
    sentences = faults(step, plan.span * compiled.layers if rotates else 0)
    kernels = ", ".join(f"{count} x {kernel}" for kernel, count in sorted(step.kernels.items()))
    paragraphs = [
        str(placement) if placement else "",
        memory_lines(device_room, step, fit, plan, (compiled.layers, full.layers)),
        exchange_lines(step, compiled, target, plan, n, left_out),
        launches.lines(step.kinds, step.graphs) if step.kinds else "",
        span_lines(step, single, plan) if single else "",
        f"Pallas kernels: {kernels or 'none'}",
        f"{name}: compiled for {chips} ({topology}) in {step.seconds:.0f} s, JAX {jax.__version__}",
        "" if sentences else "the cache is updated in place",
    ]
    print("\n".join(filter(None, paragraphs)))
    for sentence in sentences:
        print(f"error: {name}, on {chips}: {sentence}", file=sys.stderr)
    return 1 if sentences else 0


if __name__ == "__main__":
    sys.exit(main())
