"""The config of an experiment: model, engine, workload, repeats, and swept keys. Imports no jax.

    name: block-size              # the folder of its results
    question: How much does the block size matter?
    model: smollm2-135m
    engine: {max_num_seqs: 16}    # fields of pagedjax.options.config.EngineConfig; policy: mine.py:NAME is
                                  # your own policy, {name: mine.py:NAME, worth: 64} a policy with
                                  # parameters, and engine.policy.worth can be swept
    cache_tokens: 8192            # engine.num_blocks = cache_tokens / block_size, so all points have
                                  # one capacity
    workload: {kind: prompts, file: prompts/english.txt}      # see workloads.py
    sampling: {temperature: 0.0}  # fields of SamplingParams; the workload has the output lengths;
                                  # n: branches
    warmup: {requests: 2, max_tokens: 4}                      # untimed, before every measured run
    repeats: 3
    sweep: {grid: {engine.block_size: [8, 16], engine.max_num_batched_tokens: [64, 256]}}
    simulate: {chip: h200, model: llama-3-8b}     # no device: a cost model advances a clock, see
                                                  # simulate.py
    metrics: [mine.py:jain]       # your own functions of the records of a run
    records: sums                 # for a long simulation: keep no records of steps and of the
                                  # times of tokens, see totals.py
    record: true                  # keep every decision of the scheduler, for `pagedjax view`
    replicas: {count: 16, router: prefix}         # several simulated engines; router: mine.py:NAME
                                                  # is your own; changes: [{at: 30.0, join: 2},
                                                  # {at: 60.0, leave: 1}], see Change
    pools: {prefill: {count: 2}, decode: {count: 1}, link_gb_s: 50}   # in place of replicas, see
                                                                      # pool_options.py

A sweep's parts multiply: `grid` is every combination, `zip` takes the first values of its lists
together, then the second ones, and `list` gives points key by key.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, NamedTuple, TypeVar, get_args

from experiments.core import own_metrics, policy_fields, pool_options, selection
from experiments.core.overrides import combinations, override_all, put, short_names
from experiments.core.point_key import NOT_MEASURED, OWN_VALUES, point_key
from experiments.core.pool_options import POOLS, Pool, Pools
from experiments.core.replica_options import Replicas
from experiments.core.strict_yaml import load_file, parse
from experiments.core.workloads import (
    HINTS,
    Own,
    Prompts,
    RecordedRun,
    Spec,
    check,
    has_sessions,
    limits_of,
)
from experiments.simulation import cost
from experiments.simulation.cost import STEPS, Simulate
from pagedjax import routing
from pagedjax.host import kv_policies, policies, purity
from pagedjax.options.config import EngineConfig, KVPolicyOptions, one_of
from pagedjax.options.own_names import name_in_one_line, names_own_value, own_name
from pagedjax.options.params import SamplingParams
from pagedjax.routing import purity as routers_purity

# keys of a user's own values outside of the section `engine`
NOT_OF_ENGINE = ("workload.kind", "metrics", "simulate.cost")
Records = Literal["full", "sums"]
# Fields of SamplingParams that a tokenizer or `LLM` reads, and what an experiment has instead.
NEED_TEXT = {
    "stop": "use sampling.stop_token_ids",
    "bad_words": "use sampling.bad_words_token_ids",
    "structured_outputs": "python -m experiments.bench.structured measures what forms cost",
    "truncate_prompt_tokens": "the workload has the lengths of prompts",
    "trace_decode_token_ids": "a workload of kind recorded gives the tokens of each request",
}
# where a user's own value may be named
OWN_SECTIONS = {"engine", "replicas", "pools", "workload", "simulate", "metrics"}
Routed = TypeVar("Routed", Replicas, Pool)
Value = TypeVar("Value")


@dataclass(frozen=True)
class Warmup:
    """The first `requests` of the workload, at most `max_tokens` output tokens each, untimed."""

    requests: int = 2
    max_tokens: int = 8

    def __post_init__(self) -> None:
        for name, minimum in (("requests", 0), ("max_tokens", 1)):
            value = getattr(self, name)
            if value < minimum:
                raise ValueError(f"{name} is {value!r}; it must be at least {minimum}")


@dataclass(frozen=True)
class Slo:
    """Targets of goodput in seconds; None means no target.

    `itl` bounds the mean gap between output tokens.
    """

    ttft: float | None = None
    itl: float | None = None

    def __post_init__(self) -> None:
        for name in ("ttft", "itl"):
            value = getattr(self, name)
            if value is not None and value <= 0:
                raise ValueError(
                    f"{name} is {value!r}; it must be above 0 seconds, or null for no target"
                )


@dataclass(frozen=True)
class Experiment:
    """One point of a sweep, checked.

    reseed: repeat r draws its workload from seed + r instead of seed.
    metrics: functions of your own, mine.py:NAME, of the records of a run: NAME(requests, steps)
        gets lists of `RequestRecord` and `StepRecord`, and returns a number, or numbers by their
        names. A function with parameters is {name: mine.py:NAME, worth: 64}. Its numbers are in
        summaries, tables, reports and comparisons as `own.NAME`.
    records: "sums" keeps no record of a step and only the first and the last time of a request's
        tokens, for long simulations; percentiles over tokens and steps are then of rounded numbers.
    record: keep a recording of each run, `recording.jsonl` in its folder, and the viewer's page of
        it; with replicas, a recording of each, such as `recording.0.jsonl`. Recording changes no
        number of a simulated run, so the point is the same, and a finished run that has no
        recording is simulated again. Recording a measured run takes host time in each step, so a
        measured run with it is another point.
    """

    name: str
    workload: Spec
    question: str = ""
    model: str = "smollm2-135m"
    engine: EngineConfig = field(default_factory=EngineConfig)
    cache_tokens: int | None = None
    sampling: SamplingParams = field(default_factory=SamplingParams)
    warmup: Warmup = field(default_factory=Warmup)
    slo: Slo = field(default_factory=Slo)
    repeats: int = 1
    seed: int = 0
    reseed: bool = False
    simulate: Simulate | None = None
    replicas: Replicas | None = None
    pools: Pools | None = None
    records: Records = "full"
    record: bool = False
    metrics: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if not self.name or self.name.startswith(".") or any(c in self.name for c in '/\\:*?"<>|'):
            raise ValueError(
                f"name is {self.name!r}; a folder gets it: letters, digits, '-', '_' and inner dots"
            )
        if self.repeats < 1:
            raise ValueError(f"repeats is {self.repeats}; it must be at least 1")
        if self.seed < 0:
            raise ValueError(f"seed is {self.seed}; it must be at least 0")
        for name, instead in NEED_TEXT.items():
            if getattr(self.sampling, name):
                raise ValueError(
                    f"sampling.{name}: an experiment runs on token ids, without text; {instead}"
                )
        if self.sampling.taps:
            raise ValueError(
                "sampling.taps: an experiment keeps no arrays; leave it out, and give taps to "
                "LLM.generate"
            )
        if self.engine.compilation == "background":
            raise ValueError(
                "engine.compilation is 'background', and a measured run compiles everything "
                "first; set it to eager"
            )
        if self.simulate and not self.sampling.ignore_eos:
            raise ValueError(
                "sampling.ignore_eos is false, and a simulation has no tokens that could end a "
                "request; set it to true"
            )
        if self.replicas and not self.simulate:
            raise ValueError(
                f"replicas.count is {self.replicas.count} and there is no simulate section, but a "
                "measured run has 1 engine; add one, or leave replicas out"
            )
        pool_options.check_pools(self)
        self._check_limits()
        self._check_given_tokens()
        self._check_records()
        self._check_record()
        size = self.engine.block_size
        if self.cache_tokens is not None and self.engine.num_blocks is not None:
            raise ValueError("cache_tokens and engine.num_blocks are both given; give one of them")
        if self.cache_tokens is not None and (self.cache_tokens < size or self.cache_tokens % size):
            raise ValueError(
                f"cache_tokens is {self.cache_tokens}; it must be a multiple of engine.block_size "
                f"({size}), and at least {size}"
            )

    def _check_given_tokens(self) -> None:
        """Raises ValueError if an option does not go with the outputs of a recording."""
        if not isinstance(self.workload, RecordedRun):
            return
        try:
            dataclasses.replace(self.sampling, trace_decode_token_ids=(0,))
        except ValueError as error:
            raise ValueError(
                f"workload.kind is 'recorded', which gives the tokens of outputs: {error}"
            ) from None
        if self.engine.reservation == "oracle":
            raise ValueError(
                "workload.kind is 'recorded', whose requests may end before their limits, and "
                "engine.reservation is 'oracle', which takes the limit for the length; set it to "
                "pow2 or max"
            )

    def _check_limits(self) -> None:
        """Raises ValueError if requests end at drawn lengths before their limits, and an option
        does not let them.
        """
        if self.workload.predicted and not self.sampling.ignore_eos:
            raise ValueError(
                "workload.predicted is given, and sampling.ignore_eos is false, so that the model "
                "may end a request at a length that nobody knows before; set it to true"
            )
        if has_sessions(self.workload):
            why = None
            if not self.sampling.ignore_eos:
                why = "sampling.ignore_eos is false; set it to true"
            elif self.sampling.stop_token_ids:
                why = "sampling.stop_token_ids is given; leave it out"
            if why:
                raise ValueError(
                    "the workload has sessions, whose turns have the answers before them in their "
                    f"prompts, so an answer must end at its drawn length, and {why}"
                )
        if limits_of(self.workload) is None:
            return
        key = "workload.output" if isinstance(self.workload, Prompts) else "workload.max_tokens"
        why = None
        if not self.sampling.ignore_eos:
            why = (
                "sampling.ignore_eos is false, so that the model may end a request before its "
                "drawn length; set it to true"
            )
        elif self.engine.reservation == "oracle":
            why = (
                "engine.reservation is 'oracle', which reserves the limit of a request as if it "
                "were the length of its output; set it to pow2 or max"
            )
        elif self.engine.speculative and not self.simulate:
            why = (
                "engine.speculative is set: a measured step may give tokens beyond the drawn "
                "length; leave it out, or add a simulate section"
            )
        if why:
            raise ValueError(f"{key} sets limits apart from the lengths of outputs, and {why}")

    def _check_records(self) -> None:
        one_of("records", self.records, get_args(Records))
        why = None
        if self.records == "full":
            return
        if self.metrics:
            why = f"metrics has {self.metrics[0]!r}, which reads records"
        elif not self.simulate:
            why = "there is no simulate section: a measured run keeps all of its records"
        elif self.pools:
            why = "with pools, transfers are counted by their records"
        elif self.replicas and any(change.fail for change in self.replicas.changes):
            why = (
                "replicas.changes has a replica that fails, whose lost tokens cannot be taken out "
                "of sums"
            )
        if why:
            raise ValueError(f"records is 'sums', and {why}; leave records out")

    def _check_record(self) -> None:
        if not self.record:
            return
        if self.pools:
            raise ValueError(
                "record is true, and the config has pools: a sequence on its way keeps its blocks "
                "in the pool that it left, which no line of a recording says; leave record out"
            )
        if self.records == "sums":
            raise ValueError(
                "record is true and records is 'sums', but a recording has each step of the run; "
                "leave one of them out"
            )

    @property
    def engine_config(self) -> EngineConfig:
        """The engine's configuration with `cache_tokens` turned into blocks."""
        if self.cache_tokens is None:
            return self.engine
        return dataclasses.replace(
            self.engine, num_blocks=self.cache_tokens // self.engine.block_size
        )

    @property
    def num_replicas(self) -> int:
        """The number of engines of the whole experiment."""
        if self.pools:
            return self.pools.count
        return self.replicas.total if self.replicas else 1


