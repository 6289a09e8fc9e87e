"""The exchanges of a compiled step: which ones are in its program, which ones should be, and their time on the links.

A step of T tokens and R samples over n devices exchanges (docs/design/devices.md):

    all-reduce   T H numbers   2 L - 1 times: after attention and after the MLP of each layer but the last, and the
                               embedding
    all-reduce   R H numbers   twice: the last layer's, of sampled tokens. In the branch for prompt log-probabilities,
                               and where R is not less than T, they have T H numbers
    all-to-all   R V/n         once, and once in the branch for prompt log-probabilities, of PROMPT_TILE tokens
    all-gather   R C           the same: C numbers of each sample

A program for steps of decodes alone has no such branch.

A compiler may combine several exchanges into one instruction, or split one. Such a program is right, so numbers are
compared and not instructions; a difference between the two is named.
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
from pagedjax.device.sampling import PROMPT_TILE

KNOWN = get_args(Kind)
OTHERS = (
    "reduce-scatter",
    "collective-permute",
    "collective-broadcast",
    "ragged-all-to-all",
    "send",
    "recv",
)
OPCODES = {f"{kind}{form}": kind for kind in (*KNOWN, *OTHERS) for form in ("", "-start")}
GROUPS = re.compile(r"replica_groups=(?:\{\{([\d,]*)\}|\[\d+,(\d+)\])")
RINGS = re.compile(r'"strategy":"(\w+)".*?\bcolors:(\d+) phases:(\d+)')
AXES = re.compile(r"replica_groups=mesh\[([^\]]*)\] \{([^}]*)\}")


class Found(NamedTuple):
    """A collective instruction.

    kind: with the number of devices, if it is not of all.
    arrays: its operands, as text, and the dtype that the exchange itself rounds its result to.
    numbers, bytes: of one run, counted as `Exchange.bytes` is: an all-gather by its result, others by their operands.
    times: runs of it in one run of the program.
    branch: only in a branch of a conditional.
    """

    kind: str
    arrays: str
    numbers: int
    bytes: int
    times: int = 1
    branch: bool = False


def rings(program: hlo.Program) -> Counter[str]:
    """How a TPU's compiler says that it exchanges, by collectives; empty for a GPU, where it is chosen at run time.

    A color is a part of the array with a ring of its own: two in one dimension are the two directions of a ring.
    """
    return Counter(
        f"{found[1]}, {found[2]} colors, {found[3]} phases"
        for site in hlo.sites(program)
        if site.instruction.opcode in OPCODES
        and (found := RINGS.search(site.instruction.attributes))
    )


class Wanted(NamedTuple):
    """An exchange that a step must have: `times` arrays of `numbers` numbers; in a branch, in each turn of its loop."""

    kind: Kind
    numbers: int
    times: int = 1
    branch: bool = False


def found(program: hlo.Program, n: int) -> Counter[Found]:
    """The collective instructions of a program for n devices, equal ones together."""
    results, counted = program.results, Counter()
    for site in hlo.sites(program):
        one = site.instruction
        kind = OPCODES.get(one.opcode)
        if kind is None:
            continue
        operands, group = (
            [array for name in one.operands for array in results[name]],
            group_size(one.attributes, n),
        )
        copies, kind = (
            group if kind == "all-gather" else 1,
            kind if group == n else f"{kind} of {group} devices",
        )
        numbers, nbytes = sum(x.numbers for x in operands), sum(x.nbytes for x in operands)
        sizes = copies * numbers, copies * nbytes
        counted[
            Found(kind, _said(operands) + _rounded(one, operands), *sizes, site.times, site.branch)
        ] += 1
    return counted


def _rounded(one: hlo.Instruction, operands: Sequence[hlo.Array]) -> str:
    """The dtype of the result where it is another one: a compiler may round in the exchange itself."""
    given = {array.dtype for array in operands}
    others = {
        array.dtype for array in one.results if array.dims
    } - given  # a scalar is a part of the mechanism
    return "".join(f", rounded to {dtype}" for dtype in sorted(others))


def group_size(attributes: str, n: int) -> int:
    """The devices of one exchange. XLA writes groups as lists, as [groups, devices] or by axes; or not, for all n."""
    if axes := AXES.search(attributes):
        sizes = dict(re.findall(r"'(\w+)'=(\d+)", axes[1]))
        return prod(int(sizes[name]) for name in re.findall(r"'(\w+)'", axes[2]))
    match = GROUPS.search(attributes)
    if match is None:
        return n
    return int(match[2]) if match[2] else len(match[1].split(","))


def _said(arrays: Sequence[hlo.Array]) -> str:
    """Arrays as text, equal ones with their number."""
    return ", ".join(
        f"{array}" + f" x {count}" * (count > 1) for array, count in Counter(arrays).items()
    )


def wanted(
    model: DecoderConfig,
    part: DecoderConfig,
    n: int,
    tokens: int,
    samples: int,
    columns: tuple[int, int],
    *,
    decodes: bool = False,
) -> tuple[Wanted, ...]:
    """What a step must exchange; () for one device.

    Args:
        part: of the model, on one device.
        tokens, samples: T and R.
        columns: numbers of each sample that all devices get, and of each prompt token.
        decodes: the step is one of decodes alone.
    """
    if n == 1:
        return ()
    rows, tile = (-(-count // n) * n for count in (samples, min(PROMPT_TILE, tokens)))
    last = (
        (samples, tokens) if samples < tokens else ()
    )  # the last layer's tokens, in the two branches of the step
    prompts = (
        Wanted("all-to-all", part.vocab_size * tile, branch=True),
        Wanted("all-gather", columns[1] * tile, branch=True),
    )
    return (
        Wanted("all-reduce", model.hidden * tokens, 2 * model.layers + 1 - 2 * bool(last)),
        *(Wanted("all-reduce", model.hidden * count, 2, branch=True) for count in last),
        Wanted("all-to-all", part.vocab_size * rows),
        Wanted("all-gather", columns[0] * rows),
        *(() if decodes else prompts),
    )


class Difference(NamedTuple):
    """A difference between the exchanges of a program and those that it must have, as a sentence.

    wrong: other numbers are exchanged; else only the number of instructions differs.
    """

    text: str
    wrong: bool


def differences(program: Mapping[Found, int], must: Sequence[Wanted]) -> list[Difference]:
    """What differs, by the kind of exchange and by whether it is in a branch."""
    return [
        difference
        for kind, branch in sorted({(one.kind, one.branch) for one in (*program, *must)})
        if (
            difference := _difference(
                f"{kind}{' in a branch' * branch}",
                {
                    one: count
                    for one, count in program.items()
                    if (one.kind, one.branch) == (kind, branch)
                },
                [one for one in must if (one.kind, one.branch) == (kind, branch)],
            )
        )
    ]


def _difference(
    name: str, program: Mapping[Found, int], must: Sequence[Wanted]
) -> Difference | None:
    has = sum(one.numbers * count for one, count in program.items())
    needs = sum(one.numbers * one.times for one in must)
    instructions, exchanges = sum(program.values()), sum(one.times for one in must)
    if has != needs:
        arrays = "; ".join(f"{count} of {one.arrays}" for one, count in program.items()) or "none"
        return Difference(
            f"{name}: {has:,} numbers ({arrays}) in place of {needs:,} in {exchanges} exchanges",
            True,
        )
    if instructions != exchanges:
        return Difference(
            f"{name}: {instructions} instructions for {exchanges} exchanges of the same numbers",
            False,
        )
    return None


def seconds(program: Mapping[Found, int], n: int, network: Network) -> float:
    """The time on the links of the exchanges of a step without prompt log-probabilities.

    Of the sums in a branch, those of the fewest numbers count: the others belong to prompt log-probabilities, as other
    exchanges in a branch do. Kinds that no step must have count as nothing: `differences` names them.
    """
    sums = [one.numbers for one in program if one.branch and one.kind == "all-reduce"]
    return sum(
        collectives.seconds(_exchange(one, runs(one, count)), n, network)
        for one, count in program.items()
        if one.kind in KNOWN
        and (not one.branch or (one.kind == "all-reduce" and one.numbers == min(sums)))
    )


def seconds_of_layers(
    model: DecoderConfig, layers: int, n: int, tokens: int, network: Network
) -> float:
    """The time of two sums of [T, H] in each of so many layers."""
    size = collectives.SUM_BYTES * model.hidden * tokens
    return collectives.seconds(Exchange("all-reduce", size, 2 * layers), n, network)


def _exchange(one: Found, times: int) -> Exchange:
    return Exchange(one.kind, one.bytes, times)  # pyright: ignore[reportArgumentType]  (callers check it)


def runs(one: Found, count: int) -> int:
    """Runs of so many equal collectives in a step; in a branch, in one turn of its loop."""
    return count if one.branch else count * one.times


def table(program: Mapping[Found, int], n: int, network: Network) -> str:
    """The exchanges as lines to print: how often, what, the bytes of all of them, and their time."""
    lines = []
    for one, count in sorted(
        program.items(), key=lambda item: (item[0].branch, item[0].kind, item[0].arrays)
    ):
        times, time = runs(one, count), "no estimate"
        if one.kind in KNOWN:
            time = f"{1e3 * collectives.seconds(_exchange(one, times), n, network):.3f} ms"
        where = ""
        if one.branch:
            where = f", for each {PROMPT_TILE} prompt tokens with log-probabilities"
            if one.kind == "all-reduce":
                where = ", of the last layer: of sampled tokens, or of all for log-probabilities of prompts"
        lines.append(
            f"  {times:4} x {one.kind:10}  {one.arrays}: {times * one.bytes / 2**20:,.3f} MiB, {time}{where}"
        )
    return "\n".join(lines)
