"""The command `pagedjax check`: the checker of policies (host/checker), its options and its words.

Exit status 0: the properties hold for what was covered. 1: a counterexample. 2: a wrong call, or a
policy that reads what the search leaves out.
"""

from __future__ import annotations

import argparse
import shlex

from pagedjax.host.checker.check import check, text
from pagedjax.host.checker.counterexample import Counterexample, record
from pagedjax.host.checker.counterexample import text as run_text
from pagedjax.host.event_log import check_target
from pagedjax.host.policies import POLICIES
from pagedjax.host.purity import find_pure
from pagedjax.options.own_names import name_in_one_line


def main(args: argparse.Namespace) -> int:
    """Runs the command. Returns the exit status.

    Raises:
        ValueError: there is no such policy, it is not pure, it reads what the search leaves out, or
            the recording cannot be written.
    """
    policy = find_pure(args.policy)
    if args.record:
        check_target(args.record)
    bound = policy.bound if args.bound is None else args.bound
    urgent_first = policy.urgent_first or args.urgent_first
    report = check(
        policy._replace(bound=bound, urgent_first=urgent_first),
        requests=args.requests,
        num_blocks=args.blocks,
        discards=args.discards,
        seconds=args.seconds,
    )
    print(text(report))
    if report.counterexample is None:
        return 0
    print(run_text(report.counterexample))
    if args.record:
        own_policy = None
        if policy.name not in POLICIES:
            own_policy = name_in_one_line("policy", args.policy)
        _record(report.counterexample, args.record, own_policy)
    return 1


def _record(counterexample: Counterexample, path: str, own_policy: str | None) -> None:
    """Writes the recording, and prints how to look at it."""
    record(counterexample, path, own_policy)
    words = ["pagedjax", "view", path]
    if own_policy:
        words += ["--policy", own_policy]
    print(f"recorded: {shlex.join(words)}")
