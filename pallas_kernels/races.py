"""Runs a TPU kernel on a CPU, with its copies and semaphores, under JAX's race detector.

A copy is made at one of two times (`MODES`): when it is awaited, or as soon as it is started. A
mistake may show in only one mode, so run a kernel in both. The detector follows semaphores: two
accesses to the same memory need an order. A buffer that the next copy overwrites too early may give
no race, if both copies signal one semaphore. So compare results, too. A kernel that waits for a
semaphore that nothing signals hangs, so run it in a process that can be stopped.
"""

from __future__ import annotations

import contextlib
import io
from collections.abc import Callable, Iterator
from typing import Literal, NoReturn, TypeVar, get_args

import jax
from jax.experimental.pallas import tpu as pltpu

Mode = Literal["on_wait", "eager"]
MODES: tuple[Mode, ...] = get_args(Mode)
Result = TypeVar("Result")
DETECTED = "RACE DETECTED\n"  # in what JAX's detector says


def without_races(call: Callable[[pltpu.InterpretParams], Result], mode: Mode) -> Result:
    """Returns call(interpret), whose argument is the `interpret` of `pl.pallas_call`.

    Raises:
        RuntimeError: two accesses to the same memory have no order; names the first two.
    """
    # JAX has no public name for what the detector found
    from jax._src.pallas.mosaic.interpret import interpret_pallas_call

    printed = io.StringIO()
    try:
        with contextlib.redirect_stdout(printed), raised_races():
            result = jax.block_until_ready(
                call(pltpu.InterpretParams(dma_execution_mode=mode, detect_races=True))
            )
        races = interpret_pallas_call.races
        if races is None:
            raise RuntimeError(
                "the call ran no Pallas kernel, or not with this argument; "
                "pass it on as `interpret`"
            )
        if races.races_found:
            raise_race(printed.getvalue())
    finally:
        interpret_pallas_call.reset_tpu_interpret_mode_state()
    return result


@contextlib.contextmanager
def raised_races() -> Iterator[None]:
    """Within the block, a race is the RuntimeError of `raise_race`. JAX 0.12 raises an error of its
    own, and earlier versions go on and remember that there was a race.
    """
    try:
        yield
    except Exception as error:
        if DETECTED in str(error):
            raise_race(str(error))
        raise


def raise_race(report: str) -> NoReturn:
    """Raises RuntimeError with the first race in the detector's report."""
    first = report.partition(DETECTED)[2].partition("\n\n")[0]
    raise RuntimeError(f"two accesses to the same memory without an order:\n{first}")
