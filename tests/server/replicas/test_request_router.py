"""Ray Serve's own request router, as our subclass, in one event loop without a cluster: what it
does with calls whose clients leave at any moment, with replicas that come and go, and with a router
that fails."""

from __future__ import annotations

import asyncio
from pathlib import Path
from types import SimpleNamespace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from ray.serve._private.common import DeploymentHandleSource, DeploymentID, RequestMetadata
from ray.serve.request_router import PendingRequest, ReplicaID

from pagedjax import routing
from pagedjax.routing import RouterRequest, recording
from pagedjax.server.ray.link import LINK, NotRouted
from pagedjax.server.ray.request_router import PureRouter

DEPLOYMENT = DeploymentID(name="replicas", app_name="pagedjax")


async def no_queue(deadline_s: float) -> int:
    return 0


def replica(name: str) -> SimpleNamespace:
    """What Serve's router reads of a replica."""
    fields = {
        "max_ongoing_requests": 100,
        "get_queue_len": no_queue,
        "node_id": "n",
        "availability_zone": None,
    }
    return SimpleNamespace(replica_id=ReplicaID(unique_id=name, deployment_id=DEPLOYMENT), **fields)


def router(
    name: str = "least_loaded", drain_seconds: float = 60.0, record=None, kind: type = PureRouter
) -> PureRouter:
    options = {"handle_source": DeploymentHandleSource.REPLICA, "use_replica_queue_len_cache": True}
    ray_router = kind(deployment_id=DEPLOYMENT, **options)
    ray_router.initialize_state(name, 100, drain_seconds, record)
    return ray_router


def call(name: str, **arguments) -> PendingRequest:
    metadata = RequestMetadata(request_id=name, internal_request_id=name)
    return PendingRequest(args=[], kwargs=arguments, metadata=metadata)


def choose(ray_router: PureRouter, request: RouterRequest) -> asyncio.Future:
    return asyncio.ensure_future(
        ray_router._choose_replica_for_request(call(request.request_id, routed=request))
    )


class LeavesWhenChosen(PureRouter):
    """The client leaves in the moment in which Serve has set the replica of its call."""

    victim: asyncio.Future | None = None

    def _fulfill_next_pending_request(self, *arguments) -> None:
        super()._fulfill_next_pending_request(*arguments)
        if self.victim is not None:
            self.victim.cancel()


def test_assignments_are_those_of_the_pure_router(tmp_path):
    requests = [RouterRequest(f"q{i}", i, ("a", "b", "c")[: i % 4]) for i in range(12)]

    async def run() -> list[str]:
        ray_router = router("prefix", record=str(tmp_path / "routing.jsonl"))
        chosen = []
        ray_router.update_replicas([replica("a"), replica("b")])
        for i, request in enumerate(requests):
            chosen.append((await choose(ray_router, request)).replica_id.unique_id)
            if i % 3 == 2:
                LINK.end(requests[i - 1].request_id)
                await asyncio.sleep(0)
        return chosen

    chosen_ids = asyncio.run(run())
    state = routing.init(100)
    expected = []
    for name in "ab":
        state = routing.joined(state, name)
    for i, request in enumerate(requests):
        state, index = routing.route(state, routing.PREFIX, request)
        expected.append(index)
        if i % 3 == 2:
            state = routing.finished(state, requests[i - 1].request_id)
    assert chosen_ids == expected
    assert recording.replay((tmp_path / "routing.jsonl").read_text("utf-8").splitlines()) == (
        state,
        12,
    )


@settings(max_examples=60)
@given(st.lists(st.integers(-1, 6), min_size=1, max_size=12), st.booleans())
def test_a_request_that_ended_is_never_unfinished(turns, in_the_moment):
    """The client of call i leaves after turns[i] turns of the event loop; -1: it stays until it has
    a replica.
    """

    async def run() -> PureRouter:
        ray_router = router(kind=LeavesWhenChosen)
        ray_router.update_replicas([replica("a"), replica("b")])

        async def client(i: int, turns: int) -> None:
            work = choose(ray_router, RouterRequest(f"q{i}", 10))
            if turns == -1 and in_the_moment:
                ray_router.victim = work
            elif turns >= 0:
                for _ in range(turns):
                    await asyncio.sleep(0)
                work.cancel()
            await asyncio.gather(work, return_exceptions=True)
            LINK.end(f"q{i}")

        await asyncio.gather(*(client(i, n) for i, n in enumerate(turns)))
        for _ in range(20):
            await asyncio.sleep(0)
        return ray_router

    ray_router = asyncio.run(run())
    assert not ray_router.recorder.state.unfinished
    routing.state.check(ray_router.recorder.state)


def test_a_request_that_ended_before_it_was_routed_gets_no_replica():
    async def run() -> None:
        ray_router = router()
        ray_router.update_replicas([replica("a")])
        LINK.end("q")
        await asyncio.sleep(0)
        with pytest.raises(asyncio.CancelledError):
            await choose(ray_router, RouterRequest("q", 1))
        assert not ray_router.recorder.state.unfinished
        assert (await choose(ray_router, RouterRequest("r", 1))).replica_id.unique_id == "a"

    asyncio.run(run())


