"""The adapters of an engine: a table says which one is in which slot.

    init(model, config) -> table                       None without `enable_lora`
    with_adapter(table, adapter, busy, ...) -> table   in place of an adapter with its name
    without_adapter(table, name) -> table
    after_use(table, name) -> table                    a request uses the adapter
    of_tokens(table, plan, rows, t) -> the adapters of a step's tokens

A table is a value: each transition returns another one. A request keeps the slot of its adapter
until it ends. So when an adapter is replaced or unloaded while requests use it, its slot becomes
free when the last of them ends.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set
from typing import NamedTuple

import numpy as np

from pagedjax.device import adapters, formats, linear
from pagedjax.device.adapters import Adapter, Factors
from pagedjax.device.extras import TokenAdapters
from pagedjax.device.models import Model
from pagedjax.device.models.decoder import DecoderConfig
from pagedjax.engine.requests import LoadedAdapter, SequenceData, Sequences
from pagedjax.host.types import Plan
from pagedjax.options.config import Resolved


class AdapterTable(NamedTuple):
    """All adapters of an engine.

    names: the adapters that new requests may use, by name.
    factors: the factors of all slots, on the device.
    turns: the number of loads and uses so far.
    """

    config: DecoderConfig
    slots: adapters.Slots
    names: Mapping[str, LoadedAdapter]
    factors: Factors
    turns: int = 0


def init(model: Model, config: Resolved) -> AdapterTable | None:
    """Returns a table without adapters, and starts what their products need; None without
    `enable_lora`.

    Raises:
        ValueError: the model's matrix products cannot add products of low rank.
    """
    if not config.enable_lora:
        return None
    if not linear.find(model.config.linear).low_rank:
        low_rank_impls = ", ".join(
            repr(name) for name, impl in linear.IMPLS.items() if impl.low_rank
        )
        raise ValueError(
            f"enable_lora is True, and linear_impl {model.config.linear!r} adds no products of low "
            f"rank; use one of {low_rank_impls}, or set `low_rank` of your own and add `Epilogue.low`"
        )
    for weight_dtype in formats.dtypes_of(model.config.stored, model.dtype):
        linear.prepare(
            model.config.linear, dtype=model.dtype, weight_dtype=weight_dtype, low_rank=True
        )
    slots = adapters.Slots(config.max_loras, config.max_lora_rank, model.dtype)
    return AdapterTable(model.config, slots, {}, adapters.blank(model.config, slots))


def with_adapter(
    table: AdapterTable,
    adapter: Adapter,
    busy: Set[int],
    *,
    keep: bool,
    needed: Set[str] = frozenset(),
) -> AdapterTable:
    """Returns the table with an adapter under its name. Nothing is copied if the adapter of this
    name has the same content.

    Args:
        busy: slots of unfinished requests.
        keep: whether it stays until it is unloaded.
        needed: names of adapters that may not be evicted.

    Raises:
        ValueError: its rank is too large, it does not fit the model, or no slot is free.
    """
    check(table, adapter)
    previous = table.names.get(adapter.name)
    pinned = keep or (previous is not None and previous.pinned)
    names = dict(table.names)
    if previous and previous.content_hash == adapter.content_hash:
        names[adapter.name] = previous._replace(
            pinned=pinned, source=adapter.source, turn=table.turns
        )
        return table._replace(names=names, turns=table.turns + 1)
    names.pop(adapter.name, None)
    occupied = busy | {entry.slot for entry in names.values()}
    free_slots = [slot for slot in range(1, table.slots.count + 1) if slot not in occupied]
    if free_slots:
        slot = free_slots[0]
    else:
        idle = [
            name
            for name, entry in names.items()
            if not entry.pinned and entry.slot not in busy and name not in needed
        ]
        if not idle:
            raise ValueError(_no_slot(table, adapter.name, names, busy))
        oldest = min(idle, key=lambda name: names[name].turn)
        slot = names.pop(oldest).slot
    factors = adapters.with_slot(table.factors, slot, table.config, adapter.parts)
    names[adapter.name] = LoadedAdapter(
        slot, adapter.content_hash, adapter.rank, adapter.source, pinned, table.turns
    )
    return table._replace(names=names, factors=factors, turns=table.turns + 1)


def _no_slot(
    table: AdapterTable, name: str, names: Mapping[str, LoadedAdapter], busy: Set[int]
) -> str:
    loaded_slots = {entry.slot for entry in names.values()}
    num_leaving = len(busy - loaded_slots - {0})  # slot 0 is no adapter
    unfinished = f", and {num_leaving} that were replaced or unloaded serve unfinished requests"
    return (
        f"adapter {name!r} has no slot: max_loras is {table.slots.count}, and {len(names)} "
        f"adapters are loaded ({', '.join(sorted(names)) or 'none'})"
        f"{unfinished if num_leaving else ''}; unload one, wait for its requests, or raise max_loras"
    )


def without_adapter(table: AdapterTable, name: str) -> AdapterTable:
    """Returns the table without an adapter. Requests that use it continue.

    Raises:
        ValueError: there is no such adapter.
    """
    of_name(table, name)
    names = dict(table.names)
    del names[name]
    return table._replace(names=names)


def no_adapters(name: str) -> ValueError:
    """Returns the error of an engine without adapters."""
    return ValueError(f"adapter {name!r} is wanted, and this engine has none; set enable_lora=True")


def of_name(table: AdapterTable | None, name: str) -> LoadedAdapter:
    """Returns the adapter of a name.

    Raises:
        ValueError: there is no such adapter.
    """
    if table is None:
        raise no_adapters(name)
    if name not in table.names:
        names = ", ".join(map(repr, sorted(table.names))) or "none"
        raise ValueError(
            f"adapter {name!r} is not loaded; loaded are {names}; load it first (load_adapter)"
        )
    return table.names[name]


def after_use(table: AdapterTable, name: str) -> AdapterTable:
    """Returns the table after a request with this adapter."""
    names = {**table.names, name: table.names[name]._replace(turn=table.turns)}
    return table._replace(names=names, turns=table.turns + 1)


def adapter_slots_in_use(sequences: Sequences) -> frozenset[int]:
    """Returns the slots of unfinished requests."""
    return frozenset(data.adapter_slot for data in sequences.values())


def check(table: AdapterTable, adapter: Adapter) -> None:
    """Raise a ValueError unless an adapter fits the model and the slots."""
    if adapter.rank > table.slots.rank:
        raise ValueError(
            f"adapter {adapter.name!r} has rank {adapter.rank}, and max_lora_rank is "
            f"{table.slots.rank}; set max_lora_rank={adapter.rank}"
        )
    for place, (a, b) in adapter.parts.items():
        matrices = table.factors[place.layer] if place.layer < len(table.factors) else {}
        exists = place.matrix in matrices
        inputs, outputs = adapters.sizes_of(table.config, place) if exists else (0, 0)
        rank = len(a)
        if not exists or a.shape != (rank, inputs) or b.shape != (outputs, rank):
            part = f"part {place.part} of {place.matrix} of layer {place.layer}"
            fits = f"[r, {inputs}] and [{outputs}, r]" if exists else "nothing"
            raise ValueError(
                f"adapter {adapter.name!r} has factors of {a.shape} and {b.shape} for {part}, "
                f"where {fits} fits; it was made for another model"
            )


def of_tokens(
    table: AdapterTable, plan: Plan, rows: Sequence[SequenceData], t: int
) -> TokenAdapters:
    """Returns the adapters of a step's tokens; padding has none.

    Args:
        rows: the records of the plan's rows.
        t: the number of tokens of the step, with padding.
    """
    slots = np.zeros(t, np.int32)
    row_slots = [row.adapter_slot for row in rows]
    slots[: sum(plan.counts)] = np.repeat(
        np.array(row_slots, np.int32), np.asarray(plan.counts, np.int32)
    )
    return TokenAdapters(slots, table.factors)
