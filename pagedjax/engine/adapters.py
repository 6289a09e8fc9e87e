"""The adapters of an engine: which one is in which slot, and what happens when they are loaded,
replaced and unloaded.

    init(model, config) -> table                              or None, without adapters
    loaded(table, adapter, busy) -> table                     under a new name, or in the place of an old adapter
    unloaded(table, name) -> table
    of_tokens(table, plan, sequences, t) -> the adapters of a step's tokens

A table is a value: each transition returns another one. A request keeps the slot of its adapter to
its end. So when an adapter is replaced or unloaded while requests use it, its slot becomes free
with the last of them.
"""

from __future__ import annotations

from collections.abc import Mapping, Set
from typing import NamedTuple

import numpy as np

from pagedjax.config import Resolved
from pagedjax.device import adapters, linear
from pagedjax.device.adapters import Adapter, Factors
from pagedjax.device.models import Model
from pagedjax.device.models.decoder import DecoderConfig
from pagedjax.device.token_adapters import TokenAdapters
from pagedjax.engine.requests import Sequences
from pagedjax.host.types import Plan


class InSlot(NamedTuple):
    """An adapter that requests can name.

    kept: it stays until it is unloaded. Others give way to adapters of later requests.
    turn: the number of loads and uses before its last one.
    """

    slot: int
    content_hash: str
    rank: int
    source: str
    kept: bool
    turn: int


class AdapterTable(NamedTuple):
    """All adapters of an engine.

    names: those that new requests may use.
    factors: of all slots, on the device.
    """

    config: DecoderConfig
    slots: adapters.Slots
    names: Mapping[str, InSlot]
    factors: Factors
    turns: int = 0


def init(model: Model, config: Resolved) -> AdapterTable | None:
    """No adapter; None without `enable_lora`.

    Raises:
        ValueError: the model's products cannot add those of low rank.
    """
    if not config.enable_lora:
        return None
    if not linear.find(model.config.linear).low_rank:
        able = ", ".join(repr(name) for name, one in linear.IMPLS.items() if one.low_rank)
        what = f"enable_lora is True, and linear_impl {model.config.linear!r} adds no products of low rank"
        raise ValueError(
            f"{what}; use one of {able}, or set `low_rank` of your own and add `Epilogue.low`"
        )
    slots = adapters.Slots(config.max_loras, config.max_lora_rank, model.dtype)
    return AdapterTable(model.config, slots, {}, adapters.blank(model.config, slots))


def loaded(
    table: AdapterTable,
    adapter: Adapter,
    busy: Set[int],
    *,
    keep: bool,
    needed: Set[str] = frozenset(),
) -> AdapterTable:
    """With an adapter under its name. Of the same content, nothing is copied.

    Args:
        busy: slots of unfinished requests.
        keep: until it is unloaded.
        needed: names of adapters that may not give way.

    Raises:
        ValueError: its rank is too large, it does not fit the model, or no slot is free.
    """
    check(table, adapter)
    here = table.names.get(adapter.name)
    if here and here.content_hash == adapter.content_hash:
        found = here._replace(kept=here.kept or keep, source=adapter.source, turn=table.turns)
        return table._replace(names={**table.names, adapter.name: found}, turns=table.turns + 1)
    others = {name: one for name, one in table.names.items() if name != adapter.name}
    taken = busy | {one.slot for one in others.values()}
    free = [slot for slot in range(1, table.slots.count + 1) if slot not in taken]
    if not free:
        idle = [
            name
            for name, one in others.items()
            if not one.kept and one.slot not in busy and name not in needed
        ]
        if not idle:
            raise ValueError(_full(table, adapter.name, others, busy))
        oldest = min(idle, key=lambda name: others[name].turn)
        free = [others.pop(oldest).slot]
    slot = free[0]
    factors = adapters.with_slot(table.factors, slot, table.config, adapter.parts)
    kept = keep or bool(here and here.kept)
    found = InSlot(slot, adapter.content_hash, adapter.rank, adapter.source, kept, table.turns)
    return table._replace(
        names={**others, adapter.name: found}, factors=factors, turns=table.turns + 1
    )


def _full(table: AdapterTable, name: str, others: Mapping[str, InSlot], busy: Set[int]) -> str:
    leaving = len(busy - {one.slot for one in others.values()} - {0})
    what = f"adapter {name!r} has no slot: max_loras is {table.slots.count}, and {len(others)} adapters are loaded"
    rest = (
        f", and {leaving} that were replaced or unloaded serve unfinished requests"
        if leaving
        else ""
    )
    return f"{what} ({', '.join(sorted(others)) or 'none'}){rest}; unload one, wait for its requests, or raise max_loras"


def unloaded(table: AdapterTable, name: str) -> AdapterTable:
    """Without an adapter. Requests that use it continue.

    Raises:
        ValueError: there is no such adapter.
    """
    of_name(table, name)
    return table._replace(names={other: one for other, one in table.names.items() if other != name})


def no_adapters(name: str) -> ValueError:
    """The error of an engine without adapters."""
    return ValueError(f"adapter {name!r} is wanted, and this engine has none; set enable_lora=True")


def of_name(table: AdapterTable | None, name: str) -> InSlot:
    """Raises ValueError if there is no such adapter."""
    if table is None:
        raise no_adapters(name)
    if name not in table.names:
        known = ", ".join(map(repr, sorted(table.names))) or "none"
        raise ValueError(
            f"adapter {name!r} is not loaded; loaded are {known}; load it first (load_adapter)"
        )
    return table.names[name]


def used(table: AdapterTable, name: str) -> AdapterTable:
    """After a request with this adapter."""
    names = {**table.names, name: table.names[name]._replace(turn=table.turns)}
    return table._replace(names=names, turns=table.turns + 1)


def adapter_slots_in_use(sequences: Sequences) -> frozenset[int]:
    """The slots of unfinished requests."""
    return frozenset(data.adapter_slot for data in sequences.values())


def check(table: AdapterTable, adapter: Adapter) -> None:
    """Raises ValueError unless an adapter fits the model and the slots."""
    if adapter.rank > table.slots.rank:
        raise ValueError(
            f"adapter {adapter.name!r} has rank {adapter.rank}, and max_lora_rank is {table.slots.rank}; "
            f"set max_lora_rank={adapter.rank}"
        )
    for place, (a, b) in adapter.parts.items():
        inputs, outputs = adapters.sizes_of(table.config, place.matrix, place.part)
        has = place.layer < len(table.factors) and place.matrix in table.factors[place.layer]
        if not has or (a.shape, b.shape) != ((len(a), inputs), (outputs, len(a))):
            where = f"part {place.part} of {place.matrix} of layer {place.layer}"
            fits = f"[r, {inputs}] and [{outputs}, r]" if has else "nothing"
            raise ValueError(
                f"adapter {adapter.name!r} has factors of {a.shape} and {b.shape} for {where}, where {fits} fits; "
                "it was made for another model"
            )


def of_tokens(table: AdapterTable, plan: Plan, sequences: Sequences, t: int) -> TokenAdapters:
    """The adapters of a step's tokens; padding has none."""
    slots = np.zeros(t, np.int32)
    each = [sequences[seq.request_id].adapter_slot for seq in plan.seqs]
    slots[: sum(plan.counts)] = np.repeat(
        np.array(each, np.int32), np.asarray(plan.counts, np.int32)
    )
    return TokenAdapters(slots, table.factors)
