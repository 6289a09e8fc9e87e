"""A predicted run beside the same run of a real engine: `confirm(past, change, model)`.

The engine has the changed configuration, and is given each token. It gets each input before the
same step as the predicted run did. So both must decide the same, with the same blocks. A run that
cannot be repeated so is refused with the reason (engine_tokens.py).
"""

from __future__ import annotations

import tempfile
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import islice, zip_longest
from pathlib import Path
from typing import Any, NamedTuple
from zlib import crc32

from experiments.laboratory import differences, engine_tokens, paired, past, rerun
from experiments.laboratory.contents import Refused
from experiments.laboratory.differences import Difference
from experiments.laboratory.engine_tokens import EngineTokens
from experiments.laboratory.measured import Cell, cells
from experiments.laboratory.outcomes import Outcome
from experiments.laboratory.past import Past, decision
from experiments.laboratory.prediction import Prediction, reading
from experiments.laboratory.replicas import Inputs
from experiments.laboratory.rerun import CUT_OFF, NO_MEANING, Change, Run
from pagedjax import LLM
from pagedjax.engine.engine import Engine
from pagedjax.host.drafts import Sample
from pagedjax.host.event_log import Cancel, Commit, Forget, Schedule, Submit
from pagedjax.host.policies import POLICIES, Policy
from pagedjax.host.types import Event, Finished, Request, Sampled, Seq
from pagedjax.options.params import PoolingParams, SamplingParams

GIB = 2**30
LONGEST_SLEEP = 0.05  # seconds, so that an interrupt takes effect soon
REAL_TIME = "real time"


class OtherToken(NamedTuple):
    """The first token of a sequence that an engine samples otherwise.

    index: of the output. recorded, sampled: the token in each run; None: the sequence had ended.
    """

    request_id: str
    index: int
    recorded: int | None
    sampled: int | None


class OwnTokens(NamedTuple):
    """What the engine samples itself.

    equal: sequences that get the recorded tokens, of `sequences`.
    differences: of the others.
    """

    sequences: int
    equal: int
    differences: Sequence[OtherToken]


class Confirmation(NamedTuple):
    """A predicted run (A) beside that of an engine (B).

    difference: their first one.
    steps: that decide the same, with the same blocks.
    tokens: of these steps.
    without_meaning: tokens of requests that the recording saw cut off; the engine got made-up ones.
    inputs: what the engine got.
    own_tokens: None: they were not asked for.
    times: measured in real time beside predicted ones; (): not asked for.
    """

    difference: Difference
    steps: int
    tokens: int
    without_meaning: int
    inputs: EngineTokens
    own_tokens: OwnTokens | None = None
    times: Sequence[Cell] = ()

    @property
    def holds(self) -> bool:
        """Whether the engine does what was predicted."""
        return self.difference.equal


class RunWithTokens(Run):
    """A changed run for an engine, which must be given every token.

    Where the run has a token of no meaning, this one has a made-up token that stops nothing.
    """

    def __init__(self, past: Past, change: Change, vocab_size: int) -> None:
        super().__init__(past, change)
        self._vocab_size = vocab_size

    def _token(self, seq: Seq, length: int) -> int:
        token = super()._token(seq, length)
        if token != NO_MEANING or not seq.request.max_tokens:
            return token
        made_up = crc32(f"{seq.arrival} {length}".encode()) % self._vocab_size
        while made_up in seq.request.stop_token_ids:
            made_up = (made_up + 1) % self._vocab_size
        return made_up


class Script(NamedTuple):
    """What an engine repeats.

    run: the predicted run, when it has ended.
    predicted: the same as a past.
    inputs: the prompts and the tokens.
    """

    run: Run
    predicted: Past
    inputs: EngineTokens