class Point(NamedTuple):
    """One resolved configuration of a sweep.

    `content` and `source`: text and path of the workload's file, or "".
    """

    experiment: Experiment
    swept: dict[str, Any]
    key: str  # point_key: sha256 in hexadecimal
    content: str
    source: str

    @property
    def label(self) -> str:
        """The swept keys, by their last names where those are unique: `block_size=16, rate=2.0`."""
        names = short_names(self.swept)
        texts = (f"{names[path]}={selection.value_text(self.swept[path])}" for path in names)
        return ", ".join(texts) or "one point"


def load(path: Path, overrides: tuple[str, ...] = ()) -> list[Point]:
    """The points of the experiment in `path`, after `overrides` of the form `a.b=yaml`, in the
    order of the sweep.

    Raises:
        ValueError: bad YAML, unknown key, wrong type or value, a missing workload file, or two
            equal points.
    """
    raw = load_file(path)
    override_all(raw, overrides)
    return expand(raw, folder=path.parent)


def expand(raw: dict[str, Any], folder: Path) -> list[Point]:
    """The points of a raw config. Files are searched in `folder`, then in the current folder."""
    _refuse_seeds(raw)
    base = {key: value for key, value in raw.items() if key != "sweep"}
    points: list[Point] = []
    contents: dict[str | None, tuple[str, str]] = {}  # by the name of the workload's file
    for swept in combinations(raw.get("sweep")):
        values = copy.deepcopy(base)
        for path in sorted(swept, key=lambda path: path.count(".")):  # a name before its parameters
            if path.split(".")[0] in NOT_MEASURED:
                raise ValueError(
                    f"sweep has the key {path!r}; {', '.join(NOT_MEASURED)} cannot be swept"
                )
            put(values, path, copy.deepcopy(swept[path]))
        swept = {path: with_names_in_one_line(value, path) for path, value in swept.items()}
        for section in OWN_SECTIONS & values.keys():
            values[section] = with_names_in_one_line(values[section], section)
        _refuse_output_lengths(values.get("sampling"))
        _refuse_ignored_model(values)
        experiment = _with_own_files(_with_fit(parse(Experiment, values, ""), folder), folder)
        file = getattr(experiment.workload, "file", None)
        if file not in contents:
            contents[file] = read_content(experiment.workload, folder)
        content, source = contents[file]
        check(experiment.workload, content)
        policy_fields.check(experiment, content)
        point = Point(experiment, swept, point_key(experiment, content), content, source)
        for i, earlier in enumerate(points):
            if earlier.key == point.key:
                raise ValueError(
                    f"the sweep's points {i + 1} ({earlier.label}) and {len(points) + 1} are the "
                    "same"
                )
        points.append(point)
    return points


