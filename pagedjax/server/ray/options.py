"""The options of a cluster: the `args` of a YAML for `serve deploy`, or of `serve --replicas`.

Everything here is checked before Ray starts a replica, so that a mistake is one early error.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import yaml
from ray.serve.config import AutoscalingConfig

from pagedjax import routing
from pagedjax.options.config import EngineConfig, from_dict
from pagedjax.server import adapters
from pagedjax.server.app import Options
from pagedjax.server.serve import name_of, read_key
from pagedjax.text import yaml_words

RESOURCES = (
    "num_cpus",
    "num_gpus",
    "resources",
    "memory",
    "accelerator_type",
    "runtime_env",
    "label_selector",
)
AMOUNTS = ("num_cpus", "num_gpus", "memory")
SECONDS = ("drain_seconds", "route_seconds", "silent_seconds", "step_seconds")
# What the fields of ClusterOptions must be, since a YAML may have anything.
TYPES: dict[str, tuple[Any, tuple[str, ...]]] = {
    "a text": (str, ("model", "router")),
    "a text, or left out": (str | None, ("api_key_file", "record", "record_routing")),
    "fields with their values": (Mapping, ("engine", "server", "adapters")),
    "fields with their values, or left out": (Mapping | None, ("autoscaling", "resources")),
    "an integer": (int, ("replicas", "known_blocks")),
    "a number": (int | float, (*SECONDS, "kept_mib")),
    "true or false": (bool, ("compilation_cache",)),
}
# Fields of Options that only the ingress has
OF_THE_INGRESS = ("api_key", "lecture_endpoints", "allow_runtime_lora_updating")


@dataclass(frozen=True)
class ClusterOptions:
    """Replicas of one model behind one address.

    model: as `pagedjax serve` takes it. A folder must exist on every node.
    engine: fields of EngineConfig, the same for each replica.
    server: fields of `server.app.Options`, except the three of OF_THE_INGRESS.
    adapters: folders of adapters that each replica loads, by name; needs `engine: {enable_lora:
        true}`.
    replicas: how many there are, from the start and without `autoscaling` always.
    autoscaling: fields of Ray Serve's AutoscalingConfig. Its `target_ongoing_requests`, per
        replica, has the default `engine.max_num_seqs`; its `min_replicas` and `initial_replicas`
        have the default `replicas`.
    resources: what a replica asks Ray for, as a deployment's `ray_actor_options`; None is
        `default_resources`.
    router: "round_robin", "least_loaded", "prefix", or file.py:NAME on the node of the ingress.
    known_blocks: see `routing.init`; best the number of a replica's blocks.
    api_key_file: a file, on the node of the ingress, with the key that clients must send.
    drain_seconds: for the unfinished requests of a replica that is to stop, if no other replica can
        go on with them; then they are answered 503.
    route_seconds: how long a request waits while no replica is present; then it is answered 503.
    silent_seconds: how long a replica may answer nothing while others do; then its requests go on in
        others, and it gets none until it answers again.
    step_seconds: how long a step of an engine may take; then Serve replaces its replica.
    kept_mib: of tokens, and their log-probabilities, that the ingress keeps of unfinished requests.
        One beyond it cannot go on in the middle of an answer.
    record: each replica records its engine's run into this file, with the replica's name before the
        ending.
    record_routing: the ingress records the router's transitions into this file
        (`routing/recording.py`).
    compilation_cache: keep compiled programs on disk.
    """

    model: str = "smollm2-135m"
    engine: Mapping[str, Any] = field(default_factory=dict)
    server: Mapping[str, Any] = field(default_factory=dict)
    adapters: Mapping[str, str] = field(default_factory=dict)
    replicas: int = 1
    autoscaling: Mapping[str, Any] | None = None
    resources: Mapping[str, Any] | None = None
    router: str = "prefix"
    known_blocks: int = 1 << 16
    api_key_file: str | None = None
    drain_seconds: float = 60.0
    route_seconds: float = 60.0
    silent_seconds: float = 10.0
    step_seconds: float = 300.0
    kept_mib: float = 256.0
    record: str | None = None
    record_routing: str | None = None
    compilation_cache: bool = True

    def __post_init__(self) -> None:
        """Raises ValueError for a value that no replica or router can have."""
        for description, (kinds, names) in TYPES.items():
            for name in names:
                value = getattr(self, name)
                if not isinstance(value, kinds) or (isinstance(value, bool) and kinds is not bool):
                    raise ValueError(f"{name} is {value!r:.200}; it must be {description}")
        if self.replicas < 1:
            raise ValueError(f"replicas is {self.replicas}; it must be at least 1")
        for name in (*SECONDS, "kept_mib"):
            if not 0 < getattr(self, name) < math.inf:
                raise ValueError(f"{name} is {getattr(self, name)}; it must be above 0")
        for name in OF_THE_INGRESS:
            if name in self.server:
                remedy = "write api_key_file beside server" if name == "api_key" else "leave it out"
                raise ValueError(f"server.{name} is not an option of replicas; {remedy}")
        for name, value in (self.resources or {}).items():
            if name not in RESOURCES:
                raise ValueError(
                    f"resources has the unknown key {name!r}; Ray knows {', '.join(RESOURCES)}"
                )
            if name in AMOUNTS and not (isinstance(value, int | float) and value >= 0):
                raise ValueError(
                    f"resources.{name} is {value!r}; it must be a number of at least 0"
                )
            if name == "resources" and not isinstance(value, Mapping):
                raise ValueError(
                    f"resources.resources is {value!r}; it must be amounts by name, such as "
                    f"{{TPU: 4}}"
                )
        for name, folder in self.adapters.items():
            if not isinstance(folder, str):
                raise ValueError(f"adapters.{name} is {folder!r}; it must be a folder")
        routing.find(self.router)
        routing.init(self.known_blocks)
        from_dict(EngineConfig, dict(self.engine), where="engine.")
        adapters.modules(tuple(self.adapters.items()), self.of_server().name, self.engine, False)
        self.scaling()

    def of_server(self) -> Options:
        """The options of each replica's server."""
        values = {"name": name_of(self.model), **self.server, "lecture_endpoints": False}
        try:
            return from_dict(Options, values, where="server.")
        except TypeError as error:
            raise ValueError(f"server has a value of a wrong type: {error}") from error

    def of_replica(self) -> Options:
        """The options of a replica's application, without what the ingress does already."""
        return dataclasses.replace(self.of_server(), allow_origins=())

    def api_key(self) -> str | None:
        """The key of clients. Raises ValueError if its file cannot be read or is empty."""
        return None if self.api_key_file is None else read_key(self.api_key_file)

    def scaling(self) -> AutoscalingConfig | None:
        """Ray Serve's form of `autoscaling`. Raises ValueError for fields that it refuses."""
        if self.autoscaling is None:
            return None
        target = self.engine.get("max_num_seqs", EngineConfig.max_num_seqs)
        fields = {
            "min_replicas": self.replicas,
            "initial_replicas": self.replicas,
            "target_ongoing_requests": target,
            **self.autoscaling,
        }
        for name in self.autoscaling:
            if name not in AutoscalingConfig.model_fields:
                raise ValueError(
                    f"autoscaling has the unknown field {name!r}; see Ray Serve's AutoscalingConfig"
                )
        try:
            return AutoscalingConfig(**fields)
        except ValueError as error:
            raise ValueError(f"autoscaling: {error}") from error


