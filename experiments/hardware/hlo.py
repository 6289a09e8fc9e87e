"""Reads the text of a compiled program: HLO, as XLA prints it.

It gives the instructions, and how often and where each of them runs:

    %fused (p: f32[8]) -> f32[8] {
      ROOT %twice = f32[8]{0:T(128)} add(%p, %p)
    }
    ENTRY %main (x: f32[8]) -> f32[8] {
      ROOT %fusion.1 = f32[8]{0:T(128)} fusion(%x), kind=kLoop, calls=%fused
    }

The program is a list of computations, and one of them is the entry. An instruction runs as often as
its computation is called: a loop calls its body several times, and a conditional calls one of its
branches.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from math import prod
from typing import NamedTuple

HEADER = re.compile(r"(ENTRY )?%?([\w.-]+) .*\{$")
INSTRUCTION = re.compile(r"\s+(ROOT )?%?([\w.-]+) = (.+)")
ARRAY = re.compile(r"\b([a-z]+\d*\w*)\[([\d,<=]*)\]")
OPCODE = re.compile(r"\s*([\w-]+)\(")
CALLED = re.compile(
    r"\b(?:calls|to_apply|body|condition|true_computation|false_computation)=%?([\w.-]+)"
)
BRANCHES = re.compile(r"\bbranch_computations=\{([^}]*)\}")
BODY = re.compile(r"\bbody=%?([\w.-]+)")  # of a loop
TRIPS = re.compile(r'"known_trip_count":\{"n":"(\d+)"')
# other instructions call scalar functions, such as that of a sum
CALLERS = ("fusion", "call", "while", "conditional", "async-start")


class Array(NamedTuple):
    dtype: str
    dims: tuple[int, ...]

    def __str__(self) -> str:
        return f"{self.dtype}[{','.join(map(str, self.dims))}]"

    @property
    def size(self) -> int:
        """How many numbers the array has."""
        return prod(self.dims)

    @property
    def nbytes(self) -> int:
        """The bytes, without the padding of a layout. A number of less than 8 bits takes a byte."""
        bits = re.search(r"\d+", self.dtype)  # "pred" names no bits, and takes a byte
        bytes_of_number = -(-int(bits[0]) // 8) if bits else 1
        return self.size * bytes_of_number


class Instruction(NamedTuple):
    """One line of a computation.

    results: the arrays of its result, which may be a tuple.
    operands: the names of the instructions whose results it takes.
    attributes: the rest of the line.
    root: whether its result is the result of the computation.
    """

    name: str
    opcode: str
    results: tuple[Array, ...]
    operands: tuple[str, ...]
    attributes: str
    root: bool


class Program(NamedTuple):
    computations: dict[str, tuple[Instruction, ...]]
    entry: str

    @property
    def results(self) -> dict[str, tuple[Array, ...]]:
        """The arrays of each instruction's result, by its name, which is unique in a program."""
        return {
            instruction.name: instruction.results
            for body in self.computations.values()
            for instruction in body
        }


class Site(NamedTuple):
    """An instruction where it runs.

    times: how often it runs in one run of the program. A loop whose length the compiler does not
        print counts as one turn.
    branch: whether it is in a branch of a conditional, so that it may not run.
    fused: whether it is a part of a fusion, so that its result is no array in memory.
    """

    instruction: Instruction
    times: int = 1
    branch: bool = False
    fused: bool = False


def parse(text: str) -> Program:
    """The program of a text. Raises ValueError if it has no entry: it is no compiled program."""
    computations: dict[str, tuple[Instruction, ...]] = {}
    entry = ""
    name = ""  # of the computation that a line is in, "" outside of one
    body = []
    for line in text.splitlines():
        if name and line.startswith("}"):
            computations[name] = tuple(body)
            name = ""
        elif name:
            match = INSTRUCTION.match(line)
            instruction = _instruction(match) if match else None
            if instruction is not None:
                body.append(instruction)
        else:
            header = HEADER.match(line)
            if header is not None:
                name = header[2]
                body = []
                entry = name if header[1] else entry
    if not entry:
        raise ValueError(
            f"this is no text of a compiled program: it has no ENTRY; it begins with {text[:60]!r}"
        )
    return Program(computations, entry)


