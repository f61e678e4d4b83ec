"""One place's value for many requests of a step, copied for all at once, of which each is given its own rows."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from insitu.run.anatomy import Stream
from insitu.run.served import Leaf, Rows, Served, Withheld, map_tensors, storage_of

_of_lists: Any = torch  # whose functions of many tensors at once are not public


class Snapshot:
    """Copies are made when they are first asked for, those of all requests together.

    They have memory of their own as far as anybody can tell: nobody else is given the same.
    """

    def __init__(self, live: Any, rows: Sequence[Rows]) -> None:
        """``rows``: those of the requests, in the order in which ``copy`` and ``stream`` count them."""
        self.live = live
        self.rows = rows
        self._copies: dict[int, Sequence[torch.Tensor]] = {}
        self._streams: dict[tuple[int, float], Sequence[torch.Tensor] | None] = {}
        self._one_each = all(each.stop - each.start == 1 for each in rows)

    def copy(self, tensor: torch.Tensor, number: int) -> torch.Tensor:
        copies = self._copies.get(id(tensor))
        if copies is None:
            copies = self._copies[id(tensor)] = self._sums([tensor])
        return _own(copies[number])

    def stream(self, stream: Stream, number: int) -> torch.Tensor | None:
        """A request's rows of the stream, where it is not just one tensor of the value."""
        key = (stream.count, stream.multiplier)
        if key not in self._streams:
            parts = stream.parts(self.live)
            direct = len(parts) == 1 and stream.multiplier == 1
            self._streams[key] = None if direct else self._sums(parts, stream.multiplier)
        copies = self._streams[key]
        return None if copies is None else _own(copies[number])

    def _sums(self, parts: list[torch.Tensor], multiplier: float = 1.0) -> Sequence[torch.Tensor]:
        """Of each request's rows."""
        if self._one_each:
            first, *others = parts
            copies = (sum(others, first) * multiplier if others or multiplier != 1 else first.clone()).split(1)
            return [copies[each.start] for each in self.rows]
        first, *others = [self._apart(part, parts[0]) for part in parts]
        made: Any = first
        for other in others:
            made = _of_lists._foreach_add(made, other)
        if multiplier != 1:
            return _of_lists._foreach_mul(made, multiplier)
        if made is first:
            made = [torch.empty_like(each) for each in first]
            _of_lists._foreach_copy_(made, first)
        return made

    def _apart(self, part: torch.Tensor, first: torch.Tensor) -> list[torch.Tensor]:
        """Each request's rows of it, which is all of one that has no rows (a bias)."""
        by_rows = part.shape == first.shape
        return [part[_index(each)] if by_rows else part for each in self.rows]


def _own(copy: torch.Tensor) -> torch.Tensor:
    return copy.data  # those of one tensor share a counter of versions, and it is not where it begins


def _index(rows: Rows) -> slice | torch.Tensor:
    return slice(rows.start, rows.stop) if rows.scattered is None else rows.scattered


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
        self.live: Any = snapshot.live
        self.edited = False
        self.touched: set[int] = set()
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
            mine = None if storage_of(tensor) in self._fixed else self._snapshot.rows[self._number].of(tensor)
            if mine is None and self._withhold:
                return self._withheld.setdefault(id(tensor), Withheld(tensor))
            private = self._snapshot.copy(tensor, self._number) if isinstance(mine, slice) else None
            leaf = self._leaves[id(tensor)] = Leaf(tensor, mine, False, private)
            leaf.number = len(self._leaves) + len(self._withheld) - 1
        return leaf.private
