"""Runs on the nodes of a Ray cluster.

    python -m experiments.run CONFIG --backend ray [--worker-resources num_gpus=1]

    connect(...)   -> Workers   the places that the nodes have for workers; ValueError: no place
    results(runs)  -> results   of the runs, each when its run finishes

A worker is an actor: a process that reserves its resources and keeps its engines from run to run,
as one process does. A point's runs stay on one kind of machine, so that its repeats differ by noise
alone (assignment.py). If a worker dies, its run failed, and another worker takes its place; if no
machine of its kind is left, the rest of the point fails. The parent process writes every folder, so
a sweep stops and resumes as without Ray.

The cluster is that of RAY_ADDRESS, or the cluster that was started last on this machine. Without
any, a local cluster is started, and ended with the sweep.
"""

from __future__ import annotations

import importlib.util
import logging
import math
import os
import platform
import socket
import sys
from collections.abc import Generator, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from experiments.core import assignment
from experiments.core.engines import Run, engine_key, simulated_engines
from experiments.core.environment import code, environment
from experiments.core.execution import Result, failed_run, measure_run
from experiments.core.sweep import OnBegin, make_engines

# An option of Ray -> its name in a node's totals
NAMES = {"num_cpus": "CPU", "num_gpus": "GPU", "memory": "memory"}
STRANDED = (
    "other runs of this engine were made on a kind of machine ({}) that has no worker any more, "
    "and repeats on another kind would differ by more than noise. The same command makes this run "
    "where it can; --no-resume makes all again"
)
PATIENCE = 30.0  # seconds without a worker, after which a note says that the cluster is in use
FORM = "write NAME=NUMBER, separated by commas, such as num_cpus=2,num_gpus=1"

MIN_PART = 0.0001  # the least part of a resource: Ray counts in multiples of it
# Above 1, Ray (2.60) reserves only whole numbers of these.
WHOLE = ("num_gpus", "TPU", "NPU", "HPU", "RBLN", "MBLT", "TTNPU", "FURIOSA", "neuron_cores")

# Amounts by name: num_cpus, num_gpus, memory (bytes), and names of the cluster's own resources
Resources = Mapping[str, float]


class Place(NamedTuple):
    """What a worker reserves, and the id of its node; None: any node that has room."""

    resources: Resources
    node: str | None = None


class Workers(NamedTuple):
    """The workers of a sweep, before they start."""

    places: tuple[Place, ...]
    alive: int  # engines that a worker keeps
    device: bool  # whether runs are measured
    disconnects: bool  # whether this process connected with Ray, and disconnects at the end


def parse_resources(text: str) -> dict[str, float]:
    """The resources of a worker, from a text such as "num_cpus=2,num_gpus=1".

    Raises:
        ValueError: a part is not NAME=NUMBER with a number above 0, a name is there twice, or Ray
            does not reserve so much of it.
    """
    resources: dict[str, float] = {}
    for part in text.split(","):
        name, _, number = (word.strip() for word in part.partition("="))
        try:
            value = float(number)
        except ValueError:
            value = 0.0
        if not name or not 0 < value < math.inf or name in resources:
            raise ValueError(
                f"--worker-resources has {part!r}; each name once, with a number above 0: {FORM}"
            )
        if name in ("CPU", "GPU", "cpu", "gpu"):
            raise ValueError(f"--worker-resources has {name!r}; its name is num_{name.lower()}s")
        if name in ("object_store_memory", "bundle"):
            raise ValueError(
                f"--worker-resources has {name!r}, which Ray reserves for no worker; leave it out"
            )
        if value < MIN_PART:
            raise ValueError(
                f"--worker-resources has {part!r}, and the least part that Ray reserves is "
                f"{MIN_PART}"
            )
        if name in WHOLE and value > 1 and value % 1:
            below = math.floor(value)
            raise ValueError(
                f"--worker-resources has {part!r}; above 1 Ray reserves only whole ones; write "
                f"{name}={below} or {name}={below + 1}"
            )
        resources[name] = value
    return resources


def places_of(
    nodes: Sequence[Mapping[str, Any]], resources: Resources | None, *, measured: bool
) -> tuple[Place, ...]:
    """The workers that the nodes have room for, if nothing else runs there.

    By default a simulated run takes one processor, and a measured one all that could disturb it: a
    GPU with its part of the node's processors where the cluster has GPUs, else all processors of a
    node.

    Args:
        nodes: the result of ray.nodes().
        resources: what each worker reserves; None: the default.

    Raises:
        ValueError: no node has room for a worker.
    """
    alive_nodes = [(node["NodeID"], node["Resources"]) for node in nodes if node["Alive"]]
    if resources is None and measured:
        places = _undisturbed_places(alive_nodes)
    else:
        needs = {"num_cpus": 1.0} if resources is None else resources
        num_places = sum(_room(totals, needs) for _, totals in alive_nodes)
        places = [Place(needs)] * num_places
    if places:
        return tuple(places)
    request = "a worker needs num_cpus=1"
    if resources is not None:
        request = f"--worker-resources is {_words(resources)}"
    totals_texts = [_totals(totals) for _, totals in alive_nodes]
    totals_text = "; ".join(totals_texts) or "nothing: there is no node"
    raise ValueError(
        f"{request}, and no node of the Ray cluster has so much. Its nodes have {totals_text}. "
        "Ask for less"
    )


