"""Commands of the folder `experiments`: they are found from any current folder.

The library does not import experiments. These commands import them by name, when one is asked for.
"""

from __future__ import annotations

import importlib
from collections.abc import Sequence

COMMANDS = {
    "run": "measure or simulate an experiment",
    "blame": "who delayed whom in a recorded run?",
    "compare": "is the difference of two experiments real?",
    "capacity": "the highest rate at which an experiment meets its targets",
    "whatif": "what would another policy or configuration have done?",
    "diff": "where do two recorded runs differ first?",
    "report": "draw the report of an experiment again",
    "reproduce": "reproduce published results",
}


def main(name: str, words: Sequence[str]) -> int:
    """Run a command of experiments. Returns the exit code.

    Raises:
        ValueError: experiments, or a library that they need, are not installed.
    """
    try:
        command = importlib.import_module(f"experiments.{name}")
        if not hasattr(command, "main"):
            raise ImportError(f"{command.__file__} has no command")
    except ImportError as error:
        raise ValueError(
            f"{name} needs the experiments of PagedJAX ({error}); install them from a clone: pip "
            "install -e '.[experiments]'"
        ) from None
    return command.main(list(words))
