"""Adapter: a llama.cpp server. Options: `server` (the program), `gguf` (the model file), `slots`
(16), `context` (tokens of a slot, 512), `threads` (all cores).

llama.cpp creates the file: `llama-quantize --allow-requantize in.gguf out.gguf F32` from the
embedded model's GGUF, or convert_hf_to_gguf.py from a Hugging Face folder (`--outtype f32`).
"""

from __future__ import annotations

import atexit
import json
import os
import socket
import subprocess
import time
import urllib.error
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from adapter import Generate, Request, serve

PATIENCE = 300.0  # seconds for the server to load


def load(model: str, options: dict[str, Any]) -> tuple[Generate, str]:
    program = options.pop("server")
    file = options.pop("gguf")
    slots = options.pop("slots", 16)
    context = options.pop("context", 512)
    threads = options.pop("threads", os.cpu_count())
    if options:
        raise ValueError(
            f"unknown options {', '.join(options)}; there are server, gguf, slots, context and "
            "threads"
        )
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port = listener.getsockname()[1]
    command = [
        program,
        "-m",
        file,
        "--host",
        "127.0.0.1",
        "--port",
        port,
        "-np",
        slots,
        "-c",
        slots * context,
    ]
    process = subprocess.Popen([str(word) for word in [*command, "-t", threads, "-tb", threads]])
    atexit.register(process.terminate)
    address = f"http://127.0.0.1:{port}"
    await_health(address, process)

    def complete(request: Request) -> list[int]:
        prompt, count = request
        body = {
            "prompt": prompt,
            "n_predict": count,
            "temperature": 0,
            "ignore_eos": True,
            "cache_prompt": False,
            "return_tokens": True,
        }
        return post(f"{address}/completion", body)["tokens"]

    def generate(requests: list[Request]) -> list[list[int]]:
        with ThreadPoolExecutor(len(requests)) as clients:
            return list(clients.map(complete, requests))

    version = subprocess.run([program, "--version"], capture_output=True, text=True, check=False)
    return generate, (version.stderr + version.stdout).strip().splitlines()[0]


def await_health(address: str, process: subprocess.Popen) -> None:
    end = time.monotonic() + PATIENCE
    while time.monotonic() < end:
        if process.poll() is not None:
            raise RuntimeError(f"the server ended with exit code {process.returncode}")
        try:
            with urllib.request.urlopen(f"{address}/health", timeout=5) as response:
                if response.status == 200:
                    return
        except (urllib.error.URLError, OSError):
            time.sleep(0.2)
    raise RuntimeError(f"the server was not ready after {PATIENCE:.0f} s")


def post(url: str, body: dict[str, Any]) -> dict[str, Any]:
    request = urllib.request.Request(
        url, json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=3600) as response:
        return json.loads(response.read())


if __name__ == "__main__":
    serve(load)
