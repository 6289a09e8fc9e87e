"""The first difference of two recorded runs: `difference(first, second)`.

Runs are compared step by step, the first with the first and so on, by what came from outside
before a step, by what the step decided, and by the tokens that it sampled. Times and the names of
blocks are not compared.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import zip_longest
from typing import Any, NamedTuple

from experiments.laboratory.past import Past
from experiments.laboratory.rerun import run, unchanged
from pagedjax.host import scheduler
from pagedjax.host.event_log import Cancel, Commit, Entry, Schedule, Submit, kind_of, request_record
from pagedjax.host.scheduler import SchedulerState
from pagedjax.host.types import Beamed, Plan, Sampled

# what a step decides, in the order in which the scheduler does
KINDS = (
    "rejected",
    "preempted",
    "swapped",
    "admitted",
    "cached",
    "rows",
    "starts",
    "counts",
    "drafts",
)
BLOCKS = "blocks"  # which blocks sequences have, and which are moved; it is last
ENDS = "ends"  # a run has no such step
NO_STEP = "no step"
# in the text of a difference
MOST_CAUSES = 8
MOST_ROWS = 24
MOST_IDS = 6
GAUGE = 10  # characters of a bar


class Step(NamedTuple):
    """A step of a recorded run.

    inputs: what came from outside since the step before.
    offered: the drafts that there were, by sequence.
    plan: what it decided; None: the run ended after these inputs.
    state: of the scheduler when it had decided.
    tokens: those that it sampled, by sequence; of beams, their choices.
    """

    inputs: tuple[Entry, ...]
    offered: Mapping[str, int]
    plan: Plan | None
    state: SchedulerState
    tokens: tuple[tuple[str, object], ...] = ()


class Difference(NamedTuple):
    """Where two runs differ first.

    step: the number of the step, from 0.
    kind: one of `KINDS`, `BLOCKS`, or `ENDS`; "": their decisions are equal to the end.
    causes: which inputs differ before, in sentences.
    first, second: the step in each run.
    """

    step: int
    kind: str
    causes: tuple[str, ...]
    first: Step | None = None
    second: Step | None = None

    @property
    def equal(self) -> bool:
        """Whether the runs are equal."""
        return not (self.kind or self.causes)


def kind_of_difference(
    first: Plan | None, second: Plan | None, kinds: Sequence[str] = KINDS
) -> str:
    """In what two plans of one step differ first, one of `kinds`; "": in nothing; `ENDS`: one run
    has no such step.
    """
    if first is None or second is None:
        return "" if first is second else ENDS
    for kind in kinds:
        if decided(first, kind) != decided(second, kind):
            return kind
    return ""


def decided(plan: Plan, kind: str) -> Any:
    """What a plan decides of one kind."""
    if kind == "rows":
        return tuple([seq.request.request_id for seq in plan.seqs])
    if kind == BLOCKS:
        tables = [seq.blocks for seq in plan.seqs]
        return tables, plan.copies, plan.swap_out, plan.swap_in
    return getattr(plan, kind)


def difference(
    first: Past, second: Past, *, blocks: bool = False, ignored_fields: Sequence[str] = ()
) -> Difference:
    """The first difference of two recorded runs.

    Args:
        blocks: whether the names of blocks count.
        ignored_fields: of requests.
    """
    kinds = (*KINDS, BLOCKS) if blocks else KINDS
    causes = list(_settings(first, second))
    step = 0
    for step, (a, b) in enumerate(zip_longest(steps(first), steps(second))):
        if len(causes) < MOST_CAUSES:
            causes += _inputs(step, a, b, ignored_fields)
        kind = kind_of_difference(a.plan if a else None, b.plan if b else None, kinds)
        if kind:
            return Difference(step, kind, tuple(causes), a, b)
        if a and b and a.tokens != b.tokens and len(causes) < MOST_CAUSES:
            causes.append(_tokens(step, a, b))
    return Difference(step, "", tuple(causes))


def steps(past: Past) -> Iterator[Step]:
    """The steps of a recorded run, and what came after the last one."""
    made_again = run(past, unchanged(past))
    inputs: list[Entry] = []
    step: Step | None = None
    for transition in made_again:
        entry = transition.entry
        if isinstance(entry, Schedule):
            if step is not None:
                yield step
            step = Step(tuple(inputs), entry.offered, entry.plan, made_again.state)
            inputs = []
        elif isinstance(entry, Commit) and step is not None:
            yield step._replace(tokens=_sampled(entry))
            step = None
        else:
            inputs.append(entry)
    if step is not None:
        yield step
    yield Step(tuple(inputs), {}, None, made_again.state)


def _sampled(commit: Commit) -> tuple[tuple[str, object], ...]:
    tokens: list[tuple[str, object]] = []
    for event in commit.events:
        if isinstance(event, Sampled):
            tokens += zip(event.request_ids, event.token_ids, strict=True)
        elif isinstance(event, Beamed):
            children = zip(event.parents, event.token_ids, strict=True)
            tokens += zip(event.request_ids, children, strict=True)
    return tuple(tokens)


def _settings(first: Past, second: Past) -> Iterator[str]:
    """Sentences on how the policies and the configurations differ."""
    if (first.policy.name, first.own_policy) != (second.policy.name, second.own_policy):
        a = first.own_policy or first.policy.name
        b = second.own_policy or second.policy.name
        yield f"the policy is {a} in A and {b} in B"
    fields = first.config._asdict()
    for name, value in second.config._asdict().items():
        if fields[name] != value:
            yield f"{name} is {fields[name]} in A and {value} in B"


def _inputs(
    step: int, first: Step | None, second: Step | None, ignored_fields: Sequence[str]
) -> Iterator[str]:
    """A sentence on the first input before a step that differs, if one does."""
    a_inputs = first.inputs if first else ()
    b_inputs = second.inputs if second else ()
    for a, b in zip_longest(a_inputs, b_inputs):
        text = _input_difference(a, b, ignored_fields)
        if text:
            yield f"before step {step}: {text}"
            return
    a_offered = dict(first.offered) if first else {}
    b_offered = dict(second.offered) if second else {}
    for name in dict.fromkeys([*a_offered, *b_offered]):
        if a_offered.get(name, 0) != b_offered.get(name, 0):
            yield (
                f"before step {step}: {name!r} has {a_offered.get(name, 0)} drafts in A and "
                f"{b_offered.get(name, 0)} in B"
            )
            return


def _input_difference(
    first: Entry | None, second: Entry | None, ignored_fields: Sequence[str]
) -> str:
    """How an input of A differs from that of B in the same place; "": not at all."""
    if first is None:
        return f"only B has {_name(second)}" if second is not None else ""
    if second is None:
        return f"only A has {_name(first)}"
    if isinstance(first, Submit) and isinstance(second, Submit):
        a = request_record(first.request)
        b = request_record(second.request)
        if a["request_id"] == b["request_id"]:
            for name in dict.fromkeys([*a, *b]):
                if a.get(name) != b.get(name) and name not in ignored_fields:
                    return (
                        f"request {a['request_id']!r} has {name} {a.get(name)!r:.80} in A and "
                        f"{b.get(name)!r:.80} in B"
                    )
            if list(first.prompt) != list(second.prompt) and len(first.prompt) == len(
                second.prompt
            ):
                return f"request {a['request_id']!r} has another prompt in B"
            return ""
    elif isinstance(first, Cancel) and isinstance(second, Cancel):
        if first[:2] == second[:2]:
            return ""
    elif type(first) is type(second) and not isinstance(first, Submit):
        return ""
    return f"A has {_name(first)} and B has {_name(second)}"


def _name(entry: Entry) -> str:
    """An input in words."""
    if isinstance(entry, Submit):
        return f"the submit of {entry.request.request_id!r}"
    if isinstance(entry, Cancel):
        return f"the cancel of {entry.request_id!r} ({entry.reason})"
    return f"a transition {kind_of(type(entry))!r}"


def _tokens(step: int, first: Step, second: Step) -> str:
    """A sentence on the first token of a step that differs."""
    pairs = zip_longest(first.tokens, second.tokens, fillvalue=("nothing", None))
    (name, token), (other_name, other_token) = next((a, b) for a, b in pairs if a != b)
    if name == other_name:
        return f"step {step} samples {token} for {name!r} in A and {other_token} in B"
    return f"step {step} samples for {name!r} in A and for {other_name!r} in B"


def side(step: Step | None) -> dict[str, Any]:
    """A step as JSON: its rows, who enters and leaves, the queue and the free blocks."""
    if step is None or step.plan is None:
        return {"ends": True}
    plan = step.plan
    state = step.state
    drafts = plan.drafts or (0,) * len(plan.seqs)
    rows = zip(plan.seqs, plan.starts, plan.counts, plan.lengths, drafts, strict=True)
    running = {seq.request_id: seq for seq in scheduler.running(state)}
    computing = {seq.request.request_id for seq in plan.seqs}
    idle = [name for name in running if name not in computing]
    return {
        "ends": False,
        "rows": [
            {
                "id": seq.request.request_id,
                "start": start,
                "count": count,
                "length": length,
                "limit": seq.limit,
                "blocks": len(running[seq.request.request_id].blocks),
                "drafts": num_drafts,
            }
            for seq, start, count, length, num_drafts in rows
        ],
        "idle": idle,
        "rejected": list(plan.rejected),
        "preempted": list(plan.preempted),
        "swapped": list(plan.swapped),
        "admitted": list(plan.admitted),
        "cached": list(plan.cached),
        "waiting": [seq.request_id for seq in state.waiting],
        "free_blocks": plan.num_blocks - plan.blocks_used,
        "num_blocks": plan.num_blocks,
    }


def as_json(result: Difference) -> dict[str, Any]:
    """A difference as JSON."""
    return {
        "equal": result.equal,
        "step": result.step,
        "kind": result.kind or None,
        "causes": list(result.causes),
        "a": side(result.first) if result.kind else None,
        "b": side(result.second) if result.kind else None,
    }


def text(result: Difference) -> str:
    """A difference in lines for a terminal."""
    if result.equal:
        return f"equal: {result.step} steps, with the same inputs, decisions and tokens"
    lines = [f"  {cause}" for cause in result.causes]
    if lines:
        lines.insert(0, "inputs that differ:")
    if not result.kind:
        return "\n".join([f"the decisions of all {result.step} steps are equal", *lines])
    if result.kind == ENDS:
        run = "A" if result.first is None or result.first.plan is None else "B"
        lines.append(f"equal up to step {result.step}, where {run} ends")
    else:
        lines.append(f"step {result.step} is the first that decides differently: {result.kind}")
    return "\n".join([*lines, *_beside(_picture(result.first), _picture(result.second))])


def _picture(step: Step | None) -> dict[str, str]:
    """A step in lines, each under what it is about."""
    values = side(step)
    if values["ends"]:
        return {"": NO_STEP}
    free = values["free_blocks"]
    pool = _gauge(values["num_blocks"] - free, values["num_blocks"])
    lines = {"free": f"{pool} {free} of {values['num_blocks']} blocks free"}
    admitted = [
        f"{name} ({cached} cached)" if cached else name
        for name, cached in zip(values["admitted"], values["cached"], strict=True)
    ]
    for name in ("rejected", "preempted", "swapped", "admitted", "idle", "waiting"):
        ids = admitted if name == "admitted" else values[name]
        if ids:
            lines[name] = f"{name}: {_shortened(ids)}"
    lines["computes"] = "computes:"
    for row in values["rows"][:MOST_ROWS]:
        drafts = f", {row['drafts']} drafts" if row["drafts"] else ""
        stop = row["start"] + row["count"]
        text = f"  {row['id']} {_gauge(stop, row['limit'])} {row['start']}..{stop}"
        blocks = f"{row['blocks']} block{'s' if row['blocks'] != 1 else ''}"
        lines[f"row {row['id']}"] = f"{text} of {row['length']}, {blocks}{drafts}"
    if len(values["rows"]) > MOST_ROWS:
        lines["more rows"] = f"  and {len(values['rows']) - MOST_ROWS} more rows"
    return lines


def _gauge(part: int, limit: int) -> str:
    """A bar: the blocks in use, or the tokens of a sequence that are computed after the step, of
    all that it may get.
    """
    full = min(round(GAUGE * part / limit), GAUGE)
    return f"[{'#' * full}{'.' * (GAUGE - full)}]"


def _shortened(ids: Sequence[str]) -> str:
    hidden_note = f" and {len(ids) - MOST_IDS} more" if len(ids) > MOST_IDS else ""
    return " ".join(ids[:MOST_IDS]) + hidden_note


def _beside(first: Mapping[str, str], second: Mapping[str, str]) -> list[str]:
    """Two columns of lines. What is about the same is in one line, with a mark if it differs."""
    width = max([len(line) for line in (*first.values(), "A")]) + 2
    lines = [f"{'A':{width}}  B"]
    for topic in _merged(list(first), list(second)):
        a = first.get(topic, "")
        b = second.get(topic, "")
        lines.append(f"{a:{width}}{' ' if a == b else '|'} {b}".rstrip())
    return lines


def _merged(first: Sequence[str], second: Sequence[str]) -> list[str]:
    """All topics, in an order that keeps that of the first, and that of the second where it can."""
    topics: list[str] = []

    def add_from_second(start: int, stop: int) -> None:
        topics.extend([topic for topic in second[start:stop] if topic not in first])

    start = 0  # of the topics of the second that are not yet considered
    for topic in first:
        if topic in second[start:]:
            stop = second.index(topic, start)
            add_from_second(start, stop)
            start = stop + 1
        topics.append(topic)
    add_from_second(start, len(second))
    return topics
