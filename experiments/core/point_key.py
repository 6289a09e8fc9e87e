"""The key of a point: a hash of all that its measurement depends on. It names the run's folder."""

from __future__ import annotations

import dataclasses
import hashlib
import importlib
import inspect
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from experiments.core.pool_options import POOLS
from experiments.core.workloads import (
    Mooncake,
    Own,
    Prompts,
    Recorded,
    Requests,
    Synthetic,
    Tokens,
    Trace,
)
from experiments.simulation.cost import STEPS, Simulate
from pagedjax.options import own_values
from pagedjax.options.config import EngineConfig, KVPolicyOptions
from pagedjax.options.own_names import own_name
from pagedjax.options.params import SamplingParams

if TYPE_CHECKING:
    from experiments.core.config import Experiment

# Keys without influence on the measurement; they are not in a point's hash.
NOT_MEASURED = ("name", "question", "repeats", "sweep")
# Fields that are in a point's key only if their value is not the default. So a point that does not
# use them has the key that it had in versions without these fields.
LATER_FIELDS = {
    EngineConfig: (
        "speculative",
        "mesh",
        "devices",
        "linear_impl",
        "kv_policy",
        "free_window_blocks",
        "prefix_checkpoints",
        "batch_invariant",
        "row_features",
        "max_tap_bytes",
        "enable_lora",
        "max_loras",
        "max_lora_rank",
        "model_family",
        "state_impl",
        "decode_span",
        "late_stops",
        "empty_blocks",
    ),
    Simulate: ("mesh", "hop_s", "profile", "cost"),
    Prompts: ("output", "predicted", "shuffle"),
    Synthetic: ("prefixes", "max_tokens", "predicted"),
    Trace: ("rounds", "max_tokens", "predicted"),
    Tokens: ("predicted",),
    Requests: ("users", "classes"),
    Mooncake: ("sessions", "think"),
    Recorded: ("rate", "window", "num_requests"),
    SamplingParams: (
        "structured_outputs",
        "bad_words",
        "bad_words_token_ids",
        "truncate_prompt_tokens",
        "taps",
        "trace_decode_token_ids",
    ),
}
# Fields of EngineConfig that may name a user's own value, file.py:NAME. `row_features`, which is
# not here, may name several.
OWN_VALUES = ("policy", "attention_impl", "linear_impl", "model_family")


