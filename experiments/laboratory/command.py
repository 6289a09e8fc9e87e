"""What the commands about recordings share: their arguments, how they read, and what they write.

A file that cannot be written is refused before anything runs. No recording that is read is written.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from experiments.core.recordings import MOST_BYTES
from experiments.core.store import write_file
from experiments.laboratory import past
from experiments.laboratory.past import Past
from pagedjax import viewer
from pagedjax.host import replay
from pagedjax.host.event_log import check_target
from pagedjax.host.policies import POLICIES, Policy

TOO_LONG = (
    f"The recording has more than {MOST_BYTES >> 20} MiB, so no page of its steps is written."
)

# --- arguments ------------------------------------------------------------------------------------


def new_parser(name: str, description: str) -> argparse.ArgumentParser:
    """The parser of the command `pagedjax NAME`."""
    return argparse.ArgumentParser(
        prog=f"python -m experiments.{name}", description=description, allow_abbrev=False
    )


def add_results(parser: argparse.ArgumentParser, *, page: str) -> None:
    """Adds --page, --json and --recorded-policy.

    Args:
        page: the help of --page.
    """
    parser.add_argument("--page", metavar="FILE", help=page)
    parser.add_argument("--json", metavar="FILE", help="also write the whole result to this file")
    parser.add_argument(
        "--recorded-policy",
        action="append",
        default=[],
        metavar="POLICY",
        help="of your own, that a recorded run had: mine.py:NAME; may be given again",
    )


def run(
    parser: argparse.ArgumentParser,
    words: Sequence[str] | None,
    command: Callable[[argparse.Namespace], int],
    failure: Callable[[argparse.Namespace], str],
) -> int:
    """Reads the words of a command and runs it -> its exit status, 2 if it refuses.

    Args:
        command: gets the options; `options.command_line` is what the user may type again.
        failure: the beginning of the text of an error, such as "cannot change run.jsonl".
    """
    options = parser.parse_args(words)
    name = parser.prog.rpartition(".")[2]
    options.command_line = shlex.join(
        ["pagedjax", name, *(sys.argv[1:] if words is None else words)]
    )
    try:
        return command(options)
    except (ValueError, OSError) as error:
        print(f"{failure(options)}: {error}", file=sys.stderr)
        return 2


# --- files ----------------------------------------------------------------------------------------


def check_results(
    options: argparse.Namespace, name: str, *, recordings: Sequence[str], written: Sequence[str]
) -> None:
    """Raises ValueError if a result cannot be written, or would overwrite a recording that is read.

    Args:
        name: of the command, for an example of a file.
        written: recordings that the command writes.
    """
    for path in written:
        check_target(path)
    if options.json:
        check_target(options.json, "result", f"{name}.json")
    if options.page:
        check_target(options.page, "page", f"{name}.html")
    for path in (*written, options.json, options.page):
        if path:
            past.check_other_file(path, recordings)


def read(path: str, options: argparse.Namespace) -> Past:
    """Reads and verifies a recording, whose policy may be one of --recorded-policy.

    Raises:
        FileNotFoundError: there is no such file.
        ReplayError: it cannot be replayed.
    """
    header = replay.header(path)
    policies = replay.with_recorded(replay.with_own(options.recorded_policy), header)
    own_policy = header.get("own_policy")
    if own_policy and header.get("policy") not in policies:
        raise replay.ReplayError(
            f"{path} was recorded with the policy {own_policy}, and a recording runs no file; add "
            f"--recorded-policy {shlex.quote(str(own_policy))}, or where that file is now"
        )
    return past.read(path, policies)


def write_json(path: str | None, values: Any) -> None:
    """Writes a result, if a file is named."""
    if path:
        write_file(Path(path), f"{json.dumps(values, indent=2, default=int)}\n")


def write_page(path: str | os.PathLike[str], text: str) -> None:
    """Writes a page and says so."""
    write_file(Path(path), text)
    print(f"wrote {os.fspath(path)}")


# --- the viewer -----------------------------------------------------------------------------------


def view_command(*recordings: tuple[str | os.PathLike[str], str | None]) -> str:
    """The command that shows recordings, each with the name of its policy in a user's file."""
    words = ["pagedjax", "view", *[os.fspath(path) for path, _ in recordings]]
    for own_policy in dict.fromkeys([policy for _, policy in recordings if policy]):
        words += ["--policy", own_policy]
    return shlex.join(words)


def has_steps_page(recording: str | os.PathLike[str]) -> bool:
    """Whether a recording is short enough for a page of its steps that nobody asked for."""
    return os.path.getsize(recording) <= MOST_BYTES


def steps_page(
    first: tuple[str | os.PathLike[str], Policy],
    second: tuple[str | os.PathLike[str], Policy],
    *,
    names: tuple[str, str],
    opens: str = "",
) -> str:
    """The viewer's page of two recordings.

    Args:
        first, second: each with its policy.
        names: of the runs.
        opens: the place at which it opens, as in its address: step=14&request=r3.

    Raises:
        ValueError: no request is in both, or one has another prompt.
    """
    runs = [
        viewer.read(path, {**POLICIES, policy.name: policy})._replace(name=name)
        for (path, policy), name in zip((first, second), names, strict=True)
    ]
    return viewer.page(runs[0], second=runs[1], opens=opens)
