"""A replica: one engine in a process of Ray's, with the application that `pagedjax serve` has.

It listens nowhere.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator
from pathlib import Path
from typing import Any, NamedTuple

from ray import serve
from starlette.types import Message, Scope

from pagedjax.engine.garbage import collect_rarely
from pagedjax.llm import LLM
from pagedjax.routing import RouterRequest
from pagedjax.server import exchange
from pagedjax.server.app import create_app, identity
from pagedjax.server.continuation import TAKEN, Origin
from pagedjax.server.ray.options import ClusterOptions

HEADER = "x-replica"  # of each answer: the name of the replica that gave it


class Answer(NamedTuple):
    """A whole answer of one replica."""

    replica: str
    status: int
    body: bytes


class Replica:
    """The methods that the ingress calls.

    Serve waits for those that run before it stops the replica.
    """

    # async: it runs in the event loop that answers
    async def __init__(self, options: ClusterOptions) -> None:
        self.name = serve.get_replica_context().replica_id.unique_id
        self.llm = LLM(
            options.model,
            progress=False,
            compilation_cache=options.compilation_cache,
            **options.engine,
        )
        for name, folder in options.adapters.items():
            self.llm.load_adapter(name, folder)
        if options.record is not None:
            path = Path(options.record)
            self.llm.engine.record(path.with_suffix(f".{self.name}{path.suffix}"), times=True)
        self.identity = identity(self.llm, options.of_replica())
        self._step_seconds = options.step_seconds
        self.app = create_app(self.llm, options.of_replica())
        collect_rarely()
        self.app.state.worker.start()

    async def __del__(self) -> None:
        """End. Serve calls it once, after the drain; and if `__init__` has failed."""
        if hasattr(self, "app"):
            self.app.state.worker.halt()
            self.llm.engine.record(None)

    async def check_health(self) -> None:
        """Check the engine. Serve replaces a replica for which this raises."""
        worker = self.app.state.worker
        if not worker.healthy:
            raise RuntimeError(f"the engine of replica {self.name} has ended: {worker.error!r}")
        if worker.step_seconds > self._step_seconds:
            raise RuntimeError(
                f"a step of replica {self.name} has taken {worker.step_seconds:.0f} s, and "
                f"step_seconds is {self._step_seconds:g}; raise it if steps may take longer"
            )

    async def pulse(self, *, target: str) -> float:
        """Seconds that the present step of the engine has taken; 0 between steps. `target` is for
        the request router.
        """
        return self.app.state.worker.step_seconds

    async def facts(self, *, target: str | None = None) -> dict[str, Any]:
        """What the ingress must know of the engine. `target` is for the request router."""
        config = self.llm.engine.config
        names = ("max_model_len", "block_size", "enable_prefix_caching")
        return {name: getattr(config, name) for name in names} | {"identity": self.identity}

    async def answer(
        self,
        scope: Scope,
        body: bytes,
        *,
        origin: Origin | None = None,
        routed: RouterRequest | None = None,
        target: str | None = None,
    ) -> AsyncGenerator[list[Message], None]:
        """Yield the messages of the answer to an HTTP request.

        Before them comes one that says which replica has taken the request.

        Args:
            origin: of the request, which another replica may have begun.
            routed, target: for the request router.
        """
        yield [{"type": TAKEN, "engine": self.name, "identity": self.identity}]
        if origin is not None and origin.identity not in ("", self.identity):
            return  # the ingress sees it, too
        async for messages in exchange.answer_messages(self.app, scope, body, origin):
            yield [self._with_name(message) for message in messages]

    def _with_name(self, message: Message) -> Message:
        """The message; the one with the headers gets this replica's name as another one."""
        if message["type"] != "http.response.start":
            return message
        header = (HEADER.encode(), self.name.encode())
        return {**message, "headers": [*message.get("headers", ()), header]}

    async def whole(self, path: str, *, target: str) -> Answer:
        """The answer to GET, for pages that all replicas are asked for.

        `target` is for the request router.
        """
        answer: list[Any] = []
        async for messages in exchange.answer_messages(self.app, exchange.get(path), b""):
            answer += messages
        start = next(message for message in answer if message["type"] == "http.response.start")
        body = b"".join(message.get("body", b"") for message in answer)
        return Answer(self.name, start["status"], body)