def confirm(
    recorded: Past,
    prediction: Prediction,
    model: Any,
    *,
    buckets: Sequence[int] | None = None,
    options: Mapping[str, Any] | None = None,
    sampling: Mapping[str, Any] | None = None,
    real_time: bool = False,
    record: str | None = None,
) -> Confirmation:
    """Runs a prediction on a real engine, and compares.

    Args:
        recorded: the past of the prediction.
        model: what `LLM` takes.
        buckets: the engine's token buckets; None: its default ones.
        options: further arguments of `LLM`.
        sampling: arguments of `SamplingParams` with which the engine samples its own tokens, in a
            second run; None: it does not.
        real_time: whether the engine also runs with the requests at their recorded times, to
            measure what was predicted.
        record: a file for the recording of the engine.

    Raises:
        Refused: an engine cannot repeat the run, or not with these options.
        ValueError: as of `LLM`.
    """
    change = prediction.change
    engine_tokens.check(recorded, real_time=real_time)
    caching = recorded.shares if change.caching is None else change.caching
    engine = engine_of(
        model, change, caching=caching, buckets=buckets, options=options or {}, eager=real_time
    )
    script = script_of(recorded, change, engine.runtime.request_rules.vocab_size)
    if sampling is not None:
        _check_own_tokens(script.inputs, sampling)
    own_tokens = None
    times: Sequence[Cell] = ()
    with tempfile.TemporaryDirectory() as folder:
        file = record or Path(folder) / "engine.jsonl"
        engine.record(file)
        repeat(engine, script)
        engine.reset()
        difference = compare(script, file)
        if sampling is not None:
            own_tokens = sample(engine, script, sampling, Path(folder) / "own.jsonl")
        if real_time:
            times = _measured_times(engine, script, prediction, Path(folder) / "timed.jsonl")
    steps = islice(differences.steps(script.predicted), difference.step)
    return Confirmation(
        difference,
        steps=difference.step,
        tokens=sum([len(step.tokens) for step in steps]),
        without_meaning=script.run.inexact[CUT_OFF],
        inputs=script.inputs,
        own_tokens=own_tokens,
        times=times,
    )


def _measured_times(
    engine: Engine, script: Script, prediction: Prediction, file: Path
) -> Sequence[Cell]:
    """The times of requests in an engine in real time, beside the predicted ones. file: of the
    engine's recording.
    """
    outcomes = run_in_real_time(engine, script, file)
    predecessors = prediction.change.predecessors
    came = paired.came(prediction.recorded.outcomes, outcomes, predecessors)
    times = paired.times_of(outcomes, came)
    return cells(REAL_TIME, prediction.before, times, prediction.table)


def script_of(recorded: Past, change: Change, vocab_size: int) -> Script:
    """Predicts a run, with tokens of a vocabulary.

    Raises:
        Refused: an engine cannot repeat it.
    """
    run = RunWithTokens(recorded, change, vocab_size)
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "predicted.jsonl"
        rerun.record(file, run)
        predicted = past.read(file, policies_of(change))
    inputs = engine_tokens.engine_tokens(predicted, vocab_size, recorded=recorded)
    return Script(run, predicted, inputs)


def policies_of(change: Change) -> Mapping[str, Policy]:
    """The policies by name with which a recording of the changed run is read."""
    return {**POLICIES, change.policy.name: change.policy}


# --- the engine -----------------------------------------------------------------------------------


def engine_of(
    model: Any,
    change: Change,
    *,
    caching: bool,
    buckets: Sequence[int] | None,
    options: Mapping[str, Any],
    eager: bool,
) -> Engine:
    """An engine whose scheduler has the changed configuration.

    Raises:
        Refused: an option is one that the change decides, or the scheduler has another
            configuration.
    """
    config = change.config
    arguments: dict[str, Any] = {
        "block_size": config.block_size,
        "num_blocks": (config.num_blocks + 1) // config.groups - 1,
        "max_num_batched_tokens": config.max_num_batched_tokens,
        "max_num_seqs": config.max_num_seqs,
        "max_model_len": config.max_model_len,
        "chunked_prefill": config.chunked_prefill,
        "mixed_steps": config.mixed_steps,
        "reservation": config.reservation,
        "prefix_checkpoints": config.prefix_checkpoints,
        "policy": change.own_policy or change.policy,
        "enable_prefix_caching": caching,
        "preemption": "recompute",
    }
    for name in options:
        if name in arguments or name in ("swap_space_gib", "token_buckets", "speculative"):
            raise Refused(
                f"--engine gives {name}, and the recording, --set and --buckets decide it; leave "
                "it out"
            )
    arguments |= {"compilation": "eager" if eager else "lazy", "progress": False, **options}
    if buckets is not None:
        budget = config.max_num_batched_tokens
        arguments["token_buckets"] = (*[size for size in buckets if size < budget], budget)
    llm = LLM(model, **arguments)
    if config.host_blocks:
        geometry = llm.engine.runtime.geometry
        blocks = config.host_blocks // config.groups + 0.5  # the engine rounds down
        arguments["preemption"] = "swap"
        arguments["swap_space_gib"] = blocks * geometry.host_block_bytes / GIB
        llm = LLM(model, **arguments)
    fields = llm.engine.scheduler_state.config._asdict()
    for name, value in config._asdict().items():
        if fields[name] != value:
            raise Refused(
                f"the engine has {name} {fields[name]}, and the changed run has {value}; take the "
                "recorded model, and name a KV policy with --engine kv_policy=NAME"
            )
    return llm.engine


