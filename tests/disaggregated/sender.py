"""The process that computes prompts, for tests: python -m tests.disaggregated.sender JOB

A job is JSON: the model's folder, the engine's options, prompts, max_tokens, and the file for the
offers. It writes them, with the tokens that each sequence has, and lives until its input ends.
"""

from __future__ import annotations

import json
import pickle
import sys
from pathlib import Path
from typing import Any

from pagedjax import LLM, SamplingParams
from pagedjax.disaggregated import Transfers
from pagedjax.host import scheduler


def main(job: dict[str, Any]) -> None:
    engine = LLM(job["model"], progress=False, **job["engine"]).engine
    engine.record(job["recording"])
    transfers = Transfers("127.0.0.1:0")
    offers = []
    for i, prompt in enumerate(job["prompts"]):
        params = SamplingParams(
            temperature=0.9, seed=i, max_tokens=job["max_tokens"], ignore_eos=True
        )
        engine.add(f"r{i}", prompt, params)
    state = engine.scheduler_state
    while state.waiting or any(seq.length - seq.computed > 1 for seq in scheduler.running(state)):
        engine.step()
        state = engine.scheduler_state
    for i in range(len(job["prompts"])):
        offers.append(transfers.offer(engine, f"r{i}"))
        engine.release(f"r{i}")
    engine.record(None)
    Path(job["offers"]).write_bytes(pickle.dumps(offers))
    print("offered", flush=True)
    sys.stdin.read()


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
