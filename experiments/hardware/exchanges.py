"""The exchanges of a compiled step: those in its program, those that it must have, and their time.

A step of T tokens and R samples over n devices exchanges (docs/design/devices.md), with L layers,
hidden size H and vocabulary V:

    all-reduce   T H numbers   2 L - 1 times: after attention and after the MLP of each layer but
                               the last, and the embedding
    all-reduce   R H numbers   twice: the last layer's sums, of sampled tokens. Where R is not less
                               than T, these sums have T H numbers
    all-to-all   R V/n         once
    all-gather   R C           once: C numbers of each sample

Programs with log-probabilities of prompts exchange more, and are not compared here.

A compiler may combine several exchanges into one instruction, or split one. Such a program is
right, so numbers are compared and not instructions. A difference in the number of instructions is
named, and is no error.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from math import prod
from typing import NamedTuple, get_args

from experiments.hardware import hlo
from experiments.simulation import collectives
from experiments.simulation.collectives import Exchange, Kind, Network
from pagedjax.device.models.decoder import DecoderConfig

KINDS = get_args(Kind)
OTHER_KINDS = (
    "reduce-scatter",
    "collective-permute",
    "collective-broadcast",
    "ragged-all-to-all",
    "send",
    "recv",
)
OPCODES = {f"{kind}{form}": kind for kind in (*KINDS, *OTHER_KINDS) for form in ("", "-start")}
GROUPS = re.compile(r"replica_groups=(?:\{\{([\d,]*)\}|\[\d+,(\d+)\])")
RINGS = re.compile(r'"strategy":"(\w+)".*?\bcolors:(\d+) phases:(\d+)')
AXES = re.compile(r"replica_groups=mesh\[([^\]]*)\] \{([^}]*)\}")


class Collective(NamedTuple):
    """A collective instruction of a compiled program.

    kind: with the number of devices, if not all devices take part.
    arrays: its operands, as text, and the dtype that the exchange itself rounds its result to.
    numbers, bytes: of one run, counted as `Exchange.bytes` is: an all-gather by its result, others
        by their operands.
    times: how often it runs in one run of the program.
    branch: whether it is only in a branch of a conditional, where a step has none.
    """

    kind: str
    arrays: str
    numbers: int
    bytes: int
    times: int = 1
    branch: bool = False


def rings(program: hlo.Program) -> Counter[str]:
    """Count the collectives by the way in which a TPU's compiler says that it exchanges.

    The result is empty for a GPU, where the way is chosen at run time. A color is a part of the
    array with a ring of its own: two in one dimension are the two directions of a ring.
    """
    counts: Counter[str] = Counter()
    for site in hlo.sites(program):
        if site.instruction.opcode in OPCODES:
            ring = RINGS.search(site.instruction.attributes)
            if ring:
                counts[f"{ring[1]}, {ring[2]} colors, {ring[3]} phases"] += 1
    return counts


class RequiredExchange(NamedTuple):
    """An exchange that a step must have: `times` arrays of `numbers` numbers each."""

    kind: Kind
    numbers: int
    times: int = 1


def collectives_of(program: hlo.Program, n: int) -> Counter[Collective]:
    """The collective instructions of a program for n devices, each with the number of equal ones."""
    results = program.results
    counts: Counter[Collective] = Counter()
    for site in hlo.sites(program):
        instruction = site.instruction
        kind = OPCODES.get(instruction.opcode)
        if kind is None:
            continue
        operands = [array for name in instruction.operands for array in results[name]]
        group = group_size(instruction.attributes, n)
        copies = group if kind == "all-gather" else 1
        collective = Collective(
            kind=kind if group == n else f"{kind} of {group} devices",
            arrays=_arrays_text(operands) + _rounding_text(instruction, operands),
            numbers=copies * sum(array.size for array in operands),
            bytes=copies * sum(array.nbytes for array in operands),
            times=site.times,
            branch=site.branch,
        )
        counts[collective] += 1
    return counts


def _rounding_text(instruction: hlo.Instruction, operands: Sequence[hlo.Array]) -> str:
    """The dtype of the result as text; "" if it is the dtype of the operands.

    A compiler may round in the exchange itself. Scalars are a part of the compiler's mechanism and
    do not count.
    """
    dtypes = {array.dtype for array in instruction.results if array.dims}
    dtypes -= {array.dtype for array in operands}
    return "".join(f", rounded to {dtype}" for dtype in sorted(dtypes))


def group_size(attributes: str, n: int) -> int:
    """The number of devices of one exchange.

    XLA writes groups as lists, as [groups, devices] or by axes. It writes nothing for all n
    devices.
    """
    axes = AXES.search(attributes)
    if axes:
        sizes = dict(re.findall(r"'(\w+)'=(\d+)", axes[1]))
        return prod(int(sizes[name]) for name in re.findall(r"'(\w+)'", axes[2]))
    match = GROUPS.search(attributes)
    if match is None:
        return n
    return int(match[2]) if match[2] else len(match[1].split(","))


def _arrays_text(arrays: Sequence[hlo.Array]) -> str:
    """Arrays as text, equal arrays with their number."""
    return ", ".join(
        f"{array} x {count}" if count > 1 else str(array)
        for array, count in Counter(arrays).items()
    )


def required(
    model: DecoderConfig,
    part: DecoderConfig,
    n: int,
    tokens: int,
    samples: int,
    columns: int,
) -> tuple[RequiredExchange, ...]:
    """The exchanges that a step must have; () for one device.

    Args:
        part: one device's part of the model.
        tokens, samples: T and R.
        columns: how many numbers of each sample all devices get.
    """
    if n == 1:
        return ()
    # rows are padded, so that each device has equally many
    rows = -(-samples // n) * n
    num_sums = 2 * model.layers + 1  # two in each layer, and one of the embedding
    last_layer = ()
    if samples < tokens:
        last_layer = (RequiredExchange("all-reduce", model.hidden * samples, 2),)
        num_sums -= 2
    return (
        RequiredExchange("all-reduce", model.hidden * tokens, num_sums),
        *last_layer,
        RequiredExchange("all-to-all", part.vocab_size * rows),
        RequiredExchange("all-gather", columns * rows),
    )


class Difference(NamedTuple):
    """A difference between the exchanges of a program and those that it must have, as a sentence.

    wrong: other numbers are exchanged; else only the number of instructions differs.
    """

    text: str
    wrong: bool


def differences(
    program: Mapping[Collective, int], required_exchanges: Sequence[RequiredExchange]
) -> list[Difference]:
    """The differences of a program, by the kind of exchange and by whether it is in a branch.

    Args:
        program: its collectives, each with the number of equal ones.
        required_exchanges: the exchanges that it must have.
    """
    all_differences = []
    required_kinds = {exchange.kind for exchange in required_exchanges}
    for name in sorted({*map(_place, program), *required_kinds}):
        present = {
            collective: count for collective, count in program.items() if _place(collective) == name
        }
        required_in_place = [exchange for exchange in required_exchanges if exchange.kind == name]
        difference = _difference(name, present, required_in_place)
        if difference:
            all_differences.append(difference)
    return all_differences


def _place(collective: Collective) -> str:
    return f"{collective.kind} in a branch" if collective.branch else collective.kind


def _difference(
    name: str, program: Mapping[Collective, int], required_exchanges: Sequence[RequiredExchange]
) -> Difference | None:
    """The difference in the exchanges of one kind; None if there is none. name: of the kind."""
    numbers = sum(collective.numbers * count for collective, count in program.items())
    required_numbers = sum(exchange.numbers * exchange.times for exchange in required_exchanges)
    instructions = sum(program.values())
    exchanges = sum(exchange.times for exchange in required_exchanges)
    if numbers != required_numbers:
        texts = (f"{count} of {collective.arrays}" for collective, count in program.items())
        arrays = "; ".join(texts) or "none"
        return Difference(
            f"{name}: {numbers:,} numbers ({arrays}) in place of {required_numbers:,} in "
            f"{exchanges} exchanges",
            True,
        )
    if instructions != exchanges:
        return Difference(
            f"{name}: {instructions} instructions for {exchanges} exchanges of the same numbers",
            False,
        )
    return None


def seconds(program: Mapping[Collective, int], n: int, network: Network) -> float:
    """The time on the links of a step's exchanges. Kinds that no step must have count as nothing:
    `differences` names them.
    """
    exchanges = (
        _exchange(collective, count * collective.times)
        for collective, count in program.items()
        if collective.kind in KINDS
    )
    return sum(collectives.seconds(exchange, n, network) for exchange in exchanges)


def seconds_of_layers(
    model: DecoderConfig, layers: int, n: int, tokens: int, network: Network
) -> float:
    """The time of two sums of [T, H] in each of `layers` layers."""
    size = collectives.SUM_BYTES * model.hidden * tokens
    return collectives.seconds(Exchange("all-reduce", size, 2 * layers), n, network)


def _exchange(collective: Collective, times: int) -> Exchange:
    # callers check the kind
    return Exchange(collective.kind, collective.bytes, times)  # pyright: ignore[reportArgumentType]


def table(program: Mapping[Collective, int], n: int, network: Network) -> str:
    """The exchanges as lines to print: how often, kind and arrays, bytes in all, and time."""
    lines = []
    for collective, count in sorted(
        program.items(), key=lambda item: (item[0].branch, item[0].kind, item[0].arrays)
    ):
        times = count * collective.times
        time = "no estimate"
        if collective.kind in KINDS:
            time = f"{1e3 * collectives.seconds(_exchange(collective, times), n, network):.3f} ms"
        lines.append(
            f"  {times:4} x {_place(collective):10}  {collective.arrays}: "
            f"{times * collective.bytes / 2**20:,.3f} MiB, {time}"
        )
    return "\n".join(lines)
