"""The folder of a training run, and its Orbax checkpoints: a killed run resumes from the last one,
bit for bit.

OUT/run.json            the options of the run; a command with other options is refused
OUT/checkpoints/STEP/   parameters, optimiser, losses
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import orbax.checkpoint as ocp

from experiments.core.json_files import write_json
from pagedjax.weights.convert import check_free, complete_folder

Loss = dict[str, Any]  # with the keys "step", "train" and "held_out"


class State(NamedTuple):
    params: Any  # the trained parameters
    optimiser: Any  # optax's state, which also counts the steps


def begin(out: Path, run_options: Mapping[str, Any]) -> None:
    """Create the run's folder, or check that an existing one belongs to the same run.

    Args:
        run_options: the options that decide the run's result.

    Raises:
        ValueError: the folder belongs to another run (the message has all differences), or is no
            run's folder.
    """
    file = out / "run.json"
    if not file.is_file():
        check_free(out)
        with complete_folder(out) as folder:
            write_json(folder / file.name, run_options)
        return
    try:
        recorded = dict(json.loads(file.read_text(encoding="utf-8")))
    except ValueError as error:
        raise ValueError(
            f"{file} is damaged ({error}); remove {out}, or give another --out"
        ) from error
    differences = [
        f"{key} is {run_options.get(key)}, there {recorded.get(key)}"
        for key in dict(run_options) | recorded
        if run_options.get(key) != recorded.get(key)
    ]
    if differences:
        raise ValueError(
            f"{out} holds another run: {'; '.join(differences)}. Use its options (the text depends "
            "on the Python version), give another --out, or remove it"
        )


def open_checkpoints(out: Path) -> ocp.CheckpointManager:
    """The checkpoints of a run. They are written atomically; the last two are kept."""
    options = ocp.CheckpointManagerOptions(max_to_keep=2, enable_async_checkpointing=False)
    return ocp.CheckpointManager(out.absolute() / "checkpoints", options=options)


def save(manager: ocp.CheckpointManager, step: int, state: State, losses: Sequence[Loss]) -> None:
    arguments = ocp.args.Composite(
        state=ocp.args.StandardSave(state),  # type: ignore[arg-type]
        losses=ocp.args.JsonSave(list(losses)),  # type: ignore[arg-type]
    )
    manager.save(step, args=arguments)


def restore(manager: ocp.CheckpointManager, like: State) -> tuple[int, State, list[Loss]]:
    """Read the last checkpoint. Returns (steps done, state, losses); (0, `like`, []) if there is
    none. like: a state with the same shapes.
    """
    step = manager.latest_step()
    if step is None:
        return 0, like, []
    shapes = jax.tree.map(ocp.utils.to_shape_dtype_struct, like)
    arguments = ocp.args.Composite(
        state=ocp.args.StandardRestore(shapes),  # type: ignore[arg-type]
        losses=ocp.args.JsonRestore(),  # type: ignore[arg-type]
    )
    checkpoint = manager.restore(step, args=arguments)
    return step, checkpoint["state"], checkpoint["losses"]
