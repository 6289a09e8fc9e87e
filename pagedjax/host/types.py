"""Plain immutable records that `host` and `engine` share. Imports no jax and no numpy.

Words and letters: docs/design/glossary.md.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any, Literal, NamedTuple, TypeVar

from immutables import Map

from pagedjax.host.kv_policies import View
from pagedjax.options.config import PrefixCheckpoints, Reservation

__all__ = [
    "Admitted",
    "Choice",
    "Finished",
    "Plan",
    "Preempted",
    "Released",
    "Request",
    "Resumed",
    "Row",
    "Running",
    "Sampled",
    "Seq",
    "Verified",
]

# an entry of a block table: the sequence does not have this block (views.py). It is also the id of
# the trash block.
HOLE = 0
# "rejected": by the policy, before it had any output
FinishReason = Literal["stop", "length", "abort", "rejected"]
# whether unfinished sequences are computed again under new weights, or keep what they have computed
Pending = Literal["restart", "keep"]
Item = TypeVar("Item")
NO_DRAFTS: Mapping[str, int] = MappingProxyType({})
NO_HASHES: Mapping[str, tuple[str, ...]] = MappingProxyType({})


class SchedulerConfig(NamedTuple):
    """Sizes: integers of at least 1; `host_blocks` and `empty_blocks` may be 0. `num_blocks` does not count the trash
    block.

    The three fields after `host_blocks` are baselines (step_kinds.py, reservation.py).
    """

    block_size: int
    num_blocks: int
    max_num_batched_tokens: int
    max_num_seqs: int
    max_model_len: int
    host_blocks: int = 0  # blocks of the swap space; 0: preemption is by recomputation
    chunked_prefill: bool = True
    mixed_steps: bool = True
    reservation: Reservation = "none"
    # what each group of layers sees; a group has its own blocks (views.py); (): one group, sees all
    views: tuple[View, ...] = ()
    # whether a sequence may use blocks that another row of the same step fills (prefix_sharing.py)
    shares_filling: bool = True
    # where prefixes can be found in groups with a window (checkpoints.py); None: at every boundary
    prefix_checkpoints: PrefixCheckpoints | None = None
    late_stops: bool = False  # whether a plan is made before the stops of the one before are known
    # Blocks that are empty after a plan, if cached content can be given up for it: so many blocks
    # can be predicted (engine/lookahead.py).
    empty_blocks: int = 0

    def record(self) -> dict[str, Any]:
        """Its fields by name, as values of JSON."""
        fields = self._asdict()
        if self.prefix_checkpoints is not None:
            fields["prefix_checkpoints"] = dataclasses.asdict(self.prefix_checkpoints)
        return fields

    @property
    def groups(self) -> int:
        """Groups of layers. A block of tokens has an entry in the block table for each of them."""
        return len(self.views) or 1

    @property
    def sees_all(self) -> bool:
        """Whether the queries of all layers see all blocks before them."""
        return not self.views

    @property
    def max_running(self) -> int:
        """Sequences that can run at a time: each must be able to get a token in every step."""
        return min(self.max_num_seqs, self.max_num_batched_tokens)


class Request(NamedTuple):
    """A request as the scheduler sees it: counts and stop tokens, never text or token values."""

    request_id: str
    prompt_len: int
    max_tokens: int  # 0: it samples nothing, and ends when its prompt is computed
    min_tokens: int = 0
    stop_token_ids: frozenset[int] = frozenset()
    priority: int = 0
    user: str = ""  # the policy "fair" shares the machine among users
    # ids of further branches, which begin when the first branch has computed the prompt
    forks: tuple[str, ...] = ()
    # hashes of the prompt's full blocks (engine/block_hashes.py); empty: shares no blocks
    hashes: tuple[str, ...] = ()
    # whether its branches advance together, by the choices given to `commit`
    beams: bool = False
    # labels of any meaning; they salt the hashes, so requests with other tags share no blocks
    tags: tuple[str, ...] = ()
    # its sampling reads its tokens through its blocks, so no block is given back (views.py)
    keeps_blocks: bool = False
    predicted: int | None = None  # the number of output tokens that the caller predicts
    service_class: str = ""  # the name of its class of service, whose targets a policy may know
    deadline: float | None = None  # seconds after its arrival by which it should have ended

    @property
    def names(self) -> tuple[str, ...]:
        """Its id, and those of its branches that have not forked yet."""
        return (self.request_id, *self.forks)

    @property
    def advances_alone(self) -> bool:
        """Whether it is one sequence that waits for no other: no beam, and no branch is left to
        fork.
        """
        return not (self.forks or self.beams)


class Seq(NamedTuple):
    """A request in the scheduler. `computed` grows until it equals `length`; `blocks` covers at
    least `computed`.

    Only a beam may have `computed == length`: it waits until its siblings have it too.
    """

    request: Request
    arrival: int  # 0, 1, 2 ... in the order of submission: the tie-breaker of every policy
    limit: int  # tokens at its longest: the prompt and max_tokens, cut off at max_model_len
    length: int  # prompt + generated tokens
    computed: int = 0
    # its block table; while it waits, of host blocks in the swap space
    blocks: tuple[int, ...] = ()
    # hashes of its first full blocks, as far as they are known; it keeps them when preempted
    hashes: tuple[str, ...] = ()
    # arrival of the first branch or beam of its request; None: it has no others
    group: int | None = None
    # blocks of its beginning of which only the layers that see everything were in the cache when it
    # entered (checkpoints.py); 0: none
    junction: int = 0

    @property
    def request_id(self) -> str:
        """The id of its request."""
        return self.request.request_id

    @property
    def num_output(self) -> int:
        """Tokens that it has generated."""
        return self.length - self.request.prompt_len

    @property
    def predicted(self) -> int:
        """Output tokens that were predicted for it.

        Raises:
            ValueError: nothing was predicted.
        """
        tokens = self.request.predicted
        if tokens is None:
            raise ValueError(
                f"request {self.request_id!r} has no predicted length, and the policy reads one; "
                "give it to Engine.add, or workload.predicted to an experiment"
            )
        return tokens

    @property
    def num_rows(self) -> int:
        """Rows of a step that it takes, or will take when its branches fork."""
        return 1 + len(self.request.forks)

    def finish_reason(self, length: int, token: int) -> FinishReason | None:
        """Why the sequence ends when `token` has made it `length` tokens long; None if it does not
        end.
        """
        request = self.request
        if token in request.stop_token_ids and length - request.prompt_len >= request.min_tokens:
            return "stop"
        return "length" if length >= self.limit else None

    @property
    def is_beam(self) -> bool:
        """Whether it is one of several beams, which are admitted and preempted together."""
        return self.request.beams and not self.request.forks


class Running(NamedTuple):
    """The running sequences. The values that every step changes are two columns beside the records.

    A record is rebuilt only when its blocks change; its own `length` and `computed` are from that
    step. Rebuilding 256 records a step cost 230 us; two columns of integers cost a third of that.
    `scheduler.running(state)` returns current records, and policies get current ones.
    """

    seqs: tuple[Seq, ...] = ()
    lengths: tuple[int, ...] = ()
    computed: tuple[int, ...] = ()

    @staticmethod
    def of(seqs: tuple[Seq, ...]) -> Running:
        """These sequences, whose records are current."""
        return Running(
            seqs, tuple([seq.length for seq in seqs]), tuple([seq.computed for seq in seqs])
        )

    def concat(self, tail: Running) -> Running:
        """These sequences, with those of `tail` behind them."""
        return Running(
            self.seqs + tail.seqs, self.lengths + tail.lengths, self.computed + tail.computed
        )

    def pick(self, indices: Sequence[int]) -> Running:
        """The sequences at some indices, in that order."""
        return Running(
            pick(self.seqs, indices), pick(self.lengths, indices), pick(self.computed, indices)
        )


class CurrentSeqs(Sequence[Seq]):
    """The running sequences as current records. They are made when one is first read, because most
    policies read none.
    """

    def __init__(self, active: Running) -> None:
        self._active = active
        self._records: tuple[Seq, ...] | None = None

    def _read(self) -> tuple[Seq, ...]:
        if self._records is None:
            self._records = current_seqs(*self._active)
        return self._records

    def __len__(self) -> int:
        return len(self._active.seqs)

    def __getitem__(self, index: Any) -> Any:
        return self._read()[index]

    def __iter__(self) -> Iterator[Seq]:
        return iter(self._read())


def pick(column: tuple[Item, ...], indices: Sequence[int]) -> tuple[Item, ...]:
    return tuple([column[i] for i in indices])


class Row(NamedTuple):
    """One sequence of a plan: compute `count` tokens from `seq.computed` on. Blocks for them are in
    `seq.blocks`.
    """

    seq: Seq
    count: int

    @property
    def samples(self) -> bool:
        """Whether this chunk reaches the end of the known tokens, so that a new one is sampled."""
        return self.seq.computed + self.count >= self.seq.length


class Plan(NamedTuple):
    """The work of one step, in columns because a step has hundreds of rows. It is a result, never
    carried state.
    """

    step: int
    # decodes (count 1 at the end of a sequence) first, then prompt chunks; `rows` gives records
    seqs: tuple[Seq, ...]
    lengths: tuple[int, ...]  # known tokens of each before the step
    starts: tuple[int, ...]  # tokens of each whose keys and values are in the cache before the step
    counts: tuple[int, ...]  # tokens to compute of each, at least 1
    admitted: tuple[str, ...]  # request ids that entered `running` in this step
    # tokens of each admitted request: the prompt, and what was generated before a preemption
    known: tuple[int, ...]
    cached: tuple[int, ...]  # how many of the known tokens were found in the cache
    copies: tuple[tuple[int, int], ...]  # (from, to): blocks to copy before anything is written
    preempted: tuple[str, ...]  # request ids that stopped running, in that order
    # the preempted ids whose content went to host memory; the others compute it again
    swapped: tuple[str, ...]
    resumed: tuple[str, ...]  # request ids whose content came back from host memory
    # (device block, host block): moved before anything else happens
    swap_out: tuple[tuple[int, int], ...]
    # (host block, device block): moved after `swap_out` and before `copies`
    swap_in: tuple[tuple[int, int], ...]
    num_waiting: int  # after admission
    blocks_used: int  # blocks with an owner while the step runs
    num_blocks: int  # blocks that can have an owner (block 0, the trash block, is not one of them)
    # how many of the last tokens of each row are drafts; (): no row has one
    drafts: tuple[int, ...] = ()
    rejected: tuple[str, ...] = ()  # request ids that the policy turned away
    now: float | None = None  # the time that a timed policy was given, in seconds

    @property
    def rows(self) -> tuple[Row, ...]:
        """The plan as records. The engine reads the columns, which are faster."""
        return tuple(map(Row, current_seqs(self.seqs, self.lengths, self.starts), self.counts))

    @property
    def num_tokens(self) -> int:
        """Tokens that the step computes, without padding."""
        return sum(self.counts)


# A plan without rows, to get array shapes from.
EMPTY_PLAN = Plan(
    step=0,
    seqs=(),
    lengths=(),
    starts=(),
    counts=(),
    admitted=(),
    known=(),
    cached=(),
    copies=(),
    preempted=(),
    swapped=(),
    resumed=(),
    swap_out=(),
    swap_in=(),
    num_waiting=0,
    blocks_used=0,
    num_blocks=1,
)


def current_seqs(
    seqs: tuple[Seq, ...], lengths: tuple[int, ...], computed: tuple[int, ...]
) -> tuple[Seq, ...]:
    """Records with the `length` and `computed` of their columns."""
    return tuple(
        Seq(
            seq.request,
            seq.arrival,
            seq.limit,
            length,
            count,
            seq.blocks,
            seq.hashes,
            seq.group,
            seq.junction,
        )
        for seq, length, count in zip(seqs, lengths, computed, strict=True)
    )


class Released(NamedTuple):
    """An unfinished sequence that one scheduler has let go of, for another one to adopt
    (handover.py).
    """

    request: Request
    length: int  # prompt + generated tokens
    computed: int  # how many of these tokens `blocks` holds
    # the block table of the computed tokens, in the cache that it leaves
    blocks: tuple[int, ...]
    hashes: tuple[str, ...]  # hashes of its first full blocks, as far as they are known


class Adopted(NamedTuple):
    """Where a sequence is after it was adopted."""

    computed: int  # 0: it waits, and is computed again
    blocks: tuple[int, ...]
    copies: tuple[tuple[int, int], ...]  # (block in the cache that it left, block here)


class Admitted(NamedTuple):
    """A request enters the running sequences, for the first time or after a preemption."""

    step: int
    request_id: str
    num_tokens: int  # known at that moment: the prompt, and what was generated before a preemption
    num_cached: int  # how many of them were found in the cache


class Preempted(NamedTuple):
    """A request gives its blocks up, and waits again."""

    step: int
    request_id: str
    # its content is in host memory; else it goes back to the queue and is computed again
    swapped: bool


class Resumed(NamedTuple):
    """A swapped request runs again, where it stopped."""

    step: int
    request_id: str


class Forked(NamedTuple):
    """Branches that begin to run on the blocks of the branch that computed their prompt."""

    step: int
    request_ids: tuple[str, ...]


class Beamed(NamedTuple):
    """The beams of a request after a step: each continues from a parent, itself or a sibling, with
    a new token.
    """

    step: int
    request_ids: tuple[str, ...]
    parents: tuple[str, ...]
    token_ids: tuple[int, ...]


class Sampled(NamedTuple):
    """The new tokens of a step, in row order: one for each row that sampled, several for a row with
    accepted drafts.
    """

    step: int
    request_ids: tuple[str, ...]
    token_ids: tuple[int, ...]


class Verified(NamedTuple):
    """The rows of a step that had drafts: how many drafts, how many of them were accepted, and how
    many blocks each sequence has left.
    """

    step: int
    request_ids: tuple[str, ...]
    drafts: tuple[int, ...]
    accepted: tuple[int, ...]
    num_blocks: tuple[int, ...]  # 0 if it has ended


class Finished(NamedTuple):
    """A request has ended, with `num_output` tokens of output."""

    step: int
    request_id: str
    reason: FinishReason
    num_output: int


Event = Admitted | Preempted | Resumed | Sampled | Forked | Beamed | Verified | Finished
TOKEN_EVENTS = (Sampled, Beamed)  # those that give sequences new tokens
BRANCH_EVENTS = (Forked, Beamed)  # those whose sequences run on the blocks of another branch


class Submitted(NamedTuple):
    """A sequence joins the queue, for the first time in this scheduler."""

    step: int  # the number of the next step
    seq: Seq


# What a policy with memory observes. A sequence that leaves for another scheduler has finished
# here, with the reason "abort", and one that is adopted was submitted. All sequences are preempted
# when a step fails and when the weights change.
PolicyEvent = Event | Submitted


class Choice(NamedTuple):
    """The continuations of a request's beams, in the order of their names: the parent and the token
    of each.
    """

    parents: tuple[str, ...]
    token_ids: tuple[int, ...]


class Hypothesis(NamedTuple):
    """A sequence that a beam search has finished."""

    token_ids: tuple[int, ...]
    cumulative_logprob: float
    score: float  # cumulative_logprob / len(token_ids) ** length_penalty
    reason: FinishReason


class BeamResult(NamedTuple):
    """The outcome of a beam search, the best sequence first."""

    request_id: str
    sequences: tuple[Hypothesis, ...]


class TokenLogprobs(NamedTuple):
    """Log-probabilities at one position, under the model's own distribution (before penalties and
    temperature).
    """

    request_id: str
    prompt: bool  # whether it is a prompt token, or a generated one
    position: int  # index in the prompt, or in the output
    token_id: int
    logprob: float
    rank: int  # 1 is the most likely token
    top_ids: tuple[int, ...]  # as many as requested, most likely first
    top_logprobs: tuple[float, ...]


class StepResult(NamedTuple):
    """The result of a step: the plan, the events, and the times (seconds of time.perf_counter)."""

    plan: Plan
    events: tuple[Event, ...]
    started: float  # before schedule
    finished: float  # after commit
    device_seconds: float  # busy time of the device between `started` and `finished`
    padded_tokens: int  # tokens of the compiled shape; plan.num_tokens of them are real
    compilations: int  # XLA compilations during this step; 0 after warm-up
    # what requests asked for beside tokens, by the name of its reader (engine/readers.py)
    outputs: Mapping[str, Any] = Map()
    draft_seconds: float = 0.0  # of a drafter's program on the device, part of device_seconds
    draft_rows: int = 0  # rows with drafts in that program, rounded up to a bucket
    params_version: int = 0  # version of the weights: how often they had been updated

    @property
    def logprobs(self) -> tuple[TokenLogprobs, ...]:
        """The log-probabilities that requests asked for."""
        return self.outputs.get("logprobs", ())

    @property
    def beams(self) -> tuple[BeamResult, ...]:
        """Searches that ended."""
        return self.outputs.get("beams", ())

    @property
    def pooled(self) -> tuple[tuple[str, Any], ...]:
        """(request id, its float32 array) of prompts that were pooled."""
        return self.outputs.get("pooled", ())

    @property
    def taps(self) -> tuple[Any, ...]:
        """The `engine.taps.TapPart`s of the sequences that asked for taps."""
        return self.outputs.get("taps", ())

    @property
    def host_seconds(self) -> float:
        return self.finished - self.started - self.device_seconds
