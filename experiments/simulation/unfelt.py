"""Options that change the times of a real engine but not those of a simulated one."""

from __future__ import annotations

from experiments.simulation.cost import Simulate
from pagedjax.host import kv_policies
from pagedjax.options.config import EngineConfig, KVPolicyOptions


def refuse_unfelt(config: EngineConfig, simulate: Simulate, *, recorded: bool) -> None:
    """Check the options of a simulated engine.

    Args:
        recorded: whether drafts come from a recording.

    Raises:
        ValueError: a simulation ignores an option, or lacks one.
    """
    if config.lookahead:
        raise ValueError(
            f"engine.lookahead is {config.lookahead}, and a simulated step hides no host time "
            "behind the device; set it to 0, and simulate.host_s to the host time that is not "
            "hidden"
        )
    if config.late_stops:
        raise ValueError(
            "engine.late_stops is True, and a simulated step is planned when the one before has "
            "ended; set it to False"
        )
    if config.decode_span > 1:
        raise ValueError(
            f"engine.decode_span is {config.decode_span}, and a simulated step is a program of its "
            "own; set it to 1, and simulate.host_s to the host time of a step with spans"
        )
    options = [
        f"engine.{name}" for name in ("mesh", "devices") if getattr(config, name) is not None
    ]
    if options:
        raise ValueError(
            f"{' and '.join(options)} is set, and a simulated step takes the time of "
            "simulate.mesh; set that one, and leave this out"
        )
    speculates = config.speculative is not None
    accepts = simulate.acceptance is not None or recorded
    if speculates != accepts:
        names = ["engine.speculative", "simulate.acceptance"]
        if not speculates:
            names.reverse()
        raise ValueError(
            f"{names[0]} is set and {names[1]} is not; a simulated draft is right with a given "
            "probability"
        )
    if config.kv_policy is not None and not simulate.kv_cache:
        raise ValueError(
            "engine.kv_policy is set and simulate.kv_cache is false: an engine without a KV cache "
            "has no blocks to give back; leave one of them out"
        )
    if isinstance(config.kv_policy, KVPolicyOptions) and kv_policies.find(config.kv_policy).selects:
        raise ValueError(
            f"engine.kv_policy is {config.kv_policy.name!r}, which selects blocks, and a "
            "simulated step reads all that a query sees; use a policy without a selection"
        )
    if config.preemption == "swap" and simulate.chip is None and simulate.step_s is None:
        if simulate.fit is not None:
            source = "measured steps (simulate.fit)"
        elif simulate.cost is not None:
            source = "functions of your own (simulate.cost)"
        else:
            source = "a profile (simulate.profile)"
        raise ValueError(
            f"engine.preemption is 'swap', and {source} do not give the cost of moving a block; "
            "set engine.preemption: recompute, or simulate.chip in place of them"
        )
