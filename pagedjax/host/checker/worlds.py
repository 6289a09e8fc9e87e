"""The small worlds in which a policy is checked."""

from __future__ import annotations

from typing import NamedTuple

from pagedjax.host.policies import Policy
from pagedjax.host.types import Request, SchedulerConfig

WORD = 7
STOP = 2  # the stop token of all requests
BLOCK_SIZE = 2
LARGE_BLOCK = 16


class World(NamedTuple):
    """A scheduler, a policy, and the requests that may come.

    shapes: one request of each kind that may come. Its id is a letter; the id of a request that
        comes is the letter of its shape and a number.
    requests: how many requests may be unfinished at one time, of all shapes together.
    gap: the largest distance of two arrivals that the search counts; larger ones count as this one
        (folding.py).
    stride: the difference of the numbers of two arrivals that follow each other while a request is
        unfinished. Above 1, further requests came between the two, and were cancelled while they
        waited.
    cancels: whether requests may be cancelled.
    """

    name: str
    policy: Policy
    config: SchedulerConfig
    shapes: tuple[Request, ...]
    requests: int
    gap: int = 1
    stride: int = 1
    cancels: bool = True

    @property
    def timed(self) -> bool:
        """Whether the policy reads the time."""
        return self.policy.timed

    @property
    def passer(self) -> Request:
        """The shape of the requests that come between two arrivals and are cancelled."""
        return self.shapes[0]


def worlds(policy: Policy, requests: int, num_blocks: int) -> tuple[World, ...]:
    """The worlds in which a policy is checked, the smallest first.

    queue: one request runs at a time, and ends in its first step. So only the order of admission
        matters. Prompts are long enough to matter to a policy that weighs the length of a prompt
        against the age of a request.
    cached_queue: as queue, with a prefix cache, and prompts with a common beginning.
    recompute: long and short requests of different users and priorities. Together they need more
        blocks than there are, so some are preempted, and computed again.
    swap: as recompute, with a swap space of half as many blocks.
    prefix: as recompute, with a prefix cache, and prompts with a common beginning.

    Raises:
        ValueError: a number is below 1.
    """
    for name, value in (("requests", requests), ("blocks", num_blocks)):
        if value < 1:
            raise ValueError(f"{name} is {value}; it must be at least 1")
    config = SchedulerConfig(
        BLOCK_SIZE,
        num_blocks,
        max_num_batched_tokens=max(2, requests),
        max_num_seqs=requests,
        max_model_len=BLOCK_SIZE * num_blocks,
    )
    one_row = SchedulerConfig(
        LARGE_BLOCK,
        num_blocks,
        max_num_batched_tokens=LARGE_BLOCK * num_blocks,
        max_num_seqs=1,
        max_model_len=LARGE_BLOCK * num_blocks,
    )
    half = config._replace(host_blocks=max(1, num_blocks // 2))
    queued = _queued_shapes(num_blocks)
    shapes = _shapes(num_blocks)
    rows = (
        ("queue", one_row, queued),
        ("cached_queue", one_row, _with_hashes(queued, LARGE_BLOCK)),
        ("recompute", config, shapes),
        ("swap", half, shapes),
        ("prefix", config, _with_hashes(shapes, BLOCK_SIZE)),
    )
    return tuple([World(name, policy, sizes, mixture, requests) for name, sizes, mixture in rows])


def _queued_shapes(num_blocks: int) -> tuple[Request, ...]:
    """Requests of one token, with prompts of different lengths."""
    longest = LARGE_BLOCK * num_blocks - 1
    return (
        _shape("a", min(4 * LARGE_BLOCK, longest), 1, 1, "one", predicted=4),
        _shape("b", 1, 1, 0, "two", predicted=1),
        _shape("c", min(2 * LARGE_BLOCK + 1, longest), 1, 1, "two", predicted=2),
    )


def _shapes(num_blocks: int) -> tuple[Request, ...]:
    """Requests of three lengths, two users and two priorities. Three of them need more blocks than
    there are.
    """
    longest = BLOCK_SIZE * num_blocks
    long_prompt = max(1, longest // 2)
    short_prompt = max(1, longest // 6)
    return (
        _shape("a", long_prompt, min(3, longest - long_prompt), 1, "one", predicted=1),
        _shape("b", short_prompt, min(4, longest - short_prompt), 0, "two", predicted=4),
        _shape("c", 1, min(2, longest - 1), 1, "two", predicted=2),
    )


def _shape(
    letter: str, prompt_len: int, max_tokens: int, priority: int, user: str, predicted: int
) -> Request:
    return Request(
        letter,
        prompt_len,
        max_tokens,
        stop_token_ids=frozenset({STOP}),
        priority=priority,
        user=user,
        predicted=predicted,
    )


def _with_hashes(shapes: tuple[Request, ...], block_size: int) -> tuple[Request, ...]:
    """The requests with hashes of their full blocks. All but "c" have a common beginning."""
    return tuple(
        [
            shape._replace(
                hashes=tuple(
                    [
                        f"{'other' if shape.request_id == 'c' else 'common'}{i}"
                        for i in range(shape.prompt_len // block_size)
                    ]
                )
            )
            for shape in shapes
        ]
    )