def point_key(experiment: Experiment, content: str) -> str:
    """sha256 (hexadecimal) of the measured configuration, independent of key order, explicit
    defaults and names.

    Files count by their content: of the workload, a user's own values, a fitted run's steps, a
    model and a draft model (`_model_source`).
    """
    values = {k: v for k, v in dataclasses.asdict(experiment).items() if k not in NOT_MEASURED}
    values["engine"] = dataclasses.asdict(experiment.engine_config)
    speculative = experiment.engine.speculative
    if speculative:
        drafter = {
            "method": _own_source(speculative.method),
            "model": _model_source(speculative.model),
        }
        values["engine"]["speculative"] |= drafter
        if speculative.weight_dtype is None:  # not in the keys of versions before this field
            del values["engine"]["speculative"]["weight_dtype"]
    policy = experiment.engine.kv_policy
    if isinstance(policy, KVPolicyOptions):
        values["engine"]["kv_policy"]["name"] = _own_source(policy.name)
        # not in the keys of versions before these fields
        for name in ("tokens", "dense_layers", "dense_prompts"):
            if getattr(policy, name) is None:
                del values["engine"]["kv_policy"][name]
    values["engine"] |= {
        field: _own_source(getattr(experiment.engine, field)) for field in OWN_VALUES
    }
    values["engine"]["row_features"] = tuple(map(_own_source, experiment.engine.row_features))
    values["model"] = _model_source(experiment.model)
    del values["cache_tokens"]
    if experiment.simulate is None:
        del values["simulate"]
    elif experiment.simulate.fit is not None:
        steps = (Path(experiment.simulate.fit) / STEPS).read_bytes()
        values["simulate"]["fit"] = hashlib.sha256(steps).hexdigest()
    if experiment.replicas is None:
        del values["replicas"]
    else:
        values["replicas"]["router"] = _own_source(experiment.replicas.router)
        if not experiment.replicas.changes:  # not in the keys of versions before this field
            del values["replicas"]["changes"]
    if experiment.pools is None:
        del values["pools"]
    else:
        for name in POOLS:
            values["pools"][name]["router"] = _own_source(getattr(experiment.pools, name).router)
            simulate = values["pools"][name]["simulate"]
            if simulate is not None:
                simulate["cost"] = _own_source(simulate["cost"])
                if simulate["cost"] is None:
                    del simulate["cost"]
    if experiment.metrics:
        values["metrics"] = tuple(map(_own_source, experiment.metrics))
    else:
        del values["metrics"]
    if isinstance(experiment.workload, Own):
        values["workload"]["kind"] = _own_source(experiment.workload.kind)
    if experiment.simulate is not None and experiment.simulate.cost is not None:
        values["simulate"]["cost"] = _own_source(experiment.simulate.cost)
    if experiment.records == "full":  # not in the keys of versions before this field
        del values["records"]
    if not experiment.record or experiment.simulate:  # a recording changes no simulated number
        del values["record"]
    for section in ("engine", "simulate", "sampling", "workload"):
        options = getattr(experiment, section)
        if options is None:
            continue
        later_fields = [
            name for kind in type(options).__mro__ for name in LATER_FIELDS.get(kind, ())
        ]
        for field in dataclasses.fields(options):
            if field.name in later_fields and getattr(options, field.name) == default_of(field):
                del values[section][field.name]
    if "file" in values["workload"]:  # a file counts by content, not by path
        values["workload"]["file"] = hashlib.sha256(content.encode()).hexdigest()
    text = json.dumps(values, sort_keys=True, separators=(",", ":"), allow_nan=False)
    return hashlib.sha256(text.encode()).hexdigest()


def default_of(field: dataclasses.Field[Any]) -> Any:
    """The default of a field that has one."""
    if field.default_factory is not dataclasses.MISSING:
        return field.default_factory()
    return field.default


def _own_source(value: Any) -> Any:
    """The part of a point's key for a field of OWN_VALUES: a name, or for a user's own value the
    hash of its file, its name there and its parameters.

    The modules that the file imports from its folder are in the hash too.
    """
    name = own_name(value or "")
    module = name.module
    if not module:
        return value
    file: str | None = module
    if not name.is_file:
        file = inspect.getsourcefile(importlib.import_module(module))
    if file is None:
        return value
    first, *helpers = own_values.source_files(file)
    digest = hashlib.sha256(first.read_bytes())
    for helper in helpers:
        digest.update(helper.relative_to(first.parent).as_posix().encode())
        digest.update(hashlib.sha256(helper.read_bytes()).digest())
    return f"{digest.hexdigest()}:{name.attribute}{name.call}"


def _model_source(model: str | None) -> str | None:
    """The model's part of a point's key: its name; for a model on this disk a hash of its files.

    JSON files (shape, tokenizer) count by content. Weights count by name, size and modification
    time, because hashing gigabytes takes longer than many runs. A copy with other times is
    therefore another model.
    """
    if model is None:
        return model
    place = Path(model).expanduser()
    if not place.exists():
        return model
    weights = [place]
    if place.is_dir():
        weights = [*place.glob("*.safetensors"), *place.glob("params/**/*")]
    facts: list[Any] = [
        [path.name, hashlib.sha256(path.read_bytes()).hexdigest()]
        for path in sorted(place.glob("*.json"))
    ]
    for path in sorted(weights):
        if path.is_file():
            stat = path.stat()
            facts.append([path.relative_to(place).as_posix(), stat.st_size, stat.st_mtime_ns])
    return hashlib.sha256(json.dumps(facts).encode()).hexdigest()
