"""What a sweep ran, in words: model, device, workload, arrivals, targets and options. Pure functions
of the sweep's points.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

from experiments.core.config import Experiment, Point, Slo
from experiments.core.distributions import Multiple
from experiments.core.pool_options import POOLS, pool_experiment
from experiments.core.replica_options import Replicas
from experiments.core.workloads import Recorded, RecordedRun, limits_of
from experiments.simulation.cost import Simulate
from pagedjax.host import policies, purity
from pagedjax.options.config import EngineConfig
from pagedjax.options.own_names import names_own_value, own_name
from pagedjax.options.params import SamplingParams
from pagedjax.text import yaml_words

NO_OPTIONS = ("arrivals", "kind")  # fields of a workload that have a line of their own


def simulated_devices(points: Sequence[Point]) -> str:
    """The simulated devices and the models whose times they have, such as "simulated h100, times of
    llama-3-8b"; "" if steps are measured.
    """
    names = []
    for point in points:
        names += [
            f"{simulate.name}, times of {simulate.model or experiment.model}"
            for experiment, simulate in _simulated(point.experiment)
        ]
    return "; ".join(dict.fromkeys(names))


def facts(points: Sequence[Point]) -> list[tuple[str, str]]:
    """(name, value) of each thing that ran. A value has the values of all points if these differ.
    An option is listed only if it differs from its default.
    """
    experiments = [point.experiment for point in points]
    first = experiments[0]
    # part -> the function that reads its options, and the class with their defaults and their order
    parts: dict[str, tuple[Callable[[Experiment], dict[str, Any]], type | None]] = {
        "Model": (lambda experiment: {"": model(experiment)}, None),
        "Simulation": (_options_of_simulation, Simulate),
        "Engines": (_engines, Replicas),
        "Workload": (_workload, None),
        "Arrivals": (_arrivals, None),
        "Targets": (lambda experiment: _changed(experiment.slo), Slo),
        "Engine options": (_engine_options, EngineConfig),
        "Sampling": (lambda experiment: _changed(experiment.sampling), SamplingParams),
    }
    pairs = []
    for name, (options_of, kind) in parts.items():
        defaults = {} if kind is None else _defaults(kind)
        point_options = [options_of(experiment) for experiment in experiments]
        pairs.append((name, _joined(point_options, defaults)))
    seeds = f"{first.repeats} of seed {first.seed}"
    if first.reseed:
        seeds = f"seeds {first.seed} to {first.seed + first.repeats - 1}, one each"
    note = equal_repeats(experiments)
    if note:
        seeds += f"; {note}"
    pairs.append(("Repeats", seeds))
    pairs.append(("Predictions", predictions(experiments)))
    pairs.append(("Oracle", oracle(experiments)))
    return [(name, value) for name, value in pairs if value]


def oracle(experiments: Sequence[Experiment]) -> str:
    """Which policies know the length of each output before it is generated; "" if none does.

    With `ignore_eos` every request of a workload asks for as many tokens as it generates, or for a
    multiple of them, unless the workload draws its limits apart.
    """
    # what a policy reads -> the names of such policies, in order
    oracles: dict[str, dict[str, None]] = {}
    for experiment in experiments:
        sampling = experiment.sampling
        policy = experiment.engine.policy
        limits = limits_of(experiment.workload)
        if not names_own_value(policy) or not sampling.ignore_eos or sampling.stop_token_ids:
            continue
        value = policies.find(policy)
        predicted = experiment.workload.predicted
        if predicted and predicted.error == 0 and purity.reads_predictions(value):
            number = "the predicted length of a request where its error is 0, which is the length"
        elif isinstance(experiment.workload, RecordedRun):
            continue  # its limits are recorded, too
        elif limits is None and purity.reads_limits(value):
            number = "the limit of a request, which is the length"
        elif isinstance(limits, Multiple) and purity.reads_limits(value):
            number = "the limit of a request, which is a multiple of the length"
        else:
            continue
        name = own_name(str(policy))._replace(call="").short
        oracles.setdefault(number, {})[name] = None
    return "; ".join(
        f"{' and '.join(names)} {'reads' if len(names) == 1 else 'read'} {number} of its output "
        "here: no policy knows it in a real service"
        for number, names in oracles.items()
    )


def equal_repeats(experiments: Sequence[Experiment]) -> str:
    """The sentence that repeats are equal although each has its own seed; "" if they differ.

    A simulated run of a recorded load draws nothing, unless its part, limits, users, classes, waits
    or predictions are drawn.
    """
    for experiment in experiments:
        workload = experiment.workload
        is_recorded = isinstance(workload, Recorded | RecordedRun)
        if not (experiment.simulate and experiment.reseed and is_recorded):
            continue
        limits = limits_of(workload)
        draws_limits = limits is not None and not isinstance(limits, Multiple | int)
        drawn_fields = ("window", "num_requests", "users", "classes", "think")
        draws_requests = any(getattr(workload, name, None) is not None for name in drawn_fields)
        draws_predictions = workload.predicted is not None and workload.predicted.error > 0
        if experiment.repeats == 1 or draws_limits or draws_requests or draws_predictions:
            continue
        if experiment.engine.speculative is None:
            return (
                f"the {experiment.repeats} repeats of a point are equal: a simulated run of a "
                "recorded load draws nothing. An interval over them says nothing; set `repeats` "
                "to 1, or draw another part of the file for each seed with a workload of your own "
                "(docs/guides/make_a_workload.md)"
            )
    return ""


def predictions(experiments: Sequence[Experiment]) -> str:
    """Which policies read predicted lengths of outputs, and with which errors; "" if none does."""
    errors: dict[Any, list[str]] = {}
    for experiment in experiments:
        policy = experiment.engine.policy
        predicted = experiment.workload.predicted
        if not names_own_value(policy) or not predicted:
            continue
        if purity.reads_predictions(policies.find(policy)):
            errors.setdefault(policy, []).append(f"{predicted.error:g}")
    return "; ".join(
        f"{own_name(policy).short} reads predicted lengths of outputs, which are the drawn lengths with a "
        f"log-normal error of sigma {', '.join(dict.fromkeys(sigmas))}"
        for policy, sigmas in errors.items()
    )


def _simulated(experiment: Experiment) -> list[tuple[Experiment, Simulate]]:
    """The simulated engines of an experiment: with pools, those of each pool."""
    if experiment.pools:
        pools = [pool_experiment(experiment, name) for name in POOLS]
        return [(pool, pool.simulate) for pool in pools if pool.simulate]
    return [(experiment, experiment.simulate)] if experiment.simulate else []


def model(experiment: Experiment) -> str:
    """The model whose steps are measured, or whose times are calculated."""
    names = [simulate.model or pool.model for pool, simulate in _simulated(experiment)]
    return ", ".join(dict.fromkeys(names or [experiment.model]))


def _options_of_simulation(experiment: Experiment) -> dict[str, Any]:
    if experiment.pools:
        return {}
    options = _changed(experiment.simulate) if experiment.simulate else {}
    options.pop("model", None)
    return options


def _engines(experiment: Experiment) -> dict[str, Any]:
    if experiment.pools:
        return {name: getattr(experiment.pools, name) for name in POOLS}
    return _changed(experiment.replicas) if experiment.replicas else {}


def _workload(experiment: Experiment) -> dict[str, Any]:
    options = _changed(experiment.workload)
    kind = {"": experiment.workload.kind}
    return kind | {name: value for name, value in options.items() if name not in NO_OPTIONS}


def _arrivals(experiment: Experiment) -> dict[str, Any]:
    arrivals = getattr(experiment.workload, "arrivals", None)
    return {} if arrivals is None else dataclasses.asdict(arrivals)


def _engine_options(experiment: Experiment) -> dict[str, Any]:
    options = _changed(experiment.engine)
    if experiment.cache_tokens is None:
        return options
    return {"cache_tokens": experiment.cache_tokens} | options


def _defaults(options: Any) -> dict[str, Any]:
    """The defaults of a dataclass's fields, for those that have one."""
    defaults = {}
    for field in dataclasses.fields(options):
        if field.default is not dataclasses.MISSING:
            defaults[field.name] = field.default
        elif field.default_factory is not dataclasses.MISSING:
            defaults[field.name] = field.default_factory()
    return defaults


