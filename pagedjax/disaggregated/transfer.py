"""Handovers between two processes: the pages go from device to device by
`jax.experimental.transfer`.

    prefill   transfers = Transfers("10.0.0.1:0")
              offer = transfers.offer(engine, "a")
              engine.release("a")
    decode    transfers = Transfers("10.0.0.2:0")
              transfers.adopt(engine, "b", offer)

An `Offer` is small and can be pickled; the caller brings it to the other process. Pickle executes
what it reads, so take offers from processes that you trust alone.
"""

from __future__ import annotations

import itertools
import logging
import time
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
from jax.experimental import transfer
from jax.sharding import SingleDeviceSharding

from pagedjax.device.cache import KVCache
from pagedjax.engine.engine import Engine
from pagedjax.engine.handover import Handover, take_padded
from pagedjax.text.structured.matcher import Grammar

POLL_SECONDS = 0.001
log = logging.getLogger("pagedjax.disaggregated")


class Offer(NamedTuple):
    """A sequence whose pages wait to be fetched, once.

    address: the address of the process that has the pages.
    uuid: the number of these pages there.
    shapes: shape and dtype of each page array; its first axis has the blocks of
        `handover.released.blocks`, in order, and padding.
    """

    handover: Handover
    address: str
    uuid: int
    shapes: tuple[tuple[tuple[int, ...], str], ...]


class Transfers:
    """This process's end of all transfers. Keep it as long as offers are open.

    Args:
        address: host and port of this process that others can reach; port 0 is any.
        timeout: seconds to wait for pages. Then the sequence is computed again.
    """

    def __init__(self, address: str, *, timeout: float = 10.0) -> None:
        self._device = jax.local_devices()[0]
        host = address.rpartition(":")[0]
        if not host:
            raise ValueError(f"address is {address!r}; it must be HOST:PORT, e.g. 127.0.0.1:0")
        self._server = transfer.start_transfer_server(self._device.client, address, [f"{host}:0"])
        self._uuids = itertools.count(1)
        self._timeout = timeout

    def offer(self, engine: Engine, request_id: str) -> Offer:
        """Copy the pages of a sequence, and hold them until they are fetched. After this call the
        engine may release the sequence.

        Raises:
            ValueError: see `Engine.handover`.
        """
        handover = engine.handover(request_id)._replace(grammar=None)
        uuid = next(self._uuids)
        address = self._server.address()
        if not handover.released.blocks:
            return Offer(handover, address, uuid, shapes=())
        pages = jax.device_put(engine.padded_pages(handover.released.blocks), self._device)
        leaves = jax.tree.leaves(pages)
        self._server.await_pull(uuid, leaves)
        shapes = tuple([(leaf.shape, str(leaf.dtype)) for leaf in leaves])
        return Offer(handover, address, uuid, shapes)

    def adopt(
        self, engine: Engine, request_id: str, offer: Offer, *, grammar: Grammar | None = None
    ) -> bool:
        """`Engine.adopt` with the pages of an offer. Returns whether the pages are here; if not,
        the sequence is computed again.

        Args:
            grammar: the grammar of its structured outputs, compiled in this process
                (`Session.grammar_of`).

        Raises:
            ValueError: see `Engine.adopt`.
        """
        structure = jax.tree.structure(engine.runtime.cache_shapes)
        fetched = not offer.shapes

        def fetch(blocks: Sequence[int]) -> KVCache:
            nonlocal fetched
            fetched = True
            pages = jax.tree.unflatten(structure, self._pull(offer))
            row_of = {block: row for row, block in enumerate(offer.handover.released.blocks)}
            return take_padded(pages, [row_of[block] for block in blocks])

        adopted = engine.adopt(request_id, offer.handover, fetch, grammar=grammar)
        if not fetched:
            # no page was needed, because there was no room, or all blocks were here; they are
            # fetched all the same, so that the other process does not keep them
            try:
                self._pull(offer)
            except Exception as error:
                log.warning(
                    "the pages of %r, which are not needed, were not fetched: %r", request_id, error
                )
        return adopted

    def _pull(self, offer: Offer) -> list[Any]:
        """Fetch all page arrays of an offer. Raises if they do not come in time."""
        sharding = SingleDeviceSharding(self._device)
        specs = [
            jax.ShapeDtypeStruct(shape, dtype, sharding=sharding) for shape, dtype in offer.shapes
        ]
        deadline = time.monotonic() + self._timeout
        arrays = self._server.connect(offer.address).pull(offer.uuid, specs)
        while not all(x.is_ready() for x in arrays):  # a peer that is gone may never answer
            if time.monotonic() > deadline:
                raise TimeoutError(
                    f"no pages from {offer.address} in {self._timeout} s; is that process alive?"
                )
            time.sleep(POLL_SECONDS)
        # arrays of a transfer that was cut are ready too, and raise here
        return jax.block_until_ready(arrays)
