"""What the training commands have in common: options, their checks, and the exit status of a run."""

from __future__ import annotations

import argparse
import dataclasses
import math
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

SEEDS = 2**32  # number of seeds, as in an engine
Setup = TypeVar("Setup")


def run_parser(description: str | None, every: int) -> argparse.ArgumentParser:
    """A parser with `--out` and `--every`. every: the default of `--every`."""
    parser = argparse.ArgumentParser(
        description=description,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument(
        "--out", type=Path, required=True, help="folder of the run; an existing run is resumed"
    )
    parser.add_argument(
        "--every", type=int, default=every, help="steps between checkpoints (default: %(default)s)"
    )
    return parser


def add_setup(parser: argparse.ArgumentParser, setup: type[Any]) -> None:
    """Add an option for each field of a setup."""
    for field in dataclasses.fields(setup):
        kind: dict[str, Any] = {"type": type(field.default)}
        if kind["type"] is bool:
            kind = {"action": argparse.BooleanOptionalAction}
        name = f"--{field.name.replace('_', '-')}"
        parser.add_argument(name, default=field.default, help="default: %(default)s", **kind)


def setup_of(args: argparse.Namespace, setup: type[Setup]) -> Setup:
    """The setup with the values of the options of `add_setup`."""
    fields = dataclasses.fields(setup)  # pyright: ignore[reportArgumentType]
    return setup(**{field.name: getattr(args, field.name) for field in fields})


def check_least(parser: argparse.ArgumentParser, args: argparse.Namespace, **minima: int) -> None:
    """End the command with a sentence if an option is below its minimum."""
    for name, minimum in minima.items():
        value = getattr(args, name)
        if value < minimum:
            parser.error(
                f"--{name.replace('_', '-')} is {value}; it must be at least {minimum}; leave it "
                "out for the default"
            )


def check_positive(
    parser: argparse.ArgumentParser,
    args: argparse.Namespace,
    *names: str,
    below: float = math.inf,
) -> None:
    """End the command with a sentence if an option is not above 0 and below a limit."""
    for name in names:
        value = getattr(args, name)
        if not 0 < value < below:
            limit = "finite" if below == math.inf else f"below {below:g}"
            parser.error(
                f"--{name} is {value}; it must be above 0 and {limit}; leave it out for the default"
            )


def check_seed(parser: argparse.ArgumentParser, seed: int) -> None:
    """End the command with a sentence if an engine would refuse the seed."""
    if not 0 <= seed < SEEDS:
        parser.error(f"--seed is {seed}; it must be in [0, 2**32): choose another")


def check_model(parser: argparse.ArgumentParser, folder: Path) -> None:
    """End the command with a sentence if the folder has no model."""
    if not (folder / "config.json").is_file():
        parser.error(
            f"--model is {folder}, where no config.json is; python -m "
            "experiments.training.train_tiny --out FOLDER makes one, FOLDER/model"
        )


def exit_status(run: Callable[[], object]) -> int:
    """0 after a run; 2 and a sentence if it was refused; 130 if Ctrl-C stopped it."""
    try:
        run()
    except (ValueError, FileNotFoundError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("\nstopped; the same command resumes from the last checkpoint", file=sys.stderr)
        return 130
    return 0
