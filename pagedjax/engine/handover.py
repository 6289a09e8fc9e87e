"""Handing a sequence from one engine to another, with the keys and values that it has
(docs/design/disaggregation.md).

    handover(runtime, state, name) -> Handover                           what the other engine needs to know
    adopt(runtime, state, name, handover, fetch) -> (state, Adopted)     on the other side; fetch(blocks) -> their pages
    release(state, name) -> state                                        the sequence is gone here
    go_on(runtime, state, request) -> state                              its engine is gone, and its tokens are known

Blocks are known by their hashes. So the adopting engine fetches only those that it does not have,
and shares the others. If they cannot be fetched, or there is no room, the sequence is queued with
its tokens and computed again.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from hashlib import blake2b
from typing import Any, NamedTuple

import jax
import numpy as np

from pagedjax.device.cache import KVCache
from pagedjax.device.placement import fingerprint
from pagedjax.device.step import into_cache, out_of_cache
from pagedjax.engine import adapters, drafting, readers, token_masks
from pagedjax.engine.lookahead import Lookahead
from pagedjax.engine.outcome import NewRequest
from pagedjax.engine.requests import (
    EngineRequest,
    LoadedAdapter,
    checked_ids,
    prepare,
    without_hashes,
)
from pagedjax.engine.runtime import Runtime
from pagedjax.engine.state import EngineState, roll_back
from pagedjax.host import scheduler
from pagedjax.host.event_log import Adopt, Release
from pagedjax.host.types import Adopted, Released
from pagedjax.options.params import SamplingParams
from pagedjax.text.structured.matcher import Grammar

log = logging.getLogger("pagedjax.engine")

# ids of n blocks in the cache of the other engine -> their pages: [n, ...], or as `take_padded`
# returns them
Fetch = Callable[[Sequence[int]], KVCache]


class Handover(NamedTuple):
    """An unfinished sequence on its way: everything but the pages of its blocks.

    tokens: [length] int32, the prompt and what was generated.
    seed: that its samples are drawn with; a position draws the same in every engine.
    root: what its hashes grow from; None: it shares no blocks.
    adapter: the hash of its content; "" without.
    grammar: of structured outputs. It stays in its process: another one compiles it again from
        `params`.
    facts: what must be equal in both engines.
    """

    released: Released
    tokens: np.ndarray
    params: SamplingParams
    seed: int
    root: str | None
    adapter: str
    grammar: Grammar | None
    facts: Mapping[str, Any]


def facts(runtime: Runtime, state: EngineState) -> dict[str, Any]:
    """What decides on the content of blocks, and on the tokens that follow. The weights are not
    looked at.
    """
    config = runtime.config
    model = runtime.model.config
    facts: dict[str, Any] = {f"model.{name}": value for name, value in vars(model).items()}
    for name in ("model.linear", "model.axes"):  # how a device computes, and not what
        del facts[name]
    equal_options = "block_size", "max_model_len", "kv_cache_dtype", "dtype", "weight_dtype", "seed"
    facts |= {name: getattr(config, name) for name in equal_options}
    facts["eos_token_ids"] = sorted(runtime.eos_token_ids)
    facts["row_features"] = sorted(feature.name for feature in runtime.chain.features)
    facts["kv_policy"] = runtime.scheduler_config.views
    if any(kind.mixer for kind in model.kinds):  # memory of one device's heads
        facts["heads of pages"] = runtime.model.part.kv_heads
        facts["state_impl"] = config.state_impl  # which has an order of its own in pages
    facts["selection"] = runtime.shapes.selection
    pages, structure = jax.tree.flatten(runtime.cache_shapes)
    facts["pages"] = [f"{page.dtype}{list(page.shape[1:])}" for page in pages]
    facts["kinds of pages"] = str(structure)
    facts["params_version"] = state.params_version
    return facts


# Facts that decide on the content of blocks and not on tokens, or that change with each copy of the
# weights.
_OF_BLOCKS = ("block_size", "pages", "kinds of pages", "state_impl", "params_version")


def identity(runtime: Runtime, state: EngineState) -> str:
    """A short text that is equal in engines that give the same next token: that of their weights,
    of their adapters and of `facts`.
    """
    parts = {name: fact for name, fact in facts(runtime, state).items() if name not in _OF_BLOCKS}
    parts["weights"] = fingerprint(runtime.model)
    loaded = runtime.adapters.names if runtime.adapters else {}
    parts["adapters"] = sorted((name, adapter.content_hash) for name, adapter in loaded.items())
    return blake2b(repr(sorted(parts.items())).encode(), digest_size=16).hexdigest()


def check_equal(facts: Mapping[str, Any], sender_facts: Mapping[str, Any]) -> None:
    """Raises ValueError for the first fact that differs; the message has both values."""
    for name, value in sender_facts.items():
        if name not in facts or facts[name] != value:
            raise ValueError(
                f"{name} is {value!r:.200} where the sequence was and {facts.get(name)!r:.200} "
                "here; engines that hand sequences over need the same model, cache and seed"
            )


def handover(runtime: Runtime, state: EngineState, name: str) -> Handover:
    """What another engine needs to go on with a sequence. Nothing changes here.

    Raises:
        ValueError: `scheduler.release` refuses it, it has taps, its adapter was unloaded, or its
            engine has several processes.
    """
    check_processes()
    _, released = scheduler.release(state.scheduler, name)
    data = state.sequences[name]
    if readers.side_outputs_of(state.readers, [name]):
        raise ValueError(
            f"sequence {name!r} has taps, whose arrays are collected by one engine; leave taps out"
        )
    if data.given_token_ids is not data.params.trace_decode_token_ids:
        raise ValueError(
            f"sequence {name!r} has tokens that `Engine.add` got as `given`, which stay in one "
            "engine; let it end here, or give them as trace_decode_token_ids"
        )
    content_hash = ""
    if data.adapter_slot and runtime.adapters:
        for loaded in runtime.adapters.names.values():
            if loaded.slot == data.adapter_slot:
                content_hash = loaded.content_hash
        if not content_hash:
            raise ValueError(
                f"sequence {name!r} has an adapter that was unloaded or replaced; let it end here"
            )
    matcher = token_masks.matchers_in(state.readers).get(name)
    return Handover(
        released=released,
        tokens=data.tokens[: released.length].copy(),
        params=data.params,
        seed=data.seed,
        root=data.root,
        adapter=content_hash,
        grammar=matcher.grammar if matcher else None,
        facts=facts(runtime, state),
    )


def release(state: EngineState, name: str) -> EngineState:
    """The state without a sequence that another engine has adopted.

    Raises:
        ValueError: see `scheduler.release`.
    """
    after, released = scheduler.release(state.scheduler, name)
    if state.drafting:  # the rest of its output is not seen here
        data = state.sequences[name]
        num_output = released.length - data.prompt_len
        drafting.show_output(state.drafting, name, data, num_output)
    return state._replace(
        scheduler=after,
        sequences=state.sequences.delete(name),
        readers=readers.without(state.readers, [name]),
        log=(*state.log, Release(released)),
    )


def has_room(runtime: Runtime, state: EngineState, handover: Handover) -> bool:
    """Whether an engine would run a sequence in its next step. Else it queues it, to be computed
    again.
    """
    return scheduler.has_room(state.scheduler, runtime.policy, handover.released)


def adopt(
    runtime: Runtime,
    state: EngineState,
    name: str,
    handover: Handover,
    fetch: Fetch,
    *,
    grammar: Grammar | None = None,
) -> tuple[EngineState, Adopted]:
    """Go on with a sequence of another engine. The old state must not be used again: its cache may
    be donated.

    Args:
        name: its id here.
        fetch: gives the pages of blocks where the sequence was. If it raises, the sequence is
            computed again.
        grammar: of its structured outputs; None: that of `handover`.

    Raises:
        ValueError: a fact differs between the engines, the adapter is not here, or the request can
            never run here. The state is unchanged.
    """
    check_processes()
    check_equal(facts(runtime, state), handover.facts)
    request = handover.released.request
    submitted = EngineRequest(
        (name,),
        handover.tokens[: request.prompt_len].tolist(),
        handover.params,
        priority=request.priority,
        user=request.user,
        tags=request.tags,
        grammar=grammar or handover.grammar,
        predicted=request.predicted,
        service_class=request.service_class,
        deadline=request.deadline,
    )
    prepared = prepare(
        state.scheduler,
        submitted,
        runtime.request_rules,
        adapter=adapter_of(runtime, handover.adapter),
        seed=handover.seed,
    )
    data = prepared.sequences[name]
    data.tokens = np.concatenate([handover.tokens, np.zeros(runtime.spare + 1, np.int32)])
    released = handover.released._replace(request=prepared.request)
    if data.root is None or data.root != handover.root:
        data = without_hashes(data)
        request = prepared.request._replace(hashes=())
        released = released._replace(request=request, hashes=())
    after, adopted = scheduler.adopt(state.scheduler, runtime.policy, released)
    cache = state.cache
    if adopted.copies:
        cache = runtime.new_cache() if cache is None else cache
        try:
            pages = fetch([source for source, _ in adopted.copies])
            cache = put(cache, [target for _, target in adopted.copies], pages)
        except Exception as error:
            log.warning(
                "sequence %r is computed again, because its blocks did not arrive: %r", name, error
            )
            if cache is not state.cache or any(x.is_deleted() for x in jax.tree.leaves(cache)):
                state = roll_back(state)
            released = released._replace(computed=0, blocks=())
            after, adopted = scheduler.adopt(state.scheduler, runtime.policy, released)
            cache = state.cache
    state = state._replace(
        scheduler=after,
        sequences=state.sequences.set(name, data),
        readers=readers.start(state.readers, NewRequest(runtime, submitted, prepared)),
        cache=cache,
        ahead=Lookahead(),  # what was predicted does not know of these blocks
        log=(*state.log, Adopt(released, adopted)),
    )
    return state, adopted


def go_on(runtime: Runtime, state: EngineState, request: EngineRequest) -> EngineState:
    """Queue a sequence that another engine began, and whose cache is lost: it is computed again.

    Its next token is the one that the other engine would have given: it has the same seed and
    position. Weights and options of both engines must be equal, which is not looked at here.

    Args:
        request: with `begun`.

    Raises:
        ValueError: as `state.submit`, or the sequence is as long as it may be here. The state is
            unchanged.
    """
    name = request.names[0]
    progress = request.begun
    assert progress is not None, "`submit` queues what begins here"
    if len(request.names) > 1 or not isinstance(request.params, SamplingParams):
        raise ValueError(
            f"request {name!r} has branches or {type(request.params).__name__}; "
            "go on with sampled sequences one by one"
        )
    adapter = None
    if request.adapter is not None:
        adapter = adapters.of_name(runtime.adapters, request.adapter)
    prepared = prepare(
        state.scheduler, request, runtime.request_rules, adapter=adapter, seed=progress.seed
    )
    generated = checked_ids(name, progress.tokens, runtime.request_rules.vocab_size)
    data = prepared.sequences[name]
    length = data.prompt_len + len(generated)
    data.tokens = np.zeros(length + runtime.spare + 1, np.int32)
    data.tokens[: data.prompt_len] = request.prompt_token_ids
    data.tokens[data.prompt_len : length] = generated
    released = Released(prepared.request, length, 0, (), prepared.request.hashes)
    after, adopted = scheduler.adopt(state.scheduler, runtime.policy, released)
    return state._replace(
        scheduler=after,
        sequences=state.sequences.set(name, data),
        readers=readers.start(state.readers, NewRequest(runtime, request, prepared)),
        log=(*state.log, Adopt(released, adopted)),
    )


def adapter_of(runtime: Runtime, content_hash: str) -> LoadedAdapter | None:
    """The adapter with this content. Raises ValueError if it is not loaded."""
    if not content_hash:
        return None
    loaded = runtime.adapters.names if runtime.adapters else {}
    for adapter in loaded.values():
        if adapter.content_hash == content_hash:
            return adapter
    pairs = [f"{name!r} ({adapter.content_hash})" for name, adapter in sorted(loaded.items())]
    raise ValueError(
        f"a sequence needs the adapter of content {content_hash}, and the engine that goes on with "
        f"it has {', '.join(pairs) or 'none'}; load the adapter into both engines (load_adapter)"
    )


def check_processes() -> None:
    """Raises ValueError for engines of several processes."""
    number = jax.process_count()
    if number > 1:
        raise ValueError(
            f"an engine of {number} processes keeps its sequences; hand sequences over between "
            "engines of one process each"
        )


# pages --------------------------------------------------------------------------------------------


def take(cache: KVCache, blocks: Sequence[int]) -> KVCache:
    """Copies of n whole blocks: [n, ...]. Each n is compiled once.

    Raises:
        ValueError: an id is no block of the cache.
    """
    return out_of_cache(cache, _checked(cache, blocks))


def _checked(cache: KVCache, blocks: Sequence[int]) -> np.ndarray:
    """The ids of blocks as int32 [n]. Raises ValueError unless they are ids of the cache."""
    ids = np.asarray(blocks)
    count = len(cache.tokens)
    if ids.ndim != 1 or (ids.size and ids.dtype.kind not in "iu"):
        raise ValueError(
            f"blocks is {blocks!r:.80}; give a sequence of block ids, integers from 0 to "
            f"{count - 1}"
        )
    outside = ids[(ids < 0) | (ids >= count)].tolist()
    if outside:
        raise ValueError(
            f"block {outside[0]} is not in the cache; its blocks are 0 to {count - 1}: use ids of "
            "these"
        )
    return ids.astype(np.int32)


def take_padded(cache: KVCache, blocks: Sequence[int]) -> KVCache:
    """Copies of n whole blocks in as many rows as the next power of two, so that few programs are
    compiled.

    The rows behind the n blocks are padding. Raises ValueError as `take` does.
    """
    return out_of_cache(cache, _padded(_checked(cache, blocks)))


def put(cache: KVCache, blocks: Sequence[int], pages: KVCache) -> KVCache:
    """Write pages, as `take` or `take_padded` returns them, into blocks. They may come from other
    devices; the cache is donated."""
    is_padded = len(pages.tokens) != len(blocks)
    rows = _padded(blocks) if is_padded else np.asarray(blocks, np.int32)
    local_pages = jax.device_put(pages, jax.tree.map(lambda page: page.sharding, cache))
    # a copy that fails must raise here, while the cache is not yet donated
    jax.block_until_ready(local_pages)
    return into_cache(cache, rows, local_pages)


def _padded(blocks: Sequence[int] | np.ndarray) -> np.ndarray:
    """Block ids, and the trash block up to a power of two, so that few programs are compiled."""
    padded = np.zeros(1 << max(len(blocks) - 1, 0).bit_length(), np.int32)
    padded[: len(blocks)] = blocks
    return padded
