"""Rows of many requests one after another, and what is done to them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import Any

import torch

from insitu.block import EngineError
from insitu.run.indices import index_on
from insitu.run.kinds import Constant
from insitu.run.noted import mapped
from insitu.run.parcels import apart

Members = tuple[int, ...]
"""Requests by number, in the order of their rows."""


class OtherKindError(EngineError):
    """A place's value is not like those that were seen there."""


class Packed:
    """Rows of all ``members``, ``counts`` of each; None: one row for each, without an axis for it."""

    __slots__ = ("counts", "members", "tensor")

    def __init__(self, tensor: torch.Tensor, members: Members, counts: Sequence[int] | None) -> None:
        self.tensor: torch.Tensor = tensor
        self.members: Members = members
        self.counts = counts

    def apart(self) -> list[Any]:
        return apart(self.tensor, self.counts)

    def each_apart(self, function: Callable[[torch.Tensor], torch.Tensor], each: bool) -> Packed:
        """What it gives of each request's rows by themselves; ``each``: one value, without an axis for rows."""
        rows = self.tensor.unbind() if self.counts is None else self.tensor.split(list(self.counts))
        made = list(map(function, rows))
        return Packed(torch.stack(made), self.members, None) if each else self.like(torch.cat(made))

    def narrow(self, members: Members) -> Packed:
        """From here on it has these members' rows alone, in this order, in memory of its own."""
        if members is self.members or members == self.members:
            return self
        at = {member: number for number, member in enumerate(self.members)}
        chosen = [at[member] for member in members]
        rows, counts = chosen, None
        if self.counts is not None:
            starts = [0, *accumulate(self.counts)]
            rows = [row for number in chosen for row in range(starts[number], starts[number + 1])]
            counts = [self.counts[number] for number in chosen]
        self.tensor, self.members, self.counts = self.tensor[index_on(rows, self.tensor.device)], members, counts
        return self

    def like(self, tensor: torch.Tensor) -> Packed:
        return Packed(tensor, self.members, self.counts)

    def _chosen(self, key: int | slice) -> tuple[Any, list[int] | None]:
        """Which rows ``key`` means in each request, and how many."""
        assert self.counts is not None
        starts, device = [0, *accumulate(self.counts)], self.tensor.device
        if isinstance(key, int):
            if starts[-1] == len(self.counts):
                return slice(None), None
            rows = [start + key % count for start, count in zip(starts, self.counts, strict=False)]
            return index_on(rows, device), None
        found = [range(count)[key] for count in self.counts]
        rows = [start + row for start, part in zip(starts, found, strict=False) for row in part]
        return index_on(rows, device), [len(part) for part in found]

    def rows(self, key: int | slice) -> Packed:
        rows, counts = self._chosen(key)
        picked = self.tensor[rows]
        return Packed(picked.clone() if isinstance(rows, slice) else picked, self.members, counts)

    def set_rows(self, key: int | slice, part: Packed) -> None:
        self.tensor[self._chosen(key)[0]] = part.tensor

    def beside(self, value: Any) -> Any:
        """The value such that an operation with these rows does to each what it would do alone."""
        if not isinstance(value, Packed):
            return value
        tensor = value.tensor
        missing = self.tensor.dim() - tensor.dim()
        if value.counts is None and self.counts is not None and any(count != 1 for count in self.counts):
            # A request's own tensor has no axis for its rows.
            counts = index_on(self.counts, tensor.device)
            tensor = tensor.repeat_interleave(counts, 0, output_size=self.tensor.shape[0])
        return tensor.reshape(tensor.shape[0], *[1] * missing, *tensor.shape[1:]) if missing else tensor

    def change(self, what: str, value: Any) -> None:
        changed(self.tensor, what, self.beside(value))


def changed(tensor: torch.Tensor, what: str, value: Any) -> None:
    if what == "copy":
        tensor[...] = value
    else:
        getattr(tensor, f"__i{what}__")(value)


def packed(value: Any, members: Members, counts: Sequence[int], kind: Any) -> Any:
    """A place's value, whose tensors have all requests' rows. Raises ``OtherKindError`` if it is not of the kind."""
    if isinstance(kind, Constant):
        if (value is None) is not (kind.value is None):
            raise OtherKindError(_OTHER)
        return value
    if isinstance(value, torch.Tensor):
        if kind is not None and (value.dim() != kind.dims or value.shape[0] != sum(counts)):
            raise OtherKindError(_OTHER)
        return Packed(value, members, counts)
    if isinstance(value, (tuple, list)):
        return type(value)(packed(part, members, counts, kind[i]) for i, part in enumerate(value))
    if isinstance(value, dict):
        return {key: packed(part, members, counts, kind[key]) for key, part in value.items()}
    return value


def narrowed(value: Any, members: Members) -> Any:
    mapped(value, Packed, lambda each: each.narrow(members))
    return value


def bare_tensors(value: Any) -> Any:
    return mapped(value, Packed, lambda each: each.tensor)


_OTHER = "a place's value is of another kind than it was before: trace again"