def test_a_replica_that_is_avoided_gets_nothing_and_has_not_left():
    departed = []

    async def run() -> None:
        ray_router = router()
        LINK.left = departed.append
        ray_router.update_replicas([replica("a"), replica("b")])
        first = (await choose(ray_router, RouterRequest("q", 1))).replica_id.unique_id
        assert LINK.replica_of("q") == first
        LINK.avoid(frozenset([first]))
        await asyncio.sleep(0)
        (second,) = {"a", "b"} - {first}
        assert LINK.present() == (second,)
        for name in "rst":
            chosen = await choose(ray_router, RouterRequest(name, 1))
            assert chosen.replica_id.unique_id == second
        LINK.avoid(frozenset())
        await asyncio.sleep(0)
        chosen = await choose(ray_router, RouterRequest("u", 1))
        assert chosen.replica_id.unique_id == first
        assert not departed

    asyncio.run(run())


def test_a_replica_that_leaves_is_told_when_its_time_is_over():
    drained = []
    departed = []

    async def run() -> None:
        ray_router = router(drain_seconds=0.05)
        LINK.drained = drained.append
        LINK.left = departed.append
        ray_router.update_replicas([replica("a"), replica("b")])
        first = (await choose(ray_router, RouterRequest("q", 1))).replica_id.unique_id
        ray_router.update_replicas(
            [
                remaining
                for remaining in map(replica, "ab")
                if remaining.replica_id.unique_id != first
            ]
        )
        assert (
            ray_router.recorder.state.replicas
            == tuple({"a", "b"} - {first})
            == tuple(LINK.present())
        )
        assert not ray_router.recorder.state.unfinished
        assert departed == [first]
        assert not drained
        await asyncio.sleep(0.1)
        assert drained == [first]

    asyncio.run(run())


def test_a_named_replica_gets_the_call_or_it_fails():
    async def run() -> None:
        ray_router = router()
        ray_router.update_replicas([replica("a"), replica("b")])
        for name in "bba":
            chosen = await ray_router._choose_replica_for_request(call(f"t{name}", target=name))
            assert chosen.replica_id.unique_id == name
        with pytest.raises(NotRouted, match="replica 'c' is not present"):
            await ray_router._choose_replica_for_request(call("tc", target="c"))
        await ray_router._choose_replica_for_request(call("facts"))  # any replica
        assert not ray_router.recorder.state.unfinished

    asyncio.run(run())


def test_a_router_that_fails_is_an_error_of_the_request(tmp_path):
    text = "from pagedjax.routing import Router\nBAD = Router('bad', lambda state, request: 1 // request.tokens)\n"
    (tmp_path / "mine.py").write_text(text, "utf-8")

    async def run() -> None:
        ray_router = router(f"{tmp_path / 'mine.py'}:BAD")
        ray_router.update_replicas([replica("a")])
        with pytest.raises(NotRouted, match="the router failed: ZeroDivisionError"):
            await choose(ray_router, RouterRequest("q", 0))
        with pytest.raises(NotRouted, match="its choose must return one of"):
            await choose(ray_router, RouterRequest("q", 1))
        assert not ray_router.recorder.state.unfinished

    asyncio.run(run())


def test_a_request_waits_while_all_replicas_are_avoided():
    async def run() -> None:
        ray_router = router()
        ray_router.update_replicas([replica("a")])
        ray_router.avoid(frozenset("a"))
        await asyncio.sleep(0)
        waiting = asyncio.ensure_future(choose(ray_router, RouterRequest("q", 1)))
        await asyncio.sleep(0.05)
        assert not waiting.done()
        ray_router.update_replicas([replica("a"), replica("b")])
        assert (await waiting).replica_id.unique_id == "b"
        LINK.end("q")

    asyncio.run(run())


def test_an_ingress_that_starts_again_keeps_the_first_record(tmp_path):
    for _ in range(3):
        router(record=str(tmp_path / "routing.jsonl")).recorder.close()
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "routing.2.jsonl",
        "routing.3.jsonl",
        "routing.jsonl",
    ]


def test_routing_goes_on_without_a_record(tmp_path, caplog):
    async def run(record: str) -> None:
        ray_router = router(record=record)
        ray_router.update_replicas([replica("a")])
        await choose(ray_router, RouterRequest("q", 0))

    asyncio.run(run(str(tmp_path / "missing" / "routing.jsonl")))
    assert "routing is not recorded: " in caplog.text
    full = recording.Recorder(routing.ROUND_ROBIN, 0, Path("/dev/full"))  # a disk without room
    full.joined("a")
    full.joined("b")
    assert full.state.replicas == ("a", "b")
    assert caplog.text.count("the record of routing ends here: ") == 1