def submit(
    engine: Engine,
    request: Request,
    inputs: EngineTokens,
    arrivals: Sequence[int],
    *,
    shares: bool,
    sampling: Mapping[str, Any] | None = None,
) -> None:
    """Gives an engine a request of a recording.

    Args:
        request: with the ids of its sequences.
        arrivals: those of its sequences in `inputs`.
        shares: whether it shares blocks.
        sampling: how the engine samples; None: its tokens are given.
    """
    params: Any = PoolingParams(enable_prefix_caching=shares)
    outputs: dict[str, Sequence[int]] = {}
    if request.max_tokens:
        options: Mapping[str, Any] = {"temperature": 0.0} if sampling is None else sampling
        params = SamplingParams(
            **options,
            n=len(request.names),
            max_tokens=request.max_tokens,
            min_tokens=request.min_tokens,
            stop_token_ids=inputs.stops(request.stop_token_ids),
            ignore_eos=True,
            enable_prefix_caching=shares,
        )
        if sampling is None:
            pairs = zip(request.names, arrivals, strict=True)
            outputs = {name: inputs.outputs[arrival] for name, arrival in pairs}
    engine.add(
        request.request_id,
        inputs.prompts[arrivals[0]],
        params,
        forks=request.forks,
        priority=request.priority,
        user=request.user,
        tags=request.tags,
        predicted=request.predicted,
        service_class=request.service_class,
        deadline=request.deadline,
        given=outputs,
    )


def repeat(engine: Engine, script: Script) -> None:
    """Gives an engine the inputs of a run before the same steps, up to the first step that the
    engine decides otherwise.
    """
    for recorded in script.predicted.entries:
        entry = recorded.entry
        if isinstance(entry, Schedule):
            result = engine.step(now=entry.plan.now)
            if result is None or decision(result.plan) != decision(entry.plan):
                return
        elif isinstance(entry, Submit):
            _submit_recorded(engine, script, recorded.arrival, entry.request)
        elif isinstance(entry, Cancel):
            engine.cancel(entry.request_id, entry.reason)
        elif isinstance(entry, Forget):
            engine.reset_prefix_cache()


def _submit_recorded(
    engine: Engine,
    script: Script,
    arrival: int | None,
    request: Request,
    sampling: Mapping[str, Any] | None = None,
) -> None:
    assert arrival is not None, "`past.Reader` gives it"
    arrivals = range(arrival, arrival + len(request.names))
    shares = engine_tokens.shares(script.predicted, arrival)
    submit(engine, request, script.inputs, arrivals, shares=shares, sampling=sampling)


# --- the comparison -------------------------------------------------------------------------------


def compare(script: Script, engine_file: str | Path) -> Difference:
    """The first difference of a predicted run and that of an engine. The hashes of blocks may be
    others: what they let requests share is compared.
    """
    predicted = with_effect(script.predicted)
    engine_past = past.read(engine_file, policies_of(script.run.change))
    recorded_tokens = {stand_in: token for token, stand_in in script.inputs.stand_ins.items()}
    comparable = translated(engine_past, recorded_tokens)._replace(own_policy=predicted.own_policy)
    return differences.difference(predicted, comparable, blocks=True, ignored_fields=("hashes",))


def with_effect(recorded: Past) -> Past:
    """A past without cancellations of requests that had ended, which an engine does not record."""
    entries = [
        line for line in recorded.entries if not isinstance(line.entry, Cancel) or line.entry.events
    ]
    return recorded._replace(entries=tuple(entries))


def translated(recorded: Past, tokens: Mapping[int, int]) -> Past:
    """A past with other tokens in the place of some."""
    if not tokens:
        return recorded

    def translation(sample: Sample) -> Sample:
        if isinstance(sample, tuple):
            return tuple([tokens.get(token, token) for token in sample])
        return tokens.get(sample, sample)

    entries: list[past.Recorded] = []
    for line in recorded.entries:
        entry = line.entry
        if isinstance(entry, Submit):
            stops = frozenset([tokens.get(token, token) for token in entry.request.stop_token_ids])
            entry = entry._replace(request=entry.request._replace(stop_token_ids=stops))
        elif isinstance(entry, Commit):
            entry = entry._replace(sampled=[translation(sample) for sample in entry.sampled])
        entries.append(line._replace(entry=entry))
    return recorded._replace(entries=tuple(entries))