def _changed(options: Any) -> dict[str, Any]:
    """The fields of a dataclass that differ from their defaults, and the fields without a default."""
    defaults = _defaults(options)
    names = [field.name for field in dataclasses.fields(options)]
    values = {name: getattr(options, name) for name in names}
    return {
        name: value
        for name, value in values.items()
        if name not in defaults or value != defaults[name]
    }


def _joined(point_options: Sequence[dict[str, Any]], defaults: dict[str, Any]) -> str:
    """The options of all points in a line: "block_size 8, 16; max_num_seqs 24".

    Args:
        point_options: the options of each point.
        defaults: the values of options that a point does not have.
    """
    places = {name: place for place, name in enumerate(defaults)}
    names = dict.fromkeys(name for options in point_options for name in options)
    texts = []
    for name in sorted(names, key=lambda name: places.get(name, -1)):
        values = dict.fromkeys(
            _text(options.get(name, defaults.get(name, "none"))) for options in point_options
        )
        texts.append(f"{name} {', '.join(values)}".strip())
    return "; ".join(texts)


def _text(value: Any) -> str:
    """A value as a config writes it, in one line."""
    if isinstance(value, str):
        return own_name(value).short
    if value is None:
        return "none"
    text = yaml_words.dump(_plain(value), default_flow_style=True, sort_keys=False, width=1 << 20)
    return text.removesuffix("...\n").strip()


def _plain(value: Any) -> Any:
    """A value in the types of YAML."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return _plain(_changed(value) or dataclasses.asdict(value))
    if isinstance(value, dict):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple, set, frozenset)):
        return [_plain(item) for item in value]
    return value if isinstance(value, (bool, int, float, str, type(None))) else str(value)
