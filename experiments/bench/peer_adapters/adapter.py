"""The protocol between experiments/bench/peers.py and an adapter: one JSON object a line.

    to the adapter    {"model": folder, "options": {...}}          once
    from it           {"ready": seconds, "version": "1.2.3"}
    to the adapter    {"requests": [[token ids, count], ...]}      any number of times, until its input ends
    from it           {"tokens": [[...], ...], "seconds": ...}     greedy, exactly `count` of each, EOS ignored

Errors are returned as {"error": text}. Output that an engine prints goes to stderr.
"""

from __future__ import annotations

import json
import os
import sys
import time
import traceback
from collections.abc import Callable
from typing import Any

Request = tuple[list[int], int]  # prompt token ids, tokens to generate
Generate = Callable[[list[Request]], list[list[int]]]


def serve(load: Callable[[str, dict[str, Any]], tuple[Generate, str]]) -> None:
    """Answer until standard input ends.

    `load(model folder, options)` gives (generate, the engine's version).
    """
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # all other output goes to stderr

    def answer(**fields: Any) -> None:
        answers.write(json.dumps(fields) + "\n")
        answers.flush()

    try:
        started = time.perf_counter()
        first = json.loads(sys.stdin.readline())
        generate, version = load(first["model"], first["options"])
        answer(ready=time.perf_counter() - started, version=version)
        for line in sys.stdin:
            requests = [(prompt, count) for prompt, count in json.loads(line)["requests"]]
            started = time.perf_counter()
            tokens = generate(requests)
            answer(
                seconds=time.perf_counter() - started,
                tokens=[list(map(int, ids)) for ids in tokens],
            )
    except Exception as error:
        traceback.print_exc()
        first_line, *_ = str(error).strip().splitlines() or [""]
        answer(error=f"{type(error).__name__}: {first_line}")
