"""Pack rows from endless orders of documents, with a state from which they go on."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import grain
import numpy as np

from mhc.data.rows.mixture import Assignment
from mhc.data.rows.order import Order
from mhc.data.rows.packing import Batch
from mhc.data.windtunnel.rows import TaskOrder

PLACES = ("position", "offset")  # the state of a row


class Packing(NamedTuple):
    """Says how batches are packed."""

    assign: Assignment | None  # None: one source
    sources: int
    rows: Sequence[int]
    batch_size: int
    length: int

    def start(self) -> dict[str, Any]:
        """Return the state before the first batch: ``position`` and ``offset``, int64 [rows] or [rows, sources]."""
        position = np.asarray(self.rows, np.int64)
        if self.assign is not None:
            position = np.repeat(position[:, None], self.sources, axis=1)
        return {"position": position, "offset": np.zeros_like(position), "batches": np.int64(0)}


class PackedDataset(grain.IterDataset):
    """Yields batches of packed rows over endless orders of documents; for a mixture also ``sources`` [rows] int32."""

    def __init__(self, packing: Packing, orders: Sequence[Order | TaskOrder]):
        super().__init__([order.documents for order in orders if isinstance(order, Order)])
        self._packing, self._orders = packing, orders

    def __iter__(self) -> PackedIterator:
        return PackedIterator(self._packing, self._orders)


class PackedIterator(grain.DatasetIterator):
    """Packs batch after batch; its state is that of `Packing.start`."""

    def __init__(self, packing: Packing, orders: Sequence[Order | TaskOrder]):
        super().__init__()
        self._packing, self._orders = packing, orders
        self.set_state(packing.start())

    def __next__(self) -> Batch:
        rows, assign = self._packing.rows, self._packing.assign
        batch = self._orders[0].empty(len(rows), self._packing.length)
        chosen = [0 if assign is None else assign(self._made, row) for row in rows]
        for index, number in enumerate(chosen):
            self._streams[index][number].fill(batch, index)
        if assign is not None:
            batch["sources"] = np.asarray(chosen, np.int32)
        self._made += 1
        return batch

    def get_state(self) -> dict[str, Any]:
        def every(name: str) -> np.ndarray:
            values = np.array([[getattr(stream, name) for stream in own] for own in self._streams], np.int64)
            return values[:, 0] if self._packing.assign is None else values

        return {**{name: every(name) for name in PLACES}, "batches": np.int64(self._made)}

    def set_state(self, state: dict[str, Any]) -> None:
        self._made = int(state["batches"])
        position, offset = (state[name].reshape(-1, self._packing.sources) for name in PLACES)
        self._streams = [
            [
                order.stream(int(place), self._packing.batch_size, int(taken))
                for order, place, taken in zip(self._orders, positions, offsets, strict=True)
            ]
            for positions, offsets in zip(position, offset, strict=True)
        ]