# --- the engine's own tokens ----------------------------------------------------------------------


def _check_own_tokens(inputs: EngineTokens, sampling: Mapping[str, Any]) -> None:
    """Raises Refused if an engine cannot sample what the recorded one did, or with such options."""
    if inputs.made_up:
        raise Refused(
            "the recording has no prompts, or a cache salt or an adapter that it does not name, so "
            "the engine would sample other tokens; record with prompts=True, or leave --sampling out"
        )
    if inputs.stand_ins:
        raise Refused(
            f"the recording has {len(inputs.stand_ins)} tokens beyond the model's vocabulary, so "
            "the recorded model was another one; take that, or leave --sampling out"
        )
    decided = ("n", "max_tokens", "min_tokens", "stop_token_ids", "ignore_eos", "stop")
    for name in sampling:
        if name in decided or name == "enable_prefix_caching":
            raise Refused(f"--sampling gives {name}, which the recording decides; leave it out")


def sample(
    engine: Engine, script: Script, sampling: Mapping[str, Any], file: str | Path
) -> OwnTokens:
    """What the engine samples itself, with the inputs before the same steps.

    Args:
        file: for its recording.
    """
    ends = ends_from_outside(script.predicted)
    lengths: Counter[str] = Counter()
    arrivals: dict[str, int] = {}

    def step(clock: float | None) -> None:
        result = engine.step(now=clock)
        for name in _sampled_names(result.events if result else ()):
            lengths[name] += 1
            end = ends.get(arrivals[name])
            if end is not None and lengths[name] == end:
                engine.cancel(name, "stop")

    engine.record(file)
    for recorded in script.predicted.entries:
        entry = recorded.entry
        if isinstance(entry, Schedule) and engine.has_work:
            step(entry.plan.now)
        elif isinstance(entry, Submit):
            request = with_unused_ids(engine, entry.request)
            _submit_recorded(engine, script, recorded.arrival, request, sampling)
            for arrival, name in enumerate(request.names, recorded.arrival or 0):
                arrivals[name] = arrival
                lengths[name] = 0
        elif isinstance(entry, Cancel) and entry.reason == "abort":
            engine.cancel(entry.request_id, "abort")
        elif isinstance(entry, Forget):
            engine.reset_prefix_cache()
    while engine.has_work:
        step(None)
    engine.record(None)
    engine_past = past.read(file, policies_of(script.run.change))
    engine.reset()
    return _own_tokens(script, engine_past)


def _own_tokens(script: Script, engine_past: Past) -> OwnTokens:
    """Compares what an engine sampled with the recorded tokens."""
    run = script.run
    first_differences: list[OtherToken] = []
    sequences = 0
    for arrival, output in script.predicted.outputs.items():
        recorded_tokens = run.past.outputs[run.past_arrivals[arrival]].tokens
        count = min(len(recorded_tokens), len(output.tokens))
        if not count:
            continue
        sequences += 1
        own_tokens = engine_past.outputs[arrival].tokens[:count]
        pairs = zip_longest(recorded_tokens[:count], own_tokens)
        for index, (recorded_token, own_token) in enumerate(pairs):
            if recorded_token != own_token:
                request = script.predicted.requests[output.first]
                name = request.names[arrival - output.first]
                first_differences.append(OtherToken(name, index, recorded_token, own_token))
                break
    return OwnTokens(sequences, sequences - len(first_differences), first_differences)


def ends_from_outside(recorded: Past) -> dict[int, int]:
    """The sequences that something outside of the scheduler ended because of their text, such as a
    stop string -> the number of output tokens of each, by its arrival.
    """
    return {
        arrival: output.num_output
        for arrival, output in recorded.outputs.items()
        if output.cancelled and output.ended in ("stop", "length") and output.num_output
    }


def with_unused_ids(engine: Engine, request: Request) -> Request:
    """A request whose ids no unfinished sequence has: an id that is taken gets a "'" at its end."""
    names: list[str] = []
    for name in request.names:
        while name in engine.scheduler_state.ids:
            name += "'"
        names.append(name)
    return request._replace(request_id=names[0], forks=tuple(names[1:]))


