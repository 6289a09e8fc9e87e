"""The metrics of a run, from its records (records.py): a summary, which is a JSON object.

Latencies are measured from a request's *intended* arrival, so a slow driver or engine cannot hide
its delay.

A request has one branch, or as many as `sampling.n` or `best_of` says. The k tokens of a branch
have the times t1 <= ... <= tk. Then

    queue  start of the first step that computes any of the request's tokens - arrival
    ttft   the earliest t1 - arrival
    e2e    the latest tk - arrival
    itl    the gaps t2 - t1, t3 - t2, ... of all branches
    tpot   (tk - t1) / (k - 1), one value for each branch

Output tokens are those of all branches, including those that `best_of` drops. A request is done
when all its branches are done.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np

from experiments.core import service, speculation
from experiments.core.config import Slo
from experiments.core.distributions import ServiceClass
from experiments.core.records import BranchRecord, Counts, RequestRecord, StepRecord
from pagedjax.server.load_client.summary import spread


class StepSums(NamedTuple):
    """Sums over the steps of a run. `*_s` (seconds) and `per_step` are distributions (`spread`).

    end: seconds; when the last step ended.
    most_used: the most blocks that were in use after a step.
    """

    count: int
    end: float
    most_used: int
    num_blocks: int
    sums: Counts
    step_s: dict[str, Any]
    device_s: dict[str, Any]
    host_s: dict[str, Any]
    per_step: dict[str, Any]  # sequences


class TokenSums(NamedTuple):
    """When output tokens were made.

    method: how the percentiles over tokens and steps are calculated.
    """

    count: int
    itl_s: dict[str, Any]
    steady_rate: float | None
    sha256: str | None
    method: str = "linear"


def step_sums(steps: Sequence[StepRecord]) -> StepSums:
    """The sums over all steps. Raises ValueError if there are none."""
    if not steps:
        raise ValueError("the run has no steps; there is nothing to summarize")
    return StepSums(
        count=len(steps),
        end=steps[-1].started + steps[-1].seconds,
        most_used=max(step.blocks_used for step in steps),
        num_blocks=max(step.num_blocks for step in steps),
        sums=Counts(*(sum(getattr(step, name) for step in steps) for name in Counts._fields)),
        step_s=spread(step.seconds for step in steps),
        device_s=spread(step.device_seconds for step in steps),
        host_s=spread(step.host_seconds for step in steps),
        per_step=spread(float(step.sequences) for step in steps),
    )


def token_sums(requests: Sequence[RequestRecord]) -> TokenSums:
    branches = [branch for request in requests for branch in request.branches]
    return TokenSums(
        count=sum(branch.num_tokens for branch in branches),
        itl_s=spread(gap for branch in branches for gap in branch.gaps),
        steady_rate=steady_rate(time for branch in branches for time in branch.token_times),
        sha256=tokens_digest(requests),
    )


def _drafts_summary(sums: Counts, speculates: bool) -> dict[str, Any]:
    """The field `speculation` of a summary; {} for a run without drafts."""
    if not speculates:
        return {}
    counts = speculation.DraftCounts(sums.drafts, sums.accepted, sums.decodes)
    return {"speculation": speculation.summary(counts)}


def _finish_reasons(branches: Sequence[BranchRecord]) -> dict[str, int]:
    """How many branches ended for each reason."""
    reasons = [branch.finish_reason for branch in branches if branch.finish_reason is not None]
    return {reason: reasons.count(reason) for reason in sorted(set(reasons))}


def summary(
    requests: Sequence[RequestRecord],
    steps: StepSums,
    tokens: TokenSums,
    block_size: int,
    slo: Slo | None = None,
    *,
    speculates: bool = False,
    replicas: int = 1,
    classes: Sequence[ServiceClass] | None = None,
) -> dict[str, Any]:
    """The summary of a run.

    Shares are between 0 and 1; keys that end in `_s` are seconds, in `_per_s` per second.

    Averages over steps count every step once. `padding_share` and `fragmentation_share` are ratios
    of sums: the share of computed tokens that were padding, and the share of slots in used blocks
    without a token. `prefix_hit_share` is about the tokens of sequences when they are admitted for
    the first time: the share that is found in the cache.

    `blocks_saved_share` is the saving by sharing (Fig. 15 of the PagedAttention paper): 1 -
    sum(distinct blocks) / sum(entries of block tables), over the running sequences of every step,
    for shared prompts of branches and for prefixes found in the cache. Sequences without a row in a
    step count with the blocks they own. A request whose branches have not forked yet is one
    sequence.

    With several replicas, or pools, `steps` are those of all engines, and `between_steps_s` is a
    sum over all engines. Blocks and slots are those of one replica; with pools they are None
    (`pools` has the blocks).

    With `speculates` there is also `speculation`: the number of drafts, of accepted drafts, the
    share of accepted drafts, and the mean number of tokens that a decode row gives in a step.

    If requests name classes or users, there are also the numbers of these groups
    (`service.summary`). The targets of `classes`, those of the workload, count in place of `slo`.

    `requests`, `unfinished`, `requests_per_s` and `goodput` count requests; `branches`, `finished`
    (by reason) and `preemptions` count branches.
    """
    duration = steps.end
    finished = [request for request in requests if request.done]
    branches = [branch for request in requests for branch in request.branches]
    prompt = sum(request.prompt_tokens for request in finished)
    sums = steps.sums
    slots = sums.blocks_used * block_size
    class_by_name = {service_class.name: service_class for service_class in classes or ()}
    results = service.judge(requests, slo or Slo(), class_by_name)
    return {
        "duration_s": duration,
        "requests": len(requests),
        "branches": len(branches),
        "unfinished": len(requests) - len(finished),
        "finished": _finish_reasons(branches),
        "prompt_tokens": prompt,
        "output_tokens": tokens.count,
        "requests_per_s": len(finished) / duration,
        "output_tokens_per_s": tokens.count / duration,
        "total_tokens_per_s": (prompt + tokens.count) / duration,
        "steady_output_tokens_per_s": tokens.steady_rate,
        "percentile_method": tokens.method,
        "ttft_s": spread(request.ttft for request in requests),
        "itl_s": tokens.itl_s,
        "tpot_s": spread(branch.tpot for branch in branches),
        "e2e_s": spread(request.e2e for request in requests),
        "queue_s": spread(request.queue for request in requests),
        "steps": steps.count,
        "step_s": steps.step_s,
        "device_s": steps.device_s,
        "host_s": steps.host_s,
        "between_steps_s": replicas * duration - sums.seconds,
        "sequences_per_step": steps.per_step,
        "tokens_computed": sums.tokens,
        "tokens_padded": sums.padded_tokens,
        "padding_share": _missing_part(sums.tokens, sums.padded_tokens),
        "blocks_total": steps.num_blocks,
        "blocks_used": {"mean": slots / block_size / steps.count, "peak": steps.most_used},
        "slots_used": {"mean": slots / steps.count, "peak": steps.most_used * block_size},
        "fragmentation_share": _missing_part(sums.held_tokens, slots),
        "blocks_saved_share": _missing_part(sums.blocks_used, sums.blocks_listed),
        "prefix_hit_share": _part(sums.hit_tokens, sums.admitted_tokens),
        "preemptions": sums.preempted,
        "compilations": sums.compilations,
        **_drafts_summary(sums, speculates),
        "goodput": service.goodput(results, duration),
        **service.summary(results, duration),
        "tokens_sha256": tokens.sha256,
    }


def steady_rate(times: Iterable[float]) -> float | None:
    """Output tokens/s between the ends of the steps after which a tenth and nine tenths of all
    output tokens exist.

    It leaves out the start and the end of a run, which matter in a short one. None if both steps
    end at the same time.

    Args:
        times: the time of each output token, in seconds. Tokens that a failed replica lost are not
            output.
    """
    ascending = np.sort(np.fromiter(times, float))
    if not ascending.size:
        return None
    first = ascending[math.ceil(0.1 * ascending.size) - 1]
    last = ascending[math.ceil(0.9 * ascending.size) - 1]
    until_last = np.searchsorted(ascending, last, side="right")
    tokens = until_last - np.searchsorted(ascending, first, side="right")
    return float(tokens / (last - first)) if last > first else None


def _part(part: int, total: int) -> float:
    """The share of `part` in `total`; 0 if there is nothing."""
    return part / total if total else 0.0


def _missing_part(part: int, total: int) -> float:
    """The share of `total` that is not `part`; 0 if there is nothing."""
    return 1.0 - part / total if total else 0.0


def tokens_digest(requests: Sequence[RequestRecord]) -> str:
    """sha256 over every branch's output tokens: equal digests mean equal tokens."""
    branches = [branch for request in requests for branch in request.branches]
    text = json.dumps(
        [[branch.branch_id, list(branch.token_ids)] for branch in branches], separators=(",", ":")
    )
    return hashlib.sha256(text.encode()).hexdigest()
