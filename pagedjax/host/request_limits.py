"""Requests that can never run, and why: `submit` rejects them."""

from __future__ import annotations

from pagedjax.host import blocks, reservation, views
from pagedjax.host.state import SchedulerConfig, SchedulerState
from pagedjax.host.types import Request, Seq


class Rejected(ValueError):
    """A request that can never run. The message names the value, the limit and the remedy."""


def final_length(request: Request, config: SchedulerConfig) -> int:
    """Tokens of the request at its longest: prompt + max_tokens, cut off at max_model_len."""
    return min(request.prompt_len + request.max_tokens, config.max_model_len)


def check(state: SchedulerState, request: Request) -> None:
    """Raises Rejected for an empty prompt, an id in use, or a request beyond a limit of the
    scheduler.
    """
    c, r = state.config, request
    if r.prompt_len < 1:
        raise Rejected(f"request {r.request_id!r} has an empty prompt; give it at least one token")
    if r.max_tokens < 0 or (r.max_tokens == 0 and r.forks):
        wrong = f"max_tokens {r.max_tokens}" + (" and branches" if r.forks else "")
        raise Rejected(
            f"request {r.request_id!r} has {wrong}; it must be at least 1, or 0 to sample nothing"
        )
    room = c.max_model_len - min(r.max_tokens, 1)
    if r.prompt_len > room:
        output = " and one token must be left for output" if r.max_tokens else ""
        raise Rejected(
            f"request {r.request_id!r} has a prompt of {r.prompt_len} tokens, but max_model_len is {c.max_model_len}"
            f"{output}; shorten the prompt to {room} tokens or raise max_model_len"
        )
    limit, names = final_length(r, c), (r.request_id, *r.forks)
    # the beams of a request must fit together even if they share no block
    beams = len(names) if r.beams else 1
    if not c.chunked_prefill or c.reservation != "none":
        _check_baselines(
            c, Seq(request, state.arrivals, limit, r.prompt_len, hashes=r.hashes), beams
        )
    need = views.fewest(c, r, limit) if c.views else blocks.needed(limit, c.block_size)
    need, room = beams * need, c.num_blocks
    if need > room:
        what = f"can grow to {limit} tokens" + (f" in each of {beams} beams" if beams > 1 else "")
        less = f"max_tokens{', beam_width' if beams > 1 else ''}"
        raise Rejected(
            f"request {r.request_id!r} {what}, which {_takes(need, c)}, but the pool has {room}; "
            f"raise num_blocks to {need}, or lower {less} or the prompt's length"
        )
    for i, name in enumerate(names):
        if name in state.ids or name in names[:i]:
            raise Rejected(
                f"request id {name!r} is in use; ids must be unique among unfinished requests"
            )
    if len(names) > c.max_running:
        raise Rejected(
            f"request {r.request_id!r} has {len(names)} branches, but at most {c.max_running} sequences run at a time; "
            "lower n or beam_width, or raise max_num_seqs (and max_num_batched_tokens, which gives each a token)"
        )
    if len(r.hashes) > r.prompt_len // c.block_size:
        raise Rejected(
            f"request {r.request_id!r} has {len(r.hashes)} hashes; its prompt has fewer full blocks"
        )


def _takes(need: int, c: SchedulerConfig) -> str:
    if not c.views:
        return f"is {need} blocks of {c.block_size}"
    return f"needs {need} blocks of {c.block_size} at one time (in {c.groups} groups of layers)"


def _check_baselines(c: SchedulerConfig, seq: Seq, beams: int) -> None:
    """Limits of whole prompts and of contiguous reservations. Raises Rejected."""
    name = seq.request_id
    if not c.chunked_prefill and beams * seq.limit > c.max_num_batched_tokens:
        each = f" in each of {beams} beams" if beams > 1 else ""
        raise Rejected(
            f"request {name!r} can grow to {seq.limit} tokens{each}, which have to fit into one step without "
            f"chunked_prefill, but max_num_batched_tokens is {c.max_num_batched_tokens}; raise it, or lower max_tokens"
        )
    if c.reservation == "none":
        return
    if seq.request.forks or seq.request.beams or seq.hashes:
        raise Rejected(
            f"request {name!r} has branches or a shareable prefix, and a contiguous reservation ({c.reservation!r}) "
            "shares nothing; use reservation='none', or n=1 and enable_prefix_caching=False"
        )
    need, room = reservation.piece(c, seq), reservation.largest(c)
    if need > room:
        raise Rejected(
            f"request {name!r} reserves {need} blocks in a row (reservation {c.reservation!r}), but the largest piece "
            f"of the pool has {room}; raise num_blocks to {need}, or lower max_model_len or max_tokens"
        )