def with_names_in_one_line(value: Any, path: str) -> Any:
    """A raw value, in which each mapping {name: mine.py:NAME, ...} of a user's own value and its
    parameters is one text. Tables and keys of points have this text.

    Raises:
        ValueError: see `name_in_one_line`.
    """
    if isinstance(value, list):
        return [with_names_in_one_line(item, f"{path}[{i}]") for i, item in enumerate(value)]
    if not isinstance(value, dict):
        return value
    if names_own_value(value.get("name")):
        return name_in_one_line(path, value)
    return {key: with_names_in_one_line(item, f"{path}.{key}") for key, item in value.items()}


def _refuse_seeds(raw: Mapping[str, Any]) -> None:
    """Raises ValueError if the config has a key `seeds`: repeats have several seeds."""
    if "seeds" not in raw:
        return
    seeds = raw["seeds"]
    example = "repeats: 3"
    if isinstance(seeds, list) and seeds and all(type(seed) is int for seed in seeds):
        example = f"seed: {seeds[0]}, repeats: {len(seeds)}"
    raise ValueError(
        f"seeds is {seeds!r:.80}, and there is no such key; write {example} and reseed: true: "
        "repeat r draws its workload from seed + r"
    )


def _refuse_ignored_model(values: Mapping[str, Any]) -> None:
    """Raises ValueError if the named model has no use: the simulation takes its times from another
    model, and the workload needs no tokenizer.
    """
    simulate = values.get("simulate")
    workload = values.get("workload")
    model = values.get("model")
    shape = simulate.get("model") if isinstance(simulate, Mapping) else None
    tokenizes = isinstance(workload, Mapping) and workload.get("kind") in ("prompts", "sharegpt")
    # Experiment.model, the default, is no error: the resolved config of a run has it
    if shape is not None and model not in (None, Experiment.model, shape) and not tokenizes:
        raise ValueError(
            f"model is {model!r} and simulate.model is {shape!r}, from which all times come; leave "
            "model out, or make them equal"
        )