def _undisturbed_places(nodes: Sequence[tuple[str, Resources]]) -> list[Place]:
    """A place for each GPU with its part of the node's processors; without GPUs, a place for each
    node.

    Args:
        nodes: the id and the total resources of each node.
    """
    gpu_nodes = [(node, totals) for node, totals in nodes if totals.get("GPU", 0) >= 1]
    if not gpu_nodes:
        return [
            Place({"num_cpus": totals["CPU"]}, node)
            for node, totals in nodes
            if totals.get("CPU", 0) >= 1
        ]
    places = []
    for node, totals in gpu_nodes:
        num_gpus = int(totals["GPU"])
        num_cpus = int(totals.get("CPU", 0) / num_gpus)
        resources = {"num_gpus": 1.0}
        if num_cpus:
            resources["num_cpus"] = float(num_cpus)
        places += [Place(resources, node)] * num_gpus
    return places


def _room(totals: Resources, needs: Resources) -> int:
    """How many workers with these needs a node has room for."""
    # 1e-9: a quotient that should be a whole number may be a little below it
    return min(
        int(totals.get(NAMES.get(name, name), 0.0) / value + 1e-9) for name, value in needs.items()
    )


def _words(resources: Resources) -> str:
    return ",".join(f"{name}={value:g}" for name, value in resources.items())


def _totals(totals: Resources) -> str:
    names = {ray_name: name for name, ray_name in NAMES.items()}
    return ",".join(
        f"{names.get(name, name)}={value:g}"
        for name, value in sorted(totals.items())
        if ":" not in name and "memory" not in name
    )


class Worker:
    """The process of an actor. Its engines live as long as it does."""

    def __init__(self, alive: int, device: bool, resources: Resources) -> None:
        self._engines = make_engines(alive, quiet=True) if device else simulated_engines()
        self._env = {**environment(device=device), "worker": dict(resources)}

    def machine(self) -> tuple[dict[str, Any], dict[str, str | None], str]:
        """The environment of this process, its code, and the name of its node."""
        return self._env, code(), platform.node()

    def measure(self, run: Run) -> Result:
        return measure_run(run, self._engines, self._env)


def connect(
    runs: Sequence[Run], alive: int, resources: Resources | None, jobs: int | None
) -> Workers:
    """Connect with Ray, and find the places of workers for `runs`: at most `jobs`.

    Raises:
        ValueError: no node has room for a worker, Ray refuses it, or there is no cluster at
            RAY_ADDRESS.
    """
    import ray

    must_connect = not ray.is_initialized()
    if must_connect:
        check_address(os.environ.get("RAY_ADDRESS", ""))
        try:
            ray.init(include_dashboard=False, log_to_driver=False, logging_level=logging.ERROR)
        except (ConnectionError, OSError, RuntimeError, ValueError) as error:
            raise ValueError(
                f"--backend is ray, and there is no cluster to connect with: {error}"
            ) from error
    measured = any(run.point.experiment.simulate is None for run in runs)
    try:
        places = places_of(ray.nodes(), resources, measured=measured)
        _check_accepted(places[0])
    except ValueError:
        if must_connect:
            ray.shutdown()
        raise
    count = min(len(runs), len(places) if jobs is None else jobs)
    return Workers(places[:count], alive, measured, must_connect)


def check_address(address: str) -> None:
    """Raises ValueError if `address` is HOST:PORT, and no one accepts a connection there.

    Ray would try for minutes.
    """
    host, _, port = address.rpartition(":")
    if not host or "://" in address or not port.isdecimal():
        return  # auto, local, ray://HOST:PORT: Ray reports what is wrong
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=5.0).close()
    except (OSError, OverflowError) as error:
        remedy = "`ray start --head` starts a cluster; unset RAY_ADDRESS for one of this machine"
        raise ValueError(
            f"RAY_ADDRESS is {address!r}, and no cluster answers there ({error}). {remedy}"
        ) from error


def results(
    runs: Iterable[Run], env: dict[str, Any], on_begin: OnBegin, workers: Workers
) -> Generator[Result, None, None]:
    """`measure_run` of each of `runs` in a worker, as they finish.

    Closing the generator ends the workers.
    """
    import ray

    team = _Team(workers, runs, env, on_begin)
    try:
        team.start()
        while team.active:
            yield from team.wait()
        yield from team.stranded_runs()
    finally:
        team.end()
        if workers.disconnects:
            ray.shutdown()


