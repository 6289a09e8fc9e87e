"""The two endpoints of vllmini, a small engine from a lecture.

They start a generation, and tell its text so far:

    POST /generate {"prompt": "...", "max_length": 100}  ->  {"sequence_id": "kQ3v..."}
    GET  /result/kQ3v...    ->  {"status": "in progress", "generated": "so far"}

`status` is "not found", "in progress", "completed" or "error". Sampling is greedy. In vllmini
`sequence_id` is a number that counts up. Here it is a random text, so that a client cannot read the
results of another client.

A result is kept for `result_seconds` after its POST or its last GET. Then it is forgotten, and its
generation is cancelled if it still runs. At most MAX_RESULTS are kept; the oldest completed one
makes room for a new one.
"""

from __future__ import annotations

import asyncio
import secrets
from dataclasses import dataclass

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, Response

from pagedjax.engine.session import GenerationRequest
from pagedjax.options.params import SamplingParams
from pagedjax.server.errors import ApiError, in_thread, submit
from pagedjax.server.responses import JSON
from pagedjax.server.schema import LectureRequest
from pagedjax.server.streaming import CLIENT_LEFT, unless_client_leaves
from pagedjax.server.worker import EngineStopped, Submission, TurnedAway, Worker

MAX_RESULTS = 1024
ID_BYTES = 16  # random bytes of an id: 128 bits cannot be guessed


@dataclass(eq=False)
class Result:
    """One generation. `reader` collects its text."""

    submission: Submission
    status: str = "in progress"
    generated: str = ""
    reader: asyncio.Task[None] | None = None

    async def read(self) -> None:
        """Collect the text until the generation ends."""
        try:
            async for delta in self.submission:
                self.generated += delta.text
            self.status = "completed"
        except (EngineStopped, TurnedAway):
            self.status = "error"


class Results:
    """The results that are kept, in order of their POST. For use in the event loop."""

    def __init__(self, worker: Worker, seconds: float) -> None:
        self._worker = worker
        self._seconds = seconds
        self._results: dict[str, Result] = {}
        self._timers: dict[str, asyncio.TimerHandle] = {}

    def add(self, submission: Submission) -> str:
        """Keep the result of a submission, and read its text from now on. Returns its id.

        Raises:
            ApiError: all results are in progress, and there is no room for one more. The submission
                is cancelled.
        """
        if len(self._results) >= MAX_RESULTS:
            completed = [
                key for key, result in self._results.items() if result.status != "in progress"
            ]
            if not completed:
                self._worker.cancel(submission)
                message = (
                    f"{MAX_RESULTS} generations are in progress, the limit of /generate; try again "
                    "later"
                )
                raise ApiError(429, message, code="queue_full", retry_after=1)
            self._forget(completed[0])
        name = secrets.token_urlsafe(ID_BYTES)
        result = Result(submission)
        result.reader = asyncio.create_task(result.read())
        self._results[name] = result
        self._keep(name)
        return name

    def get(self, name: str) -> Result | None:
        """The result; it is kept for `seconds` more."""
        result = self._results.get(name)
        if result is not None:
            self._timers.pop(name).cancel()
            self._keep(name)
        return result

    def _keep(self, name: str) -> None:
        loop = asyncio.get_running_loop()
        self._timers[name] = loop.call_later(self._seconds, self._forget, name)

    def _forget(self, name: str) -> None:
        result = self._results.pop(name)
        self._timers.pop(name).cancel()
        self._worker.cancel(result.submission)
        if result.reader is not None:
            result.reader.cancel()  # a cancelled submission gets no more updates


def add_routes(app: FastAPI, worker: Worker, result_seconds: float) -> None:
    results = Results(worker, result_seconds)

    @app.post("/generate")
    async def generate(body: LectureRequest, request: Request) -> Response:
        """Start to continue a prompt. The answer is the id for /result."""
        generation = await in_thread(_request, worker, body)
        submission = await unless_client_leaves(request, submit(worker, [generation]))
        if submission is None:
            return Response(status_code=CLIENT_LEFT)
        if await request.is_disconnected():
            worker.cancel(submission)
            return Response(status_code=CLIENT_LEFT)
        return JSONResponse({"sequence_id": results.add(submission)})

    @app.get("/result/{sequence_id}")
    async def result(sequence_id: str) -> JSON:
        """The text so far."""
        generation = results.get(sequence_id)
        if generation is None:
            return {"status": "not found", "generated": None}
        return {"status": generation.status, "generated": generation.generated}


def _request(worker: Worker, body: LectureRequest) -> GenerationRequest:
    """The engine's request. Raises ValueError if `max_length` leaves no room for output."""
    ids = worker.llm.tokenizer.encode(body.prompt)
    room = body.max_length - len(ids)
    if room < 1:
        raise ValueError(
            f"max_length is {body.max_length} tokens with the prompt's {len(ids)}; it must be at "
            f"least {len(ids) + 1}"
        )
    return GenerationRequest(ids, SamplingParams(temperature=0.0, max_tokens=room), body.prompt)
