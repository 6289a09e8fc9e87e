"""The command `pagedjax bench serve`: its options, its table and its JSON."""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
from dataclasses import asdict
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from pagedjax.server.load_client.client import Target, measure

if TYPE_CHECKING:
    from pagedjax.server.load_client import plan

FILES = {  # the content of each option's file
    "--trace": "a CSV file, with TIMESTAMP,ContextTokens,GeneratedTokens as its first line",
    "--prompts": "a text file with a prompt on each line",
    "--api-key-file": "a text file that has the key alone",
}
GIVEN_BY_A_FILE = {  # the fields of a load that its file has
    "trace": ("arrivals", "rate", "burstiness", "prompt_tokens", "output_tokens"),
    "prompts": ("prompt_tokens", "max_prompt_tokens", "vocab"),
}


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of `bench serve`."""
    add = parser.add_argument
    add("--url", default="http://127.0.0.1:8000", help="the server's address, with or without /v1")
    add("--model", help="the name of the model; the default is the first that the server lists")
    add(
        "--endpoint",
        choices=("completions", "chat"),
        help="completions (the default) sends token ids, chat words",
    )
    add("--rate", type=float, help="requests a second")
    add(
        "--arrivals",
        choices=("poisson", "gamma", "uniform", "at-once"),
        help="the default is poisson",
    )
    add(
        "--burstiness",
        type=float,
        help="of gamma arrivals: below 1 bursts, 1 is Poisson (the default)",
    )
    add(
        "--requests",
        "--limit",
        type=int,
        help="how many; the default is 100, or every line of the file",
    )
    lengths = '"128", "16:256" or "lognormal:6.63,0.99"'
    add("--prompt-tokens", metavar="LENGTHS", help=f"{lengths}; the default is 128")
    add(
        "--output-tokens",
        metavar="LENGTHS",
        help="at most, likewise; the default is 64. See --ignore-eos",
    )
    add("--max-prompt-tokens", type=int, help="clip longer ones to this")
    add("--max-output-tokens", type=int, help="clip longer ones to this")
    add(
        "--trace",
        metavar="CSV",
        help="arrivals and lengths: TIMESTAMP,ContextTokens,GeneratedTokens",
    )
    add("--time-scale", type=float, help="multiplies a trace's gaps: 0.5 doubles its rate")
    add(
        "--prompts",
        metavar="FILE",
        help="texts, one a line; read again from the top if there are too few",
    )
    add(
        "--vocab",
        type=int,
        help="random token ids are below this; the default, 32000, suits most models",
    )
    add(
        "--seed",
        type=int,
        help="the same seed sends the same requests at the same times; the default is 0",
    )
    add(
        "--ignore-eos",
        action="store_true",
        help="ask for all output tokens, for servers that know ignore_eos",
    )
    add("--temperature", type=float, default=0.0, help="0 is greedy (the default)")
    add("--ttft-target", type=float, help="seconds until the first token, for goodput")
    add("--itl-target", type=float, help="seconds per later token (TPOT), for goodput")
    add(
        "--max-concurrency",
        type=int,
        help="requests at the same time; the others wait, and latencies include it",
    )
    add(
        "--timeout",
        type=float,
        default=600.0,
        help="seconds from a request's arrival to its end; the default is 600",
    )
    add(
        "--no-wait",
        action="store_true",
        help="begin although the server still compiles programs; the default waits for them, "
        "--timeout seconds at most",
    )
    add("--warmup", type=int, default=0, help="requests to send before the measurement")
    add("--api-key-file", help="a file with nothing but the key")
    add("--json", metavar="FILE", help="write the summary and every request to this file")


def main(args: argparse.Namespace) -> int:
    """Measure, print a table, write the JSON. Returns 0 if all completed, 1 if some failed.

    Raises:
        ValueError: nothing was measured.
    """
    from pagedjax.server.load_client import metrics_page, speculation, summary

    load = _load(args)
    target = Target(
        url=args.url,
        model=args.model,
        timeout=args.timeout,
        max_concurrency=args.max_concurrency,
        ignore_eos=args.ignore_eos,
        temperature=args.temperature,
        api_key=_key(args.api_key_file),
    )
    # An error now, not after minutes of measuring
    if args.json and not Path(args.json).absolute().parent.is_dir():
        raise ValueError(f"--json is {args.json!r}, and its folder does not exist; make it first")
    if args.json and Path(args.json).is_dir():
        raise ValueError(f"--json is {args.json!r}, which is a folder; name a file in it")
    file = load.trace or load.prompts
    content = _text("--trace" if load.trace else "--prompts", file) if file else ""
    if args.no_wait:
        missing = metrics_page.missing_programs(metrics_page.fetch(target.base, target.api_key))
    else:
        missing = metrics_page.wait_for_programs(
            target.base, target.api_key, args.timeout, partial(print, file=sys.stderr)
        )
    start = datetime.now(UTC).isoformat(timespec="seconds")
    running = measure(load, target, content, warmup=args.warmup, progress=sys.stderr.isatty())
    drafts_before = speculation.fetch(target.base, target.api_key)
    model, planned, times, lag = asyncio.run(running)
    drafts = speculation.fetch(target.base, target.api_key) - drafts_before
    totals = summary.summarize(times, ttft=args.ttft_target, itl=args.itl_target, lag=lag)
    if args.json:
        options = asdict(target) | {"model": model}
        del options["api_key"]
        record = {
            "began": start,
            "load": asdict(load),
            "target": options,
            "warmup": args.warmup,
            "missing_programs": missing,
            "clipped_prompts": planned.clipped_prompts,
            "clipped_outputs": planned.clipped_outputs,
            "summary": totals,
            "drafts": drafts._asdict(),
            "requests": [
                {**request._asdict(), "max_tokens": item.max_tokens}
                for request, item in zip(times, planned.items, strict=True)
            ],
        }
        Path(args.json).write_text(json.dumps(record, indent=1) + "\n", "utf-8")
    print(f"model {model} at {target.url}\n{summary.table(totals)}")
    if missing:
        print(
            f"note: the server had still to compile {missing} programs when the measurement began; "
            "its first answers waited for them"
        )
    if drafts.tokens:
        print(speculation.line(drafts))
    return 1 if totals["failed"] else 0


def _load(args: argparse.Namespace) -> plan.Load:
    """The load that the options describe.

    Raises:
        ValueError: options that exclude each other, or a value out of its range.
    """
    from pagedjax.server.load_client import plan

    names = plan.Load.__dataclass_fields__
    values = {
        name: value for name, value in vars(args).items() if name in names and value is not None
    }
    for file, fields in GIVEN_BY_A_FILE.items():
        clash = [_flag(name) for name in fields if name in values]
        if file in values and clash:
            raise ValueError(f"--{file} already gives {', '.join(clash)}; leave one of them out")
    if "time_scale" in values and "trace" not in values:
        raise ValueError("--time-scale needs a --trace; without one use --rate")
    for name in ("ttft_target", "itl_target"):
        target = getattr(args, name)
        if target is not None and not target > 0:
            raise ValueError(f"{_flag(name)} is {target}; it must be above 0 seconds")
    if args.warmup < 0:
        raise ValueError(f"--warmup is {args.warmup}; it must be at least 0")
    return plan.Load(**values)


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")


def _text(option: str, file: str) -> str:
    try:
        return Path(file).read_text("utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8 text"
        raise ValueError(
            f"{option} is {file!r}, which cannot be read: {reason}; name {FILES[option]}"
        ) from None


def _key(file: str | None) -> str | None:
    if file is None:
        return None
    key = _text("--api-key-file", file).strip()
    if not key or not key.isascii() or len(key.split()) != 1:
        raise ValueError(
            f"{file} must hold the API key and nothing else; it holds {len(key.split())} words"
        )
    return key
