"""One place's value for all requests of a step, copied once, of which each request is given its own row."""

from __future__ import annotations

from typing import Any

import torch

from insitu.run.anatomy import Stream
from insitu.run.served import Leaf, Rows, Served, Withheld, map_tensors, storage_of


class Snapshot:
    """Where every request has one row. Copies are made when they are first asked for, one for all.

    Its rows have memory of their own as far as anybody can tell: nobody else is given the same one.
    """

    def __init__(self, live: Any, total: int) -> None:
        self.live = live
        self.total = total
        self._rows: dict[int, tuple[torch.Tensor, ...]] = {}
        self._streams: dict[tuple[int, float], tuple[torch.Tensor, ...] | None] = {}

    def row(self, tensor: torch.Tensor, number: int) -> torch.Tensor:
        rows = self._rows.get(id(tensor))
        if rows is None:
            rows = self._rows[id(tensor)] = tensor.clone().split(1)
        return rows[number].data  # unlike the row itself, with a version counter of its own

    def stream(self, stream: Stream, number: int) -> torch.Tensor | None:
        """A row of the stream, where it is not just one tensor of the value."""
        key = (stream.count, stream.multiplier)
        if key not in self._streams:
            first, *others = stream.parts(self.live)
            direct = not others and stream.multiplier == 1
            self._streams[key] = None if direct else (sum(others, first) * stream.multiplier).clone().split(1)
        rows = self._streams[key]
        return None if rows is None else rows[number].data


class SharedServed(Served):
    """As ``Served``, of a snapshot: its tensors are made when the block asks for them."""

    __slots__ = ("_fixed", "_made", "_number", "_snapshot", "_withhold")

    def __init__(
        self, snapshot: Snapshot, number: int, what: Any, fixed: frozenset[int], withhold: bool = False
    ) -> None:
        self._withhold = withhold
        self._withheld = {}
        self._snapshot = snapshot
        self._number = number
        self._fixed = fixed
        self._made: Any = None
        self._leaves = {}
        self.live = snapshot.live
        self.edited = False
        self.touched = set()
        self.what = what

    @property
    def value(self) -> Any:
        if self._made is None:
            self._made = map_tensors(self.live, self._private)
        return self._made

    @value.setter
    def value(self, new: Any) -> None:
        self._made = new

    @property
    def is_made(self) -> bool:
        return self._made is not None

    def shared_stream(self, stream: Stream) -> torch.Tensor | None:
        return None if self.is_made else self._snapshot.stream(stream, self._number)

    def replace(self, value: Any) -> None:
        _ = self.value
        super().replace(value)

    def _private(self, tensor: torch.Tensor) -> Any:
        leaf = self._leaves.get(id(tensor))
        if leaf is None:
            rows = Rows(self._number, self._number + 1, self._snapshot.total)
            mine = None if storage_of(tensor) in self._fixed else rows.of(tensor)
            if mine is None and self._withhold:
                return self._withheld.setdefault(id(tensor), Withheld(tensor))
            private = self._snapshot.row(tensor, self._number) if isinstance(mine, slice) else None
            leaf = self._leaves[id(tensor)] = Leaf(tensor, mine, False, private)
        return leaf.private
