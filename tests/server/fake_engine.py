"""In the place of `supervisor.run_engine`: processes without an engine, which behave as a test
says. It imports little, so that they start quickly.
"""

from __future__ import annotations

import asyncio
import json
import os
import pickle
import struct
import sys
import time
from types import SimpleNamespace
from typing import Any, NamedTuple

import uvicorn

PULSES = {
    "works": {"healthy": True, "step_seconds": 0.0},
    "has a long step": {"healthy": True, "step_seconds": 1000.0},
    "has failed": {"healthy": False, "step_seconds": 0.0},
}


class Plan(NamedTuple):
    """What each process does, the first one first."""

    behaviours: tuple[str, ...]

    @property
    def options(self) -> SimpleNamespace:
        return SimpleNamespace(name="tiny")


def run(plan: Plan, path: str, number: int) -> None:
    """The process of a number behaves as `plan.behaviours[number]`."""
    behaviour = plan.behaviours[number]
    if behaviour == "does not load":
        sys.exit(3)
    if behaviour == "loads for ever":
        time.sleep(600)
    uvicorn.run(Application(behaviour, f"process {number}"), uds=path, log_level="warning")


class Application:
    """GET /pulse and POST /answer of a process."""

    def __init__(self, behaviour: str, name: str) -> None:
        self.behaviour = behaviour
        self.name = name
        self.pulses = 0
        self.has_answered = False

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] != "http":
            return
        if scope["path"] == "/answer":
            await self._answer(receive, send)
            return
        self.pulses += 1
        pulse = PULSES.get(self.behaviour, PULSES["works"])
        if self.pulses == 1:  # each is ready once
            pulse = PULSES["works"]
        elif self.behaviour == "fails after an answer" and self.has_answered:
            pulse = PULSES["has failed"]
        elif self.behaviour == "is silent":
            await asyncio.sleep(600)
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": json.dumps(pulse).encode()})

    async def _answer(self, receive: Any, send: Any) -> None:
        """Answers with the name of the process; one that "ends while it answers" ends."""
        await receive()
        await send({"type": "http.response.start", "status": 200, "headers": []})
        start = {"type": "http.response.start", "status": 200, "headers": []}
        body = {"type": "http.response.body", "body": self.name.encode()}
        notice = {"type": "pagedjax.taken", "engine": self.name, "identity": self.behaviour}
        for messages in ([notice], [start], [body]):
            data = pickle.dumps(messages)
            frame = struct.pack(">I", len(data)) + data
            await send({"type": "http.response.body", "body": frame, "more_body": True})
            if self.behaviour == "ends while it answers":
                await asyncio.sleep(0.2)
                os._exit(9)
        await send({"type": "http.response.body", "body": b""})
        self.has_answered = True
