"""Suffix decoding (Oliaro et al. 2024, arXiv 2411.04975): the continuation of the longest suffix that was seen before.

Two sources, and the one with the longer match is used: the sequence itself, and a tree of the outputs of sequences that
have ended. The tree counts every run of up to DEPTH tokens. From the match it goes to the child that was seen most
often, while that is likely. It keeps the last outputs, NODES nodes at most.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

import numpy as np

from pagedjax.engine.drafters.drafter import Drafter
from pagedjax.engine.drafters.ngram import first

DEPTH = 16  # tokens of a run in the tree: of the match and of its continuation together
LONGEST = 64  # tokens of a match in the sequence itself
NODES = 2**20  # at 267 bytes each, 280 MB (measured with random tokens, Python 3.11)
REMEMBERED = 1024  # tokens of an output, the last ones: adding them takes the engine some 20 ms, once a sequence
LIKELY = 0.1  # a draft token's estimated probability is at least this, as in vLLM's suffix_decoding_min_token_prob


@dataclass(slots=True)
class Node:
    """A run of tokens: how often it was seen, and the runs that are one token longer."""

    count: int = 0
    children: dict[int, Node] = field(default_factory=dict)


class Outputs:
    """The tree of earlier outputs. The outputs that ended first are removed when it has more than `limit` nodes."""

    def __init__(self, limit: int = NODES) -> None:
        self.root, self.limit, self.nodes = Node(), limit, 0
        self._outputs: deque[list[int]] = deque()

    def add(self, output: list[int]) -> None:
        self._outputs.append(output)
        self._count(output, 1)
        while self.nodes > self.limit:
            self._count(self._outputs.popleft(), -1)

    def _count(self, output: list[int], change: int) -> None:
        for start in range(len(output)):
            node = self.root
            for token in output[start : start + DEPTH]:
                child = node.children.get(token)
                if child is None:
                    child = node.children[token] = Node()
                    self.nodes += 1
                child.count += change
                if child.count == 0:  # so are all longer runs of this output
                    self.nodes -= _size(child)
                    del node.children[token]
                    break
                node = child

    def longest(self, tokens: list[int]) -> tuple[int, Node]:
        """The longest suffix of the tokens that some output continues: its length and its node; 0 and the root."""
        for n in range(min(DEPTH - 1, len(tokens)), 0, -1):
            node: Node | None = self.root
            for token in tokens[-n:]:
                node = node.children.get(token) if node else None
            if node is not None and node.children:
                return n, node
        return 0, self.root


def _size(node: Node) -> int:
    return 1 + sum(_size(child) for child in node.children.values())


def continuation(node: Node, k: int) -> list[int]:
    """The likeliest tokens after a run, at most k, while they are likely."""
    found, share = [], 1.0
    while node.children and len(found) < k:
        token, child = max(node.children.items(), key=lambda entry: entry[1].count)
        share *= child.count / sum(other.count for other in node.children.values())
        if share < LIKELY:
            break
        found.append(token)
        node = child
    return found


def own(tokens: np.ndarray, k: int) -> tuple[int, np.ndarray]:
    """The longest suffix of a sequence that occurs earlier in it, up to LONGEST tokens, and what followed it first."""
    text, low, high = tokens.tobytes(), 0, min(LONGEST, len(tokens) - 1)
    at = 0
    while low < high:  # a shorter suffix occurs wherever a longer one does
        n = (low + high + 1) // 2
        found = first(text, tokens[-n:])
        low, high, at = (n, high, found) if found + n < len(tokens) else (low, n - 1, at)
    return low, tokens[at + low : at + low + k] if low else tokens[:0]


def propose(
    memory: Outputs, sequence_id: str, tokens: np.ndarray, k: int
) -> np.ndarray | list[int]:
    length, drafts = own(tokens, k)
    seen, node = memory.longest(tokens[-DEPTH:].tolist())
    return continuation(node, k) if seen > length else drafts


def drafter() -> Drafter:
    def finished(memory: Outputs, sequence_id: str, output: np.ndarray) -> None:
        memory.add(output[-REMEMBERED:].tolist())

    return Drafter("suffix", propose, start=Outputs, finished=finished)