def of_args(args: Mapping[str, Any]) -> ClusterOptions:
    """The options of a YAML's `args`, or of the words NAME=VALUE of `serve run`.

    The values of these words are read as YAML.

    Raises:
        ValueError: an unknown or wrong option.
    """
    texts = (*TYPES["a text"][1], *TYPES["a text, or left out"][1])
    typed = {
        name: _read(name, value) if isinstance(value, str) and name not in texts else value
        for name, value in args.items()
    }
    return from_dict(ClusterOptions, typed)


def _read(name: str, value: str) -> Any:
    try:
        return yaml_words.load(value)
    except (yaml.YAMLError, ValueError, TypeError) as error:
        raise ValueError(
            f"{name} is {value!r:.200}, which is no YAML; write {name}='{{max_num_seqs: 4}}'"
        ) from error


def default_resources(
    cluster: Mapping[str, float], mesh: Mapping[str, int] | None
) -> dict[str, Any]:
    """What a replica asks for.

    It is its mesh's number of GPUs or TPU chips if the cluster has some, else one CPU.

    Args:
        cluster: amounts by name, as `ray.cluster_resources` has them.
        mesh: of `EngineConfig`.
    """
    devices = math.prod((mesh or {}).values())
    if cluster.get("GPU"):
        return {"num_gpus": devices}
    return {"resources": {"TPU": devices}} if cluster.get("TPU") else {"num_cpus": 1}


def check_room(
    options: ClusterOptions, resources: Mapping[str, Any], cluster: Mapping[str, float]
) -> None:
    """Check that a cluster of a fixed size has room for the replicas. Raises ValueError."""
    amounts = {
        "CPU": resources.get("num_cpus", 0),
        "GPU": resources.get("num_gpus", 0),
        **resources.get("resources", {}),
        "memory": resources.get("memory", 0),
    }
    kind = resources.get("accelerator_type")
    if kind is not None and f"accelerator_type:{kind}" not in cluster:
        raise ValueError(
            f"replicas need an accelerator {kind!r}, which Ray does not have; change "
            "--replica-resources"
        )
    for name, amount in amounts.items():
        present = cluster.get(name, 0)
        if options.replicas * amount > present:
            raise ValueError(
                f"replicas is {options.replicas}, and each needs {amount:g} {name}, but Ray has "
                f"{present:g}; start fewer, or ask for less with --replica-resources"
            )
