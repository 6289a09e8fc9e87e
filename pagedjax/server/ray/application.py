"""The application of Ray Serve: the ingress, and below it the deployment of replicas.

serve run pagedjax.server.ray:app model=smollm2-135m replicas=2
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

import ray
from ray import serve
from ray.serve import Application
from starlette.types import ASGIApp

from pagedjax.server.ray import options as cluster_options
from pagedjax.server.ray.ingress import create_ingress
from pagedjax.server.ray.options import ClusterOptions
from pagedjax.server.ray.replica import Replica

REPLICAS = "replicas"  # the name of the deployment
ROUTER = "pagedjax.server.ray.request_router.PureRouter"
# Requests that Serve lets a replica have. A replica refuses by its own max_queue, with 429.
MAX_ONGOING_REQUESTS = 1 << 14
ANSWER_SECONDS = 10.0  # to send the answers of 503
log = logging.getLogger("pagedjax.server")


def app(args: Mapping[str, Any]) -> Application:
    """The application of a YAML's `args`: fields of ClusterOptions. Serve calls it.

    Raises:
        ValueError: a wrong option.
    """
    return application(cluster_options.of_args(args))


def application(options: ClusterOptions) -> Application:
    """The application of these options. Ray must be initialized."""
    scaling = options.scaling()
    router = {
        "router": options.router,
        "known_blocks": options.known_blocks,
        "drain_seconds": options.drain_seconds,
        "record": options.record_routing,
    }
    # The ingress answers 503 when the time to drain is over; Serve ends the processes after that
    shutdown_options: dict[str, Any] = {
        "graceful_shutdown_timeout_s": options.drain_seconds + ANSWER_SECONDS,
        "graceful_shutdown_wait_loop_s": 0.5,
    }
    replicas = serve.deployment(
        Replica,
        name=REPLICAS,
        num_replicas=None if scaling else options.replicas,
        autoscaling_config=scaling,
        ray_actor_options=resources_of(options),
        max_ongoing_requests=MAX_ONGOING_REQUESTS,
        **shutdown_options,
        health_check_period_s=5.0,
        request_router_config={"request_router_class": ROUTER, "request_router_kwargs": router},
    )

    def build() -> ASGIApp:
        """Make the ingress. Serve calls it in the ingress's process."""
        name = serve.get_replica_context().app_name
        return create_ingress(options, serve.get_deployment_handle(REPLICAS, app_name=name))

    # one ingress, because its process has the state of the router
    ingress = serve.deployment(
        serve.ingress(build)(Ingress),
        num_replicas=1,
        ray_actor_options={"num_cpus": 0},
        max_ongoing_requests=MAX_ONGOING_REQUESTS,
        **shutdown_options,
    )
    return ingress.bind(replicas.bind(options))


class Ingress:
    """The ingress's deployment; `build` makes its application.

    `replicas` is an argument so that Serve deploys them with it.
    """

    def __init__(self, replicas: Any) -> None:
        pass


def resources_of(options: ClusterOptions) -> dict[str, Any]:
    if options.resources is not None:
        return dict(options.resources)
    return cluster_options.default_resources(ray.cluster_resources(), options.engine.get("mesh"))
