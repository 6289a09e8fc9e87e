"""What the training commands have in common: the checks of a seed and of a model, and the exit
status of a run.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from pathlib import Path

SEEDS = 2**32  # number of seeds, as in an engine


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
