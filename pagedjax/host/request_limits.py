"""New requests: a request that can never run is rejected. The state knows the ids of the others."""

from __future__ import annotations

from math import isfinite

from pagedjax.host import blocks, reservation, views
from pagedjax.host.state import SchedulerConfig, SchedulerState
from pagedjax.host.types import Request, Seq


class Rejected(ValueError):
    """A request that can never run. The message names the value, the limit and the remedy."""


def final_length(request: Request, config: SchedulerConfig) -> int:
    """Tokens of the request at its longest: prompt + max_tokens, cut off at max_model_len."""
    return min(request.prompt_len + request.max_tokens, config.max_model_len)


def with_ids(state: SchedulerState, request: Request) -> SchedulerState:
    """The state that knows the ids and the stop tokens of a new request."""
    names = request.names
    stops = request.stop_token_ids
    if state.ids:  # else no request is unfinished, and the stop tokens of ended ones are forgotten
        stops = state.stops | stops
    return state._replace(
        arrivals=state.arrivals + len(names),
        ids=state.ids.update(dict.fromkeys(names)),
        stops=stops,
    )


def check(state: SchedulerState, request: Request) -> None:
    """Raises Rejected for an empty prompt, an id in use, a deadline that is no time, a negative
    prediction, or a request beyond a limit of the scheduler.
    """
    config = state.config
    if request.prompt_len < 1:
        raise Rejected(
            f"request {request.request_id!r} has an empty prompt; give it at least one token"
        )
    if request.max_tokens < 0 or (request.max_tokens == 0 and request.forks):
        branches = " and branches" if request.forks else ""
        raise Rejected(
            f"request {request.request_id!r} has max_tokens {request.max_tokens}{branches}; "
            "it must be at least 1, or 0 to sample nothing"
        )
    longest_prompt = config.max_model_len - min(request.max_tokens, 1)
    if request.prompt_len > longest_prompt:
        output = " and one token must be left for output" if request.max_tokens else ""
        raise Rejected(
            f"request {request.request_id!r} has a prompt of {request.prompt_len} tokens, "
            f"but max_model_len is {config.max_model_len}{output}; "
            f"shorten the prompt to {longest_prompt} tokens or raise max_model_len"
        )
    deadline = request.deadline
    if deadline is not None and not (isfinite(deadline) and deadline > 0):
        raise Rejected(
            f"request {request.request_id!r} has a deadline of {deadline} seconds after its "
            "arrival; it must be a finite number above 0, or None"
        )
    if request.predicted is not None and request.predicted < 0:
        raise Rejected(
            f"request {request.request_id!r} has {request.predicted} predicted output tokens; give "
            "a number of at least 0, or None"
        )
    names = request.names
    _check_pool(state, request)
    for i, name in enumerate(names):
        if name in state.ids or name in names[:i]:
            raise Rejected(
                f"request id {name!r} is in use; ids must be unique among unfinished requests"
            )
    if len(names) > config.max_running:
        raise Rejected(
            f"request {request.request_id!r} has {len(names)} branches, "
            f"but at most {config.max_running} sequences run at a time; "
            "lower n or beam_width, or raise max_num_seqs "
            "(and max_num_batched_tokens, which gives each a token)"
        )
    if len(request.hashes) > request.prompt_len // config.block_size:
        raise Rejected(
            f"request {request.request_id!r} has {len(request.hashes)} hashes; "
            "its prompt has fewer full blocks"
        )


def _check_pool(state: SchedulerState, request: Request) -> None:
    """Raises Rejected for a request that can grow beyond the pool, or beyond a baseline's limit."""
    config = state.config
    limit = final_length(request, config)
    # the beams of a request must fit together even if they share no block
    beams = 1 + len(request.forks) if request.beams else 1
    if not config.chunked_prefill or config.reservation != "none":
        seq = Seq(request, state.arrivals, limit, request.prompt_len, hashes=request.hashes)
        _check_baselines(config, seq, beams)
    if config.views:
        need = beams * views.smallest_pool(config, request, limit)
    else:
        need = beams * blocks.needed(limit, config.block_size)
    if need > config.num_blocks:
        in_each = f" in each of {beams} beams" if beams > 1 else ""
        size = f"{need} blocks of {config.block_size}"
        if config.views:
            takes = f"needs {size} at one time (in {config.groups} groups of layers)"
        else:
            takes = f"is {size}"
        options = "max_tokens, beam_width" if beams > 1 else "max_tokens"
        raise Rejected(
            f"request {request.request_id!r} can grow to {limit} tokens{in_each}, "
            f"which {takes}, but the pool has {config.num_blocks}; "
            f"raise num_blocks to {need}, or lower {options} or the prompt's length"
        )


def _check_baselines(config: SchedulerConfig, seq: Seq, beams: int) -> None:
    """Raises Rejected for a request beyond the limits of whole prompts or of contiguous
    reservations.
    """
    name = seq.request_id
    if not config.chunked_prefill and beams * seq.limit > config.max_num_batched_tokens:
        in_each = f" in each of {beams} beams" if beams > 1 else ""
        raise Rejected(
            f"request {name!r} can grow to {seq.limit} tokens{in_each}, "
            "which have to fit into one step without chunked_prefill, "
            f"but max_num_batched_tokens is {config.max_num_batched_tokens}; "
            "raise it, or lower max_tokens"
        )
    if config.reservation == "none":
        return
    if seq.hashes or not seq.request.advances_alone:
        raise Rejected(
            f"request {name!r} has branches or a shareable prefix, "
            f"and a contiguous reservation ({config.reservation!r}) shares nothing; "
            "use reservation='none', or n=1 and enable_prefix_caching=False"
        )
    need = reservation.piece(config, seq)
    largest = reservation.largest(config)
    if need > largest:
        raise Rejected(
            f"request {name!r} reserves {need} blocks in a row "
            f"(reservation {config.reservation!r}), "
            f"but the largest piece of the pool has {largest}; "
            f"raise num_blocks to {need}, or lower max_model_len or max_tokens"
        )
