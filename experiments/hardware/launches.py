"""Launches of the host in one run of a program for a GPU, from the compiler's text and its log.

A launch is an instruction of the program that is a kernel, or a copy. Launches in a branch may not
run and are not counted. Launches in a loop run as often as the loop's body, if the compiler prints
how often. XLA joins launches into CUDA graphs, and the host launches each graph once. XLA's log
says how many graphs there are (`graphs`).
"""

from __future__ import annotations

import os
import re
from collections import Counter
from collections.abc import Iterable
from typing import NamedTuple

from experiments.hardware import hlo
from pagedjax.engine import programs

BUFFERS = "xla_gpu_enable_command_buffer"
GRAPHS = {  # what XLA puts into CUDA graphs
    "all": programs.GPU_OPTIONS[BUFFERS],
    "no loops": str(programs.GPU_OPTIONS[BUFFERS]).replace(",WHILE", ""),
    "none": "INVALID",
}
# instructions that move and compute nothing
NO_LAUNCH = {
    "parameter",
    "constant",
    "tuple",
    "get-tuple-element",
    "bitcast",
    "conditional",
    "while",
    "call",
    "after-all",
}
# of a custom call that is a Pallas kernel, on a GPU and on a TPU
KERNELS = "mosaic_gpu", "tpu_custom_call"
CALLS = "mpmd_map", "pallas_call"  # ends of names of operations that call kernels
OPERATION = re.compile(r'op_name="([^"]*)"')
SUFFIX = re.compile(r"(\.(\d+|remat\d*|clone))*$")  # of a name: its number, and marks of copies
GRAPH_LOG_LEVEL = "command_buffer_conversion_pass=2"  # XLA's file and level that log the graphs
# from JAX 0.12 on, the graph has a name
GRAPH_LINE = re.compile(r"Creating command buffer thunk (?:\S+ )?with the following thunks: (.*)")


class Kind(NamedTuple):
    """Launches of one kind: their number, and the bytes of their results.

    wide: bytes of those results that are float32.
    """

    name: str
    launches: int
    nbytes: int
    wide: int = 0


class Loop(NamedTuple):
    """The loop of a span: its turns are the steps.

    kinds: the launches of one turn.
    in_graph: whether the whole loop is in a CUDA graph. Else the host runs it.
    graphs: if the host runs it, the CUDA graphs of a turn.
    waits: if the host runs it, the branches and loops of a turn that are in no graph: it waits for
        the condition of each, and for those inside it.
    """

    kinds: tuple[Kind, ...]
    in_graph: bool
    graphs: int = 0
    waits: int = 0


def kinds(program: hlo.Program) -> tuple[Kind, ...]:
    """The launches by kind, the most frequent first.

    A kind is the name of a Pallas kernel, "paged_decode", or the compiler's name without its
    number: "gemm_fusion_dot", "input_scatter_fusion". The bytes are those of whole results, also of
    a result that is updated in place.
    """
    launches: dict[str, int] = {}
    nbytes: dict[str, int] = {}
    wide: dict[str, int] = {}
    for instruction, times in _launches(hlo.sites(program)):
        name = kernel_of(instruction) or SUFFIX.sub("", instruction.name)
        wide_results = [array for array in instruction.results if array.dtype == "f32"]
        launches[name] = launches.get(name, 0) + times
        for total, results in ((nbytes, instruction.results), (wide, wide_results)):
            total[name] = total.get(name, 0) + times * sum(array.nbytes for array in results)
    all_kinds = [Kind(name, count, nbytes[name], wide[name]) for name, count in launches.items()]
    return tuple(sorted(all_kinds, key=lambda kind: -kind.launches))


def kernel_of(instruction: hlo.Instruction) -> str | None:
    """The name of the Pallas kernel that an instruction runs; None if it runs none.

    It is a part of the operation's name: "jit(step)/jit(_linear)/linear_words/mpmd_map".
    """
    if not any(target in instruction.attributes for target in KERNELS):
        return None
    operation = OPERATION.search(instruction.attributes)
    parts = operation[1].split("/") if operation else []
    names = [part for part in parts if "(" not in part and part not in CALLS]
    return names[-1] if names else SUFFIX.sub("", instruction.name)


def kernels(program: hlo.Program) -> Counter[str]:
    """How often a program runs each Pallas kernel, branches included."""
    counts: Counter[str] = Counter()
    for site in hlo.sites(program):
        name = kernel_of(site.instruction)
        if name is not None:
            counts[name] += site.times
    return counts


def _launches(sites: Iterable[hlo.Site]) -> Iterable[tuple[hlo.Instruction, int]]:
    """Yields the instructions that are launches, each with how often it runs in a program's run."""
    for site in sites:
        if not site.fused and not site.branch and site.instruction.opcode not in NO_LAUNCH:
            yield site.instruction, site.times


def log_graphs() -> None:
    """Have XLA log its graphs. Call it before a backend starts: XLA reads this when it is loaded."""
    os.environ["TF_CPP_VMODULE"] = GRAPH_LOG_LEVEL
    os.environ["TF_CPP_MIN_LOG_LEVEL"] = "0"


def graphs(log: str) -> int | None:
    """The CUDA graphs of a program, by what the compiler printed; None if it logged nothing.

    If there is one graph, it is the whole program: branches that could not be in it would have
    graphs of their own.
    """
    count = len(GRAPH_LINE.findall(log))
    return count if count or "command_buffer_conversion_pass" in log else None


def loop(program: hlo.Program, turns: int, log: str) -> Loop | None:
    """The program's loop of so many turns; None if there is no such loop.

    Args:
        log: what the compiler printed.
    """
    body = hlo.loop_body(program, turns)
    if body is None:
        return None
    parts_of_graphs = [set(line.split(", ")) for line in GRAPH_LINE.findall(log)]
    parts = set().union(*parts_of_graphs)
    instructions = body.computations[body.entry]
    names = {instruction.name for instruction in instructions}
    in_graph = any(
        instruction.name in parts and body.entry in hlo.called_computations(instruction)
        for instruction in program.computations[program.entry]
    )
    if in_graph:
        return Loop(kinds(body), in_graph)
    waits = [
        instruction.name
        for instruction in instructions
        if instruction.opcode in ("conditional", "while") and instruction.name not in parts
    ]
    return Loop(
        kinds(body),
        in_graph,
        graphs=sum(not names.isdisjoint(graph) for graph in parts_of_graphs),
        waits=len(waits),
    )


def lines(by_kind: tuple[Kind, ...], graph_count: int | None, most_kinds: int = 12) -> str:
    """The launches as lines to print.

    Args:
        most_kinds: how many kinds have a line each; the other kinds share a line.
    """
    total = sum(kind.launches for kind in by_kind)
    note = ""
    if graph_count is not None:
        note = f", in {graph_count} CUDA graph{'' if graph_count == 1 else 's'}"
    rows = [f"{total} launches outside of branches{note}:"]
    wide = sum(kind.wide for kind in by_kind)
    last = f"  {wide / 2**20:.1f} MiB of their results are float32"
    if len(by_kind) > most_kinds:
        launches = sum(kind.launches for kind in by_kind[most_kinds:])
        nbytes = sum(kind.nbytes for kind in by_kind[most_kinds:])
        by_kind = (*by_kind[:most_kinds], Kind("other kinds", launches, nbytes))
    rows += [
        f"  {kind.launches:5}  {kind.nbytes / 2**20:9.1f} MiB  {kind.name}" for kind in by_kind
    ]
    return "\n".join([*rows, last])