def _sampled_names(events: Sequence[Event]) -> list[str]:
    """The sequences of new tokens."""
    sampled = [event for event in events if isinstance(event, Sampled)]
    return [name for event in sampled for name in event.request_ids]


# --- real time ------------------------------------------------------------------------------------


def run_in_real_time(engine: Engine, script: Script, file: str | Path) -> dict[int, Outcome]:
    """Runs the requests at their recorded times -> what each sequence got, by its arrival in the
    past.

    Args:
        file: for the engine's recording.
    """
    driver = RealTime(engine, script)
    start = time.perf_counter()
    engine.record(file, times=True)
    driver.drive(start)
    engine.record(None)
    engine_past = past.read(file, policies_of(script.run.change))
    outcomes = reading(rerun.run(engine_past, rerun.unchanged(engine_past))).outcomes
    arrivals = driver.past_arrivals
    return {
        arrivals[arrival]: replace(outcome, first=arrivals[outcome.first])
        for arrival, outcome in outcomes.items()
    }


class RealTime:
    """Requests that come at their recorded times, or after the end of others.

    past_arrivals: by the arrival of each sequence in the engine, that in the past.
    """

    def __init__(self, engine: Engine, script: Script) -> None:
        predicted = script.run
        self.past_arrivals: list[int] = []
        self._engine = engine
        self._past = predicted.past
        self._inputs = Inputs(predicted.past, predicted.change)
        self._tokens = script.inputs
        self._ends = ends_from_outside(predicted.past)
        self._arrivals: dict[str, int] = {}  # in the past, of unfinished sequences
        self._names: dict[int, str] = {}  # the inverse
        self._lengths: Counter[int] = Counter()  # output tokens by the arrival in the past
        self._unfinished: Counter[int] = Counter()  # sequences of each request
        self._predicted_arrivals = {
            arrival: number for number, arrival in enumerate(predicted.past_arrivals)
        }

    def drive(self, start: float) -> None:
        """Runs to the end. `start` is when the time is 0, in seconds of `time.perf_counter`."""
        engine = self._engine
        while True:
            seconds = time.perf_counter() - start
            due = self._inputs.next
            if due is not None and due <= seconds:
                self._take(self._inputs.pop(), seconds)
            elif engine.has_work:
                result = engine.step()
                self._read(result.events if result else (), time.perf_counter() - start)
            elif due is None:
                return
            else:
                time.sleep(min(due - seconds, LONGEST_SLEEP))

    def _take(self, recorded: past.Recorded, at: float) -> None:
        entry = recorded.entry
        if isinstance(entry, Submit):
            self._submit(recorded.arrival, entry.request)
        elif isinstance(entry, Cancel) and entry.reason == "abort":
            name = self._names.get(-1 if recorded.arrival is None else recorded.arrival)
            if name is not None:
                self._end(self._engine.cancel(name, "abort"), at)
        elif isinstance(entry, Forget):
            self._engine.reset_prefix_cache()

    def _submit(self, first: int | None, request: Request) -> None:
        assert first is not None, "`past.Reader` gives it"
        request = with_unused_ids(self._engine, request)
        arrivals = range(first, first + len(request.names))
        submit(
            self._engine,
            request,
            self._tokens,
            [self._predicted_arrivals[arrival] for arrival in arrivals],
            shares=engine_tokens.shares(self._past, first),
        )
        self.past_arrivals += arrivals
        self._unfinished[first] = len(request.names)
        for arrival, name in zip(arrivals, request.names, strict=True):
            self._arrivals[name] = arrival
            self._names[arrival] = name

    def _read(self, events: Sequence[Event], at: float) -> None:
        """Reads what a step gave, and ends the sequences that were ended so in the recording."""
        for name in _sampled_names(events):
            self._lengths[self._arrivals[name]] += 1
        names = dict.fromkeys(_sampled_names(events))
        self._end(events, at)
        for name in names:
            arrival = self._arrivals.get(name)
            if arrival is not None and self._lengths[arrival] == self._ends.get(arrival):
                self._end(self._engine.cancel(name, "stop"), at)

    def _end(self, events: Sequence[Event], at: float) -> None:
        """Notes the ends of sequences; the followers of a request come after its last one."""
        for event in events:
            if isinstance(event, Finished):
                arrival = self._arrivals.pop(event.request_id)
                del self._names[arrival]
                first = self._past.outputs[arrival].first
                self._unfinished[first] -= 1
                if not self._unfinished[first]:
                    self._inputs.end(first, at)
