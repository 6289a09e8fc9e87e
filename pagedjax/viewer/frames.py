"""Frames of the page from the scheduler's transitions: a pure fold over states, plans and events.

    fold = begin(config)
    fold = passed(fold, state, events)              # a change between two steps: a submit, a
                                                    # cancel, a restart
    fold = scheduled(fold, state, plan, reasons)    # a step starts
    fold, frame = committed(fold, state, events)    # the step has ended
    fold, frame = rested(fold)                      # no request is unfinished

read_recording.py updates the fold by each transition of a recorded run, live.py by each step of a
running engine. The cost of a step depends on its sequences, never on the size of the pool.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import NamedTuple

from immutables import Map

from pagedjax.host import scheduler
from pagedjax.host.policies import Policy, called
from pagedjax.host.scheduler import SchedulerConfig, SchedulerState
from pagedjax.host.types import Event, Finished, Plan, Request, Seq
from pagedjax.host.views import held
from pagedjax.host.waiting import Reason
from pagedjax.viewer import drafts, picture, story
from pagedjax.viewer.picture import Frame, Picture
from pagedjax.viewer.story import LogEntry, Tables

MOST_TEXT = 4000
NO_REASONS: Mapping[str, Reason] = MappingProxyType({})


class Fold(NamedTuple):
    state: SchedulerState  # after the last transition
    tables: Tables  # block tables at that time, by number
    picture: Picture  # after the last frame
    numbers: Map[str, int] = Map()  # id -> number, of unfinished requests
    count: int = 0  # requests so far
    # new requests since the last frame; the next three fields, too, are of the time since then
    came: tuple[list, ...] = ()
    log: tuple[LogEntry, ...] = ()
    published: tuple[int, ...] = ()  # blocks whose content can be found from now on
    evicted: tuple[int, ...] = ()  # blocks whose content was lost
    plan: Plan | None = None  # the plan of the step that runs
    frame: Frame | None = None  # the frame of that step, without its end
    at: float | None = None  # seconds: the time of the last transition that has a time
    verified: drafts.Verdicts = (0, 0)  # drafts of all steps so far, and accepted ones


def begin(config: SchedulerConfig) -> Fold:
    return Fold(scheduler.init(config), {}, Picture())


def start_from(state: SchedulerState) -> Fold:
    """Begins a fold in the middle of a run: unfinished requests count as new."""
    fold = Fold(scheduler.init(state.config), {}, Picture())
    fold = _arrived(fold, [*scheduler.running(state), *state.waiting])
    return fold._replace(
        state=state, tables=_tables(fold, state), published=tuple(state.pool.hashes)
    )


def passed(
    fold: Fold, state: SchedulerState, events: Iterable[Event] = (), at: float | None = None
) -> Fold:
    """Applies a change of the state that is no step.

    A request that is gone without an event was aborted.
    """
    unfinished = (*state.waiting, *state.running.seqs)  # an adopted request may run at once
    fold = _arrived(fold, [seq for seq in unfinished if seq.arrival >= fold.state.arrivals], at)
    fold = fold._replace(at=fold.at if at is None else at)
    if fold.state.pool.hashes and not state.pool.hashes:
        fold = fold._replace(log=(*fold.log, ["forgot", None]))
    fold = _ended(_stopped(fold, state), state, events)
    return _moved(fold, state, allocates=False)


def _stopped(fold: Fold, state: SchedulerState) -> Fold:
    """Logs the sequences that returned to the queue (`scheduler.restart`).

    The reason is a step that failed, or new weights.
    """
    if state.running.seqs is fold.state.running.seqs:
        return fold
    running_before = {seq.arrival for seq in fold.state.running.seqs}
    back = [fold.numbers[seq.request_id] for seq in state.waiting if seq.arrival in running_before]
    return fold._replace(log=(*fold.log, *(["preempted", n, False] for n in back)))


def scheduled(
    fold: Fold,
    state: SchedulerState,
    plan: Plan,
    reasons: Mapping[str, Reason] = NO_REASONS,
    at: float | None = None,
    memory: str = "",
) -> Fold:
    """Opens the frame of a step: the picture while the step runs.

    Args:
        reasons: why requests get no token in it, by their ids (host/waiting.py).
        memory: text of the policy's memory (`memory_text`).
    """
    numbers = fold.numbers
    log = story.planned(plan, numbers)
    fold = _moved(
        fold._replace(log=fold.log + tuple(log)), state, allocates=True, copies=plan.copies
    )
    columns = zip(plan.seqs, plan.starts, plan.counts, plan.lengths, strict=True)
    rows = tuple([(numbers[seq.request.request_id], *row) for seq, *row in columns])
    frame = _framed(fold, drafts.drafted(rows, plan), plan.step)
    if reasons:
        frame["why"] = _why(reasons, numbers)
    if memory:
        frame["memory"] = memory
    at = fold.at if at is None else at
    if at is not None:
        frame["at"] = [at, at]
    return _fresh(fold, frame)._replace(plan=plan, frame=frame, at=at)


def memory_text(state: SchedulerState, policy: Policy) -> str:
    """What the policy shows of its memory, at most MOST_TEXT characters; "" without a memory."""
    if policy.init is None:
        return ""
    text = str(called(policy, "show", state.memory))
    return text if len(text) <= MOST_TEXT else f"{text[:MOST_TEXT]} ..."


def committed(
    fold: Fold, state: SchedulerState, events: Sequence[Event], at: float | None = None
) -> tuple[Fold, Frame]:
    """Closes the frame of a step.

    events: the events of the commit, and of the cancels that follow from it.
    """
    frame = fold.frame
    plan = fold.plan
    assert frame is not None, "a commit without a schedule before it"
    assert plan is not None, "a commit without a schedule before it"
    frame = frame | drafts.outcome(plan, events, fold.verified)
    fold = fold._replace(verified=tuple(frame.get("verified", fold.verified)))
    if at is not None and "at" in frame:
        frame = frame | {"at": [frame["at"][0], at]}
    filled = _filled(plan, fold.state, state)
    log = story.committed(events, fold.numbers, fold.picture.requests, filled)
    published = tuple(block for _, ids in filled for block in ids)
    fold = fold._replace(published=fold.published + published, at=at or fold.at)
    fold = _ended(fold._replace(log=fold.log + tuple(log)), state, events)
    fold = _moved(fold, state, allocates=False)
    if fold.log:
        frame = frame | {"after": [list(entry) for entry in fold.log]}
    return fold._replace(log=(), plan=None, frame=None), frame


def rested(fold: Fold) -> tuple[Fold, Frame]:
    """Returns the frame of an engine without unfinished requests, or of a run's end.

    It shows the content of the cache.
    """
    frame = _framed(fold, (), fold.state.step) | {"rest": True}
    if fold.at is not None:
        frame["at"] = [fold.at, fold.at]
    return _fresh(fold, frame), frame


# --------------------------------------------------------------------------------------------------


def _fresh(fold: Fold, frame: Frame) -> Fold:
    """The fold after a frame: nothing has come since."""
    new_picture = picture.apply(fold.picture, frame)
    return fold._replace(picture=new_picture, came=(), log=(), published=(), evicted=())


def _arrived(fold: Fold, seqs: Sequence[Seq], at: float | None = None) -> Fold:
    """Numbers new requests, and their branches, which begin later."""
    if not seqs:
        return fold
    numbers = fold.numbers.mutate()
    came = list(fold.came)
    log = list(fold.log)
    count = fold.count
    for seq in seqs:
        first = count
        for name in (seq.request.request_id, *seq.request.forks):
            if name in numbers:  # cancelled and submitted again since the last frame
                log.append(["ended", numbers[name], "abort", None])
            numbers[name] = count
            came.append(
                _record(count, name, seq.request, seq.limit, None if count == first else first)
            )
            count += 1
        log.append(["submitted", first] if at is None else ["submitted", first, at])
    return fold._replace(numbers=numbers.finish(), came=tuple(came), log=tuple(log), count=count)


def _record(n: int, name: str, request: Request, limit: int, first: int | None) -> list:
    record = [n, name, request.prompt_len, limit, request.priority, request.user, first]
    return [*record, list(request.tags)] if request.tags else record


def _ended(fold: Fold, state: SchedulerState, events: Iterable[Event]) -> Fold:
    """Logs requests that finished, and those that are gone without an event."""
    numbers = fold.numbers
    log = list(fold.log)
    for event in events:
        if (
            isinstance(event, Finished)
            and event.request_id in numbers
            and event.request_id not in state.ids
        ):
            log.append(["ended", numbers[event.request_id], event.reason, event.num_output])
            numbers = numbers.delete(event.request_id)
    if len(numbers) != len(state.ids):
        for name in sorted(name for name in numbers if name not in state.ids):
            log.append(["ended", numbers[name], "abort", None])
            numbers = numbers.delete(name)
    return fold._replace(numbers=numbers, log=tuple(log))


def _tables(fold: Fold, state: SchedulerState) -> Tables:
    numbers = fold.numbers
    return {numbers[seq.request.request_id]: seq.blocks for seq in state.running.seqs}


def _moved(
    fold: Fold, state: SchedulerState, *, allocates: bool, copies: Sequence[tuple[int, int]] = ()
) -> Fold:
    """Logs the blocks that tables gained and lost since the transition before."""
    if state.running.seqs is fold.state.running.seqs:
        return fold._replace(state=state)
    tables = _tables(fold, state)
    entries = story.moves(
        fold.tables, tables, fold.state.pool, state.pool, allocates=allocates, copies=copies
    )
    evicted = fold.evicted + tuple(
        block for entry in entries if entry[0] == "evicted" for block in entry[2]
    )
    return fold._replace(state=state, tables=tables, log=fold.log + tuple(entries), evicted=evicted)


def _filled(plan: Plan, old: SchedulerState, new: SchedulerState) -> list[tuple[str, list[int]]]:
    """Blocks that a step filled and that can be found now, by the request that filled them."""
    if new.pool.hashes is old.pool.hashes:
        return []
    size = new.config.block_size
    groups = new.config.groups
    filled = []
    for seq, start, count in zip(plan.seqs, plan.starts, plan.counts, strict=True):
        full = seq.blocks[start // size * groups : (start + count) // size * groups]
        ids = [block for block in full if block in new.pool.hashes and block not in old.pool.hashes]
        if ids:
            filled.append((seq.request.request_id, ids))
    return filled


def _framed(fold: Fold, rows: picture.Batch, step: int) -> Frame:
    """A frame: the changes since the last frame."""
    state = fold.state
    numbers = fold.numbers
    base = picture.expected(fold.picture.rows, Map(fold.tables))
    waiting = tuple([numbers[seq.request.request_id] for seq in state.waiting])
    active = zip(state.running.seqs, state.running.computed, state.running.lengths, strict=True)
    running = [
        [numbers[seq.request.request_id], computed, length] for seq, computed, length in active
    ]
    packed = {row[0] for row in rows}
    frame: Frame = {
        "step": step,
        "came": list(fold.came),
        "waiting": picture.splice(fold.picture.waiting, waiting),
        "rows": picture.splice(base, rows),
        "still": [entry for entry in running if entry[0] not in packed],
        "tables": _table_changes(fold.picture.tables, fold.tables),
        "published": _publications(fold),
        "away": [
            [numbers[seq.request.request_id], held(seq.blocks)]
            for seq in state.waiting
            if seq.blocks
        ],
        "counts": _counts(fold, rows, running),
        "before": [list(entry) for entry in fold.log],
    }
    return {name: value for name, value in frame.items() if value is not None and value != []}


def _why(reasons: Mapping[str, Reason], numbers: Mapping[str, int]) -> list[list]:
    """The `why` of a frame. In a long queue most requests have the same reason, and its entry does
    not list them.
    """
    requests: dict[Reason, list[int]] = {}
    for name, reason in reasons.items():
        requests.setdefault(reason, []).append(numbers[name])
    commonest = max(requests, key=lambda reason: len(requests[reason]))
    return [
        [
            reason.sentence,
            None if reason.behind is None else numbers[reason.behind],
            None if reason is commonest else ids,
            reason.limit,
        ]
        for reason, ids in requests.items()
    ]


def _counts(fold: Fold, rows: picture.Batch, running: Sequence[Sequence[int]]) -> list[int]:
    """The `counts` of a frame. running: [number, computed, known tokens] of each request."""
    pool = fold.state.pool
    ends = {n: computed for n, computed, _ in running}
    ends |= {n: start + count for n, start, count, *_ in rows}
    empty = _empty_slots(fold.tables, ends, pool.owners, fold.state.config)
    return [sum(row[2] for row in rows), pool.num_blocks - pool.num_free, len(pool.idle), empty]


def _table_changes(old: Map[int, tuple[int, ...]], new: Tables) -> list[list]:
    changes: list[list] = [[n, None, []] for n in old if n not in new]
    for n, table in new.items():
        old_table = old.get(n)
        if old_table == table:
            continue
        old_table = old_table or ()
        if table[: len(old_table)] == old_table:
            common = len(old_table)
        else:
            pairs = enumerate(zip(old_table, table, strict=False))
            common = next((i for i, (a, b) in pairs if a != b), len(table))
        changes.append([n, common, list(table[common:])])
    return changes


def _publications(fold: Fold) -> list[list[int]] | None:
    """Returns the changes of the blocks that can be found.

    It returns all of these blocks if the changes do not explain their number.
    """
    findable = fold.state.pool.hashes
    old = fold.picture.published
    new = [
        block for block in dict.fromkeys(fold.published) if block not in old and block in findable
    ]
    lost = [
        block for block in dict.fromkeys(fold.evicted) if block in old and block not in findable
    ]
    if len(old) + len(new) - len(lost) != len(findable):
        return [sorted(findable)]
    return [new, lost] if new or lost else None


def _empty_slots(
    tables: Tables, ends: Mapping[int, int], owners: Mapping[int, int], config: SchedulerConfig
) -> int:
    """Returns the slots of owned blocks without a token when the step ends.

    A shared block counts once, at its fullest.
    """
    size = config.block_size
    groups = config.groups
    # block -> tokens in it, for blocks that some table does not fill
    tokens_in: dict[int, int] = {}
    for n, table in tables.items():
        for i in range(ends[n] // size * groups, len(table)):
            block = table[i]
            tokens = ends[n] - i // groups * size
            tokens_in[block] = max(tokens_in.get(block, 0), tokens, 0)
    shared_blocks = {block for block in tokens_in if owners[block] > 1}
    if shared_blocks:  # another table may fill a shared block
        for n, table in tables.items():
            full = ends[n] // size * groups
            tokens_in.update((block, size) for block in shared_blocks.intersection(table[:full]))
    return sum(size - tokens for tokens in tokens_in.values())
