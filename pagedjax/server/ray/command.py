"""`pagedjax serve --replicas N`: replicas on this machine, or on the cluster of --ray-address."""

from __future__ import annotations

import argparse
import logging
import os
import signal
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import httpx
import ray
from ray import serve
from ray.serve.schema import LoggingConfig

from pagedjax.host import purity
from pagedjax.options.config import EngineConfig
from pagedjax.options.own_names import name_in_one_line, names_own_value, own_name
from pagedjax.server.ray import application
from pagedjax.server.ray import options as cluster_options
from pagedjax.server.ray.options import ClusterOptions
from pagedjax.server.serve import bound_socket, name_of
from pagedjax.weights.families import own_family
from pagedjax.weights.locate import open_checkpoint

NAME = "pagedjax"  # of Serve's application
log = logging.getLogger("pagedjax.server")
OF_SERVER = (
    "max_queue",
    "min_priority",
    "max_priority",
    "allow_user",
    "allow_service_fields",
    "result_seconds",
    "tool_call_parser",
)


def options_of(args: argparse.Namespace, engine: dict[str, Any]) -> ClusterOptions:
    """The options of the command line. `engine`: fields of EngineConfig.

    Raises:
        ValueError: a wrong option, or one that replicas cannot have.
    """
    if args.allow_runtime_lora_updating:
        raise ValueError(
            "--allow-runtime-lora-updating changes one engine, and --replicas are several; name "
            "the adapters at the start, with --lora-modules"
        )
    if args.coordinator or args.processes:
        raise ValueError(
            "--replicas are engines of one process each; leave --coordinator and --processes out"
        )
    folders = dict(args.lora_modules)
    if len(folders) < len(args.lora_modules):
        raise ValueError("--lora-modules has a name twice; give each adapter its own")
    engine = {
        name: _absolute_file(name, value) if _is_named(value) else value
        for name, value in engine.items()
    }
    server = {name: getattr(args, name) for name in OF_SERVER}
    return ClusterOptions(
        model=_absolute(args.model),
        engine=engine,
        server={
            **server,
            "name": args.served_model_name or name_of(args.model),
            "max_body_bytes": int(args.max_body_mib * 2**20),
            "allow_origins": tuple(args.allow_origin),
        },
        adapters={name: _absolute(folder) for name, folder in folders.items()},
        replicas=1 if args.replicas is None else args.replicas,
        autoscaling=args.autoscaling,
        resources=args.replica_resources,
        router=_absolute_file("router", args.router or "prefix"),
        known_blocks=1 << 16 if args.known_blocks is None else args.known_blocks,
        api_key_file=args.api_key_file and _absolute(args.api_key_file),
        drain_seconds=args.drain_seconds,
        record=args.record and os.path.abspath(args.record),
        record_routing=args.record_routing and os.path.abspath(args.record_routing),
        compilation_cache=args.compilation_cache,
    )


def check_files(options: ClusterOptions) -> None:
    """Check now, and not in each replica, that all files are there.

    Raises:
        ValueError, OSError: one is missing, or a policy of a user's own is wrong.
    """
    options.api_key()
    purity.find_pure(options.engine.get("policy", EngineConfig.policy))
    open_checkpoint(options.model, family=own_family(options.engine.get("model_family")))
    for name, folder in options.adapters.items():
        if not Path(folder).is_dir():
            raise ValueError(f"--lora-modules {name}={folder}: there is no such folder")
    for flag, path in (("--record", options.record), ("--record-routing", options.record_routing)):
        if path is not None and not os.access(Path(path).parent, os.W_OK):
            raise ValueError(
                f"{flag} {path}: its folder does not exist or cannot be written; name another one"
            )
        if path is not None and flag == "--record-routing" and Path(path).exists():
            raise ValueError(f"{flag} {path} exists; name a new file, or delete it")


def _absolute(path: str) -> str:
    """The absolute path, if it exists here; a name stays. Replicas have another working folder."""
    return os.path.abspath(path) if Path(path).exists() else path


def _is_named(value: Any) -> bool:
    """Whether this may name a user's own value: a text, or a mapping with a name."""
    return isinstance(value, str) or (isinstance(value, Mapping) and "name" in value)


def _absolute_file(field: str, value: Any) -> Any:
    """A name in one line, with the absolute path of its file if it has one. A mapping with the name
    of a shipped value stays.
    """
    if not (isinstance(value, str) or names_own_value(value["name"])):
        return value
    name = own_name(name_in_one_line(field, value))
    return name._replace(module=os.path.abspath(name.module)).text if name.is_file else name.text