def _with_fit(experiment: Experiment, folder: Path) -> Experiment:
    """The experiment with the absolute path of `simulate.fit`, which is looked for in `folder`,
    then in the current folder.

    The run is fitted here as a check, so that a damaged run is an error before anything runs.
    """
    simulate = experiment.simulate
    if simulate is None or simulate.fit is None:
        return experiment
    run_folder = _fitted_run(simulate.fit, folder)
    try:
        cost.fit(cost.read_steps((run_folder / STEPS).read_text(encoding="utf-8")))
    except (AttributeError, KeyError, OSError, TypeError, ValueError) as error:
        why = f"no {error} in a step" if isinstance(error, KeyError) else error
        raise ValueError(
            f"simulate.fit: {run_folder / STEPS} cannot be fitted ({why}); give another run's "
            "folder"
        ) from None
    return dataclasses.replace(
        experiment, simulate=dataclasses.replace(simulate, fit=str(run_folder.resolve()))
    )


def _fitted_run(text: str, folder: Path) -> Path:
    """The run's folder that `simulate.fit` names, by its path or by the values of swept keys."""
    places = [folder / text, Path(text)]
    run_folder = next((place for place in places if (place / STEPS).is_file()), None)
    if run_folder is None and "=" in text:
        try:
            run_folder = selection.one_run(text, [folder, Path()])
        except ValueError as error:
            raise ValueError(f"simulate.fit: {error}") from None
        places = [run_folder]
    if run_folder is None or not (run_folder / STEPS).is_file():
        raise ValueError(
            f"simulate.fit: there is no {STEPS} in {' or '.join(map(str, places))}; give a run's "
            "folder"
        )
    return run_folder


