"""The two endpoints of vllmini, the engine that a lecture is built on: ask, and come back for what is there.

    POST /generate {"prompt": "...", "max_length": 100}   ->  {"sequence_id": 1}
    GET  /result/1                                        ->  {"status": "in progress", "generated": "so far"}

`status` is "not found", "in progress", "completed" or "error". Greedy, as there.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

from fastapi import FastAPI

from pagedjax.params import SamplingParams
from pagedjax.server.answers import JSON
from pagedjax.server.refusals import prepared, submitted
from pagedjax.server.schema import LectureRequest
from pagedjax.server.worker import Stopped, Ticket, Worker
from pagedjax.session import GenerationRequest

KEPT = 1024  # results that somebody may still come back for; of more, the oldest that have ended are forgotten


@dataclass
class Result:
    status: str = "in progress"
    generated: str = ""


def add_routes(app: FastAPI, worker: Worker) -> None:
    results: dict[int, Result] = {}
    tasks: set[asyncio.Task[None]] = set()

    async def follow(ticket: Ticket, result: Result) -> None:
        try:
            async for delta in ticket:
                result.generated += delta.text
            result.status = "completed"
        except Stopped:
            result.status = "error"

    @app.post("/generate")
    async def generate(body: LectureRequest) -> JSON:
        """Begin to continue a prompt; the answer names what to ask /result for."""
        ask = await prepared(asked, worker, body)
        result = Result()
        ticket = await submitted(worker, [ask])
        number = app.state.sequences = getattr(app.state, "sequences", 0) + 1
        results[number] = result
        task = asyncio.create_task(follow(ticket, result))
        tasks.add(task)  # the event loop itself only holds weak references
        task.add_done_callback(tasks.discard)
        ended = [key for key, one in results.items() if one.status != "in progress"]
        for key in ended[: max(0, len(results) - KEPT)]:
            del results[key]
        return {"sequence_id": number}

    @app.get("/result/{seq_id}")
    async def result(seq_id: int) -> JSON:
        """What exists so far."""
        found = results.get(seq_id)
        if found is None:
            return {"status": "not found", "generated": None}
        return {"status": found.status, "generated": found.generated}


def asked(worker: Worker, body: LectureRequest) -> GenerationRequest:
    """Raises ValueError for a prompt that is as long as the whole sequence may become."""
    ids = worker.llm.tokenizer.encode(body.prompt)
    room = body.max_length - len(ids)
    if room < 1:
        raise ValueError(
            f"max_length is {body.max_length} tokens with the prompt's {len(ids)}; it must be at least {len(ids) + 1}"
        )
    return GenerationRequest(ids, SamplingParams(temperature=0.0, max_tokens=room), body.prompt)
