"""Suffix decoding (Oliaro et al. 2024, arXiv 2411.04975): the draft is what followed the longest
suffix of a sequence that occurred before.

There are two sources: the sequence itself, and a tree of the outputs of sequences that have ended.
The source with the longer match is used.

The tree counts every run of up to DEPTH tokens. A draft goes from the match to the child that
occurred most often, and so on, while the draft is likely. The tree holds the latest outputs, NODES
nodes at most.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

import numpy as np

from pagedjax.engine.drafters.drafter import Drafter
from pagedjax.engine.drafters.ngram import first_index

DEPTH = 16  # tokens of a run in the tree: of the match and of its continuation together
MAX_MATCH = 64  # tokens of a match in the sequence itself
NODES = 2**20  # at 267 bytes each, 280 MB (measured with random tokens, Python 3.11)
# the tree gets so many last tokens of an output; this takes the engine some 20 ms, once a sequence
LEARNED_TOKENS = 1024
# a draft token's estimated probability is at least this: vLLM's suffix_decoding_min_token_prob
MIN_PROBABILITY = 0.1


@dataclass(slots=True)
class Node:
    """A run of tokens: how often it occurred, and the runs that are one token longer."""

    count: int = 0
    children: dict[int, Node] = field(default_factory=dict)


class Outputs:
    """The tree of earlier outputs. When it has more than `limit` nodes, the outputs that ended
    first are removed.
    """

    def __init__(self, limit: int = NODES) -> None:
        self.root = Node()
        self.limit = limit
        self.nodes = 0
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
                if child.count == 0:  # then no longer run of this output is left, either
                    self.nodes -= _size(child)
                    del node.children[token]
                    break
                node = child

    def longest(self, tokens: list[int]) -> tuple[int, Node]:
        """Returns the longest suffix of the tokens that some output continues: its length and its
        node; (0, the root) if there is none.
        """
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
    """Returns the likeliest tokens after a run, at most k, up to the first unlikely one."""
    drafts: list[int] = []
    probability = 1.0
    while node.children and len(drafts) < k:
        token, child = max(node.children.items(), key=lambda entry: entry[1].count)
        probability *= child.count / sum(sibling.count for sibling in node.children.values())
        if probability < MIN_PROBABILITY:
            break
        drafts.append(token)
        node = child
    return drafts


def repeated_suffix(tokens: np.ndarray, k: int) -> tuple[int, np.ndarray]:
    """Returns the length of the longest suffix that occurs earlier in the same sequence, MAX_MATCH
    tokens at most, and the k tokens after its first occurrence; (0, no tokens) if there is none.
    """
    text = tokens.tobytes()
    length = 0
    end = len(tokens)  # the index after the first occurrence
    limit = min(MAX_MATCH, len(tokens) - 1)
    while length < limit:  # bisect: a shorter suffix occurs wherever a longer one does
        n = (length + limit + 1) // 2
        n_end = first_index(text, tokens[-n:]) + n
        if n_end < len(tokens):
            length = n
            end = n_end
        else:
            limit = n - 1
    return length, tokens[end : end + k]


def propose(
    memory: Outputs, sequence_id: str, tokens: np.ndarray, k: int
) -> np.ndarray | list[int]:
    length, drafts = repeated_suffix(tokens, k)
    tree_length, node = memory.longest(tokens[-DEPTH:].tolist())
    return continuation(node, k) if tree_length > length else drafts


def drafter() -> Drafter:
    def finished(memory: Outputs, sequence_id: str, output: np.ndarray) -> None:
        memory.add(output[-LEARNED_TOKENS:].tolist())

    return Drafter("suffix", propose, start=Outputs, finished=finished)