def _instruction(match: re.Match[str]) -> Instruction | None:
    """The instruction of a line; None if the line has no opcode. match: the match of INSTRUCTION."""
    text = match[3]  # "shape opcode(operands), attributes"
    shape_end = _closing(text, 0) + 1 if text.startswith("(") else text.find(" ")
    opcode = OPCODE.match(text, shape_end)
    if opcode is None:
        return None
    close = _closing(text, opcode.end() - 1)
    operands = tuple(re.findall(r"%([\w.-]+)", text[opcode.end() : close]))
    return Instruction(
        name=match[2],
        opcode=opcode[1],
        results=arrays(text[:shape_end]),
        operands=operands,
        attributes=text[close + 1 :],
        root=bool(match[1]),
    )


def _closing(text: str, start: int) -> int:
    """The index of the parenthesis that closes the one at `start`."""
    depth = 0
    for index in range(start, len(text)):
        if text[index] == "(":
            depth += 1
        elif text[index] == ")":
            depth -= 1
        if depth == 0:
            return index
    raise ValueError(f"a parenthesis is not closed in {text[start : start + 60]!r}")


def arrays(shape: str) -> tuple[Array, ...]:
    """The arrays of a shape as XLA prints it, which may be a tuple of tuples."""
    return tuple(
        Array(dtype, tuple(map(int, re.findall(r"\d+", dims))))
        for dtype, dims in ARRAY.findall(shape)
        if dtype != "token"
    )


def sites(program: Program) -> Iterator[Site]:
    """Every instruction that one run of the program may execute."""
    any_instruction = program.computations[program.entry][0]
    yield from _sites(program, program.entry, Site(any_instruction))


def _sites(program: Program, computation: str, site: Site) -> Iterator[Site]:
    """Every instruction that one run of a computation may execute.

    site: any site in the computation; all of them have the same `times`, `branch` and `fused`.
    """
    for instruction in program.computations[computation]:
        yield site._replace(instruction=instruction)
        if instruction.opcode not in CALLERS:
            continue
        inner = site._replace(
            times=site.times * trips(instruction),
            branch=site.branch or instruction.opcode == "conditional",
            fused=site.fused or instruction.opcode == "fusion",
        )
        for name in called_computations(instruction):
            yield from _sites(program, name, inner)


def called_computations(instruction: Instruction) -> tuple[str, ...]:
    """The names of the computations that an instruction calls."""
    branches = BRANCHES.search(instruction.attributes)
    branch_names = re.findall(r"%?([\w.-]+)", branches[1]) if branches else []
    return (*CALLED.findall(instruction.attributes), *branch_names)


def trips(instruction: Instruction) -> int:
    """How often a loop runs its body; 1 if the compiler does not print it, or if there is no loop."""
    count = TRIPS.search(instruction.attributes) if instruction.opcode == "while" else None
    return int(count[1]) if count else 1


def loop_body(program: Program, turns: int) -> Program | None:
    """The body of the entry's loop of so many turns, as a program; None if there is no such loop."""
    for instruction in program.computations[program.entry]:
        if instruction.opcode == "while" and trips(instruction) == turns > 1:
            return program._replace(entry=BODY.findall(instruction.attributes)[0])
    return None


def root(program: Program, computation: str) -> Instruction:
    """The instruction that makes the result of a computation.

    A bitcast copies nothing, so the instruction of its operand is returned instead.
    """
    body = program.computations[computation]
    by_name = {instruction.name: instruction for instruction in body}
    maker = next(instruction for instruction in body if instruction.root)
    while maker.opcode == "bitcast" and maker.operands[0] in by_name:
        maker = by_name[maker.operands[0]]
    return maker