def _with_own_files(experiment: Experiment, folder: Path) -> Experiment:
    """The experiment with absolute paths of the user's own files, which are looked for in `folder`,
    then in the current folder.

    Policies, KV policies, routers, metrics and cost models are read here. The others need jax, so
    it is only checked that their files exist.
    """
    engine = experiment.engine
    paths: dict[str, Any] = {
        key: _with_path(key, getattr(engine, key), folder) for key in OWN_VALUES
    }
    paths["row_features"] = tuple(
        _with_path("row_features", feature, folder) for feature in engine.row_features
    )
    if engine.speculative:
        method = _with_path("speculative.method", engine.speculative.method, folder)
        paths["speculative"] = dataclasses.replace(engine.speculative, method=method)
    if isinstance(engine.kv_policy, KVPolicyOptions):
        name = _with_path("kv_policy", engine.kv_policy.name, folder)
        paths["kv_policy"] = dataclasses.replace(engine.kv_policy, name=name)
    experiment = dataclasses.replace(experiment, engine=dataclasses.replace(engine, **paths))
    workload = experiment.workload
    if isinstance(workload, Own):
        kind = _with_path("workload.kind", workload.kind, folder)
        experiment = dataclasses.replace(
            experiment, workload=dataclasses.replace(workload, kind=kind)
        )
    metrics = tuple([_with_path("metrics", metric, folder) for metric in experiment.metrics])
    experiment = dataclasses.replace(experiment, metrics=metrics)
    own_metrics.check(experiment.metrics)
    _check_value("engine.policy", policies.find, purity.check, experiment.engine.policy)
    kv_policy = experiment.engine.kv_policy
    if isinstance(kv_policy, KVPolicyOptions):
        _check_value("engine.kv_policy", _kv_policy, lambda value: None, kv_policy.name)
    if experiment.simulate:
        simulate = _with_cost(experiment.simulate, folder)
        experiment = dataclasses.replace(experiment, simulate=simulate)
    if experiment.replicas:
        replicas = _with_router("replicas", experiment.replicas, folder)
        experiment = dataclasses.replace(experiment, replicas=replicas)
    if experiment.pools:
        pools = {
            name: _with_router(f"pools.{name}", getattr(experiment.pools, name), folder)
            for name in POOLS
        }
        experiment = dataclasses.replace(
            experiment, pools=dataclasses.replace(experiment.pools, **pools)
        )
    return experiment