def main(args: argparse.Namespace, engine: dict[str, Any]) -> int:
    """Serve until SIGTERM or Ctrl-C. Unfinished requests have --drain-seconds to end."""
    logging.basicConfig(format="%(levelname)s %(name)s: %(message)s")
    logging.getLogger("ray.serve").setLevel(log_level(args))
    if args.restarts:
        raise ValueError(
            f"restarts is {args.restarts}, and Ray starts replicas again itself; leave --restarts "
            "out, or --replicas"
        )
    options = options_of(args, engine)
    check_files(options)
    host, port = address(args)
    start_ray(args.ray_address, log_level(args))
    try:
        for number in (signal.SIGTERM, signal.SIGINT):  # after Ray, which has a handler of its own
            signal.signal(number, _interrupted)
        check_cluster(options, args.ray_address)
        url = deploy(options, host, port, args)
        stopped = threading.Event()
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, lambda *_: stopped.set())
        scaling = options.scaling()
        count = options.replicas if scaling is None else scaling.initial_replicas
        words = "1 replica" if count == 1 else f"{count} replicas"
        print(f"serving {options.of_server().name} on {words} at {url}/v1", flush=True)
        # A wait without end would hold back the signal on some platforms
        while not stopped.wait(1.0):
            pass
        serve.delete(NAME)  # the replicas drain
    finally:
        if args.ray_address is None:
            serve.shutdown()
        ray.shutdown()
    return 0


def _interrupted(*_: Any) -> None:
    """End at once: nothing is served yet, so there is nothing to drain."""
    raise KeyboardInterrupt


def check_cluster(options: ClusterOptions, cluster: str | None) -> None:
    """Check that Ray has room for the replicas.

    Raises:
        ValueError: Ray on this machine has none. Another cluster may grow, so there is a warning.
    """
    resources = application.resources_of(options)
    try:
        cluster_options.check_room(options, resources, ray.cluster_resources())
    except ValueError as error:
        if cluster is None:
            raise
        log.warning("%s. Waiting until the cluster has more; Ctrl-C ends this", error)


def address(args: argparse.Namespace) -> tuple[str, int]:
    """Where Ray Serve is to listen.

    Raises:
        ValueError: a port that cannot be used. On a cluster it is not tried: Serve may listen there
            already.
    """
    if args.ray_address is not None:
        if not 0 < args.port < 2**16:
            raise ValueError(
                f"--port is {args.port}; on a cluster it must be from 1 to {2**16 - 1}"
            )
        return args.host, args.port
    with bound_socket(args.host, args.port) as listener:
        return listener.getsockname()[:2]


def deploy(options: ClusterOptions, host: str, port: int, args: argparse.Namespace) -> str:
    """Start the replicas, and wait until they are ready -> the address of the ingress.

    Raises:
        ValueError: the cluster serves an application of this name, or listens elsewhere already; or
            a replica cannot start, with Ray's reason.
    """
    logs = LoggingConfig(log_level=log_level(args), enable_access_log=args.log_level == "debug")
    serve.start(
        proxy_location="HeadOnly", http_options={"host": host, "port": port}, logging_config=logs
    )
    present = serve.status().applications.get(NAME)
    if present is not None and present.status != "DEPLOY_FAILED":  # a failed one is replaced
        raise ValueError(
            f"this cluster serves an application {NAME!r} already; stop the command that serves "
            f"it, or call serve.delete({NAME!r}) in Python"
        )
    url = f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
    try:
        replicas = application.application(options)
        serve.run(replicas, name=NAME, route_prefix="/", logging_config=logs)
        response = httpx.get(f"{url}/health", timeout=60)
        if response.status_code != 200:
            raise ValueError(
                f"the replicas have started, and {url}/health answers {response.status_code}: "
                f"{response.text}"
            )
    except httpx.HTTPError as error:
        serve.delete(NAME)
        raise ValueError(
            f"the ingress cannot be reached at {url} ({error}): Ray Serve listens elsewhere on "
            "this cluster already; give that address with --host and --port"
        ) from error
    except RuntimeError as error:
        deployments = serve.status().applications[NAME].deployments.values()
        reasons = "; ".join(filter(None, (deployment.message for deployment in deployments)))
        serve.delete(NAME)
        raise ValueError(f"the replicas cannot start: {error}\n{reasons}") from error
    except (ValueError, KeyboardInterrupt):
        serve.delete(NAME)
        raise
    return url


def log_level(args: argparse.Namespace) -> str:
    """The log level of Ray. Its information about itself is shown with `--log-level debug`."""
    return "WARNING" if args.log_level == "info" else args.log_level.upper()


def start_ray(address: str | None, level: str) -> None:
    """Connect to a cluster, or start Ray on this machine.

    Raises:
        ValueError: no cluster is at the address.
    """
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")  # nothing is reported
    logs: dict[str, Any] = {"log_to_driver": level != "ERROR", "logging_level": level}
    if address is None:
        ray.init(address="local", include_dashboard=False, **logs)
        return
    try:
        ray.init(address=address, **logs)
    except (ConnectionError, RuntimeError) as error:
        raise ValueError(
            f"no Ray cluster is at {address!r}, or it wants a token: {error}; start one with "
            "ray start --head, or set RAY_AUTH_MODE=token (ray get-auth-token prints the token)"
        ) from error