class _Team:
    """The actors of the workers, and what each of them does."""

    def __init__(
        self, workers: Workers, runs: Iterable[Run], env: dict[str, Any], on_begin: OnBegin
    ) -> None:
        self._workers = workers
        self._env = env
        self._on_begin = on_begin
        self._state = assignment.new(runs, len(workers.places))
        self._actors: dict[int, Any] = {}  # by the number of their place
        # environment of each worker that has answered
        self._machines: dict[int, dict[str, Any]] = {}
        # reference -> the place of a worker that starts or has a run
        self._busy: dict[Any, int] = {}
        self._reason = ""  # why the last worker that made no run was lost
        self._patient = True  # until a note has said that the cluster is in use

    def start(self) -> None:
        for place in sorted(self._state.starting):
            self._start(place)

    @property
    def active(self) -> bool:
        return assignment.active(self._state)

    def _start(self, place: int) -> None:
        import ray

        worker = ray.remote(Worker).options(**_options(self._workers.places[place]))
        resources = self._workers.places[place].resources
        self._actors[place] = worker.remote(self._workers.alive, self._workers.device, resources)
        self._busy[self._actors[place].machine.remote()] = place

    def wait(self) -> list[Result]:
        """Wait for a worker, and give it its next run.

        Returns:
            The results that it gives: none if it has started.
        """
        import ray

        ready, _ = ray.wait(list(self._busy), num_returns=1, timeout=PATIENCE)
        if not ready and self._patient and not assignment.running(self._state):
            self._patient = False
            print(
                f"NOTE: no worker after {PATIENCE:g} s; the cluster's processors or GPUs may be in "
                "use by others. Waiting",
                file=sys.stderr,
            )
        results: list[Result] = []
        for reference in ready:
            place = self._busy.pop(reference)
            try:
                answer = ray.get(reference)
            except Exception as error:  # Ray's: the worker died, or its node lacks the code
                results += self._lose_worker(place, f"{type(error).__name__}: {error}")
                continue
            if place in self._state.starting:
                self._add_worker(place, *answer)
            else:
                self._state = assignment.end_run(self._state, place)
                results.append(answer)
        for place in assignment.idle(self._state):
            self._give_run(place)
        return results

    def _add_worker(
        self, place: int, machine: dict[str, Any], worker_code: dict[str, str | None], node: str
    ) -> None:
        if worker_code != code():
            reason = (
                f"a node has other code ({worker_code}) than this process ({code()}); install the "
                "same on all"
            )
            self._lose_worker(place, reason, node)
            return
        self._machines[place] = machine
        kind = kind_of(machine) if self._workers.device else ""
        self._state = assignment.add_worker(self._state, place, kind)

    def _give_run(self, place: int) -> None:
        min_runs = 2 if self._workers.device else 1  # a simulated engine costs nothing
        self._state, run = assignment.give_run(self._state, place, min_runs)
        if run is not None:
            self._on_begin(run)
            self._busy[self._actors[place].measure.remote(run)] = place

    def _lose_worker(self, place: int, reason: str, node: str | None = None) -> list[Result]:
        """Note that a worker is gone. Its run failed.

        A new worker takes its place, unless it died before it began.
        """
        import ray

        ray.kill(self._actors.pop(place))
        machine = self._machines.pop(place, self._env)
        self._state, run = assignment.lose_worker(self._state, place)
        if run is None:
            self._reason = f"no worker is left. {reason}"
            node = node or self._workers.places[place].node or "that Ray chose"
            print(f"NOTE: a worker makes no run, on the node {node}: {reason}", file=sys.stderr)
            return []
        self._start(place)
        reason = f"the worker of this run is lost. {reason}"
        return [failed_run(run, machine, reason, reason)]

    def stranded_runs(self) -> list[Result]:
        """Failed runs: those that no worker may make."""
        results = []
        for run in self._state.waiting:
            kind = self._state.machines.get(engine_key(run.point.experiment))
            reason = STRANDED.format(kind) if kind else self._reason
            results.append(failed_run(run, self._env, reason, reason))
        return results

    def end(self) -> None:
        import ray

        for actor in self._actors.values():
            ray.kill(actor)


def kind_of(machine: Mapping[str, Any]) -> assignment.Kind:
    """The kind of a machine with this environment. The numbers of a measured run depend on it."""
    return (
        f"{machine['device']['kind']}, {machine['cpu']['model']}, {machine['cpu']['cores']} cores"
    )


def _options(place: Place) -> dict[str, Any]:
    """The options of Ray for the actor of a worker."""
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    standard = {name: value for name, value in place.resources.items() if name in NAMES}
    custom = {name: value for name, value in place.resources.items() if name not in NAMES}
    options: dict[str, Any] = {"max_restarts": 0, "num_cpus": 0, **standard}
    if place.node is not None:
        options["scheduling_strategy"] = NodeAffinitySchedulingStrategy(place.node, soft=False)
    if custom:
        options["resources"] = custom
    return options


def _check_accepted(place: Place) -> None:
    """Raises ValueError if Ray refuses the resources of a worker: some devices come in certain
    numbers.
    """
    import ray

    try:
        ray.remote(Worker).options(**_options(place))
    except ValueError as error:
        raise ValueError(
            f"--worker-resources is {_words(place.resources)}, which Ray refuses: {error}"
        ) from error


def check() -> None:
    """Raises ValueError if Ray is not installed."""
    if importlib.util.find_spec("ray") is None:
        raise ValueError(
            "--backend is ray, which is not installed: pip install 'pagedjax[ray]', or leave "
            "--backend out"
        )