def _with_cost(simulate: Simulate, folder: Path) -> Simulate:
    """The section with the absolute path of its own cost model, which is read here."""
    if simulate.cost is None:
        return simulate
    path = _with_path("simulate.cost", simulate.cost, folder)
    assert path is not None, "it has one"
    cost.own_step_time(path)
    return dataclasses.replace(simulate, cost=path)


def _with_router(section: str, engines: Routed, folder: Path) -> Routed:
    """The section with the absolute path of its router's file, which is read here."""
    router = _with_path("router", engines.router, folder)
    _check_value(f"{section}.router", routing.find, routers_purity.check, router)
    if isinstance(engines, Pool) and engines.simulate:
        engines = dataclasses.replace(engines, simulate=_with_cost(engines.simulate, folder))
    return dataclasses.replace(engines, router=router)


def _kv_policy(name: str) -> kv_policies.KVPolicy:
    return kv_policies.find(KVPolicyOptions(name))


def _check_value(
    key: str, find: Callable[[str], Value], check_pure: Callable[[Value], None], spec: Any
) -> None:
    """Check a user's own value.

    Raises:
        ValueError: `find` cannot read the value, or `check_pure` says that equal runs could differ
            with it. The message begins with the key.
    """
    section, _, name = key.rpartition(".")
    try:
        value = find(spec)
    except Exception as error:  # a user's file may raise anything
        if isinstance(error, ValueError) and str(error).startswith((f"{name} ", f"{name}.")):
            raise ValueError(f"{section}.{error}") from error
        raise ValueError(
            f"{key} is {spec!r}, whose file raises {type(error).__name__}: {error}; correct the "
            "file"
        ) from error
    if names_own_value(spec):
        try:
            check_pure(value)
        except ValueError as error:
            raise ValueError(f"{key} is {spec!r}: {error}") from None


def _with_path(key: str, value: Any, folder: Path) -> Any:
    """The value, with the absolute path of its file if it names one."""
    name = own_name(value or "")
    if not name.is_file:
        return value
    file = name.module
    places = (folder / file, Path(file))
    place = next((place for place in places if place.is_file()), places[0])
    # the errors for policies and routers come from their `find`
    if key not in ("policy", "router") and not place.is_file():
        key = key if key in NOT_OF_ENGINE else f"engine.{key}"
        raise ValueError(f"{key} is {value!r}, but there is no file {file}")
    return name._replace(module=str(place.resolve())).text


def _refuse_output_lengths(sampling: Any) -> None:
    """Refuse sampling.max_tokens: the workload has the output lengths, and two places could
    disagree.
    """
    if not isinstance(sampling, dict):
        return
    if "max_tokens" in sampling:
        raise ValueError(
            "sampling.max_tokens: output lengths belong to the workload; set them there"
        )
    if type(sampling.get("min_tokens")) is int:  # checked against each request's own length later
        sampling["max_tokens"] = max(sampling["min_tokens"], SamplingParams.max_tokens)


def read_content(spec: Spec, folder: Path) -> tuple[str, str]:
    """Text and absolute path of the workload's file; both "" for a workload without a file."""
    name = getattr(spec, "file", None)
    if name is None:
        return "", ""
    places = list(dict.fromkeys([folder / name, Path(name)]))
    for place in places:
        if place.is_file():
            try:
                return place.read_text(encoding="utf-8"), str(place.resolve())
            except (OSError, UnicodeDecodeError) as error:
                raise ValueError(
                    f"workload.file: {place} cannot be read as UTF-8 text ({error})"
                ) from None
    hint = f". {HINTS[type(spec)]}" if type(spec) in HINTS else ""
    raise ValueError(f"workload.file: there is no file {' or '.join(map(str, places))}{hint}")
